"""The order of training: which dialogues make up step s of epoch e, and which shards that step reads. It is a function
of (seed, epoch, step), never of the number of ranks, and is computed from the texts alone, before any state is read.

Terms: a row is one dialogue or, with `train.pack_tokens`, several that are packed one after the other; a global batch
is `train.global_batch` rows and one optimiser step; a window is `train.window` shards, whose rows are shuffled
together. Each epoch takes the shards in another order and cuts that order into windows.

A step reads shards of one window. The batch in which a window ends goes on in the next one and reads that one's, too:
no row is left out there. So the shards that some step has read and a later one of the epoch still needs are at most one
window's, and during such a batch two windows'. (If windows hold fewer rows than a batch: all the windows that the batch
touches.)
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import count

import numpy as np
import torch

from pipeline.artifacts.features import ShardRequest
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import token_bytes
from pipeline.features.shards import FeatureStore
from pipeline.features.text import TextTable
from pipeline.recipe.sections import TrainConfig


class Reads:
    def __init__(self, of_steps: Sequence[set[int]], shards: int):
        self.of_steps, self._shards, self._steps = of_steps, np.arange(shards), len(of_steps)
        uses = [shard * self._steps + step for step, read in enumerate(of_steps) for shard in read]
        self._uses = np.array([*sorted(uses), shards * self._steps])

    def max_shards_at_once(self, steps: int) -> int:
        """Return the largest number of shards that this many steps in a row read."""
        return max(len(set().union(*self.of_steps[first : first + steps])) for first in range(self._steps))

    def shards_by_next_use(self, step: int) -> list[int]:
        """Return the shards that this step and later ones read, in the order of their next use."""
        next_S = self._uses[np.searchsorted(self._uses, self._shards * self._steps + step)]
        read = np.flatnonzero(next_S // self._steps == self._shards)
        return read[np.argsort(next_S[read] % self._steps, kind="stable")].tolist()

    def count_made_shards(self, now: int, room: int, trainings: int = 1) -> int:
        """Return how many shards are made for this many trainings in a row, by the rule of `ShardRequest`."""
        held_shards, made = set[int](), 0
        for step in [*range(self._steps)] * trainings:
            request = ShardRequest(self.shards_by_next_use(step), now, room)
            while (turn := request.next(held_shards, set()))[1] is not None:
                held_shards = held_shards - turn[0] | {turn[1]}
                made += 1
        return made


PACK_BLOCK = 1024  # dialogues among which rows are packed
WINDOW_BYTES = 4e9  # of states, if the recipe sets no window


class Order:
    """The global batch of every step, and the shards that it reads."""

    def __init__(self, store: FeatureStore, config: TrainConfig, seed: int):
        """Compute the order without reading a shard. Raise PipelineError if the texts fill no global batch, or one of
        them fits no row.
        """
        texts, sizes = store.texts, [record.rows for record in store.records]
        self._config, self._seed, self._texts = config, seed, texts
        self._shards, self._shard_N = len(sizes), np.repeat(np.arange(len(sizes)), sizes)  # of each dialogue
        self.window = config.window or _default_window(store)
        if len(sizes) <= self.window:
            sizes = [len(store)]  # one window holds all shards: rows need not be grouped by shard
        packs = config.pack_tokens
        self.rows = pack_rows(texts, packs, seed, sizes) if packs else [[number] for number in range(len(store))]
        ends_S = np.cumsum(sizes)
        shard_R = np.searchsorted(ends_S, [row[0] for row in self.rows], side="right")
        self._starts = np.searchsorted(shard_R, np.arange(len(sizes) + 1))  # of each shard's rows
        if len(self.rows) < config.global_batch:
            rows = f", packed into {len(self.rows)} rows," if packs else ""
            raise PipelineError(
                f"{len(store)} training dialogues{rows} do not fill one global batch of {config.global_batch}: "
                "dump more, or lower train.global_batch"
            )
        self.steps_per_epoch = len(self.rows) // config.global_batch
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0))  # its number and its order
        self.steps = self._count_steps(config.tokens, texts) if config.tokens else self.steps_per_epoch * config.epochs

    def _shuffle(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng((self._seed, epoch))
        shards = random.permutation(len(self._starts) - 1)
        windows = (shards[first : first + self.window] for first in range(0, len(shards), self.window))
        rows = ([np.arange(*self._starts[shard : shard + 2]) for shard in window] for window in windows)
        return np.concatenate([random.permutation(np.concatenate(window)) for window in rows])

    def _count_steps(self, tokens: int, texts: TextTable) -> int:
        """Return how many first steps hold this many tokens with a loss, by their masks alone: the same for every
        draft.
        """
        trained_N = np.array([texts.mask(number).sum(dtype=int) for number in range(len(texts))])
        trained_R = np.array([trained_N[row].sum() for row in self.rows])
        if not trained_R.any():
            raise PipelineError(f"train.tokens={tokens}, but no training dialogue has a token with a loss")
        for epoch in count():
            rows = self._shuffle(epoch)[: self.steps_per_epoch * self._config.global_batch]
            so_far = trained_R[rows].reshape(self.steps_per_epoch, -1).sum(1).cumsum()
            if so_far[-1] >= tokens:
                return epoch * self.steps_per_epoch + int(np.searchsorted(so_far, tokens)) + 1
            tokens -= int(so_far[-1])
        raise AssertionError

    def _rows_of_step(self, step: int) -> list[int]:
        """Return the numbers of the rows of a step."""
        (epoch, place), size = divmod(step, self.steps_per_epoch), self._config.global_batch
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffle(epoch)
        return self._epoch[1][place * size : (place + 1) * size].tolist()

    def rows_of(self, step: int) -> list[list[int]]:
        """Return the global batch of a step, longest row first: the dialogues of each row. An epoch leaves out the
        remainder that fills no batch.
        """
        batch_rows = self._rows_of_step(step)
        tokens = {row: sum(len(self._texts.ids(number)) for number in self.rows[row]) for row in batch_rows}
        return [self.rows[row] for row in sorted(batch_rows, key=lambda row: (-tokens[row], row))]

    @cached_property
    def reads(self) -> Reads:
        """Return the shards of each step, by place in the store's records."""
        numbers = (
            [number for row in self._rows_of_step(step) for number in self.rows[row]] for step in range(self.steps)
        )
        return Reads([set(self._shard_N[of_step].tolist()) for of_step in numbers], self._shards)

    @property
    def dialogues(self) -> int:
        """Return how many dialogues the first epoch uses; if rows are packed, later epochs may leave out other ones."""
        used = self._shuffle(0)[: self.steps_per_epoch * self._config.global_batch]
        return sum(len(self.rows[row]) for row in used)


