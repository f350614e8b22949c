"""Estimate how long a recipe's run will take and what it requires: disk, memory, hours, GPUs.

    jakiro plan RECIPE [--dump-speed R] [--train-speed R] [--decode-ms R] [--json]

Streams the whole source to count its records, and again to encode 200 of them. Speeds that are not given are measured
on this machine, each for at most 20 seconds (AdamW apart from forward and backward). A row of the table is a figure
with its source. With --json all figures are one JSON object instead, times in hours, sizes in bytes. Duplicates are not
searched for.

    tokens    records x accepted share of the sample x tokens of an accepted dialogue, up to max_tokens or max_dialogues
    time      dump: tokens / the speed of all workers. Each has its own GPU or, on a CPU, its cores; workers that share
              a GPU share its speed. With features.keep = "window", training's tokens count as often as they are
              computed, by a simulation of its order of shards (memory.py). The dump then runs during the training: on
              a CPU, whose cores they share, both count, otherwise only the slower one, as if neither slowed the other
              train: (passes x tokens + validations x validation tokens / 3) / (the speed of all ranks x the share of
              a step that is work: ranks wait for the slowest, and rows are padded). A measured speed is that of whole
              steps: micro-batches, one step of AdamW, and on a GPU the host's work on their states (speeds.py, fitted
              to an H200). The exchange of gradients between ranks is not counted
              eval: answers x max_new_tokens x the time of a plain token / the workers, as if no draft were faster and
              no answer ended early. That makes up for what is not counted: the prefill, warm-ups, the rounds that the
              gate recomputes
              Loading, planning, writing and saving are not counted
    disk      of the shards, by their format: 5 bytes for each token, and its hidden states. With features.keep =
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
from infra.plan.memory import simulate_window
from infra.plan.sample import Sample, expected_counts, sample_source
from infra.plan.share import working_share
from pipeline.artifacts.provenance import hardware
from pipeline.basics.accelerator import current_accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import format_duration
from pipeline.basics.public import public_name
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.schema import FP8
from pipeline.lm.ability import count_experts
from pipeline.lm.model import load_config, resolve_device
from pipeline.recipe.dtypes import describe_dtypes, warn_of_emulation
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import FeaturesConfig
from pipeline.recipe.trees import require_verifiable
from pipeline.running import entry, markdown
from pipeline.running.state import require_same_settings
from preprocess.sources.sizes import require_sizes

VALIDATION_COST = 1 / 3  # relative to the cost of training on the same token
FORMULA = "formula"
SPEEDS = {  # flags with which a user gives the speeds of the planned machine
    "dump-speed": "tokens/s of a dump worker",
    "train-speed": "tokens/s of one GPU in whole training steps, without padding and waiting for other ranks",
    "decode-ms": "ms a token of plain decoding",
}


@dataclass
class ResourcePlan:
    """The rows and figures of a plan. `known_speeds` by flag; None is measured, or stays unknown if this machine lacks
    the recipe's device.
    """

    recipe: Recipe
    known_speeds: dict[str, float | None]
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, float | None] = field(default_factory=dict)  # by "stage: label"; hours, bytes
    hours: dict[str, list[float | None]] = field(default_factory=dict)  # by stage
    steps: int = 0  # of a training
    shards_ahead: int | None = None  # that there may be at once, if training is fed

    def add_row(self, stage: str, label: str, figure: float | None, text: str, source: str) -> None:
        self.rows.append([stage, label, text, source])
        self.figures[f"{stage}: {label}"] = figure and round(figure, 6)

    def add_hours(self, stage: str, hours: float | None, suffix: str, source: str, draft: str = "") -> None:
        self.hours.setdefault(stage, []).append(hours)
        text = "unknown" if hours is None else format_duration(3600 * hours)
        self.rows.append([stage, f"{draft}time", f"{text}{suffix}", source])
        self.figures[f"{stage}: {draft}hours"] = hours and round(hours, 6)

    def add_memory(self, stage: str, label: str, need: float, role: str) -> None:
        self.add_row(stage, label, need, f"{need / 1e9:,.1f} GB a {role}", FORMULA)

    def find_speed(
        self, flag: str, quantity: str, measure: Callable[[], float], reason: str | None = None
    ) -> tuple[float | None, str]:
        """Return a speed and its source as text. `reason`: why it cannot be measured, if so."""
        if value := self.known_speeds[flag]:
            return value, f"{value:,g} {quantity}, as given"
        if reason:
            return None, f"{reason}: give --{flag}"
        try:
            resolve_device(self.recipe.target.device)
        except PipelineError:
            return None, f"no such device here: give --{flag}"
        print(f"measuring {flag}: up to {speeds.PROBE} s after loading ...", file=sys.stderr, flush=True)
        value = measure()
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return value, f"{text} {quantity}, measured on {hardware(self.recipe.target.device)}"

    def gpu_text(self, workers: int, gpus_each: float | None = None) -> str:
        """Format the number of GPUs of a stage's workers; "" if the stage runs on none."""
        has_gpus = current_accelerator() or any(self.known_speeds.values())
        return f", {workers * (gpus_each or 1):g} GPUs" if has_gpus and self.recipe.target.device != "cpu" else ""

    def dump(self, sample: Sample) -> dict[str, float]:
        """Add the dump's rows to the plan; return the expected rows and tokens of the dump."""
        recipe, features, counts = self.recipe, self.recipe.features, expected_counts(self.recipe, sample)
        size, states = memory.disk_bytes(recipe, counts["rows"], counts["tokens"]), memory.states_per_token(recipe)
        by_engine = recipe.target.engine == "vllm"
        reason = "no such engine here" if by_engine and not engine.is_available(recipe.target) else None
        if recipe.data.answers == "target":
            reason = "answering is not timed"
        measure = partial(speeds.dump_speed, recipe, sample.documents["train"])
        speed, source = self.find_speed("dump-speed", "tokens/s a worker", measure, reason)
        computed_tokens = counts["tokens"]
        if features.keep == "window":
            window_bytes, times = simulate_window(
                recipe, counts["train_rows"], counts["train_tokens"], counts["trained_tokens"]
            )
            size += window_bytes - memory.disk_bytes(recipe, counts["train_rows"], counts["train_tokens"])
            computed_tokens += (times - 1) * counts["train_tokens"]
            self.shards_ahead = memory.count_shards_ahead(recipe, counts["train_rows"], counts["train_tokens"])
            self.add_row("dump", "passes", times, f"{times:.2f} over training's dialogues", "its order, simulated")
        hours = speed and computed_tokens / (speed * equivalent_workers(features)) / 3600
        stored = recipe.stored_dtype + (f", {states} states a token" if states > 1 else "")
        free = f"free here: {free_bytes(recipe) / 1e9:,.0f} GB"
        place = f"in {public_name(features.store)}" if features.store else free
        accepted = sum(map(len, sample.documents.values()))
        tokens = f"{counts['tokens']:,.0f} in {counts['rows']:,.0f} documents"
        workers = f" with {features.workers} workers{self.gpu_text(features.workers, recipe.worker_gpus)}"
        self.add_row("dump", "records", sample.records, f"{sample.records:,}", "counted")
        note = "; the target's own answers may be longer or shorter" if recipe.data.answers == "target" else ""
        self.add_row(
            "dump", "tokens", counts["tokens"], tokens, f"{accepted} documents of {sample.tried} records{note}"
        )
        self.add_row("dump", "disk", size, f"{size / 1e9:,.3f} GB ({stored}); {place}", FORMULA)
        self.add_hours("dump", hours, workers, source)
        for row in engine.engine_rows(recipe, speed) if by_engine else []:
            self.add_row("dump", *row)
        if not by_engine:
            self.add_memory("dump", "memory", memory.worker_bytes(recipe), "worker")
        return counts

    def train(self, counts: dict[str, float], sample: Sample) -> None:
        recipe, config = self.recipe, self.recipe.train
        ranks = config.ranks_of(torch.accelerator.device_count())
        on_cpu = recipe.target.device == "cpu" or not self.gpu_text(ranks)
        device = torch.device("cpu" if on_cpu else "cuda")
        lengths = [len(document.input_ids) for document in sample.documents["train"]]
        working = working_share(lengths, config, ranks, device)
        self.steps = steps = config.steps(counts["train_rows"], counts["train_tokens"], counts["trained_tokens"])
        validating = (
            VALIDATION_COST * (steps // config.validate_every + 1) * (counts["tokens"] - counts["train_tokens"])
        )
        tokens = config.passes(counts["trained_tokens"]) * counts["train_tokens"] + validating
        length = config.pack_tokens or max(int(counts["train_tokens"] / max(counts["train_rows"], 1)), 8)
        rank_memory = []
        for name in recipe.to_train:
            with torch.device("meta"):
                draft = build(recipe.draft[name], draft_shapes(load_config(recipe.target)))
            speed, source = self.find_speed(
                "train-speed",
                "tokens/s a rank",
                lambda name=name: (
                    speeds.time_training(recipe, name, length).step_speed(config.accumulation(ranks))
                    / self._ranks_a_device(ranks)
                ),
            )
            hours = speed and tokens / (speed * ranks * working) / 3600
            text = f"{steps:,} ({parameter_count(draft):,} parameters)"
            self.add_row("train", f"{name}: steps", steps, text, FORMULA)
            self.add_hours("train", hours, f" with {ranks} ranks{self.gpu_text(ranks)}", source, f"{name}: ")
            rank_memory.append(memory.rank_bytes(recipe, draft, ranks))
            self.add_memory("train", f"{name}: memory", rank_memory[-1], "rank")
        if recipe.to_train:
            text = f"{working:.0%} of a step: ranks wait for the slowest, and rows are padded"
            self.add_row("train", "working share", working, text, "its order, simulated")
        if config.together:
            self.add_memory("train", "memory of all", sum(rank_memory), "rank")

    def add_totals(self) -> None:
        """Add the hours of all stages."""
        dump, train, evaluation = (sum_hours(self.hours.get(stage, [])) for stage in ("dump", "train", "eval"))
        sequential, source = [dump, train], "their sum"
        if self.recipe.features.keep == "window":
            workers = dump and train and math.ceil(dump * self.recipe.features.workers / train)
            text = f"{workers or 'unknown how many'} keep up with it"
            self.add_row("train", "dump workers", workers, text, "hours of dump over hours of training")
            if self.recipe.target.device != "cpu":
                source = "eval's and the slower of dump and training"
                sequential = [None if None in sequential else max(sequential)]
        self.add_hours("all", sum_hours([*sequential, evaluation]), "", source)

    def _ranks_a_device(self, ranks: int) -> int:
        """Return the ranks that share the measured device: 1 for a GPU, all ranks for this machine's CPU."""
        return ranks if resolve_device(self.recipe.target.device).type == "cpu" else 1

    def evaluate(self) -> None:
        recipe, limit, workers = self.recipe, self.recipe.eval.max_new_tokens, self.recipe.eval.workers
        count = count_answers(recipe)
        token, source = self.find_speed("decode-ms", "ms a token", lambda: 1e3 * speeds.plain_token(recipe))
        hours = token and count * limit * token / 1e3 / workers / 3600
        gpus = self.gpu_text(workers, recipe.eval.gpus_per_worker)
        if gpus and recipe.target.device == "spread" and recipe.eval.gpus_per_worker is None:
            gpus = ", over all GPUs"
        suffix = f" with {workers} worker{'s' * (workers > 1)}{gpus}"
        self.add_row("eval", "answers", count, f"{count:,} of up to {limit} tokens", "counted")
        self.add_hours("eval", hours, suffix, source)
        self.add_memory("eval", "memory", memory.evaluation_bytes(recipe), "worker")


def make_plan(recipe: Recipe, known_speeds: dict[str, float | None]) -> ResourcePlan:
    plan = ResourcePlan(recipe, known_speeds)
    if ranks := recipe.train.ranks:
        recipe.train.require_exact_sum(recipe.train.accumulation(ranks))
    if recipe.target.engine == "vllm":
        engine.require_gpus(recipe.target, other_machine=known_speeds["dump-speed"] is not None)
    require_sizes(recipe)
    require_verifiable(recipe)
    sample = sample_source(recipe)
    plan.train(plan.dump(sample), sample)
    plan.evaluate()
    plan.add_totals()
    return plan


def sum_hours(hours: list[float | None]) -> float | None:
    """Return the sum of the hours; None if one is unknown."""
    known_hours = [value for value in hours if value is not None]
    return sum(known_hours) if len(known_hours) == len(hours) else None


def equivalent_workers(features: FeaturesConfig) -> float:
    """Return the equivalent number of workers with one device each: as many would dump as fast as these do."""
    return features.workers * min(1, features.gpus_per_worker or 1)


def count_answers(recipe: Recipe) -> int:
    """Count the answers of all methods at all temperatures: one to each question of a prompt."""
    questions = sum(count_questions(recipe, name) for name in recipe.eval.benchmarks)
    return questions * recipe.eval.answers_a_prompt * (1 + recipe.eval.compile + len(recipe.methods))


def count_questions(recipe: Recipe, name: str) -> int:
    """Count a benchmark's questions; of held-out dialogues, which are not dumped yet, as many as the dump will keep."""
    config = recipe.eval.benchmarks[name]
    if config.held_out:
        return config.prompts or recipe.data.heldout_prompts
    return sum(len(prompt.turns) for prompt in load_prompts(name, config, recipe))


def free_bytes(recipe: Recipe) -> int:
    """Return the free bytes of the disk that the run is written to."""
    folder = recipe.paths.run.resolve()
    return shutil.disk_usage(next(place for place in [folder, *folder.parents] if place.exists())).free


def format_disk_warning(stored_dtype: str) -> str:
    smaller = "" if stored_dtype == FP8 else f" set features.stored_dtype={FP8!r},"
    return f"WARNING: the dump does not fit the disk: lower data.max_tokens,{smaller} or point output at a larger one"


def format_summary(plan: ResourcePlan) -> str:
    """Format the time and disk of the whole run as a sentence."""
    hours, disk = plan.figures["all: hours"], plan.figures["dump: disk"] or 0
    time = "a time that is not known yet" if hours is None else f"about {format_duration(3600 * hours)}"
    return f"The run takes {time}; its features take {disk / 1e9:,.3f} GB of disk."


def find_refusal(recipe: Recipe) -> str | None:
    """Return why a run would refuse the contents of its folder; None if it would accept them."""
    try:
        return require_same_settings(recipe, recipe.to_train)
    except PipelineError as error:
        return str(error)


def warn_of_idle_gpus(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each stage whose workers leave GPUs of this machine idle."""
    gpus = 0 if recipe.target.device in ("cpu", "spread") else torch.accelerator.device_count()
    features, measuring = recipe.features, recipe.eval
    stages = [("eval", measuring.workers, measuring.gpus_per_worker or 1.0)]
    if not features.gpus:
        stages.insert(0, ("features", features.workers, recipe.worker_gpus or 1.0))
    for section, workers, each in stages:
        if int(gpus / each) > workers:
            yield (
                f"WARNING: {section}.workers={workers} use {workers * each:g} of the {gpus} GPUs here: set "
                f"{section}.workers = {int(gpus / each)}"
            )


MANY_TIMES = 2.0  # a token's experts


def warn_of_experts(recipe: Recipe) -> Iterator[str]:
    """Yield a line if a tree's tokens use many times a token's experts, each of which is then read from memory. A token
    uses each expert with the same probability, independently of the others.
    """
    experts, used = count_experts(load_config(recipe.target))
    nodes = max((recipe.tree(name).nodes for name in recipe.methods), default=0)
    if used == experts or not nodes:
        return
    expected = experts * (1 - (1 - used / experts) ** nodes)
    if expected > MANY_TIMES * used:
        yield (
            f"WARNING: a tree of {nodes} tokens reads about {expected:.0f} of the {experts} experts of a layer, and a "
            f"plain token {used}: verifying may take {expected / used:.0f} times as long. jakiro tune finds the tree "
            "that pays, perhaps a short chain"
        )


def find_warnings(plan: ResourcePlan) -> Iterator[str]:
    recipe, steps = plan.recipe, plan.steps
    if slow := warn_of_emulation(recipe):
        yield slow
    if not recipe.features.store and (plan.figures["dump: disk"] or 0) > free_bytes(recipe):
        yield format_disk_warning(recipe.stored_dtype)
    if plan.shards_ahead is not None and plan.shards_ahead < recipe.features.workers:
        yield (
            f"WARNING: features.workers={recipe.features.workers}, but training reads windows of so few shards that "
            f"{plan.shards_ahead} are made at a time, each by one worker: the others wait. Set train.window = "
            f"{math.ceil(recipe.features.workers / 2)}, or fewer features.rows_per_shard"
        )
    yield from warn_of_idle_gpus(recipe)
    yield from warn_of_experts(recipe)
    if recipe.to_train and recipe.train.warms_up_throughout(steps):
        warm_up = recipe.train.warmup_steps
        yield f"WARNING: training refuses train.warmup_steps={warm_up} of about {steps:,} steps: lower it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    for flag, description in SPEEDS.items():
        parser.add_argument(f"--{flag}", type=float, metavar="R", help=f"{description}, if known")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object, instead of the table")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not arguments.json:
        print(describe_dtypes(recipe), flush=True)
    if not arguments.json and (reason := find_refusal(recipe)):
        print(f"WARNING: a run refuses this recipe: {reason}")
    plan = make_plan(recipe, {flag: getattr(arguments, flag.replace("-", "_")) for flag in SPEEDS})
    if arguments.json:
        print(json.dumps(plan.figures))
        return
    print(markdown.format_table(["stage", "what", "figure", "where it comes from"], plan.rows))
    for warning in find_warnings(plan):
        print(warning)
    print(format_summary(plan))


if __name__ == "__main__":
    entry.run(main)
