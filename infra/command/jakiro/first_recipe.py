"""The recipe that fits a target, a source and this machine: how GPUs are shared, and how the source is divided."""

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
from jakiro.presets import Preset, presets, toml
from pipeline.basics.accelerator import kind
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path
from pipeline.basics.public import public_text
from pipeline.drafts import DRAFTS, kind_of
from pipeline.features.reasons import describe_reasons
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_tokenizer, parameter_count_of
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig, TrainConfig
from pipeline.running.cores import cores
from preprocess.sources.forms import description
from preprocess.sources.groups import Groups
from preprocess.sources.intake import DESCRIBED, clean_in_language
from preprocess.sources.read import Tail, read_records
from preprocess.sources.sequences import encode_sequences

COUNTED, ENCODED = 20_000, 200  # records, at most
LAPTOP_TOKENS = 270_000  # a quarter of an hour for a target of 0.1B
_LAPTOP = {"validation": 24, "heldout_prompts": 22, "calibration": 16, "prompts": 12}  # held-out dialogues
_PAPER = {"validation": 256, "heldout_prompts": 100, "calibration": 16, "prompts": 80}
SPARE = 1.25  # times as many are held out as are wanted: the hash of an id decides
LARGEST = 0.2  # share of dialogues that are held out
FEW_STEPS = 20  # an epoch, below which a CPU's global batch is the smallest
GB = 1e9
ROOM = 1.3  # a worker's memory over its weights, roughly: the batch in flight, the allocator
ALWAYS = {"epochs", "global_batch", "micro_batch", "warmup_steps", "learning_rate"}  # keys of [train]
TEMPLATE = jakiro.HOME / "infra/templates/recipe.toml.jinja"


class Machine(NamedTuple):
    gpus: int
    bytes: float  # of one

    @classmethod
    def here(cls) -> "Machine":
        device = kind()
        if device is None:
            return cls(0, 0)
        module = torch.get_device_module(device.type)
        return cls(torch.accelerator.device_count(), module.mem_get_info(0)[1])


