"""The sections of a recipe: every key, its type and its default have their home here."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from pipeline.basics.errors import PipelineError
from pipeline.basics.section import Dtype, Folder, Fraction, Name, Positive, Processes, Section


class DataConfig(Section):
    """Which dialogues, and how they are cut and split."""

    # a path, an fsspec or hf:// address, "datasets:NAME", or "embedded:sharegpt" (forms: preprocess/sources/read.py)
    source: str
    subset: str | None = None  # of a "datasets:" source
    split: str = "train"
    revision: str | None = None
    max_length: Positive = 2048  # tokens of a dialogue
    min_length: Positive = 1
    long: Literal["cut", "turns", "windows"] = "cut"  # what becomes of longer dialogues (preprocess/sources/pieces.py)
    languages: list[str] = []  # ISO 639-1; empty: all
    near_duplicates: Annotated[float, Field(ge=0.5, le=1)] | None = None  # similarity from which two dialogues are one
    max_tokens: Positive | None = None  # stop accepting training dialogues beyond this many tokens
    max_dialogues: Positive | None = None
    heldout_fraction: Fraction = 0.02  # of dialogues, by hash of the id: never trained on
    validation_dialogues: Positive = 256  # held-out dialogues whose features are dumped, for validation
    heldout_prompts: Positive = 100  # held-out dialogues whose first turn may be an evaluation prompt, or the tuner's
    calibration_prompts: Annotated[int, Field(ge=0)] = 16  # more of them: the target's answers tell training its tau


class FeaturesConfig(Section):
    """How the dump runs and what a shard holds."""

    stored_dtype: Dtype | Literal["float8_e4m3fn"] = "bfloat16"  # float8 with a scale a token: half the disk
    auxiliary_layers: list[Positive] = []  # decoder layers (from 1) whose outputs are stored, too
    answer_tokens: Positive = 64  # at most, of the target's answer to a calibration prompt
    rows_per_shard: Positive = 256
    batch_tokens: Positive = 8192  # padded tokens of one forward
    workers: Processes = 1
    planners: Processes = 1  # from 2 on, processes beside the driver that encode dialogues for it
    cpus_per_worker: Processes = 1
    # Default: one where Ray's nodes have GPUs, none on a CPU. 0.5: two on a GPU. More than 1: target.device = "spread".
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    store: str | None = None  # s3://, gs://, ...: where finished shards go (pipeline/features/store.py)
    hang_seconds: Positive = 900  # without a finished batch, or a loaded target, after which a worker is given up

    @model_validator(mode="after")
    def _sound(self):
        if self.auxiliary_layers != sorted(set(self.auxiliary_layers)):
            raise ValueError(f"auxiliary_layers={self.auxiliary_layers} must be different layers in rising order")
        if (self.gpus_per_worker or 0) > 1 and self.gpus_per_worker % 1:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker:g}: a part of one GPU, or whole ones")
        return self


class RegenerateConfig(Section):
    """How the target rewrites the assistant turns (preprocess/regenerate.py), with the workers of the dump."""

    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0: greedy
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 512  # of one answer
    batch: Positive = 32  # dialogues that are answered together
    dialogues_per_part: Positive = 64  # of one file of the result
    max_dialogues: Positive | None = None

    @model_validator(mode="after")
    def _greedy_is_greedy(self):
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError("top_k and top_p choose nothing at temperature 0: drop them, or set temperature")
        return self


# EAGLE-1's tree: 25 nodes below the root, each written as the ranks on its path.
EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"


class TreeConfig(Section):
    """A token tree. ``nodes`` counts every token that the target verifies, the root included.

    Dynamic (EAGLE-2): the `top_k` best nodes of a level propose `top_k` children each; of all, the best ``nodes - 1``
    stay. The defaults are the released code's tree: its ``depth=5`` counts the levels after the first.
    Static (EAGLE-1): `paths` names every node by the ranks on its path; depth, top_k and nodes follow from it.
    """

    depth: Positive = 6  # levels below the root
    top_k: Positive = 10
    nodes: Annotated[int, Field(ge=2)] = 60
    paths: list[list[Annotated[int, Field(ge=0)]]] | Literal["eagle-1"] | None = None
    candidates: Literal["plain", "decoupled", "mixture"] = (
        "plain"  # the averaged head's; the experts' lists merged; their mixture's
    )
    siblings: Literal["best", "drawn", "drawn-by-expert"] = "best"  # how a static tree takes them above temperature 0
    parallel: Positive = 1  # so many last levels come from one draft forward (Jakiro: 2)

    @model_validator(mode="before")
    @classmethod
    def _static_shape(cls, values: Any):
        """Fills in what follows from `paths`. Raises ValueError for paths that make no tree."""
        if not isinstance(values, dict) or values.get("paths") is None:
            return values
        paths = values["paths"]
        if paths != "eagle-1" and not _are_paths(paths):
            raise ValueError(f"paths={paths!r}: expected 'eagle-1' or lists of ranks, as in [[0], [1], [0, 0]]")
        known = {tuple(path) for path in static_paths(paths)}
        if len(known) < len(static_paths(paths)):
            raise ValueError("paths names a node twice: siblings are different tokens")
        for path in known:
            missing = [p for p in (path[:-1], (*path[:-1], path[-1] - 1)) if p and p[-1] >= 0 and p not in known]
            if missing:
                raise ValueError(
                    f"paths holds {list(path)} without {list(missing[0])}: a node needs its parent and the better "
                    "siblings"
                )
        follows = {"depth": max(map(len, known)), "top_k": 1 + max(map(max, known)), "nodes": 1 + len(known)}
        for key, value in follows.items():
            if values.get(key, value) != value:
                raise ValueError(f"{key}={values[key]}, but paths make it {value}: leave it out")
        return {**values, **follows}

    @model_validator(mode="after")
    def _sound(self):
        most = 1 + self.top_k + self.top_k * self.top_k * (self.depth - 1)
        if self.paths is None and self.nodes > most:
            raise ValueError(
                f"nodes={self.nodes}, but depth {self.depth} with top_k {self.top_k} scores at most {most}"
            )
        if self.nodes < self.depth + 1:
            raise ValueError(
                f"nodes={self.nodes} cannot hold a path of depth {self.depth}: use at least {self.depth + 1}"
            )
        if self.parallel > self.depth:
            raise ValueError(f"parallel={self.parallel} levels from one forward, but the tree has depth {self.depth}")
        if self.siblings != "best" and self.paths is None:
            raise ValueError(
                f"siblings={self.siblings!r} needs a static tree (paths): keeping the best of what was drawn would "
                "change the output's "
                "distribution"
            )
        drawn_from = {"drawn": ("plain", "mixture"), "drawn-by-expert": ("decoupled",)}
        if self.candidates not in drawn_from.get(self.siblings, (self.candidates,)):
            raise ValueError(
                f"siblings={self.siblings!r} cannot be had with candidates={self.candidates!r}: 'drawn' takes one "
                "distribution "
                "('plain' or 'mixture'), 'drawn-by-expert' each expert's own ('decoupled')"
            )
        return self


def _are_paths(paths: Any) -> bool:
    lists = isinstance(paths, list) and bool(paths) and all(isinstance(path, list) and path for path in paths)
    return lists and all(type(rank) is int and rank >= 0 for path in paths for rank in path)


def static_paths(paths: list[list[int]] | str) -> list[list[int]]:
    """The nodes below the root of a static tree, parents before children and siblings in the order of their ranks."""
    found = [[int(rank) for rank in word] for word in EAGLE_1.split()] if paths == "eagle-1" else paths
    return sorted(found, key=lambda path: (len(path), path))


class BranchLoss(Section):
    """Weights of one branch's two losses."""

    regression: float
    classification: float


