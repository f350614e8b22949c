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

from pipeline.artifacts.features import ShardRequest
from pipeline.basics.accelerator import pad_width
from pipeline.drafts.parts.objective import Objective
from pipeline.features.batch import CPU, Batch, Noise, collate, collate_packed
from pipeline.features.positions import count_positions
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import DTYPES
from pipeline.lm.states import Needs
from pipeline.recipe.sections import TrainConfig
from train.input.features import FedStore
from train.input.order import Order, rows_of_rank

T, R = TypeVar("T"), TypeVar("R")
STEPS_AHEAD = 2  # steps that are read while one computes


class Batches:
    """One rank's micro-batches of every step."""

    def __init__(
        self,
        store: FeatureStore,
        config: TrainConfig,
        objective: Objective,
        needs: Needs,
        seed: int,
        rank: int,
        ranks: int,
    ):
        self.accumulation = config.accumulation(ranks)
        self._store, self._config, self._seed = store, config, seed
        self._objective = objective
        # places among the stored layers
        self._auxiliary = [store.spec.auxiliary_numbers.index(layer) for layer in needs.auxiliary]
        self._is_noisy = config.noise > 0 and needs.final  # auxiliary states get none
        self._rank, self._ranks = rank, ranks
        self.order = Order(store, config, seed)
        self._fed = store if isinstance(store, FedStore) else None
        if self._fed:  # two windows, or what is read ahead, where windows hold few rows
            self._needed_now = min(
                max(2 * self.order.window, self.order.reads.max_shards_at_once(STEPS_AHEAD + 1)), len(store.records)
            )
            self._room = self._fed.count_room(self._needed_now)

    def micro_batches(self, step: int, device: torch.device = CPU) -> list[Batch]:
        """Return this rank's micro-batches of a step: ready to use on a CPU; for an accelerator in pinned memory, from
        which `Batch.to` copies them.
        """
        rows, texts = self.order.rows_of(step), self._store.texts
        seeds = {number: (self._seed, step, number) for row in rows for number in row}  # the same on every rank
        positions = {n: self._objective.positions(texts.ids(n), texts.mask(n), seed) for n, seed in seeds.items()}
        totals = count_positions(list(positions.values()))
        if self._config.weighting == "dialogue":
            weighted = self._objective.weight_by_dialogue(list(positions.values()))
            positions = dict(zip(positions, weighted, strict=True))
        packs, size = self._config.pack_tokens or 0, self._config.micro_batch
        batches = []
        for turn in range(self.accumulation):
            rank_rows = rows_of_rank(rows, turn, self._rank, self._ranks, size)
            longest = max(sum(len(texts.ids(number)) - 1 for number in row) for row in rank_rows)
            width = pad_width(max(packs, longest), device)
            stored_rows = [[self._store.row(number, decode=False) for number in row] for row in rank_rows]
            chosen = (positions[number] for row in rank_rows for number in row)
            batch = collate_packed(stored_rows, chosen, totals, self._auxiliary, width)
            noise = list(self._make_noise(rank_rows, step // self.order.steps_per_epoch)) if self._is_noisy else []
            batch = replace(batch, step=step, noise=noise, begins_BT=batch.begins_BT if packs else None)
            batches.append(_to_training_form(batch, self._config, device))
        return batches

    def _make_noise(self, rows: list[list[int]], epoch: int) -> Iterator[Noise]:
        """Yield the noise of each dialogue, by its epoch."""
        for b, numbers in enumerate(rows):
            first = 0
            for number in numbers:
                inputs = len(self._store.texts.ids(number)) - 1
                yield Noise(b, first, inputs, self._config.noise, (self._seed, epoch, number))
                first += inputs

    def from_step(self, first: int, device: torch.device = CPU) -> Iterator[tuple[int, list[Batch]]]:
        """Yield (step, micro-batches) from `first` to the end. A step is done when the caller asks for the next."""
        steps, begin = range(first, self.order.steps), time.monotonic()
        try:
            self._request_shards(first)
            for step, batches in zip(steps, read_ahead(partial(self.micro_batches, device=device), steps), strict=True):
                self._store.seconds_waited += time.monotonic() - begin
                yield step, batches
                begin = time.monotonic()
                self._request_shards(step + 1)
        finally:
            if self._fed:
                self._fed.reader_steps.pop(self, None)

    def _request_shards(self, step: int) -> None:
        """Request the shards of the coming steps. Drafts that train together read in the same order; the request is
        that of the last of them.
        """
        if self._fed and step < self.order.steps:
            self._fed.reader_steps[self] = step
            request = ShardRequest(
                self.order.reads.shards_by_next_use(min(self._fed.reader_steps.values())), self._needed_now, self._room
            )
            self._fed.request_shards(request, notify=self._rank == 0)

    def validation(self, heldout: FeatureStore, step: int, device: torch.device = CPU) -> Iterator[Batch]:
        """Yield this rank's share of the held-out dialogues, without noise. Every rank gets the same number of batches
        (ZeRO-3 requires that): a short share is filled up with batches without a trained position. They are read ahead
        and copied to the device as those of training are.
        """
        size = self._config.micro_batch

        def make_batch(first: int) -> Batch:
            begin = first + self._rank * size
            rows = [heldout.row(number, decode=False) for number in range(begin, min(begin + size, len(heldout)))]
            batch = collate(rows or [heldout.row(0, decode=False)], self._objective, {}, self._auxiliary, device)
            batch = replace(batch, step=step, totals=dict.fromkeys(batch.positions, 1))
            return _to_training_form(batch if rows else batch.empty_copy(), self._config, device)

        return read_ahead(make_batch, range(0, len(heldout), size * self._ranks))


def read_ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `make(item)` for each item; the next ones are made in a thread while the caller computes."""
    # One torch thread in it: a second team of threads would take the cores from the first.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(reader.submit(make, item))
            if len(ahead) > STEPS_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _to_training_form(batch: Batch, config: TrainConfig, device: torch.device) -> Batch:
    return batch.to(CPU, DTYPES[config.dtype]) if device.type == "cpu" else batch.pin_memory()
