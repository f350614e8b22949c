"""The sections of a recipe: the type and the default of every key, except those of drafts.

Imports no torch, so a typo is refused at once.
"""

import math
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, Field, model_validator

from pipeline.basics.errors import PipelineError
from pipeline.basics.public import ON_HUB
from pipeline.basics.section import (
    Affects,
    AutoDtype,
    Dtype,
    Folder,
    Fraction,
    Gpus,
    Measured,
    Name,
    Positive,
    Processes,
    Runtime,
    Section,
    Value,
)
from pipeline.decoding.config import Method, TreeConfig
from pipeline.lm.config import TargetConfig
from pipeline.recipe.license import License

HELDOUT = "heldout"
Cut = Annotated[Value, Affects(("dump", "figures"))]  # keys that cut and split dialogues, whatever the answers
Job = Annotated[Value, Affects(("regenerated",))]  # keys that only preprocess/regenerate.py uses


class DataConfig(Section):
    """The dialogues, and how they are cut and split."""

    # a path, an fsspec or hf:// address, "datasets:NAME", or "embedded:sharegpt" (forms: preprocess/sources/read.py)
    source: str
    subset: str | None = None  # of a "datasets:" source
    split: str = "train"  # of a "datasets:" source
    revision: str | None = None  # of a "datasets:" or hf:// source: a commit, branch or tag; default: the newest
    max_length: Positive = 2048  # tokens of a dialogue
    min_length: Cut[Positive] = 1  # minimum tokens of a dialogue
    # Treatment of dialogues that are longer than max_length (preprocess/sources/sequences.py).
    long: Cut[Literal["cut", "turns", "windows"]] = "cut"
    # Treatment of two turns of one role in a row, or of a blank turn (preprocess/sources/dialogues.py).
    repeated: Literal["join", "cut", "reject"] = "join"
    # Answers to train on: the source's, or the target's own to its questions (see [regenerate]), given during the dump.
    answers: Measured[Literal["source", "target"]] = "source"
    train_turns: Cut[Literal["all", "last"]] = "all"  # answers with a loss, of a dialogue or of each of its windows
    # A record's key, or a regular expression on its id, that names its conversation; a split never divides one.
    group: str | None = None  # default: the first question, and parts by ShareGPT's ids (preprocess/sources/groups.py)
    languages: list[str] = []  # ISO 639-1; empty: all
    near_duplicates: Annotated[float, Field(ge=0.5, le=1)] | None = None  # similarity at which dialogues are duplicates
    max_tokens: Cut[Positive | None] = None  # maximum tokens of all training dialogues
    max_dialogues: Cut[Positive | None] = None  # maximum number of training dialogues
    heldout_fraction: Cut[Fraction] = 0.02  # fraction of dialogues, by hash of their group, that is never trained on
    validation_dialogues: Cut[Positive] = 256  # held-out dialogues whose features are dumped, for validation
    # Number of held-out dialogues whose first turn may be an evaluation prompt, or a prompt of the tuner.
    heldout_prompts: Cut[Positive] = 100
    # Number of further held-out prompts: training estimates tau on the target's answers to them.
    calibration_prompts: Measured[Annotated[int, Field(ge=0)]] = 16

    @model_validator(mode="after")
    def _sound(self):
        try:
            regex.compile(self.group or "")
        except regex.error as error:
            raise ValueError(f"group={self.group!r} is no key and no regular expression: {error}") from None
        return self

    @property
    def group_key(self) -> str | None:
        """The record's key; None if `group` is a regular expression or not set."""
        return self.group if self.group is not None and self.group.isidentifier() else None


