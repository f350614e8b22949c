"""The settings of a draft, which a recipe and a tree read, and drafting level by level."""

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
    DraftOutput,
    DraftRequest,
    Draws,
    Frontier,
    Pool,
    RoundInput,
    Timer,
    untimed,
)
from pipeline.decoding.grow import best_pool, grow
from pipeline.decoding.tree import Tree
from pipeline.drafts.parts.losses import LossKind, Term
from pipeline.lm.states import Needs

STARTS = ("start", "start_differs")


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Settings):
    """What every draft's settings have, beside the `kind` that names it in a recipe."""

    description: ClassVar[str]  # for the card: the paper and what it is
    trained: ClassVar[bool] = True
    may_be_secondary: ClassVar[bool] = False  # it takes no forwards, and its candidates can fill another draft's tree
    runs_the_target: ClassVar[bool] = False  # its forwards go through the target's own blocks

    # The draft whose weights training begins with: a folder, or OWNER/NAME@COMMIT of the Hub (train/start.py).
    start: str | None = None
    start_differs: list[str] = field(default_factory=list)  # what of it may be another: "target", "template", a key

    def cold(self) -> Self:
        """What the draft is, whatever its training began with."""
        return replace(self, start=None, start_differs=[])

    @property
    def has_experts(self) -> bool:
        """Whether more than one expert predicts the next token."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the draft's own vocabulary, where that is not the target's. A draft that can have one makes this a
        key.
        """
        return None

    def terms(self, step: int) -> list[Term]:
        """The losses of a draft that is trained, at this optimiser step: the next token's first, penalties last."""
        return []

    @property
    def asks_whole_head(self) -> bool:
        """Whether training wants the target over its whole vocabulary, though the draft's is smaller."""
        return False

    @property
    def masks_teacher(self) -> bool:
        """Whether training leaves out positions whose likeliest token the draft's vocabulary lacks."""
        return False

    @property
    def corpus(self) -> str | None:
        """A text file that it copies from. A draft that can have one makes this a key."""
        return None

    def public(self) -> "DraftConfig":
        """Without what is of this machine alone: for artifacts."""
        return self

    @property
    def auxiliary(self) -> Sequence[int | str]:
        """What it says of the target's decoder layers whose outputs it wants: numbers from 1, or "default"."""
        return ()

    def needs(self, target_layers: int) -> Needs:
        """What it wants of a target with so many decoder layers."""
        return Needs()

    def levels_of(self, number: int) -> int:
        """How many levels its forward of this number in a round, from 0, can answer; 0: it makes no such forward."""
        return 1

    def parallels(self, depth: int) -> list[int]:
        """How many last levels of a tree of this depth may come from one forward, its own choice first; none where it
        grows no tree so deep.
        """
        made = list(takewhile(self.levels_of, range(depth)))
        return [depth - number for number in made if self.levels_of(number) >= depth - number]

    def reach(self, tree: TreeConfig) -> int:
        """The deepest level that its trees of these settings can have."""
        return tree.depth

    def most(self, tree: TreeConfig) -> int:
        """Nodes, the root included, that such a tree has candidates for."""
        return tree.nodes if tree.paths else 1 + tree.top_k + tree.top_k * tree.top_k * (tree.depth - 1)

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        """The tree with all that it left to the draft. Raises ValueError where the draft cannot grow it."""
        if tree.nodes > self.most(tree):
            raise ValueError(
                f"nodes={tree.nodes}, but depth {tree.depth} with top_k {tree.top_k} scores at most {self.most(tree)}"
            )
        choices = self.parallels(tree.depth)
        if not choices:
            deepest = max(filter(self.parallels, range(1, tree.depth)))
            raise ValueError(f"tree.depth={tree.depth}: this draft guesses at most {deepest} tokens ahead")
        parallel = choices[0] if tree.parallel is None else tree.parallel
        if parallel not in choices:
            raise ValueError(
                f"tree.parallel={parallel} takes that many levels from one forward: of a tree of depth {tree.depth} "
                f"this draft can take {' or '.join(map(str, sorted(choices)))}"
            )
        if tree.candidates != "plain" and not self.has_experts:
            raise ValueError(
                f"tree.candidates={tree.candidates!r} needs several experts a token that expect the next one; this "
                "draft has them not: use 'plain'"
            )
        return replace(tree, parallel=parallel)


# -- keys that several kinds have --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(DraftConfig):
    objective: LossKind = "soft-ce"  # of classifications: cross-entropy, or the acceptance itself (losses.py)


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(TrainedConfig):
    vocabulary: int | None = None  # reduced draft vocabulary: the most frequent ids of the training answers

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "vocabulary")


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
        self.at_least(1, "mlp_width")


@dataclass(frozen=True, kw_only=True)
class WindowConfig(Settings):
    window: int | None = None  # how many inputs an input sees, itself included; default: all


@dataclass(frozen=True, kw_only=True)
class FusedConfig(Settings):
    """The outputs of several of the target's layers are fused."""

    auxiliary_layers: list[int] | None = None  # of the target, from 1; default: the reference's

    def __post_init__(self):
        super().__post_init__()
        layers = self.auxiliary_layers
        if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 1):
            raise ValueError(f"auxiliary_layers={layers}: expected different layers, from 1, in rising order")

    def reference_layers(self, target_layers: int) -> list[int]:
        raise NotImplementedError

    def needs(self, target_layers: int) -> Needs:
        """Raises PipelineError for other layers than the target's."""
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
        self.at_least(0, "mask_token")


class Drafting:
    """The methods of `contract.Draft` that a round calls."""

    stepwise = True

    @abstractmethod
    def open(self) -> Any: ...

    @abstractmethod
    def start(self, state: Any, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput: ...

    def step(self, state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        raise AssertionError("a draft whose settings say that there is a second forward has a `step` of its own")

    def propose(
        self: Any, state: Any, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = untimed
    ) -> Tree:
        return grow(self, state, inputs, tree, draws, timer)

    def pool(self: Any, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer = untimed) -> Pool:
        return best_pool(self, state, inputs, tree, count, timer)

    def accept_probability(self, depth: int, score: float) -> float:
        """Its own probability of the path: the score is that one's logarithm."""
        return math.exp(min(score, 0.0))
