"""The features that the ranks of a node read: checked once, or fed while the training runs.

Guarantees: before a run each host knows the checksum of everything that its ranks may read, whatever other hosts have
(it reads what changed since it last read it). A damaged file anywhere ends all ranks by name, before the first step.

Fed, a shard is there from when it was made until no step needs it. Rank 0 writes to a file, for the feeder
(preprocess/feed.py), in which order the coming steps read the shards. The first of them are made: as many as two
windows have, or more where the steps that are read ahead need more. Others stay as long as there is room. Ranks finish
a step together, so none of them needs what the steps before it have read. What a training that was killed reads again
is made again.

With `train.shards` a node's ranks read copies on its own disk. The first that asks for a shard fetches it, from the
recipe's store or the run's folder; a copy goes when it is not among those that are needed at once.
"""

import logging
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.artifacts.features import Wanted, answers_hash, fetching, store_of, wanted_file, write_wanted
from pipeline.artifacts.provenance import recorded
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec, another_engine, token_bytes
from pipeline.features.shards import (
    ANSWERS,
    FeatureStore,
    Manifest,
    ShardRecord,
    damage,
    damages,
    kind_of,
    open_shard,
    shard_name,
)
from pipeline.features.text import TextTable
from pipeline.recipe.identity import ANSWERS_KEYS
from pipeline.recipe.recipe import Recipe
from train.engine.ranks import by_rank_0, fail_together, place_on_host

LOOK_SECONDS = 0.05  # between two looks for a shard
TELL_SECONDS = 60  # of waiting for one, after which training says so
FRAME_BYTES = 2048  # of a row: more than Arrow takes around its states
log = logging.getLogger(__name__)


