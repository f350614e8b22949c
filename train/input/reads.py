"""Which shards the steps of a training read, and how many have to be made where few fit the disk."""

from collections.abc import Sequence

import numpy as np

from pipeline.artifacts.features import Wanted


class Reads:
    def __init__(self, of_steps: Sequence[set[int]], shards: int):
        self.of_steps, self._shards, self._steps = of_steps, np.arange(shards), len(of_steps)
        uses = [shard * self._steps + step for step, read in enumerate(of_steps) for shard in read]
        self._uses = np.array([*sorted(uses), shards * self._steps])

    def at_once(self, steps: int) -> int:
        """The most shards that so many steps in a row read."""
        return max(len(set().union(*self.of_steps[first : first + steps])) for first in range(self._steps))

    def upcoming(self, step: int) -> list[int]:
        """What this step and later ones read, in the order in which they read each shard next."""
        next_S = self._uses[np.searchsorted(self._uses, self._shards * self._steps + step)]
        read = np.flatnonzero(next_S // self._steps == self._shards)
        return read[np.argsort(next_S[read] % self._steps, kind="stable")].tolist()

    def made(self, now: int, room: int, trainings: int = 1) -> int:
        """How many shards are made for so many trainings, one after the other, by the rule of `Wanted`."""
        held, made = set[int](), 0
        for step in [*range(self._steps)] * trainings:
            wanted = Wanted(self.upcoming(step), now, room)
            while (turn := wanted.next(held, set()))[1] is not None:
                held = held - turn[0] | {turn[1]}
                made += 1
        return made
