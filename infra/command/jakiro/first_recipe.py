"""Write a recipe that fits a target, a data source and this machine: shares of GPUs, and sizes of the data's parts."""

import argparse
import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined

import jakiro
from jakiro.presets import Preset, format_toml, load_presets
from pipeline.basics.accelerator import accelerator_kind
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path
from pipeline.basics.public import public_text
from pipeline.decoding.config import TreeConfig
from pipeline.drafts import DRAFTS, build, kind_key, load_settings
from pipeline.drafts.native.families import HEADS, find_family
from pipeline.drafts.parts.layers import MLP_RATIO, draft_shapes
from pipeline.features.reasons import describe_reasons
from pipeline.lm.ability import count_experts
from pipeline.lm.attention import declared_positions
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import count_parameters, load_config, load_tokenizer, load_tree_obstacle
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig, TrainConfig
from pipeline.running.cores import count_cores
from preprocess.sources.forms import describe_record
from preprocess.sources.groups import Groups
from preprocess.sources.intake import DESCRIBED_REASONS, clean_in_language
from preprocess.sources.read import TornTail, read_records
from preprocess.sources.sequences import encode_sequences

MAX_COUNTED, MAX_ENCODED = 20_000, 200  # records, at most
LAPTOP_TOKENS = 270_000  # a quarter of an hour for a target of 0.1B
_LAPTOP = {"validation": 24, "heldout_prompts": 22, "calibration": 16, "prompts": 12}  # held-out dialogues
_PAPER = {"validation": 256, "heldout_prompts": 100, "calibration": 16, "prompts": 80}
SPARE = 1.25  # times the required number is held out, since the hash of an id decides
MAX_HELD_OUT = 0.2  # of the dialogues, as a share
FEW_STEPS = 20  # an epoch: with fewer, a CPU's global batch is the smallest possible one
GB = 1e9
ROOM = 1.3  # a worker's memory over its weights, roughly: the batch in flight, the allocator
ALWAYS = {"epochs", "global_batch", "micro_batch", "warmup_steps", "learning_rate"}  # keys of [train]
SHORT_CHAIN = {"depth": 2, "siblings": "none"}
TEMPLATE = jakiro.HOME / "infra/templates/recipe.toml.jinja"


class Machine(NamedTuple):
    gpus: int
    bytes: float  # of one GPU

    @classmethod
    def detect(cls) -> "Machine":
        device = accelerator_kind()
        if device is None:
            return cls(0, 0)
        module = torch.get_device_module(device.type)
        return cls(torch.accelerator.device_count(), module.mem_get_info(0)[1])