class DraftBase(Section):
    fc_bias: bool = False
    vocabulary: Positive | None = None  # reduced draft vocabulary: the most frequent ids of the training answers
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0  # multiplies e(t) on its way into fc
    next: BranchLoss = BranchLoss(regression=1.0, classification=0.1)
    ahead: BranchLoss = BranchLoss(
        regression=1.0, classification=0.05
    )  # of each branch further ahead, where there is one
    rollout: Positive = (
        1  # training passes; from the second on, features are the draft's own (EAGLE-3's training-time test)
    )
    own: BranchLoss = BranchLoss(regression=1.0, classification=0.1)  # of each pass from the second on

    def with_tree(self, tree: TreeConfig):
        """The same draft with another tree. Raises ValidationError when it cannot grow it."""
        return type(self).model_validate(self.model_dump() | {"tree": tree.model_dump()})

    def _require_tree(self, horizons: int, experts: bool) -> None:
        """Raises ValueError when the decoding tree asks for what this draft cannot give."""
        tree: TreeConfig = self.tree
        if tree.parallel > horizons:
            raise ValueError(
                f"tree.parallel={tree.parallel} takes that many levels from one forward, but this draft looks "
                f"{horizons} ahead: lower it, "
                "or give the draft more branches (eagle: horizons; jakiro: contrast)"
            )
        if tree.candidates != "plain" and not experts:
            raise ValueError(
                f"tree.candidates={tree.candidates!r} needs several experts a token that expect the next one; this "
                "draft has "
                "them not: use 'plain'"
            )


