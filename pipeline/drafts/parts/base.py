"""The base of all draft settings, which recipes and trees read, and the methods that draft level by level."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, ClassVar, Self

from pipeline.basics.errors import PipelineError
from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import (
    CandidatePool,
    DraftOutput,
    DraftRequest,
    Draws,
    Frontier,
    RoundInput,
    Timer,
    call_untimed,
)
from pipeline.decoding.grow import best_pool, grow
from pipeline.decoding.tree import Tree
from pipeline.drafts.parts.losses import LossKind, Term
from pipeline.lm.states import Needs

STARTS = ("start", "start_differs")


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Settings):
    """The settings that every draft has, in addition to the `kind` that names it in a recipe."""

    description: ClassVar[str]  # for the card: the paper and what it is
    trained: ClassVar[bool] = True
    may_be_secondary: ClassVar[bool] = False  # it needs no forward pass; its candidates can fill another draft's tree
    runs_the_target: ClassVar[bool] = False  # its forward passes run the target's own blocks

    # The draft whose weights training begins with: a folder, or OWNER/NAME@COMMIT of the Hub (train/start.py).
    start: str | None = None
    start_differs: list[str] = field(default_factory=list)  # what may differ there: "target", "template", a key

    def without_start(self) -> Self:
        """Return the settings without those for the start of training."""
        return replace(self, start=None, start_differs=[])

    @property
    def has_module(self) -> bool:
        """Return whether the draft has weights: trained here, or read out of the target's files."""
        return self.trained

    @property
    def has_experts(self) -> bool:
        """Return whether more than one expert predicts the next token."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens of the draft's own vocabulary; None if it has the target's.

        A draft that supports its own vocabulary overrides this with a recipe key.
        """
        return None

    def terms(self, step: int) -> list[Term]:
        """Return the loss terms at this optimiser step: the next token's first, penalties last."""
        return []

    @property
    def needs_full_head(self) -> bool:
        """Return whether training requires the target's distribution over all tokens, though the draft has fewer."""
        return False

    @property
    def masks_teacher(self) -> bool:
        """Return whether training leaves out positions whose likeliest token is not in the draft's vocabulary."""
        return False

    @property
    def corpus(self) -> str | None:
        """The text file that the draft copies from. A draft that supports one overrides this with a recipe key."""
        return None

    def public(self) -> "DraftConfig":
        """Return the settings for artifacts, without those that hold only on this machine."""
        return self

    @property
    def auxiliary(self) -> Sequence[int | str]:
        """The target's decoder layers whose outputs the draft needs, as set: numbers from 1, or "default"."""
        return ()

    def needs(self, target_layers: int) -> Needs:
        """Return which hidden states the draft needs from a target with this number of decoder layers."""
        return Needs()

    def levels_of(self, number: int) -> int:
        """Return the number of levels that a round's forward pass `number`, from 0, can predict; 0: there is none."""
        return 1

    def parallel_choices(self, depth: int) -> list[int]:
        """Return the possible numbers of last levels of a tree of this depth that come from one forward pass.

        The draft's preference is first. The list is empty if the draft cannot grow a tree of this depth.
        """
        forwards = list(takewhile(self.levels_of, range(depth)))
        return [depth - number for number in forwards if self.levels_of(number) >= depth - number]

    def max_level(self, tree: TreeConfig) -> int:
        """Return the deepest level that the draft's trees can have with these settings."""
        return tree.depth

    def max_nodes(self, tree: TreeConfig) -> int:
        """Return the number of nodes, the root included, that a tree with these settings has candidates for."""
        return tree.nodes if tree.paths else 1 + tree.top_k + tree.top_k * tree.top_k * (tree.depth - 1)

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        """Return the tree settings with the draft's defaults. Raises ValueError if it cannot grow such a tree."""
        if tree.nodes > self.max_nodes(tree):
            raise ValueError(
                f"nodes={tree.nodes}, but depth {tree.depth} with top_k {tree.top_k} scores at most "
                f"{self.max_nodes(tree)}"
            )
        choices = self.parallel_choices(tree.depth)
        if not choices:
            deepest = max(filter(self.parallel_choices, range(1, tree.depth)))
            raise ValueError(f"tree.depth={tree.depth}: this draft guesses at most {deepest} tokens ahead")
        parallel = choices[0] if tree.parallel is None else tree.parallel
        if parallel not in choices:
            raise ValueError(
                f"tree.parallel={parallel} takes that many levels from one forward: of a tree of depth {tree.depth} "
                f"this draft can take {' or '.join(map(str, sorted(choices)))}"
            )
        if tree.candidates != "plain" and not self.has_experts:
            raise ValueError(
                f"tree.candidates={tree.candidates!r} needs several experts that predict each next token; this draft "
                "has no experts; use 'plain'"
            )
        return replace(tree, parallel=parallel)


