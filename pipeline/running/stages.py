"""The stages of a run. Each is a command of its own: it is started unless it is done, and its progress is shown.

A stage that is done is not started again, so a second run continues where the first stopped.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipeline.artifacts.features import SHARDS_MADE, shard_request_file
from pipeline.artifacts.published import download_published
from pipeline.artifacts.reports import REPORT, TABLE, describe_faster_drafts, eval_state, read_report, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, is_held, lock_folder
from pipeline.basics.progress import METRICS, Screen, read_event, read_events
from pipeline.drafts.prompt_lookup import corpus_hashes
from pipeline.lm.model import identify_if_local
from pipeline.recipe.dtypes import describe_dtypes, warn_of_emulation
from pipeline.recipe.identity import run_hash
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.trees import require_verifiable
from pipeline.running import children
from pipeline.running.cores import check_process_count
from pipeline.running.gpus import env_assignments, launch_command, require_choice, require_gpus, require_step
from pipeline.running.state import features_state, require_same_settings, train_state

STAGES = {"preprocess": "dump", "train": "train", "eval": "eval"}  # with their commands' names


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]
    environment: dict[str, str]
    state: Callable[[Recipe], tuple[bool, str]]  # (done, one line for the user)
    held_folders: list[Path]  # locked while it runs
    feeder: list[str] = field(default_factory=list)  # a command that runs next to it


def list_stages(recipe_path: str, overrides: list[str], recipe: Recipe) -> list[Stage]:
    arguments, environment = [recipe_path, *override_arguments(overrides)], dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    if recipe.target.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    local_launcher = Path(sys.executable).with_name("deepspeed")
    launcher = [str(local_launcher) if local_launcher.exists() else "deepspeed", "--master_port", str(_free_port())]
    train = launch_command(launcher, str(ROOT / "train/main.py"), recipe.train, recipe.target.device)
    interpreter = (
        ["env", *env_assignments(recipe.features.gpus), sys.executable] if recipe.features.gpus else [sys.executable]
    )
    dump = [*interpreter, str(ROOT / "preprocess/dump_features.py"), *arguments]
    feeder = [*interpreter, str(ROOT / "preprocess/feed.py"), *arguments] if recipe.fed else []
    evaluation = [sys.executable, str(ROOT / "eval/main.py"), *arguments]
    drafts = [recipe.paths.draft(name) for name in recipe.to_train]
    return [
        Stage("preprocess", dump, environment, features_state, [recipe.paths.features]),
        Stage("train", [*train, *arguments], environment, train_state, drafts, feeder),
        Stage("eval", evaluation, environment, eval_state, [recipe.paths.eval]),
    ]


def _free_port() -> int:
    """Return a free port, so that two runs on one machine do not collide."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(recipe_path: str, overrides: list[str], until: str = "eval") -> None:
    """Run all stages up to `until`."""
    recipe = load_recipe(recipe_path, overrides, begin=True)
    _require_possible(recipe, until)
    (recipe.paths.run / "logs").mkdir(parents=True, exist_ok=True)
    begin, screen = time.monotonic(), Screen(sys.stdout)
    for line in filter(None, (describe_dtypes(recipe), warn_of_emulation(recipe))):
        screen.write_line(line)
    if until != "preprocess":
        download_published(recipe, screen.write_line)
    for stage in list_stages(recipe_path, overrides, recipe)[: 1 + list(STAGES).index(until)]:
        done, state = stage.state(recipe)
        if done:
            screen.write_line(f"{stage.name}: done already ({state})")
            continue
        screen.write_line(f"{stage.name}: starts at {time.strftime('%H:%M')}")
        started = time.monotonic()
        run_stage(recipe, stage)
        done, state = stage.state(recipe)
        if not done:
            log = recipe.paths.run / "logs" / f"{stage.name}.log"
            raise PipelineError(f"stage {stage.name} ended without an error, but is not done: {state}. See {log}")
        screen.write_line(f"{stage.name}: {state}, {_minutes(started)}")
    if until == "eval":
        _print_release(recipe)
    print(f"total {_minutes(begin)}")


def _require_possible(recipe: Recipe, until: str) -> None:
    """Raise PipelineError, before hours of dumping, for what a stage up to `until` would refuse."""
    require_choice(recipe)
    if until == "eval":
        require_verifiable(recipe)
    if until != "preprocess":
        if recipe.target.device != "cpu":
            require_gpus(recipe.train.ranks or 1)
        require_step(recipe)
    require_same_settings(recipe, [] if until == "preprocess" else recipe.to_train)
    check_process_count("train.ranks", recipe.train.ranks or 1)
    corpus_hashes(recipe.draft.values())