class FeaturesConfig(Section):
    """The dump's workers and the content of its shards."""

    # float8, with a scale a token, halves the disk. Default: float8 if a draft needs auxiliary layers, else bfloat16.
    stored_dtype: Dtype | Literal["float8_e4m3fn"] | None = None
    # Decoder layers (from 1) whose outputs are stored as well; default: those that the drafts need.
    auxiliary_layers: list[Positive] | None = None
    answer_tokens: Measured[Positive] = 64  # maximum tokens of the target's answer to a calibration prompt
    rows_per_shard: Positive = 256  # dialogues of one file
    batch_tokens: Runtime[Positive] = 8192  # padded tokens of one forward pass
    workers: Runtime[Processes] = 1  # Ray actors that compute states, each with the target
    planners: Runtime[Processes] = 1  # 2 or more: extra processes that encode dialogues for the driver
    cpus_per_worker: Runtime[Processes] = 1  # cores that Ray reserves for each worker
    # Default: 1 if Ray's nodes have GPUs, else 0. 0.5: two workers on a GPU. More than 1: target.device = "spread".
    gpus_per_worker: Runtime[Annotated[float, Field(ge=0)] | None] = None
    gpus: Runtime[Gpus | None] = None  # GPUs of the machine, for `jakiro run`; default: all visible ones
    store: Runtime[str | None] = None  # address for finished shards: s3://, gs://, ... (pipeline/features/store.py)
    # The hash of somebody else's dump in `store`, given on its card; the settings of that dump are then not compared.
    dump: Measured[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None] = None
    # A worker, of the dump or the evaluation, is replaced after this time without a heartbeat (a batch, or loading).
    hang_seconds: Runtime[Positive] = 900
    # "window": training's shards are made while training reads them, and then deleted (preprocess/feed.py).
    keep: Runtime[Literal["all", "window"]] = "all"
    # Maximum disk space of these shards; default: the size of two windows of training.
    disk_bytes: Runtime[Positive | None] = None

    @model_validator(mode="after")
    def _sound(self):
        if self.disk_bytes and self.keep == "all":
            raise ValueError("disk_bytes bounds the shards of keep='window', but keep='all'")
        if self.dump and (not self.store or self.keep == "window"):
            raise ValueError(f"dump={self.dump!r} is a complete dump in a store: set store, and keep='all'")
        if self.auxiliary_layers is not None and self.auxiliary_layers != sorted(set(self.auxiliary_layers)):
            raise ValueError(f"auxiliary_layers={self.auxiliary_layers} must be distinct layers in ascending order")
        if (self.gpus_per_worker or 0) > 1 and self.gpus_per_worker % 1:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker:g}: use a fraction of one GPU, or a whole number")
        return self


class RegenerateConfig(Section):
    """The target's own answers in place of the source's: preprocess/regenerate.py, or `data.answers = "target"`."""

    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0: greedy
    top_k: Positive | None = None  # sample from the likeliest top_k tokens; default: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens with this total probability
    max_new_tokens: Positive = 512  # maximum tokens of one answer
    batch: Runtime[Positive] = 32  # dialogues that are answered together
    dialogues_per_part: Job[Positive] = 64  # dialogues of one file of the result
    max_dialogues: Job[Positive | None] = None  # maximum number of the source's dialogues; default: all

    @model_validator(mode="after")
    def _greedy_is_greedy(self):
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError("top_k and top_p choose nothing at temperature 0: drop them, or set temperature")
        return self


