"""Training on several nodes: by Slurm's script, with a srun that starts its tasks on this machine, and by DeepSpeed's
hostfile.
"""

import random
import stat

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from pipeline.basics.files import sha256
from tests.kit import ROOT, command_environment, override_arguments, run_command
from tests.train.test_fed import FED, WEIGHTS, fed, prepared

SRUN = """#!/usr/bin/env bash
# Two "nodes" on this machine; the first that fails ends both.
[ "$1" = --kill-on-bad-exit=1 ] || exit 64
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n || { kill $(jobs -p); wait; exit 1; }
"""


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """An environment with Slurm's commands on this machine."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.1\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(stat.S_IRWXU)
    slurm = {"JOB_ID": random.randrange(12000), "JOB_NODELIST": "x", "NNODES": 2, "SUBMIT_DIR": ROOT}
    path = f"{commands}:{command_environment()['PATH']}"
    return {"PATH": path, "DS_ACCELERATOR": "cpu", **{f"SLURM_{key}": str(value) for key, value in slurm.items()}}


@pytest.mark.real
@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="the script starts the checkout's own .venv")
def test_the_slurm_script_trains_on_two_nodes_that_are_fed_from_elsewhere(dumped, by_two, tmp_path, cluster):
    """All nodes see one folder. The weights are those of two ranks on one machine that has all shards."""
    recipe = prepared(dumped, tmp_path)
    command = ["bash", "infra/slurm/train.sbatch", str(dumped[0]), "--draft", "jakiro"]
    command += override_arguments([f"output={tmp_path}", *FED, "train.micro_batch=2"])
    with fed(recipe):
        done = run_command(command, **cluster)
        assert done.returncode == 0, done.stdout + done.stderr
    assert sha256(tmp_path / WEIGHTS) == by_two


@pytest.mark.real
@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="the script starts the checkout's own .venv")
def test_its_failure_is_the_jobs(dumped, cluster):
    done = run_command(["bash", "infra/slurm/train.sbatch", "no-such-recipe.toml"], **cluster)
    assert done.returncode != 0 and "no-such-recipe.toml does not exist" in done.stdout + done.stderr


def test_the_hostfile_is_one_that_deepspeed_reads():
    assert dict(fetch_hostfile(str(ROOT / "infra/hostfile.example"))) == {"node-1": 8, "node-2": 8}
