"""How long a recipe's run will take and how much it needs: disk, memory, hours, GPUs.

    jakiro plan RECIPE [--dump-speed R] [--train-speed R] [--decode-ms R] [--json]

Streams the whole source to count its records, and once more to encode 200 of them. Speeds that are not given are
measured here, each for 20 seconds at most. A row of the table is a figure, with where it comes from. With --json all
figures are one JSON object instead, times in hours, sizes in bytes. Duplicates are not looked for.

    tokens    records x accepted share of the sample x tokens of an accepted dialogue, up to max_tokens or max_dialogues
    time      dump: tokens over the speed of all workers. Each has a GPU of its own or, on a CPU, its cores; those that
              share a GPU share its speed. With features.keep = "window", training's tokens as often as they are made,
              by a simulation of its order of shards (memory.py). The dump then runs during the training: on a CPU,
              whose cores they share, both count, elsewhere the slower one, as if neither slowed the other down
              train: (passes x tokens + validations x validation tokens / 3) over the speed of all ranks
              eval: answers x max_new_tokens x a plain token over the workers, as if no draft gained anything and no
              answer ended early. That makes up for what is left out: the prompts' forwards, warm-ups, the rounds that
              the gate looks at closely
              Loading, planning, writing, saving and waiting for data are in none of them
    disk      of the shards, by their format; of each token, 5 bytes and its hidden states. With features.keep =
              "window", of training's two windows or of features.disk_bytes
    memory    of one worker or rank: infra/plan/memory.py has the formulas; of a vLLM engine: infra/plan/engine.py
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from eval.measure.prompts import load_prompts
from infra.plan import engine, memory, speeds
from infra.plan.memory import stream
from infra.plan.sample import Sample, expected, sample_source
from pipeline.artifacts.provenance import hardware
from pipeline.basics.accelerator import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import duration
from pipeline.basics.public import public_name
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.schema import FP8
from pipeline.lm.model import load_config, resolve_device
from pipeline.recipe.dtypes import describe_dtypes, warn_of_emulation
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import FeaturesConfig
from pipeline.running import entry, markdown
from pipeline.running.state import require_same_settings
from preprocess.sources.sizes import require_sizes

VALIDATION = 1 / 3  # of a token's training
FORMULA = "formula"
SPEEDS = {  # what a user may know of the machine that will do it
    "dump-speed": "tokens/s of a dump worker",
    "train-speed": "tokens/s of one GPU training the draft",
    "decode-ms": "ms a token of plain decoding",
}


@dataclass
class Plan:
    """`given`: speeds by flag; what is None is measured, or stays unknown where the recipe's device is not here."""

    recipe: Recipe
    given: dict[str, float | None]
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)  # by "stage: what"; hours, bytes
    hours: dict[str, list[float | None]] = field(default_factory=dict)  # by stage
    steps: int = 0  # of a training

    def say(self, stage: str, what: str, figure: float | None, said: str, source: str) -> None:
        self.rows.append([stage, what, said, source])
        self.figures[f"{stage}: {what}"] = figure and round(figure, 6)

    def say_hours(self, stage: str, hours: float | None, by: str, source: str, draft: str = "") -> None:
        self.hours.setdefault(stage, []).append(hours)
        said = "unknown" if hours is None else duration(3600 * hours)
        self.rows.append([stage, f"{draft}time", f"{said}{by}", source])
        self.figures[f"{stage}: {draft}hours"] = hours and round(hours, 6)

    def say_memory(self, stage: str, what: str, need: float, one: str) -> None:
        self.say(stage, what, need, f"{need / 1e9:,.1f} GB a {one}", FORMULA)

    def speed(
        self, flag: str, unit: str, measure: Callable[[], float], lacking: str | None = None
    ) -> tuple[float | None, str]:
        """A speed and, in words, where it comes from. `lacking`: why it cannot be measured."""
        if value := self.given[flag]:
            return value, f"{value:,g} {unit}, as given"
        if lacking:
            return None, f"{lacking}: give --{flag}"
        try:
            resolve_device(self.recipe.target.device)
        except PipelineError:
            return None, f"no such device here: give --{flag}"
        print(f"measuring {flag}: up to {speeds.PROBE} s after loading ...", file=sys.stderr, flush=True)
        value = measure()
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return value, f"{shown} {unit}, measured on {hardware(self.recipe.target.device)}"

    def gpus(self, workers: int, each: float | None = None) -> str:
        """How many the workers of a stage take, where it is to run on any."""
        there = accelerator() or any(self.given.values())
        return f", {workers * (each or 1):g} GPUs" if there and self.recipe.target.device != "cpu" else ""

    def dump(self, sample: Sample) -> dict[str, float]:
        """Rows and tokens of the dump."""
        recipe, features, counts = self.recipe, self.recipe.features, expected(self.recipe, sample)
        size, states = memory.disk_bytes(recipe, counts["rows"], counts["tokens"]), memory.states_of(recipe)
        by_engine = recipe.target.engine == "vllm"
        lacking = "no such engine here" if by_engine and not engine.is_here(recipe.target) else None
        if recipe.data.answers == "target":
            lacking = "answering is not timed"
        measure = partial(speeds.dump_speed, recipe, sample.documents["train"])
        speed, source = self.speed("dump-speed", "tokens/s a worker", measure, lacking)
        made = counts["tokens"]
        if features.keep == "window":
            kept, times = stream(recipe, counts["train_rows"], counts["train_tokens"], counts["trained_tokens"])
            size += kept - memory.disk_bytes(recipe, counts["train_rows"], counts["train_tokens"])
            made += (times - 1) * counts["train_tokens"]
            self.say("dump", "passes", times, f"{times:.2f} over training's dialogues", "its order, simulated")
        hours = speed and made / (speed * workers_worth(features)) / 3600
        stored = recipe.stored_dtype + (f", {states} states a token" if states > 1 else "")
        free = f"free here: {free_bytes(recipe) / 1e9:,.0f} GB"
        place = f"in {public_name(features.store)}" if features.store else free
        accepted = sum(map(len, sample.documents.values()))
        tokens = f"{counts['tokens']:,.0f} in {counts['rows']:,.0f} documents"
        workers = f" with {features.workers} workers{self.gpus(features.workers, recipe.worker_gpus)}"
        self.say("dump", "records", sample.records, f"{sample.records:,}", "counted")
        own = "; the target's own answers may be longer or shorter" if recipe.data.answers == "target" else ""
        self.say("dump", "tokens", counts["tokens"], tokens, f"{accepted} documents of {sample.tried} records{own}")
        self.say("dump", "disk", size, f"{size / 1e9:,.3f} GB ({stored}); {place}", FORMULA)
        self.say_hours("dump", hours, workers, source)
        for row in engine.rows(recipe, speed) if by_engine else []:
            self.say("dump", *row)
        if not by_engine:
            self.say_memory("dump", "memory", memory.worker_bytes(recipe), "worker")
        return counts

    def train(self, counts: dict[str, float]) -> None:
        recipe, config = self.recipe, self.recipe.train
        ranks = config.ranks_of(torch.accelerator.device_count())
        self.steps = steps = config.steps(counts["train_rows"], counts["train_tokens"], counts["trained_tokens"])
        validating = VALIDATION * (steps // config.validate_every + 1) * (counts["tokens"] - counts["train_tokens"])
        tokens = config.passes(counts["trained_tokens"]) * counts["train_tokens"] + validating
        length = max(int(counts["train_tokens"] / max(counts["train_rows"], 1)), 8)
        ranks_need = []
        for name in recipe.to_train:
            with torch.device("meta"):
                draft = build(recipe.draft[name], shapes_of(load_config(recipe.target)))
            speed, source = self.speed(
                "train-speed",
                "tokens/s a rank",
                lambda name=name: speeds.training_speed(recipe, name, length) / self._sharing(ranks),
            )
            hours = speed and tokens / (speed * ranks) / 3600
            said = f"{steps:,} ({parameter_count(draft):,} parameters)"
            self.say("train", f"{name}: steps", steps, said, FORMULA)
            self.say_hours("train", hours, f" with {ranks} ranks{self.gpus(ranks)}", source, f"{name}: ")
            ranks_need.append(memory.rank_bytes(recipe, draft, ranks))
            self.say_memory("train", f"{name}: memory", ranks_need[-1], "rank")
        if config.together:
            self.say_memory("train", "memory of all", sum(ranks_need), "rank")

    def all(self) -> None:
        """The hours of all stages."""
        dump, train, evaluation = (whole(self.hours.get(stage, [])) for stage in ("dump", "train", "eval"))
        together, source = [dump, train], "their sum"
        if self.recipe.features.keep == "window":
            workers = dump and train and math.ceil(dump * self.recipe.features.workers / train)
            said = f"{workers or 'unknown how many'} keep up with it"
            self.say("train", "dump workers", workers, said, "hours of dump over hours of training")
            if self.recipe.target.device != "cpu":
                source = "eval's and the slower of dump and training"
                together = [None if None in together else max(together)]
        self.say_hours("all", whole([*together, evaluation]), "", source)

    def _sharing(self, ranks: int) -> int:
        """Ranks that share what is measured: a GPU is one rank's, this machine's CPU all of theirs."""
        return ranks if resolve_device(self.recipe.target.device).type == "cpu" else 1

    def evaluate(self) -> None:
        recipe, limit, workers = self.recipe, self.recipe.eval.max_new_tokens, self.recipe.eval.workers
        count = answers(recipe)
        token, source = self.speed("decode-ms", "ms a token", lambda: 1e3 * speeds.plain_token(recipe))
        hours = token and count * limit * token / 1e3 / workers / 3600
        gpus = self.gpus(workers, recipe.eval.gpus_per_worker)
        if gpus and recipe.target.device == "spread" and recipe.eval.gpus_per_worker is None:
            gpus = ", over all GPUs"
        by = f" with {workers} worker{'s' * (workers > 1)}{gpus}"
        self.say("eval", "answers", count, f"{count:,} of up to {limit} tokens", "counted")
        self.say_hours("eval", hours, by, source)
        self.say_memory("eval", "memory", memory.evaluation_bytes(recipe), "worker")


def make(recipe: Recipe, given: dict[str, float | None]) -> Plan:
    plan = Plan(recipe, given)
    if ranks := recipe.train.ranks:
        recipe.train.require_exact_sum(recipe.train.accumulation(ranks))
    if recipe.target.engine == "vllm":
        engine.require_gpus(recipe.target, elsewhere=given["dump-speed"] is not None)
    require_sizes(recipe)
    plan.train(plan.dump(sample_source(recipe)))
    plan.evaluate()
    plan.all()
    return plan


def whole(hours: list[float | None]) -> float | None:
    """Their sum; None where one is unknown."""
    known = [one for one in hours if one is not None]
    return sum(known) if len(known) == len(hours) else None


def workers_worth(features: FeaturesConfig) -> float:
    """Workers with a device of their own that would dump as fast as these do."""
    return features.workers * min(1, features.gpus_per_worker or 1)


def answers(recipe: Recipe) -> int:
    """How many answers all methods give, at all temperatures: one to each question of a prompt."""
    questions = sum(questions_of(recipe, name) for name in recipe.eval.benchmarks)
    return questions * recipe.eval.answers_a_prompt * (1 + len(recipe.methods))


def questions_of(recipe: Recipe, name: str) -> int:
    """A benchmark's; of held-out dialogues that are not dumped yet, as many as the dump will keep."""
    config = recipe.eval.benchmarks[name]
    if config.held_out:
        return config.prompts or recipe.data.heldout_prompts
    return sum(len(prompt.turns) for prompt in load_prompts(name, config, recipe))


def free_bytes(recipe: Recipe) -> int:
    """Free bytes of the disk that the run goes to."""
    folder = recipe.paths.run.resolve()
    return shutil.disk_usage(next(place for place in [folder, *folder.parents] if place.exists())).free


def disk_warning(stored_dtype: str) -> str:
    smaller = "" if stored_dtype == FP8 else f" set features.stored_dtype={FP8!r},"
    return f"WARNING: the dump does not fit the disk: lower data.max_tokens,{smaller} or point output at a larger one"


def summary(plan: Plan) -> str:
    """Return what the whole run takes, in a sentence."""
    hours, disk = plan.figures["all: hours"], plan.figures["dump: disk"] or 0
    time = "a time that is not known yet" if hours is None else f"about {duration(3600 * hours)}"
    return f"The run takes {time}; its features take {disk / 1e9:,.3f} GB of disk."


def refusal(recipe: Recipe) -> str | None:
    """Return why a run would refuse what its folder holds; None where it would not."""
    try:
        return require_same_settings(recipe, recipe.to_train)
    except PipelineError as error:
        return str(error)


def warnings(plan: Plan) -> Iterator[str]:
    recipe, steps = plan.recipe, plan.steps
    if slow := warn_of_emulation(recipe):
        yield slow
    if not recipe.features.store and (plan.figures["dump: disk"] or 0) > free_bytes(recipe):
        yield disk_warning(recipe.stored_dtype)
    if recipe.to_train and recipe.train.warms_up_throughout(steps):
        warm_up = recipe.train.warmup_steps
        yield f"WARNING: training refuses train.warmup_steps={warm_up} of about {steps:,} steps: lower it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    for flag, what in SPEEDS.items():
        parser.add_argument(f"--{flag}", type=float, metavar="R", help=f"{what}, where it is known")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object, instead of the table")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not arguments.json:
        print(describe_dtypes(recipe), flush=True)
    if not arguments.json and (reason := refusal(recipe)):
        print(f"WARNING: a run refuses this recipe: {reason}")
    plan = make(recipe, {flag: getattr(arguments, flag.replace("-", "_")) for flag in SPEEDS})
    if arguments.json:
        print(json.dumps(plan.figures))
        return
    print(markdown.table(["stage", "what", "figure", "where it comes from"], plan.rows))
    for warning in warnings(plan):
        print(warning)
    print(summary(plan))


if __name__ == "__main__":
    entry.run(main)