class EagleConfig(DraftBase):
    """EAGLE-1/2: one dense Llama layer. With more horizons, each has a down projection of its own: the control for
    Jakiro's branch.
    """

    kind: Literal["eagle"]
    mlp_width: Positive | None = None  # default: the target's
    horizons: Annotated[int, Field(ge=1, le=5)] = 1
    tree: TreeConfig = TreeConfig()

    @model_validator(mode="after")
    def _tree_fits(self):
        self._require_tree(self.horizons, experts=False)
        return self


class JakiroConfig(DraftBase):
    """Jakiro (arXiv 2502.06282): a mixture of experts in EAGLE's layer, and branches further ahead from the same
    experts.
    """

    kind: Literal["jakiro"]
    experts: Annotated[int, Field(ge=2)] = 2
    experts_per_token: Positive = 2
    expert_width: Positive | None = None  # default: the hidden size, as in the released code
    routing: Literal["learned", "depth"] = "learned"  # depth: expert j for the j-th level of a roll-out, one a token
    contrast: Literal["router", "scalar", "experts", "none"] = (
        "router"  # the branches ahead: eq. 7 twice, one expert each, none
    )
    expert_loss: BranchLoss | None = None  # of each kept expert's own head (decoupled trees); averaged over them
    mixture_loss: Annotated[float, Field(ge=0)] = (
        0.0  # weight of the cross-entropy of the experts' mixture of softmaxes
    )
    tree: TreeConfig = TreeConfig(parallel=2)

    @model_validator(mode="before")
    @classmethod
    def _parallel_by_default(cls, values: Any):
        """Also where a tree is given without saying so."""
        tree = values.get("tree", {}) if isinstance(values, dict) else None
        if not isinstance(tree, dict):
            return values
        paths = tree.get("paths")
        depth = (
            max(map(len, paths))
            if paths and _are_paths(paths)
            else tree.get("depth", TreeConfig.model_fields["depth"].default)
        )
        alone = values.get("contrast") == "none" or depth == 1
        return {**values, "tree": {"parallel": 1 if alone else 2, **tree}}

    @property
    def horizons(self) -> int:
        return {"router": 2, "scalar": 2, "experts": self.experts_per_token, "none": 1}[self.contrast]

    @model_validator(mode="after")
    def _sound(self):
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        if self.routing == "depth" and (self.experts_per_token > 1 or self.contrast != "none" or self.rollout == 1):
            raise ValueError(
                "routing='depth' runs one expert a token: it needs experts_per_token=1, contrast='none' and rollout "
                ">= 2"
            )
        if self.routing == "depth" and (self.expert_loss or self.mixture_loss):
            raise ValueError("routing='depth' runs one expert a token: expert_loss and mixture_loss are of several")
        if self.contrast == "experts" and (self.expert_loss or self.mixture_loss or self.experts_per_token > 5):
            raise ValueError(
                "contrast='experts' gives each of at most 5 kept experts a horizon of its own: expert_loss and "
                "mixture_loss would train all of "
                "them for the next token"
            )
        if self.routing == "learned" and self.experts_per_token < 2:
            raise ValueError("experts_per_token=1 with routing='learned': nothing would train the gate; use 2 or more")
        self._require_tree(self.horizons, experts=self.experts_per_token > 1 and self.contrast != "experts")
        return self


DraftConfig = Annotated[EagleConfig | JakiroConfig, Field(discriminator="kind")]


