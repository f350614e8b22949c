"""How a draft drafts: level by level, by `start` and `step`; whoever finds a whole tree or block at once overrides
`propose` and `pool`.
"""

import math
from abc import abstractmethod
from typing import Any

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
