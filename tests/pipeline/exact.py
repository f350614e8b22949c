"""Every outcome of what is random, in turn."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


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
