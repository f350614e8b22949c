"""The share of ranks' time that goes into tokens: in a step all ranks wait for the one with the most padded tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipeline.basics.accelerator import pad_width
from pipeline.recipe.sections import TrainConfig
from train.input.order import Order, rows_of_rank

STEPS, MAX_ROWS = 50, 4096  # of the simulation


@dataclass(frozen=True)
class Lengths:
    """Texts of which only the lengths are known."""

    lengths_N: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths_N)

    def ids(self, number: int) -> range:
        return range(self.lengths_N[number])


@dataclass(frozen=True)
class LengthsStore:
    """A store of one shard with such texts, for `Order`."""

    texts: Lengths

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def records(self) -> list[Any]:
        return [SimpleNamespace(rows=len(self.texts))]


def working_share(lengths: Sequence[int], config: TrainConfig, ranks: int, device: torch.device) -> float:
    """Return the mean tokens of a rank over the padded tokens of the rank that has the most, over the first steps of an
    epoch in training's own order. Dialogues have these lengths, each drawn as often as needed.
    """
    packed = config.pack_tokens
    per_row = max(packed // int(np.mean(lengths)), 1) if packed else 1
    count = min(STEPS * config.global_batch * per_row * 2, max(MAX_ROWS, config.global_batch * per_row * 4))
    drawn = np.random.default_rng(0).choice(np.asarray(lengths), count)
    store: Any = LengthsStore(Lengths(drawn))
    order = Order(store, config.model_copy(update={"window": 1, "tokens": None, "epochs": 1}), 0)
    tokens = slowest = 0.0
    for step in range(min(order.steps_per_epoch, STEPS)):
        rows, padded_R = order.rows_of(step), np.zeros(ranks)
        inputs = [sum(int(drawn[number]) - 1 for number in row) for row in rows]
        for rank in range(ranks):
            for turn in range(config.accumulation(ranks)):
                longest = max(rows_of_rank(inputs, turn, rank, ranks, config.micro_batch))
                padded_R[rank] += config.micro_batch * (packed or pad_width(longest, device))
        tokens, slowest = tokens + sum(inputs) / ranks, slowest + padded_R.max()
    return float(tokens / slowest)