def rows_of_rank(rows: Sequence, turn: int, rank: int, ranks: int, size: int) -> Sequence:
    """Return the `size` rows, of a global batch's, that a rank takes in its forward number `turn`. Rows are sorted by
    length: in every second turn ranks are dealt theirs in reverse, so that no rank always gets the longest.
    """
    place = rank if turn % 2 == 0 else ranks - 1 - rank
    first = (turn * ranks + place) * size
    return rows[first : first + size]


def pack_rows(texts: TextTable, tokens: int, seed: int, sizes: list[int]) -> list[list[int]]:
    """Pack every dialogue into one row of at most `tokens` inputs. `sizes` are those of consecutive groups that share
    no row: shards if an epoch has several windows, so that a row lies in one shard whatever the windows are. A group's
    dialogues are shuffled and cut into blocks; in each block, first-fit by decreasing length.

    The rows are the same for all epochs, which shuffle them. Raise PipelineError for a dialogue that fits no row.
    """
    lengths = texts.lengths_N - 1
    if lengths.max() > tokens:
        raise PipelineError(
            f"train.pack_tokens={tokens}, but dialogue {texts.doc_id(int(lengths.argmax()))} has {lengths.max()} "
            "inputs: raise it to data.max_length"
        )
    random, rows = np.random.default_rng((seed, 0x7061636B)), []
    orders = [end - size + random.permutation(size) for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
    for block in (order[at : at + PACK_BLOCK] for order in orders for at in range(0, len(order), PACK_BLOCK)):
        filled: list[list[int]] = []
        room = np.full(len(block), tokens)
        for number in block[np.argsort(-lengths[block], kind="stable")].tolist():
            row = int(np.argmax(room >= lengths[number]))  # the first that has room
            if row == len(filled):
                filled.append([])
            filled[row].append(number)
            room[row] -= lengths[number]
        rows += filled
    return rows


def _default_window(store: FeatureStore) -> int:
    spec, tokens = store.spec, int(store.texts.lengths_N.sum())
    size = tokens * token_bytes(spec.stored_dtype, spec.hidden_size, 1 + spec.auxiliary)
    return max(1, int(WINDOW_BYTES * len(store.records) // max(size, 1)))


def most_frequent_tokens(texts: TextTable, target_vocabulary: int, size: int) -> torch.Tensor:
    """Return the ids of the `size` most frequent assistant tokens, ascending; ties go to the smaller id."""
    counts = np.zeros(target_vocabulary, dtype=np.int64)
    for number in range(len(texts)):
        counts += np.bincount(_trained_ids(texts, number), minlength=target_vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def vocabulary_coverage(texts: TextTable, ids: torch.Tensor) -> float:
    """Return the share of the texts' assistant tokens that a reduced vocabulary holds."""
    return float(np.isin(np.concatenate([_trained_ids(texts, n) for n in range(len(texts))]), ids.numpy()).mean())


def _trained_ids(texts: TextTable, number: int) -> np.ndarray:
    return texts.ids(number)[texts.mask(number).astype(bool)]
