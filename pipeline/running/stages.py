"""The stages of a run, each a command of its own: whether it is done, by what it left on disk, and how it is started.

A stage that is done is not started again, so a second run continues where the first stopped.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import MADE, answers_hash, of_another_target, wanted_file
from pipeline.artifacts.published import fetch
from pipeline.artifacts.reports import REPORT, TABLE, eval_state, faster_drafts, read_report, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, exclusive, is_held, read_sealed
from pipeline.basics.progress import CHANNEL, Display, lines_of
from pipeline.features.reasons import describe_reasons
from pipeline.features.shards import MANIFEST, Manifest, damage, prompts_damage
from pipeline.lm.model import identify_if_here
from pipeline.recipe.dtypes import describe_dtypes, warn_of_emulation
from pipeline.recipe.load import hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running import children
from pipeline.running.cores import require_few
from pipeline.running.crew import CUDA, HIP
from pipeline.running.settings import features_differences, require_same_settings, training_differences

# What a user names GPUs with, by numbers or UUIDs, and DeepSpeed's launcher overwrites in its ranks: of CUDA and ROCm,
# of XPU. (It leaves ROCm's own alone, which goes before the first.)
CHOICES = (CUDA, "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]
    environment: dict[str, str]
    state: Callable[[Recipe], tuple[bool, str]]  # (done, one line for the user)
    feeder: list[str] = field(default_factory=list)  # a command that runs beside it


def features_state(recipe: Recipe) -> tuple[bool, str]:
    folder = recipe.features_dir
    if not (folder / MANIFEST).exists():
        return False, "no shard yet" if folder.exists() else "not started"
    manifest = Manifest.load(folder)
    if said := features_differences(recipe):
        return False, f"{folder} holds features of other settings: {said}"
    target = identify_if_here(recipe.target)
    if target and (differences := of_another_target(target, manifest.spec)):
        return False, f"features of what the target was before: {'; '.join(differences)}"
    if target and manifest.answers_hash != answers_hash(recipe, manifest.spec.recipe, target):
        return False, "answers to calibration prompts are to be given anew"
    here = [] if recipe.features.store else manifest.lasting(recipe.features.keep)
    broken = [shard.name for shard in here if damage(folder, shard, digest=None)]
    if broken:
        return False, f"{len(broken)} of {len(manifest.files)} tables and shards missing or truncated"
    if not manifest.complete or prompts_damage(folder, manifest):
        return False, f"{len(manifest.shards)} shards finished, dump not complete"
    rejected = manifest.accounting.get("rejected") or {}
    why = f"; {sum(rejected.values())} rejected: {describe_reasons(rejected)}" if rejected else ""
    if recipe.features.keep == "window":
        return True, f"texts, validation and answers; training is fed with the rest{why}"
    if lacking := manifest.lacks("train"):
        return False, f"the states of {lacking} dialogues were not kept"
    return True, f"{manifest.total('train', 'rows')} dialogues, {manifest.total('train', 'tokens'):,} tokens{why}"


def train_state(recipe: Recipe) -> tuple[bool, str]:
    # A feeder that was killed has not cleaned up.
    target = identify_if_here(recipe.target)
    parts, done = [], recipe.features.keep == "all" or not wanted_file(recipe).exists()
    for name in recipe.trained:
        folder = recipe.draft_dir(name)
        if not (folder / checkpoint.CONFIG).exists():
            resume = recipe.resume_dir(name) / "resume.json"
            at = f"stopped after step {_resume_step(resume)}" if resume.exists() else "not trained"
            at = "not fetched" if name in recipe.published else at
            parts.append(f"{name}: {at}")
            done = False
            continue
        saved = checkpoint.read_config(folder)
        state = saved.training_said
        if said := training_differences(recipe, name):
            done, state = False, f"of other settings: {said}"
        elif target and (differences := target.differences(saved.target)):
            done, state = False, f"of what the target was before: {'; '.join(differences)}"
        elif checkpoint.lacks_plot(folder):
            done, state = False, "its plot is missing"
        parts.append(f"{name}: {state}")
    return done, "; ".join(parts)


def _resume_step(state: Path) -> int:
    return read_sealed(state, f"Remove {state.parent} to train this draft from the start")["step"]


def stages(recipe_path: str, overrides: list[str], recipe: Recipe) -> list[Stage]:
    arguments, environment = hand_over(recipe_path, overrides)
    deepspeed = (
        shutil.which("deepspeed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") or "deepspeed"
    )
    launcher = [deepspeed, "--master_port", str(_free_port())]  # two runs on one machine do not meet
    train = launch_command(launcher, str(ROOT / "train/main.py"), recipe.train, recipe.target.device)
    making = ["env", *_named(recipe.features.gpus), sys.executable] if recipe.features.gpus else [sys.executable]
    commands = {
        "preprocess": ([*making, str(ROOT / "preprocess/dump_features.py")], features_state),
        "train": (train, train_state),
        "eval": ([sys.executable, str(ROOT / "eval/main.py")], eval_state),
    }
    feeders = {"train": [*making, str(ROOT / "preprocess/feed.py"), *arguments]}
    feeders = feeders if recipe.fed else {}
    return [
        Stage(name, [*command, *arguments], environment, state, feeders.get(name, []))
        for name, (command, state) in commands.items()
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in CHOICES if os.environ.get(name)}


def _named(gpus: list[int] | None) -> list[str]:
    """A recipe's choice, or else the user's, as `env` takes it."""
    here = torch.accelerator.current_accelerator()
    name = CHOICES[here is not None and here.type == "xpu"]
    chosen = {name: ",".join(map(str, gpus))} if gpus else _chosen()
    return [f"{name}={value}" for name, value in chosen.items()]


def launch_command(launcher: list[str], script: str, train: TrainConfig, device: str) -> list[str]:
    """`launcher`, DeepSpeed's, starting the ranks of the script, by default one for each accelerator that is chosen, or
    else visible here. `device` is ``target.device``.

    Told how many ranks to start, it gives them accelerators 0, 1, ... whatever the user chose; not told, it cannot read
    UUIDs. So it is not shown the choice, and each rank gets that back from `env`.
    """
    chosen, ranks = _named(train.gpus), train.ranks
    hidden = ["env", *(f"--unset={name}" for name in _chosen())] if _chosen() else []
    rank = [script]
    if chosen:  # hidden, it would count all that there are
        ranks = train.ranks_of(1 if device == "cpu" else torch.accelerator.device_count())
    if chosen and device != "cpu":
        rank = ["--no_python", "--no_local_rank", "env", *chosen, sys.executable, "-u", script]
    return [*hidden, *launcher, *(["--num_accelerators", str(ranks)] if ranks else []), *rank]


def require_choice(recipe: Recipe) -> None:
    """Raises PipelineError where the recipe names GPUs that are not here, or the environment chooses, too."""
    there, names = torch.accelerator.device_count(), (*CHOICES, HIP)
    for key, gpus, more in (("features", recipe.features.gpus, ["RAY_ADDRESS"]), ("train", recipe.train.gpus, [])):
        chosen = ", ".join(f"{name}={os.environ[name]}" for name in (*names, *more) if os.environ.get(name))
        if gpus and chosen:
            raise PipelineError(f"{key}.gpus={gpus}, but {chosen} in the environment chooses, too: leave one out")
        if gpus and there <= max(gpus):
            raise PipelineError(f"{key}.gpus={gpus}, but this machine has {there}, counted from 0: name others")


def require_gpus(ranks: int) -> None:
    """Raises PipelineError where there are accelerators, but not one for each rank."""
    there = torch.accelerator.device_count()
    if 0 < there < ranks:
        chosen = ", ".join(_named(None))
        raise PipelineError(
            f"train.ranks={ranks}, but the accelerators that are visible{chosen and f' ({chosen})'} are {there}, and "
            "each rank takes one: lower train.ranks, or choose more of them"
        )


def require_step(recipe: Recipe) -> None:
    """Raises PipelineError where the ranks of this machine cannot take a step as the recipe wants it."""
    there = 1 if recipe.target.device == "cpu" else torch.accelerator.device_count()
    accumulation = recipe.train.accumulation(recipe.train.ranks_of(there))
    if any(not (recipe.draft_dir(name) / checkpoint.CONFIG).exists() for name in recipe.to_train):
        recipe.train.require_exact_sum(accumulation)


def run(recipe_path: str, overrides: list[str], until: str = "eval") -> None:
    """All stages up to `until`."""
    recipe = load_recipe(recipe_path, overrides, begin=True)
    require_choice(recipe)
    if until != "preprocess":  # before hours of dumping
        if recipe.target.device != "cpu":
            require_gpus(recipe.train.ranks or 1)
        require_step(recipe)
    require_same_settings(recipe, [] if until == "preprocess" else recipe.to_train)
    require_few("train.ranks", recipe.train.ranks or 1)
    recipe.corpora(*recipe.draft)  # one that cannot be read is refused before hours of dumping
    logs = recipe.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    wanted = stages(recipe_path, overrides, recipe)
    wanted = wanted[: 1 + [stage.name for stage in wanted].index(until)]
    shown = Display(sys.stdout)
    for line in filter(None, (describe_dtypes(recipe), warn_of_emulation(recipe))):
        shown.say(line)
    if until != "preprocess":
        fetch(recipe, shown.say)
    for stage in wanted:
        done, state = stage.state(recipe)
        if done:
            shown.say(f"{stage.name}: done already ({state})")
            continue
        shown.say(f"{stage.name}: starts at {time.strftime('%H:%M')}")
        started = time.monotonic()
        _run_stage(recipe, stage, logs / f"{stage.name}.log", shown)
        done, state = stage.state(recipe)
        if not done:
            raise PipelineError(
                f"stage {stage.name} ended without an error but is not done: {state}. See {logs / stage.name}.log"
            )
        shown.say(f"{stage.name}: {state}, {_minutes(started)}")
    if until == "eval":
        _print_release(recipe)
    print(f"total {_minutes(begin)}")


def _minutes(since: float) -> str:
    seconds = round(time.monotonic() - since)
    return f"{seconds // 60} min {seconds % 60:02d} s"


def _run_stage(recipe: Recipe, stage: Stage, log: Path, shown: Display) -> None:
    """Starts the stage's command, shows what it reports, stops at its failure with its own message."""
    channel = log.with_suffix(".progress")
    channel.write_text("")
    shares = not (recipe.features.gpus or recipe.train.gpus or recipe.target.device == "cpu")
    if stage.feeder and shares and torch.accelerator.device_count():
        shown.say("train: its ranks and its feeder share all GPUs; features.gpus and train.gpus give each its own")
    environment = {**stage.environment, CHANNEL: str(channel.resolve()), "PYTHONUNBUFFERED": "1"}
    if recipe.target.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with log.open("w") as output, channel.open() as reports, _fed(recipe, stage, log.with_name("feed.log")) as fed:
        process = children.start(stage.command, environment, stdout=output, stderr=subprocess.STDOUT)
        shown.begin(stage.name)
        try:
            while process.poll() is None:
                shown.update(reports)
                fed()
                time.sleep(0.3)
            shown.update(reports)
        except KeyboardInterrupt as error:
            children.end(process)
            shown.update(reports)
            if shown.lost:
                error.add_note(shown.lost)
            raise
        finally:
            children.end(process)
            shown.end()
        channel.unlink()
        _require_success(f"stage {stage.name}", process.returncode, log)
    told = log.with_name("feed.log").read_text().splitlines() if stage.feeder else []
    if (trained := shown.seen.get("tokens/s")) and (line := next((one for one in told if MADE in one), "")):
        waiting = shown.seen["waiting"]
        shown.say(f"train: {trained} trained tokens/s, waiting {waiting} for states; feed: {line}")