class Share(NamedTuple):
    """The division of a machine's GPUs between workers and ranks."""

    device: str
    workers: int
    gpus_per_worker: int
    ranks: int

    @classmethod
    def of(cls, machine: Machine, weights: float) -> "Share":
        if not machine.gpus:
            workers = min(count_cores(), 2)
            return cls("cpu", workers, 0, workers)
        gpus_each = math.ceil(weights * ROOM / machine.bytes)
        if gpus_each > machine.gpus:
            raise PipelineError(
                f"the target's weights are {weights / GB:.0f} GB in bfloat16, but the {machine.gpus} GPUs here have "
                f"{machine.gpus * machine.bytes / GB:.0f} GB: write the recipe on a machine that holds it"
            )
        return cls("auto" if gpus_each == 1 else "spread", machine.gpus // gpus_each, gpus_each, machine.gpus)


@dataclass(frozen=True)
class DataSource:
    """Statistics of a data source's first records; of all records if `whole`."""

    records: int
    complete: bool
    usable: float  # share of the encoded records
    length: float  # tokens of a sequence
    report: str

    @property
    def dialogues(self) -> int:
        return max(int(self.records * self.usable), 1)

    @classmethod
    def of(cls, target: TargetConfig, data: DataConfig) -> "DataSource":
        """Count the records, up to a limit, and encode the first ones. Raise PipelineError if none is usable."""
        tokenizer, groups, refused = load_tokenizer(target), Groups(data), Counter[str]()
        examples: dict[str, str] = {}
        lengths: list[int] = []
        learnt = records = 0
        for record in islice(read_records(data, TornTail()), MAX_COUNTED):
            records += 1
            if records > MAX_ENCODED:
                continue
            try:
                sequences, _ = encode_sequences(tokenizer, clean_in_language(record, data, groups), data)
            except Unusable as error:
                refused[str(error).partition(":")[0]] += 1
                if str(error) in DESCRIBED_REASONS:
                    examples.setdefault(str(error), describe_record(record))
                continue
            lengths += [len(sequence.input_ids) for _, sequence in sequences]
            learnt += sum(int(sequence.loss_mask.sum()) for _, sequence in sequences)
        tried = min(records, MAX_ENCODED)
        reasons = describe_reasons(refused)
        reasons += public_text("".join(f"; the first {reason} record: {text}" for reason, text in examples.items()))
        if not lengths:
            raise PipelineError(
                f"none of the first {tried} records of {data.source} is usable ({reasons or 'it is empty'})"
            )
        usable, length = tried - sum(refused.values()), sum(lengths) / len(lengths)
        complete = records < MAX_COUNTED
        report = (
            f"{'' if complete else 'more than '}{records:,} records; of the first {tried} {usable} are usable"
            f"{f' ({reasons})' if reasons else ''}: {length:.0f} tokens each, "
            f"{100 * learnt / sum(lengths):.0f}% of them with a loss"
        )
        return cls(records, complete, usable / tried, length, report)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the parts of a data source, and the length of a training on it."""

    heldout_fraction: float
    validation: int
    heldout_prompts: int
    calibration: int
    prompts: int
    max_tokens: int | None
    tokens: int  # of training, roughly
    global_batch: int
    micro_batch: int
    epochs: int
    steps: int
    warmup: int

    @property
    def every(self) -> int:
        """Return the steps from one validation to the next: a quarter of a short training."""
        return min(max(self.steps // 4, 10), 500)

    @classmethod
    def of(cls, source: DataSource, ranks: int, paper: TrainConfig | None, row_tokens: int | None = None) -> "Sizes":
        """Return the paper's sizes, or those of a quarter of an hour on a CPU; smaller ones if the source is small.
        `row_tokens`: of a row of packed dialogues.
        """
        defaults = _PAPER if paper else _LAPTOP
        dialogues, need = (
            source.dialogues,
            max(defaults["validation"], defaults["heldout_prompts"] + defaults["calibration"]),
        )
        fraction = min(max(math.ceil(100 * SPARE * need / dialogues) / 100, 0.02), MAX_HELD_OUT)
        share = min(fraction * dialogues / SPARE / need, 1)
        held = {name: max(int(count * share), 1) for name, count in defaults.items()}
        all_tokens = int(dialogues * (1 - fraction) * source.length)
        budget = None if paper or (source.complete and all_tokens <= LAPTOP_TOKENS) else LAPTOP_TOKENS
        tokens = min(all_tokens, budget or all_tokens)
        paper_batch, largest = (paper.global_batch, paper.micro_batch) if paper else (16, 2)
        micro = largest if paper_batch % (largest * ranks) == 0 else 1
        rows = int(tokens / (row_tokens or source.length))
        batches = paper_batch if paper or rows >= 16 * FEW_STEPS else micro * ranks
        batch = math.ceil(batches / (micro * ranks)) * micro * ranks
        epochs = paper.epochs if paper else min(max(math.ceil(3 * LAPTOP_TOKENS / max(tokens, 1)), 3), 20)
        steps = rows // batch * epochs
        max_warmup = paper.warmup_steps if paper else 20
        warmup = min(max_warmup, steps // 10) if source.complete or budget else max_warmup
        return cls(fraction, **held, max_tokens=budget, tokens=tokens, global_batch=batch, micro_batch=micro,
                   epochs=epochs, steps=steps, warmup=warmup)  # fmt: skip


def recipe_text(
    args: argparse.Namespace,
    config: Any,
    machine: Machine,
    weights: float,
    source: DataSource,
    obstacle: str | None = None,
) -> str:
    """Return the recipe as TOML; `obstacle`: why the target cannot verify trees."""
    share, preset, paper = Share.of(machine, weights), load_presets()[args.draft], uses_paper_preset(args, machine)
    longest = max_length_of(config, paper)
    # A row holds at most two dialogues on average: a step is then not far from the paper's.
    pack_tokens = longest if paper and preset.packs and 2 * source.length >= longest else None
    gpus = f"a machine with {machine.gpus} GPUs of {machine.bytes / GB:.0f} GB"
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["toml"] = format_toml
    return environment.from_string(TEMPLATE.read_text()).render(
        **{key: getattr(args, key, None) for key in ("target", "subset", "split", "draft", "license")},
        data=args.data or preset.data["source"],
        max_dialogues=preset.data["max_dialogues"] if paper and not args.data else None,
        architecture=type(config).__name__.removesuffix("Config"),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        billions=f"{weights / 2e9:.2f}",
        found=gpus if machine.gpus else f"{count_cores()} cores without a GPU",
        about=textwrap.wrap(preset.about, 118) if paper else [],
        cpu=not machine.gpus,
        laptop=not paper,
        name=args.out.stem,
        share=share,
        max_length=max_length_of(config, paper),
        source=source,
        settings=draft_settings(preset, config, paper),
        training=preset.training,
        more={key: value for key, value in preset.train.items() if key not in ALWAYS},
        tree=choose_tree(preset, config, obstacle),
        experts=count_experts(config)[0],
        obstacle=obstacle and obstacle.partition(":")[0],
        pack_tokens=pack_tokens,
        sizes=Sizes.of(source, share.ranks, preset.training if paper else None, pack_tokens),
    )


def choose_tree(preset: Preset, config: Any, obstacle: str | None) -> dict[str, Any]:
    """Return the preset's tree; a short chain for a target of experts, most of which a tree reads; or the chain that is
    as deep as the preset's tree, for a target that verifies chains alone.
    """
    if count_experts(config)[0]:
        return SHORT_CHAIN
    return {"depth": TreeConfig(**preset.tree).depth, "siblings": "none"} if obstacle else preset.tree


def draft_settings(preset: Preset, config: Any, paper: bool) -> dict[str, Any]:
    """Return the draft's settings for a target of this configuration; `paper`: training is as long as in the paper.

    A target with few tokens requires no reduced vocabulary, and one with experts has no dense MLP to take a width from.
    """
    settings = preset.settings | (preset.long if paper else {})
    if settings.get("vocabulary", 0) >= config.vocab_size:
        del settings["vocabulary"]
    if config.model_type == "llama" and config.vocab_size == 32_000:
        settings |= preset.llama_2
    family = find_family(config)
    if settings["kind"] == "mtp" and family and HEADS[family].before_norm:
        settings |= {"before_norm": True}
    if count_experts(config)[0] and "mlp_width" in DRAFTS[kind_key(settings)].config.__dataclass_fields__:
        settings.setdefault("mlp_width", MLP_RATIO * config.hidden_size)
    return settings


def uses_paper_preset(args: argparse.Namespace, machine: Machine) -> bool:
    """Return whether the recipe has the hyper-parameters of the draft's paper."""
    return args.preset == "paper" if args.preset else bool(machine.gpus)


def max_length_of(config: Any, paper: bool) -> int:
    """Return the most tokens of a dialogue."""
    return min(2048 if paper else 512, declared_positions(config))


def write_recipe(args: argparse.Namespace) -> list[str]:
    """Write the recipe that the arguments describe, and return a summary of target and data. Raise PipelineError if the
    target does not fit the machine or no record is usable; then no recipe is written.
    """
    target = TargetConfig(model=args.target)
    config, machine = load_config(target), Machine.detect()
    settings = draft_settings(load_presets()[args.draft], config, uses_paper_preset(args, machine))
    with torch.device("meta"):
        build(load_settings(settings), draft_shapes(config))  # raises where the target has no such draft
    weights = 2 * count_parameters(target)
    Share.of(machine, weights)  # raises before the data are read
    selection = {key: getattr(args, key) for key in ("subset", "split") if getattr(args, key)}
    length, data = (
        max_length_of(config, uses_paper_preset(args, machine)),
        args.data or load_presets()[args.draft].data["source"],
    )
    source = DataSource.of(target, DataConfig(source=data, max_length=length, **selection))
    text = recipe_text(args, config, machine, weights, source, load_tree_obstacle(target))
    with atomic_path(args.out) as unfinished:  # no file is left if the recipe is invalid
        unfinished.write_text(text)
        load_recipe(unfinished)
    run = f"jakiro run {args.out}"
    if count_experts(config)[0]:  # the recipe's chain is a guess
        run += f" --until train, jakiro tune {args.out} and jakiro eval {args.out} --tuned"
    return [
        f"target: {type(config).__name__}, {config.num_hidden_layers} layers, {weights / 2e9:.2f}B parameters",
        f"data: {source.report}",
        f"{args.out} is written: read it, then jakiro plan {args.out} and {run}",
    ]
