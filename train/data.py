"""Which dialogues make up step s of epoch e: a function of (seed, epoch, step), never of the number of ranks.

Terms: a global batch is `train.global_batch` dialogues and one optimiser step; a micro-batch is one forward of one rank.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from pipeline.batch import Batch, collate, trained, uniform_noise
from pipeline.errors import PipelineError
from pipeline.features.shards import FeatureStore
from pipeline.sections import TrainConfig


class Batches:
    """One rank's micro-batches of every step."""

    def __init__(self, store: FeatureStore, config: TrainConfig, horizons: list[int], seed: int, rank: int, ranks: int):
        if config.global_batch % (config.micro_batch * ranks):
            raise PipelineError(
                f"train.global_batch={config.global_batch} is no multiple of micro_batch x ranks = {config.micro_batch} x "
                f"{ranks}: change one of them"
            )
        if len(store) < config.global_batch:
            raise PipelineError(
                f"{len(store)} training dialogues do not fill one global batch of {config.global_batch}: "
                "dump more, or lower train.global_batch"
            )
        self._store, self._config, self._horizons, self._seed = store, config, horizons, seed
        self._rank, self._ranks = rank, ranks
        self.accumulation = config.global_batch // (config.micro_batch * ranks)
        self.steps_per_epoch = len(store) // config.global_batch
        self.steps = self.steps_per_epoch * config.epochs

    def rows_of(self, step: int) -> list[int]:
        """The global batch of a step, longest dialogue first. An epoch leaves out the rest that fills no batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._store))
        rows = order[place * self._config.global_batch :][: self._config.global_batch].tolist()
        return sorted(rows, key=lambda row: (-len(self._store.row(row).input_ids), row))

    def micro_batches(self, step: int) -> list[Batch]:
        rows = self.rows_of(step)
        totals = self._totals(rows)
        size, epoch = self._config.micro_batch, step // self.steps_per_epoch
        out = []
        for turn in range(self.accumulation):
            first = (turn * self._ranks + self._rank) * size
            out.append(self._collate(rows[first : first + size], totals, epoch))
        return out

    def _totals(self, rows: list[int]) -> dict[int, int]:
        masks = [self._store.row(row).loss_mask for row in rows]
        return {h: sum(int(trained(mask, h, self._config.mask).sum()) for mask in masks) for h in self._horizons}

    def _collate(self, numbers: list[int], totals: dict[int, int], epoch: int) -> Batch:
        rows = [self._store.row(number) for number in numbers]
        noises = None
        if self._config.noise:
            noises = [
                uniform_noise(row, self._config.noise, self._config.noise_scaling, (self._seed, epoch, number))
                for row, number in zip(rows, numbers, strict=True)
            ]
        return collate(rows, self._horizons, self._config.mask, totals, noises)

    def documents(self, step: int) -> list[str]:
        return [self._store.row(row).doc_id for row in self.rows_of(step)]

    def from_step(self, first: int) -> Iterator[tuple[int, list[Batch]]]:
        """(step, micro-batches) from `first` to the end; the next step is read while this one computes."""
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self.micro_batches, first) if first < self.steps else None
            for step in range(first, self.steps):
                ready = ahead.result()
                if step + 1 < self.steps:
                    ahead = reader.submit(self.micro_batches, step + 1)
                yield step, ready


def validation_batches(
    store: FeatureStore, config: TrainConfig, horizons: list[int], rank: int, ranks: int
) -> Iterator[Batch]:
    """This rank's share of the held-out dialogues; the same number of batches on every rank (ZeRO-3 needs that).

    Where a share is short, a batch without a trained position fills in.
    """
    size = config.micro_batch
    for first in range(0, len(store), size * ranks):
        begin = first + rank * size
        rows = [store.row(number) for number in range(begin, min(begin + size, len(store)))]
        totals = dict.fromkeys(horizons, 1)
        if rows:
            yield collate(rows, horizons, config.mask, totals)
        else:
            filler = collate([store.row(0)], horizons, config.mask, totals)
            filler.trained = {h: torch.zeros_like(mask) for h, mask in filler.trained.items()}
            yield filler


def frequent_tokens(store: FeatureStore, target_vocabulary: int, size: int) -> torch.Tensor:
    """The `size` most frequent assistant tokens of the training dialogues, ascending by id; ties go to the smaller id."""
    counts = np.zeros(target_vocabulary, dtype=np.int64)
    for number in range(len(store)):
        row = store.row(number)
        counts += np.bincount(row.input_ids[row.loss_mask.astype(bool)], minlength=target_vocabulary)
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order))


def coverage(store: FeatureStore, ids: torch.Tensor) -> float:
    """Share of the assistant tokens of `store` that a reduced vocabulary holds."""
    known = set(ids.tolist())
    tokens = [row.input_ids[row.loss_mask.astype(bool)] for row in (store.row(n) for n in range(len(store)))]
    flat = np.concatenate(tokens)
    return float(np.isin(flat, list(known)).mean())
