"""What the dump costs beside the target's bare forward, and beside one dialogue at a time.

    python -m preprocess.bench RECIPE [--dialogues 64] [--repeats 3] [--no-memory]
    python -m preprocess.bench RECIPE --scaling 2 [--dialogues 64] [--repeats 3]

All three run on the same dialogues in one process, taking turns: the bare forward over our batches, the whole dump
(forward, transfer, writing, hashing), and the dump with one dialogue a batch. Ratios are of tokens per second. Peak
memory is that of processes that dump N and 10 N dialogues. With --scaling W: what W workers dump at once, each pinned
to a core of its own, over what one of them dumps alone, the two taking turns. The last line is JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import ROOT, hardware
from pipeline.basics.accelerator import now
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.lm.model import load_tokenizer, resolve_device
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from preprocess.dump.plan import Plan
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FeatureWorker, length_sorted_batches


def some_tasks(recipe: Recipe, dialogues: int) -> Iterator[ShardTask]:
    """The first training shards with so many dialogues, as the recipe plans them (a shard being no larger than
    that).
    """
    rows = min(recipe.features.rows_per_shard, dialogues)
    smaller = recipe.with_features(rows_per_shard=rows)
    train = (task for task in Plan(smaller, load_tokenizer(recipe.target)).tasks() if task.split == "train")
    return islice(train, -(-dialogues // rows))


class Methods:
    """The three ways, each over the same tasks."""

    def __init__(self, recipe: Recipe, folder: Path, tasks: list[ShardTask]):
        spec = feature_spec(recipe)
        alone = recipe.with_features(batch_tokens=1)
        self._tasks, self._device = tasks, resolve_device(recipe.target.device)
        self._ours, self._alone = FeatureWorker(recipe, folder, spec), FeatureWorker(alone, folder, spec)
        self._ours.ready()
        self._alone.__dict__["_source"] = self._ours._source  # one copy of the weights
        self._batch_tokens = recipe.features.batch_tokens

    def bare(self) -> None:
        """In the thread that the dump computes in: each thread has its own pool of OpenMP threads."""
        self._ours._computing.submit(self._forwards).result()

    def _forwards(self) -> None:
        for task in self._tasks:
            for batch in length_sorted_batches(task.documents, self._batch_tokens):
                self._ours._forward(batch)
        now(self._device)  # waits

    def dump(self) -> None:
        for task in self._tasks:
            self._ours.work(task)

    def one_at_a_time(self) -> None:
        for task in self._tasks:
            self._alone.work(task)


def peak_mb(recipe_path: str, overrides: list[str], dialogues: int) -> float:
    """Peak resident memory of a process that dumps so many dialogues."""
    arguments, environment = hand_over(recipe_path, overrides)
    command = [sys.executable, "-m", "preprocess.bench", *arguments, "--peak-of", str(dialogues)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def dump_and_tell_peak(recipe: Recipe, dialogues: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worker = FeatureWorker(recipe, Path(folder), feature_spec(recipe))
        worker.ready()
        for task in some_tasks(recipe, dialogues):
            (Path(folder) / worker.work(task).name).unlink()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def bench(recipe: Recipe, dialogues: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each method, one figure a repeat."""
    tasks = list(some_tasks(recipe, dialogues))
    tokens = sum(len(document.input_ids) for task in tasks for document in task.documents)
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=recipe.run_dir) as folder:  # the disk that a dump writes to
        methods = Methods(recipe, Path(folder), tasks)
        ways = {"forward": methods.bare, "dump": methods.dump, "single": methods.one_at_a_time}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()  # warm-up
        with Progress("bench", repeats * len(ways), "runs") as progress:
            for repeat in range(repeats):
                names = list(ways)
                for name in names[repeat % 3 :] + names[: repeat % 3]:
                    begin = time.perf_counter()
                    ways[name]()
                    speeds[name].append(tokens / (time.perf_counter() - begin))
                    progress.advance(1)
    return speeds


