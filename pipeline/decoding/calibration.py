"""What the scores of a source's candidates are worth: the probability that the target's own text goes through them.

Counted on calibration answers (eval/tuning/calibrate.py), by temperature, by source, by depth and by how many levels a
forward looked ahead for the candidate. Each curve rises with the score. Where nothing was counted, the source's own
default holds (`Source.accept_probability`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig

AcceptProbability = Callable[[int, float], float]  # of a candidate, by depth and score


@dataclass(frozen=True, kw_only=True)
class Curve(Settings):
    """Probabilities by score, counted at a few points: piecewise linear between them, flat beyond. They do not fall."""

    x: list[float]
    y: list[float]

    def __post_init__(self):
        if not self.x or len(self.x) != len(self.y) or any(a >= b for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError(f"x={self.x} must rise, and y={self.y} must have as many values")
        if any(a > b for a, b in zip(self.y, self.y[1:], strict=False)) or self.y[0] < 0 or self.y[-1] > 1:
            raise ValueError(f"chances y={self.y} must be probabilities that do not fall")

    def __call__(self, at: float) -> float:
        place = bisect_left(self.x, at)
        if place in (0, len(self.x)):
            return self.y[min(place, len(self.y) - 1)]
        (left, right), (low, high) = self.x[place - 1 : place + 1], self.y[place - 1 : place + 1]
        return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """``curves[temperature][source][level]``; a level is the depth, and "+a" where a forward looked a levels ahead."""

    curves: dict[float, dict[str, dict[str, Curve]]] = field(default_factory=dict)

    def __post_init__(self):
        # JSON's keys are strings
        self._set("curves", {float(temperature): found for temperature, found in self.curves.items()})

    def of(self, source: str, temperature: float, tree: TreeConfig, default: AcceptProbability) -> AcceptProbability:
        """What `source`'s candidates in such a tree are worth, at the temperature that is nearest of those counted."""
        nearest = min(self.curves, key=lambda counted: (abs(counted - temperature), counted), default=None)
        found = {} if nearest is None else self.curves[nearest].get(source, {})
        curves = {depth: found[name] for depth, name in enumerate(levels(tree), start=1) if name in found}
        return lambda depth, score: curves[depth](score) if depth in curves else default(depth, score)


def levels(tree: TreeConfig) -> list[str]:
    """The names of its levels, the root's children's first."""
    last = tree.forwards
    return [str(depth) if depth <= last else f"{depth}+{depth - last}" for depth in range(1, tree.depth + 1)]
