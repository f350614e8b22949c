"""The micro-batches of a training: texts and states of the dialogues that `order.py` chooses. A micro-batch is one
forward of one rank.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from pipeline.artifacts.features import Wanted
from pipeline.features.batch import Batch, ChoosesPositions, Noise, collate, collate_packed, counts
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import DTYPES
from pipeline.lm.states import Needs
from pipeline.recipe.sections import TrainConfig
from train.input.features import FedStore
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
        self._objective = objective
        self._auxiliary = [store.spec.auxiliary_numbers.index(layer) for layer in needs.auxiliary]  # of the stored ones
        self._rank, self._ranks = rank, ranks
        self.order = Order(store, config, seed)
        self._fed = store if isinstance(store, FedStore) else None
        if self._fed:  # two windows, or what is read ahead, where windows hold few rows
            self._now = min(max(2 * self.order.window, self.order.reads.at_once(AHEAD + 1)), len(store.records))
            self._room = self._fed.room(self._now)

    def micro_batches(self, step: int, device: torch.device = CPU) -> list[Batch]:
        """This rank's: on a CPU whole, for an accelerator in pinned memory, as `Batch.to` takes them there."""
        rows, texts = self.order.rows_of(step), self._store.texts
        seeds = {number: (self._seed, step, number) for row in rows for number in row}  # whichever rank asks
        positions = {n: self._objective.positions(texts.ids(n), texts.mask(n), seed) for n, seed in seeds.items()}
        totals = counts(list(positions.values()))
        width, size = self._config.pack_tokens or 0, self._config.micro_batch
        out = []
        for turn in range(self.accumulation):
            first = (turn * self._ranks + self._rank) * size
            mine = rows[first : first + size]
            read = [[self._store.row(number, decode=False) for number in row] for row in mine]
            chosen = (positions[number] for row in mine for number in row)
            batch = collate_packed(read, chosen, totals, self._auxiliary, width)
            noise = list(self._noise(mine, step // self.order.steps_per_epoch)) if self._config.noise else []
            batch = replace(batch, step=step, noise=noise, begins_BT=batch.begins_BT if width else None)
            out.append(_ready(batch, self._config, device))
        return out

    def _noise(self, rows: list[list[int]], epoch: int) -> Iterator[Noise]:
        """Of each dialogue, by its epoch."""
        for b, numbers in enumerate(rows):
            first = 0
            for number in numbers:
                inputs = len(self._store.texts.ids(number)) - 1
                yield Noise(b, first, inputs, self._config.noise, (self._seed, epoch, number))
                first += inputs

    def from_step(self, first: int, device: torch.device = CPU) -> Iterator[tuple[int, list[Batch]]]:
        """(step, micro-batches) from `first` to the end. Whoever asks for the next has done this one."""
        steps, begin = range(first, self.order.steps), time.monotonic()
        try:
            self._want(first)
            for step, made in zip(steps, read_ahead(partial(self.micro_batches, device=device), steps), strict=True):
                self._store.waited += time.monotonic() - begin
                yield step, made
                begin = time.monotonic()
                self._want(step + 1)
        finally:
            if self._fed:
                self._fed.at.pop(self, None)

    def _want(self, step: int) -> None:
        """Of drafts that train together, all have the same order; what the last of them reads is wanted."""
        if self._fed and step < self.order.steps:
            self._fed.at[self] = step
            wanted = Wanted(self.order.reads.upcoming(min(self._fed.at.values())), self._now, self._room)
            self._fed.want(wanted, tell=self._rank == 0)

    def validation(self, heldout: FeatureStore, step: int, device: torch.device = CPU) -> Iterator[Batch]:
        """This rank's share of the held-out dialogues, without noise; the same number of batches on every rank (ZeRO-3
        needs that): where a share is short, a batch without a trained position fills in. They are read ahead, and
        brought to a device, as those of a training are.
        """
        size = self._config.micro_batch

        def made(first: int) -> Batch:
            begin = first + self._rank * size
            rows = [heldout.row(number, decode=False) for number in range(begin, min(begin + size, len(heldout)))]
            batch = collate(rows or [heldout.row(0, decode=False)], self._objective, {}, self._auxiliary)
            batch = replace(batch, step=step, totals=dict.fromkeys(batch.positions, 1))
            return _ready(batch if rows else batch.emptied(), self._config, device)

        return read_ahead(made, range(0, len(heldout), size * self._ranks))


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


def _ready(batch: Batch, config: TrainConfig, device: torch.device) -> Batch:
    return batch.to(CPU, DTYPES[config.dtype]) if device.type == "cpu" else batch.pinned()