class TrainConfig(Section):
    """Optimisation. Defaults are the paper's, and from its code where the paper is silent."""

    epochs: Positive = 20
    global_batch: Positive = 16  # rows per optimiser step, over all ranks
    micro_batch: Positive = 4  # rows per forward of one rank
    pack_tokens: Positive | None = None  # of a row that holds several dialogues; default: each row is one dialogue
    ranks: Processes | None = None  # for `pipeline run` on one machine; default: every accelerator
    learning_rate: Annotated[float, Field(gt=0)] = 9e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 2000
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    clip_norm: Annotated[float, Field(gt=0)] = 0.5
    noise: Annotated[float, Field(ge=0)] = 0.1  # half-width of the uniform noise on input features
    noise_scaling: Literal["plain", "legacy"] = "plain"  # legacy: times 512 / length, as EAGLE's code
    mask: Literal["predicted", "legacy"] = (
        "predicted"  # legacy: train where t_{i+h-1}, not t_{i+1+h}, is the assistant's
    )
    dtype: Dtype = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 0  # from 1 on, micro-batch gradients of a half-precision run add up in float32
    recompute: bool = False  # activations again in the backward instead of keeping them
    not_finite: Literal["stop", "skip"] = "stop"  # of a loss: end the run, or leave that turn's micro-batches out
    checkpoint_every: Positive = 500  # steps
    validate_every: Positive = 500
    keep: Literal["last", "best"] = "last"  # best: the weights of the validation with the largest estimated tau
    patience: Positive | None = None  # validations without a larger estimated tau after which training ends
    decode: Literal["never", "last", "always"] = "never"  # when rank 0 decodes the calibration prompts with the target
    tracker: Literal["wandb", "trackio", "mlflow"] | None = None  # beside TensorBoard, through its own package
    verify_checksums: bool = True
    shards: Folder | None = None  # of each node's own disk, where features are brought; default: where they are
    resume: Folder | None = None  # that all nodes see, for resume states; default: beside the draft, in `output`
    deepspeed: dict[str, Any] = {}  # more of its configuration; what follows from the keys above is refused here

    def accumulation(self, ranks: int) -> int:
        """Micro-batches of each rank in a step. Raises PipelineError where so many ranks cannot share a global
        batch.
        """
        if self.global_batch % (self.micro_batch * ranks):
            raise PipelineError(
                f"train.global_batch={self.global_batch} is no multiple of micro_batch x ranks = {self.micro_batch} x "
                f"{ranks}: change one "
                "of them"
            )
        return self.global_batch // (self.micro_batch * ranks)

    def bucket_elements(self, parameters: int) -> int:
        """Of the buffer in which ZeRO reduces gradients: DeepSpeed's own 5e8 is more than most drafts have."""
        own = self.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size")
        return own or min(parameters, 500_000_000)


class BenchmarkConfig(Section):
    # JSONL of {question_id, category, turns}; "benchmark:NAME", "embedded:humaneval" or "heldout"
    # (eval/measure/prompts.py)
    source: str
    prompts: Positive | None = None  # the first so many
    path: str | None = None  # of "benchmark:NAME": a copy of its data set, or another Hub id
    revision: str | None = None  # of that data set

    @model_validator(mode="after")
    def _for_named_ones(self):
        given = [key for key in ("path", "revision") if getattr(self, key) is not None]
        if given and not self.source.startswith("benchmark:"):
            raise ValueError(
                f"{given[0]} says where a 'benchmark:NAME' comes from; source={self.source!r} is a place of its own"
            )
        return self


class MethodConfig(Section):
    """One of the drafts with another tree than its own, measured beside it."""

    draft: str
    tree: TreeConfig


class EvalConfig(Section):
    """What is measured. Every method decodes the same prompts in one process, interleaved."""

    benchmarks: Annotated[dict[str, BenchmarkConfig], Field(min_length=1)]
    methods: dict[Name, MethodConfig] = {}  # beside each draft with its own tree
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 1.0]
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_new_tokens: Positive = 512
    repeats: Positive = 3  # at temperature 0
    sampled_repeats: Positive = 3  # above it, each with its own seed
    warmups: Positive = 3
    dtype: Dtype = "bfloat16"
    pack_linears: bool = False  # CPU: pre-packed weights for target and drafts alike
    compile: bool = False  # GPU: fixed shapes and CUDA graphs for plain and speculative decoding
    gate_rounds: Positive = 2  # of each prompt and method, looked at closely: at T > 0, in half precision always
    workers: Processes = 1  # from 2 on Ray actors, each with the target, take the prompts one by one
    gpus_per_worker: Annotated[int, Field(ge=0)] | None = None  # as the dump's; who shares one measures others' work
    hang_seconds: Positive = 900  # without an answer, or a loaded target, after which a worker is given up

    @model_validator(mode="after")
    def _sound(self):
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures={self.temperatures} names one twice")
        if self.compile and self.pack_linears:
            raise ValueError("compile=true is for GPUs and pack_linears=true for CPUs: choose one")
        return self


class PublishConfig(Section):
    draft: str  # which of the run's drafts
    license: str  # of the draft, as the Hub spells it; mind the target's and the data's
    language: list[str] = ["en"]
