"""The micro-batches of a training: texts and states of the dialogues that `order.py` chooses. A micro-batch is one
forward of one rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pipeline.features.batch import Batch, Noise, collate, collate_packed, scaled, uniform_noise
from pipeline.features.positions import ChoosesPositions, Group, Positions, counts
from pipeline.features.schema import Row
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import DTYPES
from pipeline.lm.states import Needs
from pipeline.recipe.sections import TrainConfig
from train.input.order import Order

CPU = torch.device("cpu")
T, R = TypeVar("T"), TypeVar("R")
AHEAD = 2  # steps that are read while one computes


class Batches:
    """One rank's micro-batches of every step."""

    def __init__(
        self,
        store: FeatureStore,
        config: TrainConfig,
        objective: ChoosesPositions,
        needs: Needs,
        seed: int,
        rank: int,
        ranks: int,
    ):
        self.accumulation = config.accumulation(ranks)
        self._store, self._config, self._seed = store, config, seed
        self._objective, self._auxiliary = objective, auxiliary_of(store, needs)
        self._rank, self._ranks = rank, ranks
        self.order = Order(store.texts, config, seed)

    def micro_batches(self, step: int, device: torch.device = CPU) -> list[Batch]:
        """This rank's, as `Batch.to` takes them to a device: to an accelerator from pinned memory, with what it decodes
        and draws itself. (Its noise is its own generator's, from the same seeds.)
        """
        rows = self.order.rows_of(step)
        positions = {number: self._positions(number, step) for row in rows for number in row}
        totals = counts(list(positions.values()))
        size, epoch = self._config.micro_batch, step // self.order.steps_per_epoch
        out = []
        for turn in range(self.accumulation):
            first = (turn * self._ranks + self._rank) * size
            here = device.type == "cpu"
            batch = replace(self._collate(rows[first : first + size], positions, totals, epoch, here), step=step)
            out.append(batch if here else batch.pinned())
        return out

    def _positions(self, number: int, step: int) -> dict[Group, Positions]:
        """A dialogue's at this step, whichever rank asks."""
        texts = self._store.texts
        return self._objective.positions(texts.ids(number), texts.mask(number), (self._seed, step, number))

    def _collate(
        self,
        rows: list[list[int]],
        positions: dict[int, dict[Group, Positions]],
        totals: dict[Group, int],
        epoch: int,
        here: bool,
    ) -> Batch:
        """`positions`: by dialogue. `here`: with noise, and decoded."""
        read = [[self._store.row(number, here) for number in row] for row in rows]
        noises = None
        if self._config.noise and here:
            pairs = [pair for row in zip(rows, read, strict=True) for pair in zip(*row, strict=True)]
            noises = (self._noise(number, row, epoch) for number, row in pairs)
        width = self._config.pack_tokens or 0
        dtype = DTYPES[self._config.dtype]
        chosen = (positions[number] for row in rows for number in row)
        batch = collate_packed(read, chosen, totals, noises, width, dtype, self._auxiliary)
        if self._config.noise and not here:
            batch.noise = [noise for b, row in enumerate(rows) for noise in self._noise_there(b, row, read[b], epoch)]
        return batch if width else replace(batch, begins_BT=None)

    def _noise(self, number: int, row: Row, epoch: int) -> Tensor:
        return uniform_noise(row, self._config.noise, self._config.noise_scaling, (self._seed, epoch, number))

    def _noise_there(self, b: int, numbers: list[int], rows: list[Row], epoch: int) -> Iterator[Noise]:
        first = 0
        for number, row in zip(numbers, rows, strict=True):
            inputs = len(row.input_ids) - 1
            half_width = scaled(self._config.noise, inputs + 1, self._config.noise_scaling)
            yield Noise(b, first, inputs, half_width, (self._seed, epoch, number))
            first += inputs

    def from_step(self, first: int, device: torch.device = CPU) -> Iterator[tuple[int, list[Batch]]]:
        """(step, micro-batches) from `first` to the end."""
        steps = range(first, self.order.steps)
        yield from zip(steps, read_ahead(partial(self.micro_batches, device=device), steps), strict=True)


def read_ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What is made of each item; the next ones are made in a thread while the caller computes."""
    # One thread of torch's for it: a second team of them would take the cores from the first.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(reader.submit(make, item))
            if len(ahead) > AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def validation_batches(
    store: FeatureStore,
    config: TrainConfig,
    objective: ChoosesPositions,
    needs: Needs,
    step: int,
    rank: int,
    ranks: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """This rank's share of the held-out dialogues, without noise; the same number of batches on every rank (ZeRO-3
    needs that). They are read ahead, and brought to a device, as those of a training are.

    Where a share is short, a batch without a trained position fills in.
    """
    size, auxiliary = config.micro_batch, auxiliary_of(store, needs)
    here, dtype = device.type == "cpu", DTYPES[config.dtype]

    def made(first: int) -> Batch:
        begin = first + rank * size
        rows = [store.row(number, here) for number in range(begin, min(begin + size, len(store)))]
        batch = collate(rows or [store.row(0, here)], objective, {}, auxiliary=auxiliary, dtype=dtype)
        batch = replace(batch, step=step, totals=dict.fromkeys(batch.positions, 1))
        batch = batch if rows else batch.emptied()
        return batch if here else batch.pinned()

    return read_ahead(made, range(0, len(store), size * ranks))


def auxiliary_of(store: FeatureStore, needs: Needs) -> list[int]:
    """Which of the stored auxiliary states the draft wants."""
    return [store.spec.auxiliary_numbers.index(layer) for layer in needs.auxiliary]
