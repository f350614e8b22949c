"""Which path of a tree is accepted, and what is emitted after it: the lossless rules, and tau, each defined once.

At temperature 0 the longest path of the target's argmax. Above it, rejection with deterministic candidates: a tree that
is a function of the context proposes a point mass at each candidate, so candidate x is accepted with probability p(x),
and on rejection p is conditioned on "not x". Summed over its siblings a token is emitted with exactly its p.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pipeline.decoding.tree import Tree

T = TypeVar("T")


class Chance(Protocol):
    """Where randomness enters: one seeded generator when decoding, every outcome in turn when proving."""

    def accept(self, probability: float) -> bool: ...

    def draw(self, p_V: Tensor) -> int: ...


class Sampler:
    """One seeded generator, on the CPU whatever the device, for coins and draws alike."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def accept(self, probability: float) -> bool:
        return self._uniform() < probability

    def draw(self, p_V: Tensor) -> int:
        """Inverse of the cumulative distribution: the first token whose cumulated mass exceeds a uniform number."""
        cumulated_V = p_V.double().cumsum(0)
        return int(torch.searchsorted(cumulated_V, self._uniform() * cumulated_V[-1], right=True))


def accept_greedy(tree: Tree, best_N: list[int]) -> tuple[list[int], int]:
    """``(path, bonus)``: nodes below the root whose tokens are the target's argmax, and the argmax after them."""
    children, node, path = tree.children(), 0, []
    while True:
        match = next((child for child in children[node] if tree.tokens[child] == best_N[node]), None)
        if match is None:
            return path, best_N[node]
        path.append(match)
        node = match


def accept_sampled(tree: Tree, p_NV: Tensor, chance: Chance) -> tuple[list[int], int]:
    """``(path, bonus)`` by rejection; ``p_NV`` are the target's PROCESSED probabilities after each node."""
    children, node, path = tree.children(), 0, []
    while True:
        p_V, accepted = p_NV[node].clone(), None
        for child in children[node]:
            token = tree.tokens[child]
            probability = p_V[token].item()
            if not probability > 0:  # outside top-k or top-p, or (0/0) no mass is left: nothing to reject
                continue
            if chance.accept(probability):
                accepted = child
                break
            p_V[token] = 0
            p_V /= p_V.sum()
        if accepted is None:
            return path, chance.draw(p_V)
        path.append(accepted)
        node = accepted


class _Script:
    """Replays a prefix of accept/reject decisions, then rejects; `draw` keeps its distribution instead of drawing."""

    def __init__(self, decisions: list[bool]):
        self.decisions, self.used, self.weight = decisions, 0, 1.0
        self.drawn_V: Tensor | None = None

    def accept(self, probability: float) -> bool:
        if self.used == len(self.decisions):
            self.decisions.append(False)
        decision = self.decisions[self.used]
        self.used += 1
        self.weight *= probability if decision else 1 - probability
        return decision

    def draw(self, p_V: Tensor) -> int:
        self.drawn_V = p_V
        return -1


def every_outcome(decide: Callable[[Chance], T]) -> Iterator[tuple[T, float, Tensor]]:
    """Runs `decide` once for every sequence of accept/reject decisions: (result, its probability, the final draw's p_V)."""
    decisions: list[bool] = []
    while True:
        script = _Script(decisions)
        result = decide(script)
        yield result, script.weight, script.drawn_V
        while decisions and decisions[-1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] = True


def first_token_distribution(tree: Tree, p_NV: Tensor) -> Tensor:
    """The exact distribution of the first token that a round emits, summed over every outcome of the real rule."""
    emitted_V = torch.zeros(p_NV.shape[1], dtype=torch.float64)
    below_root = [node for node, depth in enumerate(tree.depths) if depth == 1]
    stump = Tree(
        tree.tokens_N,
        [tree.tokens[0]] + [tree.tokens[n] for n in below_root],
        [-1] + [0] * len(below_root),
        [0] + [1] * len(below_root),
        tree.ancestors_NN,
    )
    p_stump = torch.cat([p_NV[:1], p_NV[below_root]]).double().cpu()
    p_stump /= p_stump.sum(-1, keepdim=True)
    for (path, _), weight, drawn_V in every_outcome(lambda chance: accept_sampled(stump, p_stump, chance)):
        if path:
            emitted_V[stump.tokens[path[0]]] += weight
        elif weight > 0:
            emitted_V += weight * drawn_V
    return emitted_V


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
