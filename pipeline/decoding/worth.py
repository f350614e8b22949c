"""What one more node, and one more draft forward, is worth in a round.

A token takes so long now (`token`, found by the tuner as the fixed point). So a round that is expected to accept `a`
more tokens saves `a * token` seconds, and a part of it pays where that is more than it costs. All figures come from
eval/tune.py: costs are measured, gains are counted on calibration answers. Nothing of it looks at the target's answer,
so the tree stays a function of the text.
"""

from dataclasses import dataclass

from pipeline.basics.settings import Settings
from pipeline.decoding.calibration import Line


@dataclass(frozen=True, kw_only=True)
class Worth(Settings):
    """Seconds, and expected tokens."""

    token: float
    verify: dict[int, float]  # by nodes, the root included: the sizes that a tree may have
    forwards: list[float]  # of a round's draft forwards, the first one first
    gains: list[Line]  # what each is expected to add to a round's value, by the value without it

    def __post_init__(self):
        self._set("verify", {int(nodes): seconds for nodes, seconds in sorted(self.verify.items())})  # JSON's are text
        if 1 not in self.verify or len(self.gains) != len(self.forwards) or self.token <= 0:
            raise ValueError("worth needs the time of verifying 1 node, a gain for each forward, and a token's time")

    def price(self, nodes: int) -> float:
        """Tokens that so many nodes have to bring, the root included."""
        return (self.verify[nodes] - self.verify[1]) / self.token

    def size(self, chances: list[float]) -> tuple[int, float]:
        """How many nodes to verify of candidates with these chances, likeliest first, and what the round is then worth:
        the tokens that it is expected to accept, less the price of verifying them.
        """
        best, value, accepted, taken = 1, 0.0, 0.0, 0
        for nodes in self.verify:
            if taken == len(chances) and nodes > taken + 1:
                break
            for chance in chances[taken : nodes - 1]:
                accepted += chance
            taken = min(nodes - 1, len(chances))
            if accepted - self.price(nodes) > value:
                best, value = nodes, accepted - self.price(nodes)
        return best, value

    def pays(self, number: int, value: float) -> bool:
        """Whether a round's forward of this number, from 0, brings more than it costs, where it is worth `value`
        without it.
        """
        return number < len(self.forwards) and self.gains[number](value) * self.token > self.forwards[number]
