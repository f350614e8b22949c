"""The dialogues of a training that is fed while it runs: a shard is there from when it was made until no step needs it.

Rank 0 tells the feeder (preprocess/feed.py), in a file, in which order the coming steps read the shards. The first of
them, as many as two windows have or more where the steps that are read ahead want more, are made; others stay as long
as there is room. Ranks finish a step together, so none of them needs what the steps before it have read. What a
training that was killed reads again is made again.

With `train.shards` a node's ranks read copies on its own disk. The first that asks for a shard fetches it, from the
recipe's store or the run's folder; a copy goes when it is not among those that are needed at once.
"""

import logging
import time
from typing import Any

import numpy as np

from pipeline.artifacts.features import Wanted, fetching, store_of, wanted_file, write_wanted
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec, require_readable, token_bytes
from pipeline.features.shards import (
    FeatureStore,
    Manifest,
    ShardRecord,
    damage,
    kind_of,
    open_shard,
    part_starts,
    shard_name,
)
from pipeline.features.text import TextTable
from pipeline.recipe.recipe import Recipe

LOOK_SECONDS = 0.05  # between two looks for a shard
TELL_SECONDS = 60  # of waiting for one, after which training says so
FRAME_BYTES = 2048  # of a row: more than Arrow takes around its states
log = logging.getLogger(__name__)


class FedStore(FeatureStore):
    """All of the train table's dialogues. `records` are what the shards will be, their bytes an upper bound."""

    def __init__(self, recipe: Recipe, expected: FeatureSpec):
        """Raises PipelineError for an unfinished or foreign dump."""
        folder, size = recipe.paths.shards, recipe.features.rows_per_shard
        manifest = Manifest.load(folder)
        require_readable(manifest.spec, expected, folder)
        manifest.require_complete(folder)
        self._take(manifest.spec, expected)
        self._recipe = recipe
        self.texts = TextTable.open(folder, manifest.text_of("train"), self.spec)
        lengths_N, self.records = self.texts.lengths_N, []
        for index, first in enumerate(range(0, len(lengths_N), size)):
            mine = lengths_N[first : first + size]
            rows, tokens = len(mine), int(mine.sum())
            most = tokens * token_bytes(self.stored.stored_dtype, self.stored.hidden_size, 1 + self.stored.auxiliary)
            most += FRAME_BYTES * (rows + 1)
            self.records.append(ShardRecord(shard_name("train", index), "train", index, rows, tokens, 0, most, ""))
        self._starts = np.cumsum([0] + [record.rows for record in self.records])
        self._parts = part_starts(self.records)
        self._readers = self._arriving = _Arriving(recipe, self.stored)
        self.at: dict[Any, int] = {}  # the step that each of its readers is at
        self._news: tuple[set[int], int] | None = None  # what the last step wanted soon, and how many in all

    def room(self, now: int) -> int:
        """How many shards the recipe has room for, whichever they are. `now`: so many are needed at once, and are all
        that there is room for unless the recipe gives bytes. Raises PipelineError where these are too few.
        """
        bound = self._recipe.features.disk_bytes
        if not bound:
            return now
        most_S = np.cumsum(sorted((record.bytes for record in self.records), reverse=True))
        if most_S[now - 1] > bound:
            raise PipelineError(
                f"features.disk_bytes={bound:,}, but the {now} shards that training may need at once take up to "
                f"{most_S[now - 1]:,}: raise it, or lower train.window or features.rows_per_shard"
            )
        return int(np.searchsorted(most_S, bound, side="right"))

    def want(self, wanted: Wanted, tell: bool) -> None:
        """What is read from now on. `tell`: on the one rank that tells the feeder."""
        soon = set(wanted.soon)
        news = soon, len(wanted.shards)
        if news == self._news:  # the order of the others is what it was
            return
        self._news = news
        self._arriving.close_others(soon)
        if tell:
            write_wanted(self._recipe, wanted)


class _Arriving(dict[int, Any]):
    """Open shards by number. One that is asked for is waited for."""

    def __init__(self, recipe: Recipe, spec: FeatureSpec):
        self._recipe, self._folder, self._spec = recipe, recipe.paths.shards, spec
        self._store = store_of(recipe, self._folder) if recipe.paths.copies else None

    def __missing__(self, index: int) -> Any:
        begin, told, waited = time.monotonic(), wanted_file(self._recipe), 0.0
        while True:
            for record in Manifest.load(self._recipe.paths.features).of("train"):
                if record.index == index and (reader := self._opened(record, waited)) is not None:
                    self[index] = reader
                    return reader
            time.sleep(LOOK_SECONDS)
            before, waited = waited, time.monotonic() - begin
            if before // TELL_SECONDS < waited // TELL_SECONDS:
                log.warning("training waits for shard %d: does preprocess/feed.py run, and see %s?", index, told)

    def _opened(self, record: ShardRecord, waited: float, tries: int = 2) -> Any:
        """None where it went at this moment: the feeder makes it again. Raises PipelineError for a damaged one, for one
        that cannot be fetched, and for one that a shared folder lacks for long: it may show a new file late.
        """
        source = self._recipe.paths.features
        try:
            if self._store is not None:
                with fetching(self._folder):  # once for all ranks of this node
                    if damage(self._folder, record):
                        self._store.get(record.name, self._folder, record.sha256)
            elif reason := damage(self._folder, record):
                raise PipelineError(f"{kind_of(record)} {self._folder / record.name}: {reason}. Run again")
            return open_shard(self._folder, record, self._spec)
        except (PipelineError, OSError) as error:
            if record not in Manifest.load(source).of("train"):
                return None
            shared = not self._recipe.features.store
            if shared and waited < TELL_SECONDS and not (source / record.name).exists():
                return None
            if tries == 1:  # else it went, and is there again
                raise PipelineError(f"feature shard {record.name}: {error}") from None
            time.sleep(LOOK_SECONDS)
            return self._opened(record, waited, tries - 1)

    def close_others(self, kept: set[int]) -> None:
        """Their space on the disk is free when every rank has closed them."""
        for index in set(self).difference(kept):
            del self[index]
        remove_copies(self._recipe, kept)


def remove_copies(recipe: Recipe, kept: set[int]) -> None:
    """This node's, of other shards. A rank that still reads one goes on."""
    names = {shard_name("train", index) for index in kept}
    for path in recipe.paths.shards.glob("features-train-*") if recipe.paths.copies else ():
        if path.name not in names:
            path.unlink(missing_ok=True)