class Share(NamedTuple):
    """How a machine's GPUs serve a target."""

    device: str
    workers: int
    gpus_per_worker: int
    ranks: int

    @classmethod
    def of(cls, machine: Machine, weights: float) -> "Share":
        if not machine.gpus:
            few = min(cores(), 2)
            return cls("cpu", few, 0, few)
        each = math.ceil(weights * ROOM / machine.bytes)
        if each > machine.gpus:
            raise PipelineError(
                f"the target's weights are {weights / GB:.0f} GB in bfloat16, and the {machine.gpus} GPUs here have "
                f"{machine.gpus * machine.bytes / GB:.0f} GB: write the recipe on a machine that holds it"
            )
        return cls("auto" if each == 1 else "spread", machine.gpus // each, each, machine.gpus)


@dataclass(frozen=True)
class Source:
    """What a look at a source's records gave: all of them where `whole`."""

    records: int
    whole: bool
    usable: float  # share of those that were encoded
    length: float  # tokens of a sequence
    report: str

    @property
    def dialogues(self) -> int:
        return max(int(self.records * self.usable), 1)

    @classmethod
    def of(cls, target: TargetConfig, data: DataConfig) -> "Source":
        """Count the records, up to a limit, and encode the first ones. Raises PipelineError where none is usable."""
        tokenizer, groups, refused = load_tokenizer(target), Groups(data), Counter[str]()
        examples: dict[str, str] = {}
        lengths: list[int] = []
        learnt = records = 0
        for record in islice(read_records(data, Tail()), COUNTED):
            records += 1
            if records > ENCODED:
                continue
            try:
                sequences, _ = encode_sequences(tokenizer, clean_in_language(record, data, groups), data)
            except Unusable as error:
                refused[str(error).partition(":")[0]] += 1
                if str(error) in DESCRIBED:
                    examples.setdefault(str(error), description(record))
                continue
            lengths += [len(one.input_ids) for _, one in sequences]
            learnt += sum(int(one.loss_mask.sum()) for _, one in sequences)
        tried = min(records, ENCODED)
        why = describe_reasons(refused)
        why += public_text("".join(f"; the first {reason} record: {text}" for reason, text in examples.items()))
        if not lengths:
            raise PipelineError(
                f"none of the first {tried} records of {data.source} is usable ({why or 'it is empty'})"
            )
        usable, length = tried - sum(refused.values()), sum(lengths) / len(lengths)
        whole = records < COUNTED
        report = (
            f"{'' if whole else 'more than '}{records:,} records; of the first {tried} {usable} are usable"
            f"{f' ({why})' if why else ''}: {length:.0f} tokens each, {100 * learnt / sum(lengths):.0f}% of them with "
            "a loss"
        )
        return cls(records, whole, usable / tried, length, report)


@dataclass(frozen=True)
class Sizes:
    """How a recipe divides a source, and how long it trains on it."""

    heldout_fraction: float
    validation: int
    heldout_prompts: int
    calibration: int
    prompts: int
    max_tokens: int | None
    tokens: int  # to train on, roughly
    global_batch: int
    micro_batch: int
    epochs: int
    steps: int
    warmup: int

    @property
    def every(self) -> int:
        """Steps from one validation to the next: four of them in a short training."""
        return min(max(self.steps // 4, 10), 500)

    @classmethod
    def of(cls, source: Source, ranks: int, paper: TrainConfig | None) -> "Sizes":
        """The paper's sizes, or else a quarter of an hour's on a CPU, and less of each where the source is small."""
        wanted = _PAPER if paper else _LAPTOP
        dialogues, need = source.dialogues, max(wanted["validation"], wanted["heldout_prompts"] + wanted["calibration"])
        fraction = min(max(math.ceil(100 * SPARE * need / dialogues) / 100, 0.02), LARGEST)
        share = min(fraction * dialogues / SPARE / need, 1)
        held = {name: max(int(count * share), 1) for name, count in wanted.items()}
        every = int(dialogues * (1 - fraction) * source.length)
        budget = None if paper or (source.whole and every <= LAPTOP_TOKENS) else LAPTOP_TOKENS
        tokens = min(every, budget or every)
        asked, largest = (paper.global_batch, paper.micro_batch) if paper else (16, 2)
        micro = largest if asked % (largest * ranks) == 0 else 1
        rows = int(tokens / source.length)
        batches = asked if paper or rows >= 16 * FEW_STEPS else micro * ranks
        batch = math.ceil(batches / (micro * ranks)) * micro * ranks
        epochs = paper.epochs if paper else min(max(math.ceil(3 * LAPTOP_TOKENS / max(tokens, 1)), 3), 20)
        steps = rows // batch * epochs
        most = paper.warmup_steps if paper else 20
        warmup = min(most, steps // 10) if source.whole or budget else most
        return cls(fraction, **held, max_tokens=budget, tokens=tokens, global_batch=batch, micro_batch=micro,
                   epochs=epochs, steps=steps, warmup=warmup)  # fmt: skip


def recipe_text(given: argparse.Namespace, config: Any, machine: Machine, weights: float, source: Source) -> str:
    share, preset, paper = Share.of(machine, weights), presets()[given.draft], is_papers(given, machine)
    gpus = f"a machine with {machine.gpus} GPUs of {machine.bytes / GB:.0f} GB"
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["toml"] = toml
    return environment.from_string(TEMPLATE.read_text()).render(
        **{key: getattr(given, key, None) for key in ("target", "subset", "split", "draft", "license")},
        data=given.data or preset.data["source"],
        max_dialogues=preset.data["max_dialogues"] if paper and not given.data else None,
        architecture=type(config).__name__.removesuffix("Config"),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        billions=f"{weights / 2e9:.2f}",
        found=gpus if machine.gpus else f"{cores()} cores without a GPU",
        about=textwrap.wrap(preset.about, 118) if paper else [],
        cpu=not machine.gpus,
        laptop=not paper,
        name=given.out.stem,
        share=share,
        max_length=length_of(config, paper),
        source=source,
        settings=settings_for(preset, config, paper),
        training=preset.training,
        more={key: value for key, value in preset.train.items() if key not in ALWAYS},
        tree=preset.tree,
        sizes=Sizes.of(source, share.ranks, preset.training if paper else None),
    )


def settings_for(preset: Preset, config: Any, paper: bool) -> dict[str, Any]:
    """The draft's settings for a target of this configuration; `paper`: its training is as long as the paper's.

    A target of few tokens has no use for a vocabulary, and a mixture of experts no dense MLP to take a width from.
    """
    settings = preset.settings | (preset.long if paper else {})
    if settings.get("vocabulary", 0) >= config.vocab_size:
        del settings["vocabulary"]
    if config.model_type == "llama" and config.vocab_size == 32_000:
        settings |= preset.llama_2
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts and "mlp_width" in DRAFTS[kind_of(settings)].config.__dataclass_fields__:
        settings.setdefault("mlp_width", 3 * config.hidden_size)
    return settings


def is_papers(given: argparse.Namespace, machine: Machine) -> bool:
    """Whether the recipe has the hyper-parameters of the draft's paper."""
    return given.preset == "paper" if given.preset else bool(machine.gpus)


def length_of(config: Any, paper: bool) -> int:
    """Tokens of a dialogue, at most."""
    return min(2048 if paper else 512, config.max_position_embeddings)


def write_recipe(given: argparse.Namespace) -> list[str]:
    """Write the recipe that a user asks for, and return what was looked at. Raises PipelineError where the target does
    not fit the machine or no record is usable; then no recipe is there.
    """
    target = TargetConfig(model=given.target)
    config = load_config(target)
    weights = 2 * parameter_count_of(target)
    machine = Machine.here()
    Share.of(machine, weights)  # refused before the data are read
    part = {key: getattr(given, key) for key in ("subset", "split") if getattr(given, key)}
    length, data = length_of(config, is_papers(given, machine)), given.data or presets()[given.draft].data["source"]
    source = Source.of(target, DataConfig(source=data, max_length=length, **part))
    text = recipe_text(given, config, machine, weights, source)
    with atomic_path(given.out) as unfinished:  # it stays away where its recipe is of no use
        unfinished.write_text(text)
        load_recipe(unfinished)
    return [
        f"target: {type(config).__name__}, {config.num_hidden_layers} layers, {weights / 2e9:.2f}B parameters",
        f"data: {source.report}",
        f"{given.out} is written: read it, then jakiro plan {given.out} and jakiro run {given.out}",
    ]
