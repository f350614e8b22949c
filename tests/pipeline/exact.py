"""Every outcome of what is random, in turn, and the rule for drawn candidates enumerated on a real round.

Over a whole vocabulary the draws of several siblings are too many to enumerate. The rule does not know how large a
vocabulary is, so a real p and a real q are both restricted to their heaviest tokens, and every draw and decision of the
real rule is summed over there.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from pipeline.decoding.accept import accept_drawn
from pipeline.decoding.tree import Tree, build_tree

T = TypeVar("T")
Rule = Callable[[Tree, Tensor, "Script"], tuple[list[int], int]]
TOKENS = 3  # heaviest of p, and as many of q


class Script:
    """A `Randomness` that repeats these choices and then takes the first possible ones; `weight` is the probability of
    all of them.
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
    """Run `decide` once for every sequence of possible choices: its result and the probability of the sequence."""
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


def drawn_error(tree: Tree, p_V: Tensor, rule: Rule = accept_drawn) -> float:
    """Largest difference between the first token's distribution, over every draw of the root's children, and p."""
    proposals = [tree.proposals[child].double() for child in tree.children()[0]]
    candidates = torch.cat([p_V.topk(TOKENS).indices, proposals[0].topk(TOKENS).indices]).unique()
    p, bases = p_V[candidates].double() / p_V[candidates].double().sum(), [q_V[candidates] for q_V in proposals]
    emitted = torch.zeros_like(p)
    for token, weight in every_outcome(lambda script: _first_token(bases, p, script, rule)):
        emitted[token] += weight
    return (emitted - p).abs().max().item()


def _first_token(bases: list[Tensor], p: Tensor, script: Script, rule: Rule) -> int:
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
    path, bonus = rule(stump, p.expand(1 + len(tokens), -1), script)
    return stump.tokens[path[0]] if path else bonus