@contextmanager
def _fed(recipe: Recipe, stage: Stage, log: Path) -> Iterator[Callable[[], None]]:
    """The stage's feeder, if it has one, runs in the block, and as long as it has to clean up. Yields what raises
    PipelineError where it failed.
    """
    if not stage.feeder:
        yield lambda: None
        return
    with exclusive(recipe.features_dir, "dump"):  # of an earlier training: nobody is fed now
        wanted_file(recipe).unlink(missing_ok=True)
    with log.open("w") as output:
        process = children.start(stage.feeder, stage.environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield lambda: _require_success("feeding", process.poll(), log)
            _require_success("feeding", process.wait(), log)
        finally:
            children.end(process)


def _require_success(what: str, status: int | None, log: Path) -> None:
    if status:
        raise PipelineError(f"{what} failed (status {status}); the whole log is {log}\n{_last_words(log)}")


def _last_words(log: Path) -> str:
    """The stage's own error message; failing that, the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        first = errors[0]
        own = [lines[first], *(line for line in lines[first + 1 : first + 20] if line.startswith("  "))]
        return "\n".join(own)
    return "\n".join(lines[-25:])


def _print_release(recipe: Recipe) -> None:
    found = read_report(recipe.release_dir / REPORT)
    print(found["table"])
    if (recipe.eval_dir / TABLE).exists():
        print(f"all figures, and how they were checked: {recipe.eval_dir / TABLE}")
    rows = [row for row in read_rows(recipe.eval_dir) if row.instrument == "decoded"]
    if faster := faster_drafts(recipe, found, rows):
        print(faster)
    print(f"\nrelease: {recipe.release_dir}/")
    for plot in found["plots"]:
        print(f"plot: {recipe.release_dir / plot}")


def _held_by(stage: str, recipe: Recipe) -> list[Path]:
    """The folders that it holds while it runs."""
    drafts = [recipe.draft_dir(name) for name in recipe.to_train]
    return {"preprocess": [recipe.features_dir], "train": drafts, "eval": [recipe.eval_dir]}[stage]


def status(recipe_path: str, overrides: list[str], watch: float | None = None) -> None:
    """`watch`: seconds after which to look again, until all is done."""
    recipe = load_recipe(recipe_path, overrides)
    while True:
        lines, undone = [f"{recipe.name} ({recipe.hash}) in {recipe.output}"], False
        if identify_if_here(recipe.target) is None:
            lines.append(f"  the files of {recipe.target.model} are not here: whether they changed is not known")
        for stage in stages(recipe_path, overrides, recipe):
            done, state = stage.state(recipe)
            undone |= not done
            running = any(map(is_held, _held_by(stage.name, recipe)))
            word = "done" if done else "runs" if running else "to do"
            lines.append(f"  {word:<6} {stage.name:<11} {state}")
        lines += [f"  {line}" for line in lines_of(recipe.run_dir)] if undone else []
        print("\x1b[H\x1b[2J" * (watch is not None and sys.stdout.isatty()) + "\n".join(lines), flush=True)
        if watch is None or not undone:
            return
        time.sleep(watch)
