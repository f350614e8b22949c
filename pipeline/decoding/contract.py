"""The protocols of a draft and of a target in decoding, and the data that passes between them.

A draft that proposes level by level has `start` and `step`, and `propose` grows its tree from these (grow.py). One that
finds candidates in another way implements `propose` itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.pools import CandidatePool
from pipeline.decoding.tree import Tree
from pipeline.lm.ability import Shape
from pipeline.lm.states import Needs, States


@dataclass
class RoundInput:
    """The input of a round: the text so far and the target's states of those of its tokens that are new to the
    draft.
    """

    tokens: list[int]  # t_0 .. t_n, prompt and answer; the last one is the tree's root and has no states yet
    states_TSD: Tensor  # of the T positions before it that are new to the draft, as its `Needs` require
    positions: int = 0  # that the text may reach, if known: caches of fixed shapes have room for them


@dataclass
class Frontier:
    """The W nodes of one level that are forwarded together."""

    tokens_W: Tensor  # target ids
    carry_WD: Tensor  # the `carry_WD` rows of their parents' outputs
    visible_WC: Tensor  # bool over the tree nodes forwarded so far and this level's: ancestors and itself
    depth: int  # of these nodes; the root's children have depth 1
    prefix_W: Tensor | None = None  # number of verified inputs that each sees, from the first on; default: all


@dataclass
class DraftOutput:
    """A draft forward's output for W nodes; logits are over the draft's vocabulary."""

    carry_WD: Tensor  # for the forward of each row's children; a tree only indexes it by row
    logits_LWU: list[Tensor]  # of the next token; in a tree's last forward also of those after it
    experts_WKU: Tensor | None = None  # the experts' own logits of the next token, where the tree requests them
    log_weights_WK: Tensor | None = None  # their routing weights

    def is_nonfinite(self) -> Tensor:
        """Return whether a logit is not finite: a bool on the device, so that the host does not wait for it here."""
        logits = [*self.logits_LWU, *([] if self.experts_WKU is None else [self.experts_WKU])]
        return ~torch.stack([part.sum(dtype=torch.float32) for part in logits]).isfinite().all()


@dataclass(frozen=True)
class DraftRequest:
    """The request of a tree to a draft forward."""

    levels: int = 1  # tokens to predict ahead, or as many as this forward can
    experts: bool = False  # also each expert's own next token


class Randomness(Protocol):
    """A source of randomness: seeded when decoding; tests try every outcome in turn."""

    def accept(self, probability: float) -> bool: ...

    def draw_rows(self, q_WV: Tensor) -> Tensor:
        """Draw one token from each row [W]."""


class Processing(Protocol):
    """The processing of logits into the probabilities that siblings are drawn from (`generate.Sampling`)."""

    @property
    def temperature(self) -> float: ...

    def probabilities(self, logits_NV: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Draws:
    """The inputs of a tree whose siblings are drawn."""

    processing: Processing
    randomness: Randomness


class Timer(Protocol):
    """A clock: return the function's result; its seconds and the number of calls go to the name."""

    def __call__(self, name: str, function: Callable[..., Any], /, *arguments: Any, calls: int = 1) -> Any: ...


def call_untimed(_name: str, function: Callable[..., Any], /, *arguments: Any, calls: int = 1) -> Any:
    """Call the function without measuring it, as a `Timer`."""
    return function(*arguments)


class TreeSupport(Protocol):
    """A draft's settings that concern trees."""

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        """Return the tree with the draft's defaults filled in. Raise ValueError where the draft cannot grow it."""

    def max_nodes(self, tree: TreeConfig) -> int:
        """Return the maximum number of nodes, the root included, that such a tree has candidates for, regardless of
        `tree.nodes`.
        """

    def max_level(self, tree: TreeConfig) -> int:
        """Return the deepest level that trees of these settings can have."""

    def levels_of(self, number: int) -> int:
        """Return how many levels its forward of this number in a round, from 0, can predict; 0: it makes no such
        forward.
        """

    def parallel_choices(self, depth: int) -> list[int]:
        """Return the allowed values of `tree.parallel` at this depth, the default first; none where no tree can be so
        deep.
        """


class Draft(Protocol):
    """The protocol of a draft in decoding."""

    name: str  # for messages
    stepwise: bool  # it has `start` and `step`
    rounds: Any  # compiled ones (fixed.py), or None
    target_vocabulary: int

    @property
    def token_ids_U(self) -> Tensor | None:
        """Return the target ids of its vocabulary; None where it has the target's own."""

    @property
    def config(self) -> TreeSupport: ...

    @property
    def needs(self) -> Needs: ...

    def open(self) -> Any:
        """Create the state of one sequence."""

    def start(self, state: Any, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Drop the last tree, forward the newly verified tokens, and return the output after the last `places`
        positions.
        """

    def step(self, state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        """Forward the frontier's nodes once; each sees its verified prefix, its ancestors and itself."""

    def propose(
        self, state: Any, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = call_untimed
    ) -> Tree:
        """Grow a tree below the last emitted token: a function of the text and the draft; drawn siblings also depend on
        `draws`.

        `timer` calls the draft's forwards, by the name "draft". Raise PipelineError where logits are not finite.
        """


class Source(Draft, Protocol):
    """A draft whose candidates can be in one tree with those of others (sources.py)."""

    def packable(self) -> list[torch.nn.Module]:
        """Return the modules of decoding whose linear layers may be packed."""

    def compile_rounds(self, backend: Any = ...) -> None:
        """Compile the rounds for trees of best candidates, if the draft supports it; after it has its weights, and the
        target's embedding and head. Without a backend they have fixed shapes, but are not compiled.
        """

    def pool(
        self, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer = call_untimed
    ) -> CandidatePool:
        """Return its `count` best candidates for such a tree."""

    def accept_probability(self, depth: int, score: float) -> float:
        """Convert a candidate's score to the probability that the target's text goes through it."""


class Cache(Protocol):
    """A target's keys and values of one sequence."""

    length: int

    def keep(self, prefix: int, path: Sequence[int] = ...) -> None: ...


class TargetModel(Protocol):
    """The protocol of a target in decoding."""

    device: torch.device
    dtype: torch.dtype
    positions: int  # maximum number of tokens of a sequence
    compiled: bool

    @property
    def verifies(self) -> Shape: ...

    def new_cache(self, capacity: int) -> Any: ...

    def forward(
        self,
        tokens_N: Tensor,
        cache: Any,
        positions_N: Tensor | None = None,
        mask_NC: Tensor | None = None,
        width: int = 1,
        layers: tuple[int, ...] = (),
    ) -> States: ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
