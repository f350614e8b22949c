"""Runs a recipe's stages as a user would, estimates what they will take, or says what is done.

    python -m pipeline run RECIPE
    python -m pipeline plan RECIPE
    python -m pipeline status RECIPE

Stages are separate processes with their own commands; this file imports none of them and knows their results only by
what they leave on disk. A stage that is done is not started again, so a second `run` continues where the first stopped.
"""

import argparse
import json
import os
import shutil
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline import checkpoint, children, entry
from pipeline.cores import require_few
from pipeline.errors import PipelineError
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest, damage
from pipeline.files import read_json
from pipeline.progress import CHANNEL
from pipeline.provenance import ROOT
from pipeline.recipe import Recipe, add_recipe_arguments, hand_over, load_recipe


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]
    environment: dict[str, str]
    state: Callable[[Recipe], tuple[bool, str]]  # (done, one line for the user)


def features_state(recipe: Recipe) -> tuple[bool, str]:
    folder = recipe.features_dir
    if not (folder / MANIFEST).exists():
        return False, "not started"
    manifest = Manifest.load(folder)
    if manifest.spec.recipe != recipe.dump_hash:
        return False, f"{folder} holds features of other settings"
    if manifest.answers != recipe.answers_hash:
        return False, "answers to calibration prompts are to be given anew"
    here = [] if recipe.features.store else manifest.shards
    broken = [shard.name for shard in here if damage(folder, shard, checksum=False)]
    if broken:
        return False, f"{len(broken)} of {len(manifest.shards)} shards missing or truncated"
    if not manifest.complete or not (folder / HELDOUT_PROMPTS).exists():
        return False, f"{len(manifest.shards)} shards finished, dump not complete"
    return True, f"{manifest.total('train', 'rows')} dialogues, {manifest.total('train', 'tokens'):,} tokens"


def train_state(recipe: Recipe) -> tuple[bool, str]:
    parts, done = [], True
    for name in sorted(recipe.draft):
        folder = recipe.draft_dir(name)
        if not (folder / checkpoint.CONFIG).exists():
            resume = folder / "resume" / "resume.json"
            at = f"stopped after step {read_json(resume)['step']}" if resume.exists() else "not trained"
            parts.append(f"{name}: {at}")
            done = False
            continue
        saved = checkpoint.read_config(folder)
        fits = saved.train_hash == recipe.train_hash(name)
        done &= fits
        parts.append(
            f"{name}: {saved.training['trained_tokens']:,} trained tokens" if fits else f"{name}: of other settings"
        )
    return done, "; ".join(parts)


def eval_state(recipe: Recipe) -> tuple[bool, str]:
    """Done when the release's report was measured under this recipe on the weights that are in the draft folders now."""
    path = recipe.release_dir / "report.json"
    if not path.exists():
        return False, "no release"
    found = read_json(path)
    if found["provenance"]["recipe_hash"] != recipe.hash:
        return False, "release of other settings"
    tuned = recipe.tuned_file
    if (read_json(tuned) if tuned.exists() else {}) != found.get("tuned"):
        return False, "release without the tuned trees"
    for facts in found["drafts"].values():
        folder = recipe.draft_dir(facts["draft"])
        if (
            not (folder / checkpoint.CONFIG).exists()
            or checkpoint.read_config(folder).weights_sha256 != facts["weights_sha256"]
        ):
            return False, "release of other weights"
    return True, f"release in {recipe.release_dir}/"