class FedStore(FeatureStore):
    """All of the train table's dialogues. `records` are what the shards will be, their bytes an upper bound. A row is
    waited for until its shard is there.
    """

    def __init__(self, recipe: Recipe, expected: FeatureSpec):
        """Raises PipelineError for an unfinished or foreign dump."""
        self._recipe, self._folder = recipe, recipe.paths.shards
        self._source = store_of(recipe, self._folder) if recipe.paths.copies else None
        self._open: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self.at: dict[Any, int] = {}  # the step that each of its readers is at
        self._news: tuple[set[int], int] | None = None  # what the last step wanted soon, and how many in all
        super().__init__(self._folder, "train", expected)

    def _opened(self, folder: Path, manifest: Manifest, split: str) -> tuple[list[ShardRecord], TextTable]:
        texts = TextTable.open(folder, manifest.text_of(split), self.stored)
        size, records = self._recipe.features.rows_per_shard, []
        for index, first in enumerate(range(0, len(texts), size)):
            lengths = texts.lengths_N[first : first + size]
            rows, tokens = len(lengths), int(lengths.sum())
            most = tokens * token_bytes(self.stored.stored_dtype, self.stored.hidden_size, 1 + self.stored.auxiliary)
            most += FRAME_BYTES * (rows + 1)
            records.append(ShardRecord(shard_name(split, index), split, index, rows, tokens, 0, most, ""))
        return records, texts

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
        for index in set(self._open).difference(soon):  # its space is free when every rank has closed it
            del self._open[index]
        remove_copies(self._recipe, soon)
        if tell:
            write_wanted(self._recipe, wanted)

    def _reader(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        begin, waited = time.monotonic(), 0.0
        while (reader := self._open.get(shard)) is None:
            if (record := self._listed(shard)) and (reader := self._arrived(record, waited)) is not None:
                self._open[shard] = reader
                break
            time.sleep(LOOK_SECONDS)
            before, waited = waited, time.monotonic() - begin
            if before // TELL_SECONDS < waited // TELL_SECONDS:
                where = wanted_file(self._recipe)
                log.warning("training waits for shard %d: does preprocess/feed.py run, and see %s?", shard, where)
        return reader

    def _listed(self, index: int) -> ShardRecord | None:
        shards = Manifest.load(self._recipe.paths.features).of("train")
        return next((record for record in shards if record.index == index), None)

    def _arrived(self, record: ShardRecord, waited: float, tries: int = 2) -> pa.ipc.RecordBatchFileReader | None:
        """None where it went at this moment: the feeder makes it again. Raises PipelineError for a damaged one, for one
        that cannot be fetched, and for one that a shared folder lacks for long: it may show a new file late.
        """
        path = self._folder / record.name
        try:
            if self._source is not None:
                with fetching(self._folder):  # once for all ranks of this node
                    if damage(self._folder, record):
                        self._source.get(record.name, self._folder, record.sha256)
            elif reason := damage(self._folder, record):
                raise PipelineError(f"feature shard {path}: {reason}. Run again")
            return open_shard(self._folder, record, self.stored)
        except (PipelineError, OSError) as error:
            if record != self._listed(record.index):
                return None
            late = not self._recipe.features.store and not (self._recipe.paths.features / record.name).exists()
            if late and waited < TELL_SECONDS:
                return None
            if tries == 1:  # else it went, and is there again
                raise PipelineError(f"feature shard {record.name}: {error}") from None
            time.sleep(LOOK_SECONDS)
            return self._arrived(record, waited, tries - 1)


def remove_copies(recipe: Recipe, kept: set[int]) -> None:
    """This node's, of other shards. A rank that still reads one goes on."""
    names = {shard_name("train", index) for index in kept}
    for path in recipe.paths.shards.glob("features-train-*") if recipe.paths.copies else ():
        if path.name not in names:
            path.unlink(missing_ok=True)


Stores = tuple[FeatureStore, FeatureStore, FeatureStore | None]


def open_checked(recipe: Recipe, expected: FeatureSpec) -> Stores:
    """The dump's training and held-out dialogues, and the target's answers to calibration prompts where it has any. All
    ranks take part.

    Raises PipelineError, on all of them, where a rank's host has a damaged shard, where there is nothing to train on,
    or where the recipe's keys need answers that are not there.
    """
    with fail_together():
        _require_whole(recipe)
        return stores(recipe, expected)


def _require_whole(recipe: Recipe) -> None:
    """The ranks of a host share its shards among them."""
    number, count = place_on_host()
    folder, brought = recipe.paths.shards, recipe.features.store or recipe.train.shards
    files = Manifest.load(folder).lasting(recipe.features.keep)  # what training is fed with it checks as it comes
    files = files[number::count]
    for record, reason in zip(files, damages(folder, files), strict=True):
        if reason:
            again = f"jakiro verify {folder} --recipe RECIPE --repair"
            raise PipelineError(
                f"{kind_of(record)} {folder / record.name} on {socket.gethostname()}: {reason}. "
                + ("Remove it and run again: it is brought anew" if brought else f"It can be dumped again: {again}")
            )


def stores(recipe: Recipe, expected: FeatureSpec) -> Stores:
    folder = recipe.paths.shards
    manifest = Manifest.load(folder)
    if note := another_engine(manifest.spec, expected):
        log.warning("%s: %s", folder, note)
    fed, heldout = recipe.features.keep == "window", FeatureStore(folder, "validation", expected)
    if not fed and manifest.lacks("train"):
        raise PipelineError(f"{folder} was dumped for features.keep='window': run the dump again, or set that")
    store = FedStore(recipe, expected) if fed else FeatureStore(folder, "train", expected)
    if not fed and manifest.total("train", "trained_tokens") == 0:
        raise PipelineError(
            f"{folder}: its {len(store)} training dialogues have no trained position: no token of theirs is the "
            "assistant's. Look at the chat template, and dump again into another folder"
        )
    if manifest.total(ANSWERS, "rows"):
        if manifest.answers_hash != answers_hash(recipe, manifest.spec.recipe):
            found = recorded(recipe.paths.features)
            keys = found.differences(recipe, ANSWERS_KEYS) if found else f"one of {', '.join(ANSWERS_KEYS)}"
            raise PipelineError(
                f"{folder}: its answers to calibration prompts are of other settings, or of a target that ended them "
                f"at other tokens ({keys or 'the settings are the same'}). Run the dump again: it keeps the rest"
            )
        if manifest.total(ANSWERS, "trained_tokens") == manifest.total(ANSWERS, "rows"):
            raise PipelineError(
                f"{folder}: the target answers every calibration prompt with one token, its stop token: the chat "
                "template is not the one it was trained with. Set target.chat_template, and dump again into another "
                "folder"
            )
        return store, heldout, FeatureStore(folder, ANSWERS, expected)
    config = recipe.train
    if config.keep == "best" or config.patience or config.decode != "never":
        raise PipelineError(
            f"{folder} holds no answers to calibration prompts, by which train.keep, train.patience and train.decode "
            "go: the source had no held-out dialogues left for them, or data.calibration_prompts was 0. Set that and "
            "run the dump again, which keeps the rest; or raise data.heldout_fraction and dump into another folder"
        )
    return store, heldout, None


def require_shared(folder: Path) -> None:
    """All ranks take part. Raises PipelineError where one of them does not see what rank 0 writes into `folder`."""

    def leave_mark() -> Path:
        mark = folder / f".seen-{uuid.uuid4().hex}.tmp"
        mark.touch()
        return mark

    mark = by_rank_0(leave_mark)
    with fail_together():
        if not mark.exists():
            raise PipelineError(
                f"{folder} on {socket.gethostname()} is not the one of rank 0, but resume states need an output that "
                "all nodes see"
            )
    mark.unlink(missing_ok=True)  # all have looked
