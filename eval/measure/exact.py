"""Every outcome of what is random, and the rule for drawn candidates enumerated on a real round.

Over a whole vocabulary the draws of several siblings are too many to enumerate. The rule does not know how large a
vocabulary is, so a real p and a real q are both restricted to their heaviest tokens, and every draw and decision of the
real `accept_drawn` is summed over there.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from pipeline.decoding.accept import accept_drawn
from pipeline.decoding.tree import Tree, build_tree

T = TypeVar("T")
TOKENS = 3  # heaviest of p, and as many of q


class Script:
    """A `Chance` that replays choices and then takes the first possible one; the weight is what they are worth
    together.
    """

    def __init__(self, choices: list[int]):
        self.choices, self.options, self.weight = choices, [], 1.0

    def choose(self, probabilities: list[float]) -> int:
        possible = [number for number, p in enumerate(probabilities) if p > 0]
        place = len(self.options)
        if place == len(self.choices):
            self.choices.append(0)
        self.options.append(len(possible))
        chosen = possible[self.choices[place]]
        self.weight *= probabilities[chosen]
        return chosen

    def accept(self, probability: float) -> bool:
        return self.choose([1 - probability, probability]) == 1

    def draw_rows(self, q_WV):
        return torch.tensor([self.choose(row) if sum(row) > 0 else 0 for row in q_WV.tolist()])


def every_outcome(decide: Callable[[Script], T]) -> Iterator[tuple[T, float]]:
    """Runs `decide` once for every sequence of possible choices: its result and the probability of the sequence."""
    choices: list[int] = []
    while True:
        script = Script(choices)
        result = decide(script)
        yield result, script.weight
        while choices and choices[-1] == script.options[len(choices) - 1] - 1:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


def drawn_error(tree: Tree, p_V: Tensor) -> float:
    """Largest difference between the first token's distribution, over every draw of the root's children, and p."""
    siblings = tree.children()[0]
    if not siblings:
        return 0.0
    proposals = [tree.proposals[child].double().cpu() for child in siblings]
    p_V = p_V.double().cpu()
    kept = torch.cat([p_V.topk(TOKENS).indices, proposals[0].topk(TOKENS).indices]).unique()
    p = p_V[kept] / p_V[kept].sum()
    bases = [q_V[kept] for q_V in proposals]
    emitted = torch.zeros_like(p)
    for (stump, path, last_V), weight in every_outcome(lambda script: _first_decision(bases, p, script)):
        if path:
            emitted[stump.tokens[path[0]]] += weight
        else:
            emitted += weight * last_V
    return (emitted - p).abs().max().item()


class _Undrawn:
    """Decides as `script` does, but keeps the distribution of the token after the path instead of drawing it."""

    def __init__(self, script: Script):
        self.accept, self.last_V = script.accept, None

    def draw_rows(self, p_WV: Tensor) -> Tensor:
        self.last_V = p_WV[0]
        return torch.zeros(1, dtype=torch.long)


def _first_decision(bases: list[Tensor], p: Tensor, script: Script) -> tuple[Tree, list[int], Tensor]:
    """Draws the siblings, each from its base without the earlier ones, and decides about them."""
    tokens, proposals, free = [], [], torch.ones_like(p)
    for base in bases:
        q = base * free
        if q.sum() > 0:
            proposals.append(q / q.sum())
            tokens.append(script.choose(proposals[-1].tolist()))
            free[tokens[-1]] = 0
    stump = build_tree(-1, tokens, [0] * len(tokens), torch.device("cpu"))
    stump.proposals = [None, *proposals]
    chance = _Undrawn(script)
    path, _ = accept_drawn(stump, p.expand(1 + len(tokens), -1), chance)
    return stump, path, chance.last_V
