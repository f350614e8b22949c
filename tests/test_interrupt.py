"""Ctrl-C as a terminal sends it, to every process of the command's group: one line, status 130, nobody left behind."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.recipe.load import load_recipe, override_arguments
from tests import engines
from tests.kit import (
    PATIENCE,
    ROOT,
    command_environment,
    dump_command,
    dump_here,
    holding_files,
    recipe_tree,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.warm import Forked

pytestmark = pytest.mark.real
PROGRESS = re.compile(r"\w+: [\d,]+ (of [\d,]+ )?tokens")
LINE = "interrupted: what is finished is kept; run the same command again to continue"


def interrupted(
    process: Forked, began: Callable[[], bool], error: Path, mark: str, times: int = 1
) -> tuple[int, list[str]]:
    """(status, stderr without transformers' bars) of a command whose group is interrupted when `began`
    says so, and again until it has ended. Waits until no process of its session, and none with `mark` in its command
    line, is left.
    """
    try:
        wait_until(began, process)
        for _ in range(times):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.3)
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not holding_files(os.getsid, process.pid))
    wait_until(lambda: not any(mark in words_of(process) for process in Path("/proc").glob("[0-9]*")))
    lines = error.read_text().replace("\r", "\n").splitlines()
    return process.returncode, [line for line in lines if line and "it/s" not in line]


def words_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def slow(tiny_target, tmp_path) -> tuple[Path, Path]:
    """(recipe, run folder) of a dump of many small shards, by two planning processes, and a training of many steps."""
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json", 3000), tmp_path / "run")
    tree["features"] |= {"rows_per_shard": 1, "planners": 2}
    tree["data"]["validation_dialogues"] = 2
    del tree["draft"]["jakiro"]
    tree["publish"]["draft"] = "eagle"
    return write_recipe(tree, tmp_path / "recipe"), tmp_path / "run"


@pytest.mark.long
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_dump_ends_in_one_line(slow, tmp_path, warm, engine):
    """The second Ctrl-C ends it at once, where the first has not. Of two workers' engines nothing stays, neither a
    process nor shared memory. A run's, and its stage's: tests/pipeline/test_entry.py.
    """
    recipe, run = slow
    python = engines.environment(tmp_path / "environment")
    workers = ["features.workers=2", "features.planners=1"]
    engine_settings = [f"target.engine_python={python}", *workers] if engine == "vllm" else []
    command = dump_command(recipe, f"target.engine={engine}", *engine_settings)
    process = Forked(command, command_environment(**warm), tmp_path / "stderr")
    manifest, count = run / "features/manifest.json", 2 if engine_settings else 0

    def began() -> bool:
        return manifest.exists() and len(engines.started(python)) == count

    status, error = interrupted(process, began, tmp_path / "stderr", str(recipe), times=3)
    assert status == 130
    lines = [re.sub(r", but the [\d,]+ tokens of what is in work, which are made again", "", line) for line in error]
    assert [line for line in lines if not PROGRESS.match(line)] == [LINE]
    wait_until(lambda: not engines.left_of(python))


@pytest.mark.long
def test_a_run_ends_with_its_launcher_and_ranks_in_one_line(slow, tmp_path):
    """None of ours leaves a traceback, and of the ranks the first tells."""
    recipe, run = slow
    sets = ["features.planners=1", "data.max_dialogues=40", "train.epochs=5000", "train.ranks=2"]
    dump_here(load_recipe(recipe, sets))
    command = [sys.executable, "-m", "pipeline", "run", str(recipe), "--until", "train", *override_arguments(sets)]
    (tmp_path / "stderr").touch()
    process = Forked(command, command_environment(), tmp_path / "stderr")
    began = (run / "drafts/eagle/metrics.jsonl").exists
    status, error = interrupted(process, began, tmp_path / "stderr", str(recipe))
    log = (run / "logs/train.log").read_text()
    assert (status, error) == (130, [LINE]) and log.count(LINE.removeprefix("interrupted")) == 1
    assert f'File "{ROOT}' not in log