class TrainConfig(Section):
    """Optimisation. Defaults are the paper's, or its code's if the paper does not state them."""

    epochs: Positive = 20  # passes over the training dialogues
    tokens: Positive | None = None  # instead of epochs: tokens with a loss after which training ends
    global_batch: Positive = 16  # rows per optimiser step, over all ranks
    micro_batch: Runtime[Positive] = 4  # rows per forward pass of one rank
    pack_tokens: Positive | None = None  # tokens of a row of several dialogues; default: each row is one dialogue
    weighting: Literal["token", "dialogue"] = "token"  # of which the global batch's loss is the mean
    window: Positive | None = None  # shards whose rows an epoch shuffles together; default: as many as fit in 4 GB
    # Train all drafts at once, a step of each in turn: one pass over the states serves them all.
    together: Runtime[bool] = False
    ranks: Runtime[Processes | None] = None  # for `jakiro run` on one machine; default: one for each of its GPUs
    gpus: Runtime[Gpus | None] = None  # GPUs of the machine, for `jakiro run`; default: all visible ones
    learning_rate: Annotated[float, Field(gt=0)] = 9e-5  # the highest rate, after the warm-up
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = {}  # by draft; the others use learning_rate
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 1e-3  # AdamW's
    warmup_steps: Annotated[int, Field(ge=0)] = 2000  # optimiser steps over which the learning rate rises
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # of the learning rate after the warm-up
    clip_norm: Annotated[float, Field(gt=0)] = 0.5  # maximum norm of the gradient
    noise: Annotated[float, Field(ge=0)] = 0.1  # half-width of the uniform noise on input features
    # The dtype of training. auto: bfloat16 if the device computes it natively, else float32.
    dtype: AutoDtype = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 0  # from 1 on, half-precision micro-batch gradients are summed in float32
    recompute: Runtime[bool] = False  # recompute activations in the backward pass instead of keeping them
    compile: bool = False  # GPU: compile the losses' passes over the vocabulary, which fuses them
    checkpoint_every: Runtime[Positive | None] = None  # steps from one resume state to the next; default: ten minutes
    validate_every: Positive = 500  # steps
    keep: Literal["last", "best"] = "last"  # best: the weights of the validation with the largest estimated tau
    patience: Positive | None = None  # validations without a larger estimated tau after which training ends
    # Validations at which rank 0 decodes the calibration prompts with the target.
    decode: Runtime[Literal["never", "last", "always"]] = "never"
    tracker: Runtime[Literal["wandb", "trackio", "mlflow"] | None] = None  # in addition to TensorBoard; its own package
    # Folder on each node's own disk for copies of the features; default: they are read from the run's folder.
    shards: Runtime[Folder | None] = None
    deepspeed: dict[str, Any] = {}  # further keys of its configuration; those set by the keys above are refused

    def accumulation(self, ranks: int) -> int:
        """Return the micro-batches of each rank in a step. Raises PipelineError if `ranks` ranks cannot share a global
        batch.
        """
        if self.global_batch % (self.micro_batch * ranks):
            raise PipelineError(
                f"train.global_batch={self.global_batch} is no multiple of micro_batch x ranks = {self.micro_batch} x "
                f"{ranks}: change one of them"
            )
        return self.global_batch // (self.micro_batch * ranks)

    def warms_up_throughout(self, steps: int) -> bool:
        """Return whether the learning rate still rises at the end of a run of `steps` steps."""
        return self.warmup_steps >= steps and self.schedule != "constant"

    def require_exact_sum(self, accumulation: int) -> None:
        """Raise PipelineError if the gradients of `accumulation` micro-batches would be summed in half precision."""
        if self.dtype != "float32" and accumulation > 1 and self.zero_stage == 0:
            raise PipelineError(
                f"train.zero_stage=0 would add the gradients of {accumulation} micro-batches up in {self.dtype}; set "
                "train.zero_stage=1, which adds them in float32 (or train.dtype='float32', or more ranks)"
            )

    def ranks_of(self, accelerators: int) -> int:
        """Return the number of ranks that a machine with `accelerators` accelerators starts."""
        return self.ranks or len(self.gpus or ()) or max(accelerators, 1)

    def passes(self, trained: float) -> float:
        """Return the number of passes of a training over a set of `trained` tokens with a loss."""
        return self.tokens / trained if self.tokens else self.epochs

    def steps(self, rows: float, tokens: float, trained: float) -> int:
        """Return the optimiser steps of a training on a set of these sizes; packed rows are counted as full."""
        full_rows = tokens / self.pack_tokens if self.pack_tokens else rows
        return math.ceil(full_rows // self.global_batch * self.passes(trained))

    def bucket_elements(self, parameters: int) -> int:
        """Return the elements of the buffer in which ZeRO reduces gradients, at most the parameters: DeepSpeed's
        default of 5e8 is larger than most drafts.
        """
        configured = self.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size")
        return configured or min(parameters, 500_000_000)


class BenchmarkConfig(Section):
    # JSONL of {question_id, category, turns}; "benchmark:NAME", "embedded:humaneval", "heldout" or "heldout:TOKENS"
    # (eval/measure/prompts.py)
    source: str
    prompts: Positive | None = None  # maximum number of prompts
    # For "benchmark:NAME": a copy of its data set, or one of the Hub: OWNER/NAME or OWNER/NAME@REVISION.
    path: str | None = None

    @model_validator(mode="after")
    def _for_named_ones(self):
        if self.path is not None and not self.source.startswith("benchmark:"):
            raise ValueError(f"path applies to source='benchmark:NAME' only, got source={self.source!r}: leave it out")
        return self

    @property
    def held_out(self) -> bool:
        return self.source == HELDOUT or self.context is not None

    @property
    def context(self) -> int | None:
        """The length in tokens to which "heldout:TOKENS" extends each prompt; None for other sources."""
        of, _, tokens = self.source.partition(":")
        return int(tokens) if of == HELDOUT and tokens.isdecimal() and int(tokens) else None


class EvalConfig(Section):
    """The measurement. Every method decodes the same prompts in one process, interleaved."""

    benchmarks: Annotated[dict[str, BenchmarkConfig], Field(min_length=1)]  # sets of prompts, by a name you choose
    # The tree of every method without its own; "auto": the default, or a chain if the target verifies chains alone.
    tree: TreeConfig = TreeConfig()
    # Methods by name. Every draft is a method of its own name, and is listed only if its tree differs.
    methods: dict[Name, Method] = {}
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 1.0]  # 0: greedy
    top_k: Positive | None = None  # sample from the likeliest top_k tokens; default: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens with this total probability
    max_new_tokens: Positive = 512  # maximum tokens of one answer
    repeats: Positive = 3  # measurements of each prompt; above temperature 0 each has its own seed
    dtype: AutoDtype = "bfloat16"  # dtype of target and drafts when decoding; auto: as for train.dtype
    pack_linears: bool = False  # CPU: pre-packed weights for target and drafts alike
    compile: bool = False  # GPU: fixed shapes and CUDA graphs for plain and speculative decoding
    workers: Runtime[Processes] = 1  # 2 or more: Ray actors, each with the target, which take the prompts one by one
    # As features.gpus_per_worker, but whole GPUs: workers that share a GPU would disturb each other's timings.
    gpus_per_worker: Runtime[Annotated[int, Field(ge=0)] | None] = None

    @model_validator(mode="after")
    def _sound(self):
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures={self.temperatures} names one twice")
        if self.compile and self.pack_linears:
            raise ValueError("compile=true is for GPUs and pack_linears=true for CPUs: choose one")
        return self

    @property
    def of_contexts(self) -> dict[str, int]:
        """The benchmarks whose prompts are extended, with the length in tokens."""
        return {name: benchmark.context for name, benchmark in self.benchmarks.items() if benchmark.context}

    @property
    def answers_a_prompt(self) -> int:
        """The number of answers of one method to a prompt, over all temperatures."""
        return self.repeats * len(self.temperatures)


class PublishConfig(Section):
    draft: str  # name of the draft to release
    license: License  # the draft's license, as the Hub spells it; it has to agree with the target's and the data's


def _require_commit(address: str) -> str:
    if not ON_HUB.fullmatch(address):
        raise ValueError(f"{address!r}: expected OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits")
    return address


def _require_folder(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} names no folder: give one, such as runs/mine")
    return value


class Outline(Section):
    """A recipe whose drafts are not checked."""

    name: Runtime[Name]  # name of the run, and prefix of the released model's name
    output: Runtime[Annotated[str, AfterValidator(_require_folder)]]  # the run's folder
    seed: Annotated[int, Field(ge=0)] = 0  # seed of weights, orders and samples
    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: dict[Name, Any]  # one or several, trained on the same shards and measured side by side
    train: TrainConfig = TrainConfig()
    eval: EvalConfig
    publish: PublishConfig
    # Drafts that are downloaded instead of trained, each from its OWNER/NAME@COMMIT of the Hub.
    published: dict[Name, Annotated[str, AfterValidator(_require_commit)]] = {}
