"""What the scores of a source's candidates are worth: the probability that the target's own text goes through them.

Counted on calibration answers (eval/tuning/calibrate.py), by temperature, by source, by depth and by how many levels a
forward looked ahead for the candidate. Each curve rises with the score. Where nothing was counted, the source's own
default holds (`Draft.chance`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig

Chance = Callable[[int, float], float]  # of a candidate, by depth and score


@dataclass(frozen=True, kw_only=True)
class Curve(Settings):
    """Piecewise linear between its points, flat beyond them."""

    scores: list[float]
    chances: list[float]

    def __post_init__(self):
        rising = all(a < b for a, b in zip(self.scores, self.scores[1:], strict=False))
        falling = any(a > b for a, b in zip(self.chances, self.chances[1:], strict=False))
        if not self.scores or len(self.scores) != len(self.chances) or not rising or falling:
            raise ValueError(f"scores={self.scores} must rise and chances={self.chances}, as many, must not fall")
        if self.chances[0] < 0 or self.chances[-1] > 1:
            raise ValueError(f"chances={self.chances} are no probabilities")

    def __call__(self, score: float) -> float:
        place = bisect_left(self.scores, score)
        if place in (0, len(self.scores)):
            return self.chances[min(place, len(self.chances) - 1)]
        (left, right), (low, high) = self.scores[place - 1 : place + 1], self.chances[place - 1 : place + 1]
        return low + (high - low) * (score - left) / (right - left)


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """``curves[temperature][source][level]``; a level is the depth, and "+a" where a forward looked a levels ahead."""

    curves: dict[float, dict[str, dict[str, Curve]]] = field(default_factory=dict)

    def __post_init__(self):
        # JSON's keys are strings
        self._set("curves", {float(temperature): found for temperature, found in self.curves.items()})

    def of(self, source: str, temperature: float, tree: TreeConfig, default: Chance) -> Chance:
        """What `source`'s candidates in such a tree are worth, at the temperature that is nearest of those counted."""
        nearest = min(self.curves, key=lambda counted: (abs(counted - temperature), counted), default=None)
        found = {} if nearest is None else self.curves[nearest].get(source, {})
        curves = {depth: found[name] for depth, name in enumerate(levels(tree), start=1) if name in found}
        return lambda depth, score: curves[depth](score) if depth in curves else default(depth, score)


def levels(tree: TreeConfig) -> list[str]:
    """The names of its levels, the root's children's first."""
    last = tree.forwards
    return [str(depth) if depth <= last else f"{depth}+{depth - last}" for depth in range(1, tree.depth + 1)]
