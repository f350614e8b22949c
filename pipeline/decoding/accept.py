"""Which path of a tree is accepted, and what is emitted after it: the lossless rules, and tau, each defined once.

Every rule emits each token with exactly the probability that plain decoding would give it (proofs: docs/lossless.md).

Best candidates   the tree is a function of the context. The target's own next token is chosen after every node as plain
                  decoding would choose it, with the same random number; the longest path of such tokens is accepted. So
                  the answer IS plain decoding's, token for token, at every temperature.
Drawn candidates  speculative sampling with several siblings: x_j, drawn from q_j, is accepted with min(1, p / q_j); on
                  rejection p becomes norm(max(0, p - q_j)).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.decoding.tree import Tree


class Chance(Protocol):
    """Where randomness enters: one seeded generator when decoding, every outcome in turn when proving."""

    def accept(self, probability: float) -> bool: ...

    def draw_rows(self, q_WV: Tensor) -> Tensor:
        """One token of each row [W]."""


class Sampler:
    """Seeded randomness, on the CPU whatever the device: a number for each place of the answer, and coins and draws beside."""

    BLOCK = 256

    def __init__(self, seed: int):
        self._placed = torch.Generator().manual_seed(seed)
        second = int(torch.randint(1 << 32, (), generator=self._placed))  # torch's CPU generator sees 32 bits of a seed
        self._generator = torch.Generator().manual_seed(second)
        self._numbers = torch.empty(0, dtype=torch.float64)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def _through(self, place: int) -> Tensor:
        while len(self._numbers) <= place:
            more = torch.rand(self.BLOCK, generator=self._placed, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, more])
        return self._numbers

    def number(self, place: int) -> float:
        """What the answer's token at `place` is chosen with."""
        return self._through(place)[place].item()

    def choose(self, p_NV: Tensor, places: list[int]) -> Tensor:
        """Row n's token [N] by the number of the answer's ``places[n]``-th token."""
        return _inverse(p_NV, self._through(max(places))[places])

    def accept(self, probability: float) -> bool:
        return self._uniform(1).item() < probability

    def draw_rows(self, q_WV: Tensor) -> Tensor:
        return _inverse(q_WV, self._uniform(len(q_WV)))


def _inverse(p_NV: Tensor, u_N: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: the first token whose cumulated mass exceeds u."""
    cumulated_NV = p_NV.double().cumsum(-1)
    u_N = u_N.to(p_NV.device, non_blocking=True)
    found = torch.searchsorted(cumulated_NV, (u_N * cumulated_NV[:, -1])[:, None], right=True)[:, 0]
    return found.clamp_max(p_NV.shape[1] - 1)


def accept_best(tree: "Tree", following: Callable[[int], int]) -> tuple[list[int], int]:
    """``(path, bonus)``: the nodes below the root that the target's own choices lead through, and its choice after them.

    ``following(node)`` is the target's token after a node: the argmax of its processed logits, or drawn from them.
    """
    children, node, path = tree.children(), 0, []
    while True:
        token = following(node)
        match = next((child for child in children[node] if tree.tokens[child] == token), None)
        if match is None:
            return path, token
        path.append(match)
        node = match


def accept_drawn(tree: "Tree", p_NV: Tensor, chance: Chance) -> tuple[list[int], int]:
    """``(path, bonus)`` by rejection; ``p_NV`` are the target's processed probabilities after each node."""
    children, node, path = tree.children(), 0, []
    p_NV = p_NV.double().cpu()  # the only wait for the device
    while True:
        p_V, accepted = p_NV[node], None
        for child in children[node]:
            token, q_V = tree.tokens[child], tree.proposals[child]
            if chance.accept(min(1.0, (p_V[token] / q_V[token]).item())):
                accepted = child
                break
            rest_V = (p_V - q_V).clamp_min(0)
            if (mass := rest_V.sum()) > 0:  # otherwise p is q but for rounding, and this rejection has no probability
                p_V = rest_V / mass
        if accepted is None:
            return path, int(chance.draw_rows(p_V[None])[0])
        path.append(accepted)
        node = accepted


@dataclass
class Acceptance:
    """Raw counts of one or many generations; the only place where tau is formed.

    tau = tokens emitted by verification passes / verification passes. A pass emits its accepted tokens and one more;
    tokens after a stop id or beyond the limit are not counted; the first token, which the prompt's own forward
    gives, belongs to no pass.
    """

    tokens: int = 0
    passes: int = 0
    accepted: list[int] = field(default_factory=list)  # accepted[k]: passes that accepted at least k draft tokens

    def add_pass(self, accepted: int, emitted: int) -> None:
        self.passes += 1
        self.tokens += emitted
        self.accepted.extend([0] * (accepted + 1 - len(self.accepted)))
        for depth in range(accepted + 1):
            self.accepted[depth] += 1

    def merge(self, other: "Acceptance") -> None:
        self.tokens += other.tokens
        self.passes += other.passes
        self.accepted.extend([0] * (len(other.accepted) - len(self.accepted)))
        for depth, count in enumerate(other.accepted):
            self.accepted[depth] += count

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else float("nan")

    def rate_by_depth(self) -> list[float]:
        """Share of passes that accepted a token at depth k, of those that accepted one at depth k - 1 (k = 1, 2, ...)."""
        pairs = zip(self.accepted[1:], self.accepted, strict=False)
        return [deeper / shallower for deeper, shallower in pairs]


def legacy_tau(acceptances: list[Acceptance], untrimmed_tokens: list[int]) -> float:
    """The released scripts' figure, printed beside ours and named so: mean accepted length with R - 1 for R rounds.

    Per prompt, tokens (those after the stop id included, the first one too) divided by one pass fewer.
    """
    tokens = sum(untrimmed_tokens)
    passes = sum(max(a.passes - 1, 1) for a in acceptances)
    return tokens / passes if passes else float("nan")