# -- keys that several kinds share -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(DraftConfig):
    objective: LossKind = "soft-ce"  # of classifications: cross-entropy, or the acceptance probability (losses.py)


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(TrainedConfig):
    vocabulary: int | None = None  # reduced draft vocabulary: the most frequent ids of the training answers

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "vocabulary")


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(Settings):
    embedding_scale: float = 1.0  # multiplies e(t) on its way into the draft

    def __post_init__(self):
        super().__post_init__()
        if not self.embedding_scale > 0:
            raise ValueError(f"embedding_scale={self.embedding_scale}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class DenseConfig(Settings):
    mlp_width: int | None = None  # of each layer; default: the target's

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "mlp_width")


@dataclass(frozen=True, kw_only=True)
class WindowConfig(Settings):
    window: int | None = None  # number of inputs that an input attends to, itself included; default: all


@dataclass(frozen=True, kw_only=True)
class FusedConfig(Settings):
    """The settings of a draft that fuses the outputs of several target layers."""

    auxiliary_layers: list[int] | None = None  # of the target, from 1; default: the reference's

    def __post_init__(self):
        super().__post_init__()
        layers = self.auxiliary_layers
        if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 1):
            raise ValueError(f"auxiliary_layers={layers}: expected different layers, from 1, in rising order")

    def reference_layers(self, target_layers: int) -> list[int]:
        """Return the layers that the reference implementation fuses, counted from 1."""
        raise NotImplementedError

    def needs(self, target_layers: int) -> Needs:
        """Return the layers that are fused. Raises PipelineError for layers that the target does not have."""
        layers = self.auxiliary_layers or self.reference_layers(target_layers)
        if layers[-1] > target_layers:
            raise PipelineError(
                f"auxiliary_layers={layers}, but the target has {target_layers} layers, counted from 1: name others"
            )
        return Needs(final=False, auxiliary=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class MaskConfig(Settings):
    mask_token: int | None = None  # an id that no text has; default: the highest one that the training texts lack

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(0, "mask_token")


class Drafting:
    """The methods of `contract.Draft` that a decoding round calls."""

    stepwise = True
    rounds: Any = None

    @abstractmethod
    def open(self) -> Any: ...

    @abstractmethod
    def start(self, state: Any, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput: ...

    def step(self, state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        raise AssertionError("a draft whose `levels_of` allows a second forward pass has to override `step`")

    def propose(
        self: Any, state: Any, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = call_untimed
    ) -> Tree:
        return grow(self, state, inputs, tree, draws, timer)

    def pool(
        self: Any, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer = call_untimed
    ) -> CandidatePool:
        return best_pool(self, state, inputs, tree, count, timer)

    def compile_rounds(self, backend: Any = "inductor") -> None:
        """Do nothing: most kinds of drafts have eager rounds only."""

    def accept_probability(self, depth: int, score: float) -> float:
        """Return the draft's own probability of the path, whose logarithm is the score."""
        return math.exp(min(score, 0.0))
