"""The protocols of a draft and of a target, as decoding knows them, and what passes between them.

A draft that answers level by level has `start` and `step`, and `propose` grows its tree from these (grow.py). One that
finds candidates in another way has a `propose` of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.tree import Tree
from pipeline.lm.states import Needs, States


@dataclass
class RoundInput:
    """What a round begins with: the text so far and, of its tokens that the draft has not seen, the target's states."""

    tokens: list[int]  # t_0 .. t_n, prompt and answer; the last one is the tree's root and has no states yet
    states_TSD: Tensor  # of the T positions before it that are new to the draft, as its `Needs` say


@dataclass
class Frontier:
    """The W nodes of one level that are forwarded together."""

    tokens_W: Tensor  # target ids
    carry_WD: Tensor  # what the answers to their parents carried
    visible_WC: Tensor  # bool over the tree nodes forwarded so far and this level's own: ancestors and itself
    depth: int  # of these nodes; the root's children have depth 1
    prefix_W: Tensor | None = None  # how many verified inputs each sees, from the first on; all of them by default


@dataclass
class DraftOutput:
    """A forward's answer for W nodes; logits are over the draft's vocabulary."""

    carry_WD: Tensor  # for the forward of each row's children; a tree only indexes it by row
    logits_LWU: list[Tensor]  # of the next token; then, from a tree's last forward, of those after it
    experts_WKU: Tensor | None = None  # the experts' own logits of the next token, where the tree wants them
    log_weights_WK: Tensor | None = None  # their routing weights

    def broken(self) -> Tensor:
        """Whether a logit is not finite: a bool on the device, so that nobody waits for it here."""
        logits = [*self.logits_LWU, *([] if self.experts_WKU is None else [self.experts_WKU])]
        return ~torch.stack([part.sum(dtype=torch.float32) for part in logits]).isfinite().all()


@dataclass(frozen=True)
class DraftRequest:
    """What a tree wants of a forward."""

    levels: int = 1  # so many tokens ahead, or as many as this forward can answer
    experts: bool = False  # and each expert's own next token


class Randomness(Protocol):
    """Where randomness enters: seeded when decoding; tests try every outcome in turn."""

    def accept(self, probability: float) -> bool: ...

    def draw_rows(self, q_WV: Tensor) -> Tensor:
        """One token of each row [W]."""


class Processing(Protocol):
    """How logits become the probabilities that siblings are drawn from (`generate.Sampling`)."""

    @property
    def temperature(self) -> float: ...

    def probabilities(self, logits_NV: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Draws:
    """What a tree wants whose siblings are drawn."""

    processing: Processing
    randomness: Randomness


@dataclass
class Pool:
    """Candidates of one source below the root, parents before children."""

    tokens: list[int]  # target ids
    parents: list[int]  # 0: the root; n: the pool's n-th candidate, from 1
    scores: list[float]  # what its source ranks them by: of two at one depth the higher one is likelier

    def depths(self) -> list[int]:
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return found[1:]


Timer = Callable[..., Any]  # timer(name, function, *arguments): the function's result; its seconds go to that name


def untimed(_name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A `Timer` that does not measure."""
    return function(*arguments)


class TreeSupport(Protocol):
    """A draft's settings, as far as trees go."""

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        """The tree with all that it left to the draft. Raises ValueError where the draft cannot grow it."""

    def most(self, tree: TreeConfig) -> int:
        """Nodes, the root included, that such a tree has candidates for, whatever `tree.nodes` says."""

    def reach(self, tree: TreeConfig) -> int:
        """The deepest level that its trees of these settings can have."""

    def levels_of(self, number: int) -> int:
        """How many levels its forward of this number in a round, from 0, can answer; 0: it makes no such forward."""

    def parallels(self, depth: int) -> list[int]:
        """Allowed values of `tree.parallel` at this depth, the default first; none where it grows no tree so deep."""


class Draft(Protocol):
    """What decoding knows of a draft."""

    name: str  # for messages
    stepwise: bool  # it has `start` and `step`
    target_vocabulary: int

    @property
    def token_ids_U(self) -> Tensor | None:
        """Target ids of its vocabulary; None where it has the target's own."""

    @property
    def config(self) -> TreeSupport: ...

    @property
    def needs(self) -> Needs: ...

    def open(self) -> Any:
        """A state of one sequence."""

    def start(self, state: Any, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Drops the last tree, takes in what was verified, answers after the last `places` of its positions."""

    def step(self, state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        """One forward for the frontier's nodes; each sees its verified prefix, its ancestors and itself."""

    def propose(
        self, state: Any, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = untimed
    ) -> Tree:
        """A tree below the last emitted token: a function of the text and the draft; siblings that are drawn also
        depend on `draws`.

        `timer` calls the draft's forwards, by the name "draft". Raises PipelineError where logits are not finite.
        """


class Source(Draft, Protocol):
    """A draft whose candidates can stand in one tree with those of others (sources.py)."""

    def packable(self) -> list[torch.nn.Module]:
        """What decodes: modules whose linear layers may be laid out anew."""

    def pool(self, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer = untimed) -> Pool:
        """Its `count` best candidates for such a tree."""

    def accept_probability(self, depth: int, score: float) -> float:
        """What a candidate's score is worth, as the probability that the target's text goes through it."""


class Cache(Protocol):
    """A target's keys and values of one sequence."""

    length: int

    def keep(self, prefix: int, path: Sequence[int] = ...) -> None: ...


class TargetModel(Protocol):
    """What decoding knows of a target."""

    device: torch.device
    dtype: torch.dtype
    positions: int  # most tokens of a sequence
    compiled: bool

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
        """Logits."""
