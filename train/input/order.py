"""Which dialogues make up step s of epoch e: a function of (seed, epoch, step), never of the number of ranks. It is
known from the texts alone, before any state is read.

Terms: a row is one dialogue or, with `train.pack_tokens`, several that are packed one behind the other; a global batch
is `train.global_batch` rows and one optimiser step.
"""

import numpy as np
import torch

from pipeline.basics.errors import PipelineError
from pipeline.features.text import TextTable
from pipeline.recipe.sections import TrainConfig

WINDOW = 1024  # dialogues among which rows are packed


class Order:
    """The global batch of every step."""

    def __init__(self, texts: TextTable, config: TrainConfig, seed: int):
        """Raises PipelineError where the texts fill no global batch, or one of them fits no row."""
        self._config, self._seed, self._lengths_N = config, seed, texts.lengths_N
        packs = config.pack_tokens
        self.rows = packed(texts, packs, seed) if packs else [[number] for number in range(len(texts))]
        if len(self.rows) < config.global_batch:
            rows = f", packed into {len(self.rows)} rows," if packs else ""
            raise PipelineError(
                f"{len(texts)} training dialogues{rows} do not fill one global batch of {config.global_batch}: "
                "dump more, or lower train.global_batch"
            )
        self.steps_per_epoch = len(self.rows) // config.global_batch
        self.steps = self.steps_per_epoch * config.epochs
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0))  # its number and its order

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self.rows))

    def rows_of(self, step: int) -> list[list[int]]:
        """The global batch of a step, longest row first: the dialogues of each. An epoch leaves out the rest that fills
        no batch.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        chosen = self._epoch[1][place * self._config.global_batch :][: self._config.global_batch].tolist()
        tokens = {row: int(self._lengths_N[self.rows[row]].sum()) for row in chosen}
        return [self.rows[row] for row in sorted(chosen, key=lambda row: (-tokens[row], row))]

    @property
    def dialogues(self) -> int:
        """How many the first epoch takes in; where rows are packed, later ones may leave out others."""
        used = self._shuffled(0)[: self.steps_per_epoch * self._config.global_batch]
        return sum(len(self.rows[row]) for row in used)


def packed(texts: TextTable, tokens: int, seed: int) -> list[list[int]]:
    """Every dialogue in one row of at most so many inputs: windows of the shuffled dialogues, in each first-fit by
    falling length.

    The same for all epochs, which shuffle the rows. Raises PipelineError for a dialogue that fits no row.
    """
    lengths = texts.lengths_N - 1
    if lengths.max() > tokens:
        raise PipelineError(
            f"train.pack_tokens={tokens}, but dialogue {texts.doc_id(int(lengths.argmax()))} has {lengths.max()} "
            "inputs: raise it to data.max_length"
        )
    order, rows = np.random.default_rng((seed, 0x7061636B)).permutation(len(texts)), []
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        filled: list[list[int]] = []
        room = np.full(len(window), tokens)
        for number in window[np.argsort(-lengths[window], kind="stable")].tolist():
            row = int(np.argmax(room >= lengths[number]))  # the first that has room
            if row == len(filled):
                filled.append([])
            filled[row].append(number)
            room[row] -= lengths[number]
        rows += filled
    return rows


def frequent_tokens(texts: TextTable, target_vocabulary: int, size: int) -> torch.Tensor:
    """The ids of the `size` most frequent assistant tokens, ascending; ties go to the smaller id."""
    counts = np.zeros(target_vocabulary, dtype=np.int64)
    for number in range(len(texts)):
        counts += np.bincount(_trained(texts, number), minlength=target_vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def coverage(texts: TextTable, ids: torch.Tensor) -> float:
    """Share of the assistant tokens of the texts that a reduced vocabulary holds."""
    return float(np.isin(np.concatenate([_trained(texts, n) for n in range(len(texts))]), ids.numpy()).mean())


def _trained(texts: TextTable, number: int) -> np.ndarray:
    return texts.ids(number)[texts.mask(number).astype(bool)]
