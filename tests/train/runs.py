"""Trainings as a user starts them, on features that were dumped once."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipeline.artifacts.curves import METRICS, read_metrics
from pipeline.recipe.load import load_recipe, override_arguments
from tests.kit import (
    PATIENCE,
    call,
    command_environment,
    dump_here,
    free_port,
    recipe_tree,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.warm import Forked, run_forked
from train.engine.engine import TrainingEngine
from train.main import main


def dump_for(target: Path, folder: Path, **features: str) -> tuple[Path, Path]:
    """Dump in this process, without Ray, and return (recipe file, features folder). 20 steps of 8 dialogues in 4
    epochs, each in windows of two shards, two and one.
    """
    tree = recipe_tree(target, write_sharegpt(folder / "data.json", 60), folder / "run")
    tree["data"]["max_dialogues"] = 40
    tree["train"] |= {"epochs": 4, "window": 2}
    tree["features"] |= features
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path)
    assert dump_here(recipe).total("train", "rows") == 40
    return path, recipe.paths.features


def run_training(
    dumped, output: Path, *overrides: str, ranks: int = 1, draft: str | None = "jakiro", **environment: str
):
    """Train a draft, or all of them, on the dumped features under another output folder, as DeepSpeed's launcher does:
    a process a rank. What the launcher itself does is shown where a test has `train_command`.
    """
    return run_forked(*_ranks(dumped, output, overrides, ranks, draft, environment), PATIENCE)


def kill_training(dumped, output: Path, happened: Callable[[], bool], *overrides: str, ranks: int = 1) -> None:
    """Train jakiro in the same way, and kill its ranks as soon as `happened` returns True."""
    commands, environment = _ranks(dumped, output, overrides, ranks, "jakiro", {})
    running = [
        Forked([sys.executable, *arguments], {**environment, **rank_environment})
        for arguments, rank_environment in commands
    ]
    try:
        wait_until(happened, running[0])
    finally:
        for rank in running:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in running:
            rank.wait()


def _ranks(dumped, output: Path, overrides: tuple[str, ...], ranks: int, draft: str | None, environment: dict):
    """Return each rank's command with its own variables, and the variables that all ranks share."""
    arguments = ["train/main.py", str(linked(dumped, output)), *(["--draft", draft] if draft else [])]
    arguments += override_arguments([f"output={output}", *overrides])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    each = [(arguments, {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    return each, command_environment(**shared, **environment)


def train_here(dumped, output: Path, *overrides: str, draft: str | None = "jakiro") -> None:
    """Train in the same way on one rank, in this process: three fewer processes to start, each of which takes far
    longer than a tiny draft's training. The process group stays for the next one: DeepSpeed remembers it. Raise
    PipelineError.
    """
    single_process = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    recipe, threads = linked(dumped, output), torch.get_num_threads()
    with (
        mock.patch.dict(os.environ, {key: str(value) for key, value in single_process.items()}),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        try:
            draft_option = ["--draft", draft] if draft else []
            call(main, str(recipe), *draft_option, *override_arguments([f"output={output}", *overrides]))
        finally:
            torch.set_num_threads(threads)


def stopped_here(dumped, output: Path, *overrides: str, draft: str | None = "jakiro", saves: int = 1) -> None:
    """Train in the same way, and interrupt (Ctrl-C) after this many resume states."""
    left, saved = [None] * saves, TrainingEngine.save_resume

    def save_and_end(self, progress) -> None:
        saved(self, progress)
        self.finish_resume()
        left.pop()
        if not left:
            raise KeyboardInterrupt

    with mock.patch.object(TrainingEngine, "save_resume", save_and_end), pytest.raises(KeyboardInterrupt):
        train_here(dumped, output, *overrides, draft=draft)


def linked(dumped, output: Path) -> Path:
    """Return the recipe file; link the dumped features to where a training into `output` expects them."""
    recipe, features = dumped
    output.mkdir(exist_ok=True)
    if not (output / "features").exists():
        (output / "features").symlink_to(features)
    return recipe


def lines_of(output: Path, kind: str, draft: str = "jakiro") -> list[dict]:
    return [line for line in read_metrics(output / "drafts" / draft / METRICS) if line["kind"] == kind]


def steps_so_far(output: Path, draft: str = "jakiro") -> int:
    """Count the steps with a complete line in the metrics of a training that still writes them, or was killed while
    writing.
    """
    path = output / "drafts" / draft / METRICS
    complete_lines = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return sum(json.loads(line)["kind"] == "train" for line in complete_lines.splitlines())


def losses(output: Path, draft: str = "jakiro") -> list[float]:
    return [line["loss"] for line in lines_of(output, "train", draft)]


def largest_difference(first: Path, second: Path, draft: str = "jakiro") -> float:
    """Return the largest relative difference of two loss curves."""
    return max(abs(a - b) / a for a, b in zip(losses(first, draft), losses(second, draft), strict=True))
