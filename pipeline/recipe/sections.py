"""The sections of a recipe: every key, its type and its default have their home here, but for those of drafts.

Imports no torch: a typo is refused at once.
"""

import math
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, Field, model_validator

from pipeline.basics.errors import PipelineError
from pipeline.basics.section import (
    Affects,
    AutoDtype,
    Dtype,
    Folder,
    Fraction,
    Gpus,
    Measured,
    Name,
    Of,
    Positive,
    Processes,
    Runtime,
    Section,
)
from pipeline.decoding.config import Method, TreeConfig
from pipeline.lm.config import TargetConfig
from pipeline.recipe.license import License

HELDOUT = "heldout"
ON_HUB = regex.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")  # a commit: a branch would move
Cut = Annotated[Of, Affects(("dump", "figures"))]  # how dialogues are cut and split, whoever answers in them
Job = Annotated[Of, Affects(("regenerated",))]  # of preprocess/regenerate.py alone


class DataConfig(Section):
    """Which dialogues, and how they are cut and split."""

    # a path, an fsspec or hf:// address, "datasets:NAME", or "embedded:sharegpt" (forms: preprocess/sources/read.py)
    source: str
    subset: str | None = None  # of a "datasets:" source
    split: str = "train"  # of a "datasets:" source
    revision: str | None = None  # of a "datasets:" or hf:// source: a commit, branch or tag; default: the newest
    max_length: Positive = 2048  # tokens of a dialogue
    min_length: Cut[Positive] = 1  # tokens that a dialogue has at least
    # What becomes of longer ones (preprocess/sources/sequences.py).
    long: Cut[Literal["cut", "turns", "windows"]] = "cut"
    # Of two turns of one role in a row, or a blank one (preprocess/sources/dialogues.py).
    repeated: Literal["join", "cut", "reject"] = "join"
    # Whose answers: the source's, or those that the target gives to its questions (by [regenerate]) as they are dumped.
    answers: Measured[Literal["source", "target"]] = "source"
    train_turns: Cut[Literal["all", "last"]] = "all"  # answers with a loss: of a dialogue, or of each window of one
    # A record's key, or a regular expression on its id, whose value is its conversation's name: one side of the split.
    group: str | None = None  # default: the first question, and parts by ShareGPT's ids (preprocess/sources/groups.py)
    languages: list[str] = []  # ISO 639-1; empty: all
    near_duplicates: Annotated[float, Field(ge=0.5, le=1)] | None = None  # similarity from which two dialogues are one
    max_tokens: Cut[Positive | None] = None  # stop accepting training dialogues beyond this many tokens
    max_dialogues: Cut[Positive | None] = None  # stop accepting training dialogues beyond so many
    heldout_fraction: Cut[Fraction] = 0.02  # of dialogues, by hash of their group: never trained on
    validation_dialogues: Cut[Positive] = 256  # held-out dialogues whose features are dumped, for validation
    # Held-out dialogues whose first turn may be an evaluation prompt, or the tuner's.
    heldout_prompts: Cut[Positive] = 100
    # More of them: the target's answers tell training its tau.
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
        """The record's key; None where `group` is a regular expression, or nothing."""
        return self.group if self.group is not None and self.group.isidentifier() else None


class FeaturesConfig(Section):
    """How the dump runs and what a shard holds."""

    # float8 with a scale a token: half the disk. Default: float8 where a draft wants auxiliary layers, else bfloat16.
    stored_dtype: Dtype | Literal["float8_e4m3fn"] | None = None
    # Decoder layers (from 1) whose outputs are stored, too; default: those that the drafts want.
    auxiliary_layers: list[Positive] | None = None
    answer_tokens: Measured[Positive] = 64  # at most, of the target's answer to a calibration prompt
    rows_per_shard: Positive = 256  # dialogues of one file
    batch_tokens: Runtime[Positive] = 8192  # padded tokens of one forward
    workers: Runtime[Processes] = 1  # Ray actors that compute states, each with the target
    planners: Runtime[Processes] = 1  # from 2 on, processes beside the driver that encode dialogues for it
    cpus_per_worker: Runtime[Processes] = 1  # cores that Ray keeps for each
    # Default: one where Ray's nodes have GPUs, none on a CPU. 0.5: two on a GPU. More than 1: target.device = "spread".
    gpus_per_worker: Runtime[Annotated[float, Field(ge=0)] | None] = None
    gpus: Runtime[Gpus | None] = None  # of the machine, for `jakiro run`; default: all that are visible
    store: Runtime[str | None] = None  # s3://, gs://, ...: where finished shards go (pipeline/features/store.py)
    # The hash of somebody's dump in `store`, as its card gives it: what it was dumped from is then not asked.
    dump: Measured[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None] = None
    # Without a heartbeat (a batch, or the whole of loading), then a worker is replaced, of the evaluation, too.
    hang_seconds: Runtime[Positive] = 900
    # "window": training's shards are made while it reads them, and go (preprocess/feed.py).
    keep: Runtime[Literal["all", "window"]] = "all"
    # That these may take of the disk; default: what two of its windows take.
    disk_bytes: Runtime[Positive | None] = None

    @model_validator(mode="after")
    def _sound(self):
        if self.disk_bytes and self.keep == "all":
            raise ValueError("disk_bytes bounds what keep='window' leaves on the disk, but keep='all'")
        if self.dump and (not self.store or self.keep == "window"):
            raise ValueError(f"dump={self.dump!r} is somebody's whole dump in a store: set store, and keep='all'")
        if self.auxiliary_layers is not None and self.auxiliary_layers != sorted(set(self.auxiliary_layers)):
            raise ValueError(f"auxiliary_layers={self.auxiliary_layers} must be different layers in rising order")
        if (self.gpus_per_worker or 0) > 1 and self.gpus_per_worker % 1:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker:g}: a part of one GPU, or whole ones")
        return self