def pinned(recipe: Recipe, core: int, dialogues: int) -> None:
    """A worker on one core: says "ready", then its tokens a second after each line that it is sent."""
    os.sched_setaffinity(0, {core})
    recipe = recipe.with_features(cpus_per_worker=1)
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=recipe.run_dir) as folder:
        worker, tasks = FeatureWorker(recipe, Path(folder), feature_spec(recipe)), list(some_tasks(recipe, dialogues))
        tokens = sum(len(document.input_ids) for task in tasks for document in task.documents)
        worker.ready()
        worker.work(tasks[0])
        print("ready", flush=True)
        for _ in sys.stdin:
            begin = time.perf_counter()
            for task in tasks:
                worker.work(task)
            print(tokens / (time.perf_counter() - begin), flush=True)


def scaling(recipe_path: str, overrides: list[str], workers: int, dialogues: int, repeats: int) -> list[float]:
    """Tokens a second of all workers at once over those of the first alone, one figure a repeat."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    if len(cores) < workers:
        raise PipelineError(f"--scaling {workers}: there are {len(cores)} cores")
    started = []
    for core in cores:
        arguments, environment = hand_over(recipe_path, overrides)
        command = [sys.executable, "-m", "preprocess.bench", *arguments]
        command += ["--dialogues", str(dialogues), "--pinned-to", str(core)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))

    def run(some: list[subprocess.Popen]) -> float:
        for process in some:
            process.stdin.write("go\n")
        return sum(float(process.stdout.readline()) for process in some)

    try:
        for process in started:
            if process.stdout.readline() != "ready\n":
                raise PipelineError("a worker did not start; its own message stands above")
        ratios = []
        with Progress("scaling", repeats, "repeats") as progress:
            for _ in range(repeats):
                before, together, after = run(started[:1]), run(started), run(started[:1])
                ratios.append(together / ((before + after) / 2))
                progress.advance(1)
        return ratios
    finally:
        for process in started:
            process.stdin.close()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true", help="leave out the two runs for peak memory")
    parser.add_argument("--scaling", type=int, metavar="W", help="W pinned workers against one")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pinned-to", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides).with_features(store=None)  # it is not for trials
    if arguments.pinned_to is not None:
        pinned(recipe, arguments.pinned_to, arguments.dialogues)
        return
    if arguments.scaling:
        ratios = scaling(
            arguments.recipe, arguments.overrides, arguments.scaling, arguments.dialogues, arguments.repeats
        )
        print(f"{recipe.target.model}, {recipe.target.dtype}, {hardware('cpu')}, a core a worker")
        print(f"  {arguments.scaling} workers over 1: {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
        mean = round(sum(ratios) / len(ratios), 4)
        print(json.dumps({"workers": arguments.scaling, "speedup": mean, "range": [min(ratios), max(ratios)]}))
        return
    if arguments.peak_of:
        dump_and_tell_peak(recipe, arguments.peak_of)
        return
    speeds = bench(recipe, arguments.dialogues, arguments.repeats)
    print(
        f"{recipe.target.model}, {recipe.target.dtype}, {hardware(recipe.target.device)}, {arguments.dialogues} "
        "dialogues"
    )
    for name, label in (("forward", "bare forward"), ("dump", "dump"), ("single", "dump, one dialogue a batch")):
        print(f"  {label:<28} {' '.join(f'{speed:9,.0f}' for speed in speeds[name])}  tokens/s")
    over = {
        name: [dump / other for dump, other in zip(speeds["dump"], speeds[name], strict=True)]
        for name in ("forward", "single")
    }
    for name, ratios in over.items():
        print(f"  dump over {name:<18} {' '.join(f'{ratio:9.3f}' for ratio in ratios)}")
    figures = {
        **{f"dump_over_{name}": round(sum(ratios) / len(ratios), 4) for name, ratios in over.items()},
        **{f"dump_over_{name}_range": [round(min(r), 4), round(max(r), 4)] for name, r in over.items()},
        "hardware": hardware(recipe.target.device),
    }
    if arguments.no_memory:
        print(json.dumps(figures))
        return
    few, many = (peak_mb(arguments.recipe, arguments.overrides, arguments.dialogues * n) for n in (1, 10))
    print(
        f"  peak memory of {arguments.dialogues} and {10 * arguments.dialogues} dialogues: {few:,.0f} and {many:,.0f} "
        "MB"
    )
    print(json.dumps({**figures, "peak_mb": round(few), "peak_mb_of_10x": round(many)}))


if __name__ == "__main__":
    entry.run(main)
