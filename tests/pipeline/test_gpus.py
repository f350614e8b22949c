"""GPUs of workers and ranks, with and without GPUs on the nodes. The tests need no GPU."""

import logging
import subprocess
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from infra.plan.__main__ import equivalent_workers, make_plan
from pipeline.basics.errors import PipelineError
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running.crew import Crew, require_room
from pipeline.running.gpus import DEVICE_VARIABLES, launch_command, require_choice
from pipeline.running.stages import list_stages, run
from tests.kit import ROOT, command_environment, recipe_tree, write_recipe, write_sharegpt

RANK = r"""
import os, sys
told = [os.environ.get(name, "-") for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")]
os.write(1, ("rank " + " ".join([*told, *sys.argv[1:]]) + "\n").encode())
"""


def test_the_ranks_get_the_gpus_that_the_user_chose(tmp_path, tiny_recipe, monkeypatch):
    """DeepSpeed's own launcher is run, as `pipeline run` starts it."""
    choice = {"CUDA_VISIBLE_DEVICES": "3,GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "ZE_AFFINITY_MASK": "1.0"}
    for name, value in choice.items():
        monkeypatch.setenv(name, value)
    all_stages = list_stages("RECIPE", [], with_settings(tiny_recipe, "train", "auto", ranks=2))
    command = next(stage.command for stage in all_stages if stage.name == "train")
    expected = [f"rank {rank} {' '.join(choice.values())} RECIPE" for rank in range(2)]
    assert printed_by_ranks(command, tmp_path) == expected


def printed_by_ranks(command: list[str], folder: Path) -> list[str]:
    """Return the lines that the processes of a stage's command print: their GPU variables and arguments."""
    (folder / "rank.py").write_text(RANK)
    command = [
        str(folder / "rank.py") if word.startswith(str(ROOT)) and word.endswith(".py") else word for word in command
    ]
    done = subprocess.run(command, env=command_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_each_side_gets_the_gpus_that_the_recipe_gives_it(tmp_path, tiny_recipe, monkeypatch):
    for name in DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    recipe = with_settings(tiny_recipe, "train", "auto", ranks=None, gpus=[3, 1]).with_features(gpus=[0], keep="window")
    dump, train, evaluation = list_stages("RECIPE", [], recipe)
    assert printed_by_ranks(train.command, tmp_path) == [f"rank {rank} 3,1 - RECIPE" for rank in range(2)]
    assert printed_by_ranks(dump.command, tmp_path) == printed_by_ranks(train.feeder, tmp_path) == ["rank - 0 - RECIPE"]
    assert printed_by_ranks(evaluation.command, tmp_path) == ["rank - - - RECIPE"]
    with pytest.raises(PipelineError, match=r"features.gpus=\[0\], but this machine has 0, counted from 0"):
        require_choice(recipe)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with pytest.raises(PipelineError, match=r"train.gpus=\[3, 1\], but this machine has 3, counted from 0"):
        require_choice(recipe)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    with pytest.raises(PipelineError, match=r"features.gpus=\[0\], but CUDA_VISIBLE_DEVICES=6,7 in the environment"):
        require_choice(recipe)
    require_choice(tiny_recipe)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")  # of ROCm
    with pytest.raises(PipelineError, match=r"features.gpus=\[0\], but HIP_VISIBLE_DEVICES=6,7 in the environment"):
        require_choice(recipe)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(PipelineError, match=r"features.gpus=\[0\], but RAY_ADDRESS=auto in the environment"):
        require_choice(recipe)


def test_of_ranks_on_the_cpu_the_launcher_is_shown_no_gpu(monkeypatch):
    """The launcher would look for the third CPU if it saw GPU 3."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert launch_command(["deepspeed"], "main.py", TrainConfig(ranks=2), "cpu") == [
        *("env", "--unset=CUDA_VISIBLE_DEVICES", "deepspeed", "--num_accelerators", "2", "main.py")
    ]
    for device in ("cpu", "auto"):  # of which none is visible here
        words = launch_command(["deepspeed"], "main.py", TrainConfig(), device)
        assert words[words.index("--num_accelerators") + 1] == "1"


def test_what_the_launcher_would_overwrite_is_known():
    assert set(get_accelerator().visible_devices_envs()) <= set(DEVICE_VARIABLES)


def test_without_a_number_of_ranks_each_visible_gpu_is_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    words = launch_command(["deepspeed"], "main.py", TrainConfig(), "auto")
    assert words[words.index("--num_accelerators") + 1] == "2" and "CUDA_VISIBLE_DEVICES=6,7" in words
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch_command(["deepspeed"], "main.py", TrainConfig(), "auto") == ["deepspeed", "main.py"]


@pytest.mark.parametrize(
    ("command", "device", "settings", "message"),
    [
        *(
            (
                command,
                "cpu",
                {"dtype": "bfloat16", "ranks": 2, "micro_batch": 1, "global_batch": 4},
                "zero_stage=0 would add the gradients of 2 micro-batches up in bfloat16",
            )
            for command in (run, lambda recipe, _: make_plan(load_recipe(recipe), {}))
        ),
        (run, "auto", {"ranks": None}, "is no multiple of micro_batch x ranks = 4 x 3"),  # every GPU
        (
            run,
            "auto",
            {"ranks": 4, "micro_batch": 1},
            r"train\.ranks=4, but the accelerators that are visible \(CUDA_VISIBLE_DEVICES=6,7\) are 3",
        ),
    ],
)
def test_what_training_would_refuse_is_refused_before_the_dump(
    command, device, settings, message, tiny_target, tmp_path, monkeypatch
):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"] |= settings
    tree["target"]["device"] = device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with pytest.raises(PipelineError, match=message):
        command(str(write_recipe(tree, tmp_path / "tiny.toml")), [])
    assert not (tmp_path / "run").exists()


def with_settings(recipe: Recipe, section: str, device: str, **settings) -> Recipe:
    target = recipe.target.model_copy(update={"device": device})
    changed = getattr(recipe, section).model_copy(update=settings)
    return recipe.model_copy(update={"target": target, section: changed})


def crew(device: str, workers: int = 1, gpus: float | None = None, **settings) -> Crew:
    return Crew("features", workers, 1, gpus, device, 900, **settings)


def test_workers_are_one_a_gpu_of_the_nodes(caplog):
    nodes = [{"CPU": 64}, {"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}]
    assert require_room(crew("auto", 16), nodes) == 1
    assert require_room(crew("cpu", 16), nodes) == 0
    assert require_room(crew("auto", 32, 0.5), nodes) == 0.5
    assert require_room(crew("spread", 4, 4), nodes) == 4
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert require_room(crew("auto", 17), nodes) == 1
    assert "at most 64 CPUs and 8 GPUs, and room for 16 now: the remaining workers wait" in caplog.text
    for device, gpus, node in (("auto", None, {"CPU": 2}), ("auto", 0, {"CPU": 2}), ("cpu", 0, {"CPU": 2, "GPU": 2})):
        assert require_room(crew(device, 2, gpus), [node]) == 0


@pytest.mark.parametrize(
    ("refused_crew", "nodes", "message"),
    [
        (
            crew("spread", 1, 16),
            [{"CPU": 64, "GPU": 8}],
            "16 GPUs each, but the nodes have at most 64 CPUs and 8 GPUs, and room for 0",
        ),
        (crew("cuda"), [{"CPU": 2}], "1 CPUs and 1 GPUs each, but the nodes have at most 2 CPUs and 0 GPUs"),
        (crew("auto"), [], "at most 0 CPUs"),
        (crew("auto", 1, 0), [{"CPU": 2, "GPU": 2}], "features.gpus_per_worker=0, but target.device='auto' would have"),
        (crew("cuda", 1, 0), [{"CPU": 2}], "gpus_per_worker=0, but target.device='cuda' would have every"),
        (
            crew("auto", 8, all_at_once=True),
            [{"CPU": 64, "GPU": 4}],
            "workers=8 require 1 CPUs and 1 GPUs each, but the nodes have .* room for 4. Lower features.workers",
        ),
    ],
)
def test_a_crew_without_room_is_refused(refused_crew, nodes, message):
    with pytest.raises(PipelineError, match=message):
        require_room(refused_crew, nodes)


def test_workers_that_share_a_gpu_share_its_speed(tiny_recipe):
    config = tiny_recipe.features.model_copy(update={"workers": 8})
    assert equivalent_workers(config) == 8
    assert equivalent_workers(config.model_copy(update={"gpus_per_worker": 0.5})) == 4
    assert equivalent_workers(config.model_copy(update={"gpus_per_worker": 4.0})) == 8