def _minutes(since: float) -> str:
    seconds = round(time.monotonic() - since)
    return f"{seconds // 60} min {seconds % 60:02d} s"


def run_stage(recipe: Recipe, stage: Stage) -> None:
    """Run the stage's command, and its feeder until it has cleaned up, and show the progress that the stage records."""
    screen, logs = Screen(sys.stdout), recipe.paths.run / "logs"
    commands = [(f"stage {stage.name}", stage.command, logs / f"{stage.name}.log")]
    if stage.feeder:
        commands.append(("feeding", stage.feeder, logs / "feed.log"))
        with lock_folder(recipe.paths.features, "dump"):  # left by an earlier training: no training reads shards now
            shard_request_file(recipe).unlink(missing_ok=True)
        shares_gpus = not (recipe.features.gpus or recipe.train.gpus or recipe.target.device == "cpu")
        if shares_gpus and torch.accelerator.device_count():
            screen.write_line(
                "train: its ranks and its feeder share all GPUs; features.gpus and train.gpus give each its own"
            )
    record = recipe.paths.run / METRICS / f"{STAGES[stage.name]}.json"
    record.unlink(missing_ok=True)
    try:
        with ExitStack() as stack:
            stack.callback(screen.close)
            running = []
            for title, command, log in commands:
                output = {"stdout": stack.enter_context(log.open("w")), "stderr": subprocess.STDOUT}
                process = stack.enter_context(children.start_command(command, stage.environment, **output))
                running.append((title, log, process))
            while False in [_has_ended(*part) for part in running]:
                screen.show(read_event(record), stage.name)
                time.sleep(0.3)
    except KeyboardInterrupt as error:
        event = read_event(record)
        if event and event.lost:
            error.add_note(event.lost)
        raise
    if stage.feeder:
        lines = [line for line in (logs / "feed.log").read_text().splitlines() if SHARDS_MADE in line]
        for line in lines[-1:]:  # a library may print after it
            screen.write_line(f"feed: {line}")


def _has_ended(title: str, log: Path, process: subprocess.Popen) -> bool:
    """Return whether the command has ended. Raise PipelineError, with the command's own message, where it failed."""
    if process.poll():
        raise PipelineError(f"{title} failed (status {process.returncode}); the whole log is {log}\n{_read_error(log)}")
    return process.returncode is not None


def _read_error(log: Path) -> str:
    """Return the stage's own error message, or else the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        first = errors[0]
        error_lines = [lines[first], *(line for line in lines[first + 1 : first + 20] if line.startswith("  "))]
        return "\n".join(error_lines)
    return "\n".join(lines[-25:])


def _print_release(recipe: Recipe) -> None:
    report = read_report(recipe.paths.release / REPORT)
    print(report["table"])
    if (recipe.paths.eval / TABLE).exists():
        print(f"all figures, and how they were checked: {recipe.paths.eval / TABLE}")
    rows = [row for row in read_rows(recipe.paths.eval) if row.instrument == "decoded"]
    if faster := describe_faster_drafts(recipe, report, rows):
        print(faster)
    print(f"\nrelease: {recipe.paths.release}/")
    for plot in report["plots"]:
        print(f"plot: {recipe.paths.release / plot}")


def print_status(recipe_path: str, overrides: list[str], watch: float | None = None) -> None:
    """Print the state of each stage. `watch`: print it again after this many seconds, until all is done."""
    recipe = load_recipe(recipe_path, overrides)
    while True:
        lines, undone = [f"{recipe.name} ({run_hash(recipe)}) in {recipe.output}"], False
        if identify_if_local(recipe.target) is None:
            lines.append(f"  the files of {recipe.target.model} are not here: whether they changed is not known")
        for stage in list_stages(recipe_path, overrides, recipe):
            done, state = stage.state(recipe)
            undone |= not done
            running = any(map(is_held, stage.held_folders))
            word = "done" if done else "runs" if running else "to do"
            lines.append(f"  {word:<6} {stage.name:<11} {state}")
        for job, event in read_events(recipe.paths.run).items() if undone else ():
            lines += [f"  {event.line(job)}"] if event.done != event.total else []
        print("\x1b[H\x1b[2J" * (watch is not None and sys.stdout.isatty()) + "\n".join(lines), flush=True)
        if watch is None or not undone:
            return
        time.sleep(watch)
