"""Training on one and two ranks of DeepSpeed: ZeRO stages, kills, bad input."""

import json
import os
import random
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from filelock import FileLock

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running.state import train_state
from tests.kit import BIN, flip, free_port, kill_when, run_command, train_command
from tests.train.runs import kill_training, largest_difference, linked, losses, run_training, steps_so_far, train_here
from train.engine.config import deepspeed_config
from train.engine.engine import COLLECTIVE_TIMEOUT, require_dtype
from train.engine.ranks import join_on_loopback

pytestmark = pytest.mark.real
# ZeRO-3 keeps tensors as small as these whole unless it is told to take all apart.
PARTITIONED = ["train.deepspeed={zero_optimization={stage3_param_persistence_threshold=0,stage3_max_reuse_distance=0}}"]


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 1), (1, 2)])
def test_the_split_of_the_global_batch_does_not_change_the_loss_curve(
    dumped, undisturbed, tmp_path, micro_batch, ranks
):
    """1x8 (and 4x2, the reference) on one rank, 1x4 on two."""
    sets = [f"train.micro_batch={micro_batch}"]
    if ranks == 1:
        train_here(dumped, tmp_path / "run", *sets)
    else:
        done = run_training(dumped, tmp_path / "run", *sets, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
    worst = largest_difference(undisturbed, tmp_path / "run")
    print(f"micro-batch {micro_batch}, ranks {ranks}: largest relative difference {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize(("stage", "recompute"), [(2, "false"), (3, "true")])
def test_zero_stages_train_alike_and_save_whole_weights(dumped, undisturbed, tmp_path, stage, recompute):
    """The third with recomputed activations. Without them: tests/train/test_frames.py."""
    compiled = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    sets = [f"train.zero_stage={stage}", f"train.recompute={recompute}", *PARTITIONED]
    done = run_training(dumped, tmp_path / "run", *sets, ranks=2, **compiled)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "extensions").exists()  # nothing to compile: a kill there would block all later trainings
    worst = largest_difference(undisturbed, tmp_path / "run")
    print(f"ZeRO-{stage}: largest relative difference {worst:.1e}")
    assert worst < 1e-5
    saved = json.loads((tmp_path / "run/drafts/jakiro/config.json").read_text())
    config = json.loads((undisturbed / "drafts/jakiro/config.json").read_text())
    assert saved["training"]["parameters"] == config["training"]["parameters"]
    size = "drafts/jakiro/model.safetensors"
    assert (tmp_path / "run" / size).stat().st_size == (undisturbed / size).stat().st_size


def listening(output: Path) -> dict[str, list[bytes]]:
    """Return the addresses at which the processes of a training listen for TCP, by command line."""
    sockets = {}
    for version in ("tcp", "tcp6"):
        lines = [line.split() for line in Path(f"/proc/net/{version}").read_text().splitlines()[1:]]
        sockets |= {f"socket:[{words[9]}]": bytes.fromhex(words[1][:-5])[::-1] for words in lines if words[3] == "0A"}
    addresses = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (process / "cmdline").read_text()
            if str(output) in command:
                opened = set()
                for entry in (process / "fd").iterdir():
                    with suppress(OSError):  # it was closed meanwhile
                        opened.add(str(entry.readlink()))
                addresses[f"{process.name} {command}"] = [sockets[name] for name in opened if name in sockets]
    return addresses


@pytest.mark.long
def test_ranks_of_one_machine_listen_on_its_loopback_alone(dumped, tmp_path):
    """The store of the process group and the sockets of collectives, while the ranks train; by DeepSpeed's launcher."""
    listeners: dict[str, list[bytes]] = {}

    def happened() -> bool:
        if begun := steps_so_far(tmp_path) >= 2:
            listeners.update(listening(tmp_path))
        return begun

    command = train_command(linked(dumped, tmp_path), f"output={tmp_path}", ranks=2, draft="jakiro")
    kill_when(command, happened)
    assert len(listeners) >= 3 and sum(map(bool, listeners.values())) == 2  # the launcher listens nowhere
    assert {address for addresses in listeners.values() for address in addresses} == {bytes((127, 0, 0, 1))}


def test_ranks_of_several_machines_meet_where_their_launcher_says(monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", None)  # not called
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    join_on_loopback("gloo", None, COLLECTIVE_TIMEOUT)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_port_that_is_taken_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        with pytest.raises(PipelineError, match=rf"MASTER_PORT={port}: Address already in use, expected"):
            join_on_loopback("gloo", None, COLLECTIVE_TIMEOUT)


def test_two_trainings_do_not_share_a_folder(dumped, tmp_path):
    (tmp_path / "run/drafts/jakiro").mkdir(parents=True)
    with (
        FileLock(tmp_path / "run/drafts/jakiro/.lock"),
        pytest.raises(PipelineError, match="another training is writing here"),
    ):
        train_here(dumped, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "zero_optimization.stage=3 contradicts 0"),
        ({"deepspeed": {"gradient_accumulation_steps": 7}}, "gradient_accumulation_steps=7 contradicts 2"),
        ({"deepspeed": {"bf16": {"enabled": False}}}, "bf16.enabled=False contradicts True"),
        ({}, "train.zero_stage=0 would add the gradients of 2 micro-batches up in bfloat16"),
    ],
)
def test_contradictions_with_the_recipes_own_keys_are_refused(changes, message):
    accumulation = 2 if not changes or "gradient_accumulation_steps" in changes["deepspeed"] else 1
    stage = 1 if accumulation == 2 and changes else 0
    with pytest.raises(PipelineError, match=re.escape(message)):
        deepspeed_config(TrainConfig(**changes, zero_stage=stage), accumulation, 1000)