class RegenerateConfig(Section):
    """How the target rewrites the assistant turns: preprocess/regenerate.py, or a dump of `data.answers = "target"`."""

    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0: greedy
    top_k: Positive | None = None  # draw from so many tokens; default: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # draw from the likeliest tokens of this share together
    max_new_tokens: Positive = 512  # of one answer
    batch: Runtime[Positive] = 32  # dialogues that are answered together
    dialogues_per_part: Job[Positive] = 64  # of one file of the result
    max_dialogues: Job[Positive | None] = None  # of the source; default: all

    @model_validator(mode="after")
    def _greedy_is_greedy(self):
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError("top_k and top_p choose nothing at temperature 0: drop them, or set temperature")
        return self


class TrainConfig(Section):
    """Optimisation. Defaults are the paper's, and from its code where the paper is silent."""

    epochs: Positive = 20  # passes over the training dialogues
    tokens: Positive | None = None  # with a loss, after which training ends, in however many epochs; instead of epochs
    global_batch: Positive = 16  # rows per optimiser step, over all ranks
    micro_batch: Runtime[Positive] = 4  # rows per forward of one rank
    pack_tokens: Positive | None = None  # of a row that holds several dialogues; default: each row is one dialogue
    window: Positive | None = None  # shards whose rows an epoch shuffles together; default: as many as 4 GB are
    # All drafts at once, a step of each in turn: one pass over the states serves them all.
    together: Runtime[bool] = False
    ranks: Runtime[Processes | None] = None  # for `jakiro run` on one machine; default: one for each of its GPUs
    gpus: Runtime[Gpus | None] = None  # of the machine, for `jakiro run`; default: all that are visible
    learning_rate: Annotated[float, Field(gt=0)] = 9e-5  # the highest, behind the warm-up
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = {}  # by draft: of those that want another
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 1e-3  # AdamW's
    warmup_steps: Annotated[int, Field(ge=0)] = 2000  # optimiser steps over which the learning rate rises
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # of the learning rate behind the warm-up
    clip_norm: Annotated[float, Field(gt=0)] = 0.5  # of the gradient, at most
    noise: Annotated[float, Field(ge=0)] = 0.1  # half-width of the uniform noise on input features
    # That the draft is trained in. auto: bfloat16 where the device computes it natively, else float32.
    dtype: AutoDtype = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 0  # from 1 on, micro-batch gradients of a half-precision run add up in float32
    recompute: Runtime[bool] = False  # activations again in the backward instead of keeping them
    checkpoint_every: Runtime[Positive] = 500  # steps
    validate_every: Positive = 500  # steps
    keep: Literal["last", "best"] = "last"  # best: the weights of the validation with the largest estimated tau
    patience: Positive | None = None  # validations without a larger estimated tau after which training ends
    # When rank 0 decodes the calibration prompts with the target.
    decode: Runtime[Literal["never", "last", "always"]] = "never"
    tracker: Runtime[Literal["wandb", "trackio", "mlflow"] | None] = None  # beside TensorBoard, through its own package
    # Of each node's own disk, where features are brought; default: where they are.
    shards: Runtime[Folder | None] = None
    deepspeed: dict[str, Any] = {}  # more of its configuration; what follows from the keys above is refused here

    def accumulation(self, ranks: int) -> int:
        """Micro-batches of each rank in a step. Raises PipelineError where so many ranks cannot share a global
        batch.
        """
        if self.global_batch % (self.micro_batch * ranks):
            raise PipelineError(
                f"train.global_batch={self.global_batch} is no multiple of micro_batch x ranks = {self.micro_batch} x "
                f"{ranks}: change one of them"
            )
        return self.global_batch // (self.micro_batch * ranks)

    def warms_up_throughout(self, steps: int) -> bool:
        """Whether the learning rate would still be rising when a run of so many steps ends."""
        return self.warmup_steps >= steps and self.schedule != "constant"

    def require_exact_sum(self, accumulation: int) -> None:
        """Raises PipelineError where the gradients of so many micro-batches would add up in half precision."""
        if self.dtype != "float32" and accumulation > 1 and self.zero_stage == 0:
            raise PipelineError(
                f"train.zero_stage=0 would add the gradients of {accumulation} micro-batches up in {self.dtype}; set "
                "train.zero_stage=1, which adds them in float32 (or train.dtype='float32', or more ranks)"
            )

    def ranks_of(self, accelerators: int) -> int:
        """How many a machine with so many starts."""
        return self.ranks or len(self.gpus or ()) or max(accelerators, 1)

    def passes(self, trained: float) -> float:
        """How often a training goes through a set of so many tokens with a loss."""
        return self.tokens / trained if self.tokens else self.epochs

    def steps(self, rows: float, tokens: float, trained: float) -> int:
        """Optimiser steps of a training on a set of so many; packed rows are taken as full."""
        whole = tokens / self.pack_tokens if self.pack_tokens else rows
        return math.ceil(whole // self.global_batch * self.passes(trained))

    def bucket_elements(self, parameters: int) -> int:
        """Elements of the buffer in which ZeRO reduces gradients: DeepSpeed's own 5e8 is more than most drafts have."""
        own = self.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size")
        return own or min(parameters, 500_000_000)


class BenchmarkConfig(Section):
    # JSONL of {question_id, category, turns}; "benchmark:NAME", "embedded:humaneval", "heldout" or "heldout:TOKENS"
    # (eval/measure/prompts.py)
    source: str
    prompts: Positive | None = None  # the first so many
    # Of "benchmark:NAME": a copy of its data set, or one of the Hub: OWNER/NAME or OWNER/NAME@REVISION.
    path: str | None = None

    @model_validator(mode="after")
    def _for_named_ones(self):
        if self.path is not None and not self.source.startswith("benchmark:"):
            raise ValueError(
                f"path says where a 'benchmark:NAME' comes from; source={self.source!r} is a place of its own"
            )
        return self

    @property
    def held_out(self) -> bool:
        return self.source == HELDOUT or self.context is not None

    @property
    def context(self) -> int | None:
        """Tokens that each prompt is filled up to, of "heldout:TOKENS"."""
        of, _, tokens = self.source.partition(":")
        return int(tokens) if of == HELDOUT and tokens.isdecimal() and int(tokens) else None


class EvalConfig(Section):
    """What is measured. Every method decodes the same prompts in one process, interleaved."""

    benchmarks: Annotated[dict[str, BenchmarkConfig], Field(min_length=1)]  # prompts, by a name of yours
    tree: TreeConfig = TreeConfig()  # of every method that has none of its own
    # Every draft is a method of its own name; it stands here where its tree is another.
    methods: dict[Name, Method] = {}
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 1.0]  # 0: greedy
    top_k: Positive | None = None  # draw from so many tokens; default: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # draw from the likeliest tokens of this share together
    max_new_tokens: Positive = 512  # of one answer
    repeats: Positive = 3  # above temperature 0 each with its own seed
    dtype: AutoDtype = "bfloat16"  # that target and drafts decode in; auto: as above
    pack_linears: bool = False  # CPU: pre-packed weights for target and drafts alike
    compile: bool = False  # GPU: fixed shapes and CUDA graphs for plain and speculative decoding
    workers: Runtime[Processes] = 1  # from 2 on Ray actors, each with the target, take the prompts one by one
    # As the dump's; who shares one measures others' work.
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
        """Benchmarks whose prompts are filled up, and to how many tokens."""
        return {name: one.context for name, one in self.benchmarks.items() if one.context}

    @property
    def answers_a_prompt(self) -> int:
        """How many answers one method gives to a prompt, at all temperatures."""
        return self.repeats * len(self.temperatures)


class PublishConfig(Section):
    draft: str  # which of the run's drafts
    license: License  # of the draft, as the Hub spells it; mind the target's and the data's


def _at_commit(address: str) -> str:
    if not ON_HUB.fullmatch(address):
        raise ValueError(f"{address!r}: expected OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits")
    return address


def _folder(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} names no folder: give one, such as runs/mine")
    return value


class Outline(Section):
    """A recipe, but for what its drafts are."""

    name: Runtime[Name]  # of the run: the released model's name begins with it
    output: Runtime[Annotated[str, AfterValidator(_folder)]]  # the run's folder
    seed: Annotated[int, Field(ge=0)] = 0  # of weights, orders and samples
    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: dict[Name, Any]  # one or several, trained on the same shards and measured side by side
    train: TrainConfig = TrainConfig()
    eval: EvalConfig
    publish: PublishConfig
    # Drafts that are fetched, not trained, each from its OWNER/NAME@COMMIT of the Hub.
    published: dict[Name, Annotated[str, AfterValidator(_at_commit)]] = {}