def stages(recipe_path: str, overrides: list[str], recipe: Recipe) -> list[Stage]:
    arguments, environment = hand_over(recipe_path, overrides)
    deepspeed = (
        shutil.which("deepspeed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") or "deepspeed"
    )
    ranks = ["--num_accelerators", str(recipe.train.ranks)] if recipe.train.ranks else []
    ranks += ["--master_port", str(_free_port())]  # two runs on one machine do not meet
    commands = {
        "preprocess": ([sys.executable, str(ROOT / "preprocess/dump_features.py")], features_state),
        "train": ([deepspeed, *ranks, str(ROOT / "train/main.py")], train_state),
        "eval": ([sys.executable, str(ROOT / "eval/main.py")], eval_state),
    }
    return [Stage(name, [*command, *arguments], environment, state) for name, (command, state) in commands.items()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(recipe_path: str, overrides: list[str], until: str = "eval") -> None:
    """All stages up to `until`."""
    recipe = load_recipe(recipe_path, overrides)
    if until != "preprocess" and recipe.target.device != "cpu":
        recipe.train.accumulation(recipe.train.ranks or max(torch.cuda.device_count(), 1))  # before hours of dumping
    require_few("train.ranks", recipe.train.ranks or 1)
    console = Console()
    logs = recipe.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as display:
        wanted = stages(recipe_path, overrides, recipe)
        for stage in wanted[: 1 + [stage.name for stage in wanted].index(until)]:
            done, state = stage.state(recipe)
            if done:
                console.print(f"{stage.name}: done already ({state})", highlight=False)
                continue
            started = time.monotonic()
            _run_stage(recipe, stage, logs / f"{stage.name}.log", display)
            done, state = stage.state(recipe)
            if not done:
                raise PipelineError(
                    f"stage {stage.name} ended without an error but is not done: {state}. See {logs / stage.name}.log"
                )
            console.print(f"{stage.name}: {state}, {_minutes(started)}", highlight=False)
    if until == "eval":
        _print_release(recipe, console)
    console.print(f"total {_minutes(begin)}", highlight=False)


def _minutes(since: float) -> str:
    seconds = round(time.monotonic() - since)
    return f"{seconds // 60} min {seconds % 60:02d} s"


def _run_stage(recipe: Recipe, stage: Stage, log: Path, display: Progress) -> None:
    """Starts the stage's command, draws what it reports, stops at its failure with its own message."""
    channel = log.with_suffix(".progress")
    channel.write_text("")
    environment = {**stage.environment, CHANNEL: str(channel.resolve()), "PYTHONUNBUFFERED": "1"}
    if recipe.target.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with log.open("w") as output, channel.open() as reports:
        process = children.start(stage.command, environment, stdout=output, stderr=subprocess.STDOUT)
        bars: dict[str, TaskID] = {}
        try:
            while process.poll() is None:
                _draw(stage.name, reports, bars, display)
                time.sleep(0.3)
        finally:
            children.end(process)
        _draw(stage.name, reports, bars, display)
    for bar in bars.values():
        display.remove_task(bar)
    channel.unlink()
    if process.returncode:
        raise PipelineError(
            f"stage {stage.name} failed (status {process.returncode}); the whole log is {log}\n{_last_words(log)}"
        )


def _draw(stage: str, reports, bars: dict[str, TaskID], display: Progress) -> None:
    while line := reports.readline():
        if not line.endswith("\n"):  # written in part: read again at the next look
            reports.seek(reports.tell() - len(line.encode()))
            break
        report = json.loads(line)
        what = report["what"]
        if what not in bars:
            bars[what] = display.add_task(f"{stage}: {what}", total=report["total"] or None, state="")
        shown = ", ".join(f"{key} {value}" for key, value in report["shown"].items())
        display.update(bars[what], completed=report["done"], state=f"{report['done']:,}/{report['total']:,} {shown}")


def _last_words(log: Path) -> str:
    """The stage's own error message; failing that, the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        first = errors[0]
        own = [lines[first], *(line for line in lines[first + 1 : first + 20] if line.startswith("  "))]
        return "\n".join(own)
    return "\n".join(lines[-25:])


def _print_release(recipe: Recipe, console: Console) -> None:
    found = read_json(recipe.release_dir / "report.json")
    print(found["table"])
    console.print(f"\nrelease: {recipe.release_dir}/", highlight=False)
    for plot in found["plots"]:
        console.print(f"plot: {recipe.release_dir / plot}", highlight=False)


def plan(recipe_path: str, overrides: list[str], known: dict[str, float | None]) -> None:
    """The stages' own estimates, one after the other: tokens, disk, hours, memory. The last line is JSON.

    `known`: speeds of the hardware that will do it, by stage; what is missing is measured here.
    """
    load_recipe(recipe_path, overrides)
    given_to_all = hand_over(recipe_path, overrides)
    flags = {"preprocess": "--tokens-per-second", "train": "--tokens-per-second", "eval": "--ms-per-token"}
    given = {stage: [flags[stage], str(speed)] if speed else [] for stage, speed in known.items()}
    dump = _estimate("preprocess", given_to_all, given["preprocess"])
    rest = dump["tokens"] - dump["train_tokens"]
    sizes = ["--rows", dump["train_rows"], "--tokens", dump["train_tokens"], "--validation-tokens", rest]
    train = _estimate("train", given_to_all, [*map(str, sizes), *given["train"]])
    found = {"dump": dump, "train": train, "eval": _estimate("eval", given_to_all, given["eval"])}
    print(f"all    {sum(stage['hours'] for stage in found.values()):,.2f} h")
    print(json.dumps(found))


def _estimate(stage: str, recipe: tuple[list[str], dict[str, str]], more: list[str]) -> dict:
    """Runs a stage's estimate: shows its text, returns its figures. Ends with its status where it fails."""
    arguments, environment = recipe
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", f"{stage}.estimate", *arguments, *more]
    status, printed = children.call(command, {**environment, "PYTHONPATH": path}, Path.cwd(), capture=True)
    *text, figures = printed.splitlines() or [""]
    print("\n".join(text if status == 0 else [*text, figures]), flush=True)
    if status:
        sys.exit(status)
    return json.loads(figures)


def status(recipe_path: str, overrides: list[str]) -> None:
    recipe = load_recipe(recipe_path, overrides)
    print(f"{recipe.name} ({recipe.hash}) in {recipe.output}")
    for stage in stages(recipe_path, overrides, recipe):
        done, state = stage.state(recipe)
        print(f"  {'done' if done else 'to do':<6} {stage.name:<11} {state}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "plan", "status"):
        add_recipe_arguments(commands.add_parser(name))
    commands.choices["run"].add_argument(
        "--until", choices=("preprocess", "train", "eval"), default="eval", help="the last stage"
    )
    planned = commands.choices["plan"]
    planned.add_argument("--dump-speed", type=float, metavar="R", help="tokens/s of a dump worker, where it is known")
    planned.add_argument("--train-speed", type=float, metavar="R", help="tokens/s of one GPU training the draft")
    planned.add_argument("--decode-ms", type=float, metavar="R", help="ms a token of plain decoding")
    arguments = parser.parse_args()
    if arguments.command == "plan":
        known = {"preprocess": arguments.dump_speed, "train": arguments.train_speed, "eval": arguments.decode_ms}
        plan(arguments.recipe, arguments.overrides, known)
    elif arguments.command == "run":
        run(arguments.recipe, arguments.overrides, arguments.until)
    else:
        status(arguments.recipe, arguments.overrides)


if __name__ == "__main__":
    entry.run(main)