def test_a_dtype_that_the_device_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: False)
    monkeypatch.setattr(type(get_accelerator()), "is_bf16_supported", lambda _: True)
    with pytest.raises(PipelineError, match=r"train.dtype='float16', which \w+ does not .*use 'float32' or 'bfloat16'"):
        require_dtype("float16")
    require_dtype("bfloat16")


def test_other_keys_pass_through_to_deepspeed():
    more = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True}
    more["zero_optimization"]["allgather_bucket_size"] = 7
    made = deepspeed_config(TrainConfig(zero_stage=2, deepspeed=more), 4, 10**10)
    assert made["zero_optimization"]["stage"] == 2 and made["zero_optimization"]["overlap_comm"] is True
    assert (
        made["zero_optimization"]["reduce_bucket_size"] == 5e8
        and made["zero_optimization"]["allgather_bucket_size"] == 7
    )
    assert deepspeed_config(TrainConfig(zero_stage=2), 4, 1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert made["wall_clock_breakdown"] is True and made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("default", 0, 1e-7), pytest.param("bf16", 1e-3, 1e-2, marks=pytest.mark.long)]
)
def test_ranks_add_gradients_up_in_float32(dtype, least, most):
    """And in bfloat16 only where a recipe says so, which costs three digits."""
    launcher = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = run_command([*launcher, "-m", "tests.train.sums", dtype])
    errors = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ZeRO-")]
    print(done.stdout)
    for rank in (0, 1):
        assert f"rank {rank} decides [True, False]" in done.stdout, "rank 0's wish alone counts, on every rank"
    assert len(errors) == 3 and all(least <= error <= most for error in errors), done.stderr


def test_bfloat16_micro_batches_add_up_in_float32(dumped, tmp_path):
    """ZeRO-1: eight micro-batches of one dialogue against one of eight; bf16 rounds each forward on its own."""
    outputs = [tmp_path / str(micro_batch) for micro_batch in (1, 8)]
    for output, micro_batch in zip(outputs, (1, 8), strict=True):
        sets = ["train.epochs=2", "train.dtype=bfloat16", "train.zero_stage=1", f"train.micro_batch={micro_batch}"]
        train_here(dumped, output, *sets)
    worst = largest_difference(*outputs)
    print(f"bf16, 1x8 against 8x1: largest relative difference {worst:.1e}")
    assert worst < 1e-3


def test_killed_in_the_middle_and_resumed_gives_the_same_weights(dumped, undisturbed, tmp_path):
    output = tmp_path / "run"
    resume = output / "drafts/jakiro/resume/resume.json"
    step = random.randrange(3, 18)  # a state is saved every 2 of 20
    kill_training(dumped, output, lambda: resume.exists() and steps_so_far(output) >= step)
    print(f"killed at step {steps_so_far(output)}")
    assert 0 < json.loads(resume.read_text())["step"] < 20
    assert not (output / "drafts/jakiro/config.json").exists()
    with pytest.raises(PipelineError, match="holds the resume state of a run with other settings"):
        train_here(dumped, output, "train.learning_rate=0.01")
    state = json.loads(resume.read_text())
    assert set(state["files"]) == {f"{state['tag']}/{path.name}" for path in (resume.parent / state["tag"]).iterdir()}
    (name,) = state["files"]
    flip(resume.parent / name)
    with pytest.raises(PipelineError, match=f"resume state {resume.parent / name}: its SHA-256 is not resume.json"):
        train_here(dumped, output)
    flip(resume.parent / name)
    train_here(dumped, output)
    weights = "drafts/jakiro/model.safetensors"
    assert sha256(output / weights) == sha256(undisturbed / weights)
    assert losses(output) == losses(undisturbed)
    assert not resume.parent.exists()


def test_a_training_that_was_killed_before_its_plot_draws_it(dumped, undisturbed, capsys):
    folder = undisturbed / "drafts/jakiro"
    (folder / "training.png").unlink()
    (folder / "resume").mkdir()
    recipe = load_recipe(dumped[0], [f"output={undisturbed}"])
    assert not train_state(recipe)[0]
    train_here(dumped, undisturbed)
    assert "trained already" in capsys.readouterr().out
    assert (folder / "training.png").stat().st_size > 5000 and not (folder / "resume").exists()
    assert "its plot is missing" not in train_state(recipe)[1]


def test_a_finished_draft_is_left_alone_and_a_foreign_one_refused(dumped, undisturbed, capsys):
    before = sha256(undisturbed / "drafts/jakiro/model.safetensors")
    train_here(dumped, undisturbed)
    assert "trained already" in capsys.readouterr().out
    with pytest.raises(PipelineError, match="trained with other settings"):
        changed = load_recipe(dumped[0], [f"output={undisturbed}", "train.learning_rate=0.01"])
        checkpoint.require_trained_under(changed, "jakiro")
    assert sha256(undisturbed / "drafts/jakiro/model.safetensors") == before


def test_bad_shards_stop_training_before_it_starts(dumped, tmp_path):
    """One damage, found by one of two ranks; each that the reader refuses is in
    tests/pipeline/test_shards.py.
    """
    recipe, features = dumped
    copy = tmp_path / "features"
    shutil.copytree(features, copy)
    victim = copy / "features-train-000001.arrow"
    flip(victim)
    done = run_training((recipe, copy), tmp_path, draft="eagle", ranks=2)
    assert done.returncode != 0
    assert "its SHA-256 is not the manifest's" in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not (tmp_path / "drafts/eagle/metrics.jsonl").exists()
