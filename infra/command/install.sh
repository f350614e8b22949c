#!/bin/sh
# Installs the project without a network, in the folder `jakiro` next to this file: `make pack` copies it to build/pack.
# It requires Python with venv, of the version that packed. PYTHON=python3.11 chooses one.
set -eu
cd "$(dirname "$0")"
mkdir -p jakiro
tar -xf jakiro.tar -C jakiro
"${PYTHON:-python3}" -m venv jakiro/.venv
install() {
    jakiro/.venv/bin/python -m pip install --quiet --no-index --find-links "$PWD/wheels" "$@"
}
install -c jakiro/infra/constraints.txt -e './jakiro[demo,test]'
install --no-deps -r jakiro/infra/embedded.txt
touch jakiro/.venv/.installed # make installs nothing again
cat <<END
Installed. Next:
    cd $PWD/jakiro && . .venv/bin/activate
    jakiro check                            # ten minutes: measures the GPU
    jakiro run infra/recipes/one-gpu.toml   # all of ShareGPT: dump, train, measure, release
END
