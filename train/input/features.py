"""The features that the ranks of a node read: checked once, or fed while training runs.

Guarantees: before a run each host verifies the checksum of every file that its ranks may read, independently of other
hosts (it reads only files that changed since it last read them). A damaged file on any host ends all ranks before the
first step, with the file's name.

When training is fed, a shard exists from when it was made until no step needs it. Rank 0 writes to a file, for the
feeder (preprocess/feed.py), in which order the coming steps read the shards. The first of them are made: as many as two
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

from pipeline.artifacts.features import (
    ShardRequest,
    answers_hash,
    download_lock,
    open_store,
    shard_request_file,
    write_shard_request,
)
from pipeline.artifacts.provenance import read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec, describe_engine_change, token_bytes
from pipeline.features.shards import (
    ANSWERS,
    FeatureStore,
    Manifest,
    ShardRecord,
    file_kind,
    find_all_damage,
    find_damage,
    open_shard,
    shard_name,
)
from pipeline.features.text import TextTable
from pipeline.recipe.identity import ANSWERS_KEYS
from pipeline.recipe.recipe import Recipe
from train.engine.ranks import fail_together, local_rank_and_size, run_on_rank_0

POLL_SECONDS = 0.05  # between two checks for a shard
WARNING_SECONDS = 60  # of waiting for a shard, after which a warning is logged
ROW_OVERHEAD_BYTES = 2048  # of a row: an upper bound of Arrow's overhead around its states
log = logging.getLogger(__name__)


class FedStore(FeatureStore):
    """The train table's dialogues, in shards that are made while training runs. `records` describe the shards to come;
    their bytes are an upper bound. Reading a row blocks until its shard exists.
    """

    def __init__(self, recipe: Recipe, expected: FeatureSpec):
        """Raise PipelineError for an unfinished dump, or one of another recipe."""
        self._recipe, self._folder = recipe, recipe.paths.shards
        self._source = open_store(recipe, self._folder) if recipe.paths.copies else None
        self._open: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self.reader_steps: dict[Any, int] = {}  # the current step of each reader
        self._last_request: tuple[set[int], int] | None = (
            None  # the shards that the last step needed soon, and how many in all
        )
        super().__init__(self._folder, "train", expected)

    def _open_set(self, folder: Path, manifest: Manifest, split: str) -> tuple[list[ShardRecord], TextTable]:
        texts = TextTable.open(folder, manifest.text_of(split), self.stored)
        size, records = self._recipe.features.rows_per_shard, []
        for index, first in enumerate(range(0, len(texts), size)):
            lengths = texts.lengths_N[first : first + size]
            rows, tokens = len(lengths), int(lengths.sum())
            max_bytes = tokens * token_bytes(
                self.stored.stored_dtype, self.stored.hidden_size, 1 + self.stored.auxiliary
            )
            max_bytes += ROW_OVERHEAD_BYTES * (rows + 1)
            records.append(ShardRecord(shard_name(split, index), split, index, rows, tokens, 0, max_bytes, ""))
        return records, texts

    def count_room(self, now: int) -> int:
        """Return how many shards the recipe has room for, whichever they are. `now` shards are needed at once, and
        there is room for no more unless the recipe sets a size in bytes. Raise PipelineError if that size is too small.
        """
        disk_bytes = self._recipe.features.disk_bytes
        if not disk_bytes:
            return now
        max_bytes_S = np.cumsum(sorted((record.bytes for record in self.records), reverse=True))
        if max_bytes_S[now - 1] > disk_bytes:
            raise PipelineError(
                f"features.disk_bytes={disk_bytes:,}, but the {now} shards that training may need at once take up to "
                f"{max_bytes_S[now - 1]:,}: raise it, or lower train.window or features.rows_per_shard"
            )
        return int(np.searchsorted(max_bytes_S, disk_bytes, side="right"))

    def request_shards(self, request: ShardRequest, notify: bool) -> None:
        """Request the shards that are read from now on. `notify` is set on the one rank that writes the request for the
        feeder.
        """
        soon = set(request.soon)
        latest = soon, len(request.shards)
        if latest == self._last_request:  # the order of the other shards is unchanged
            return
        self._last_request = latest
        for index in set(self._open).difference(soon):  # its space is freed when every rank has closed it
            del self._open[index]
        remove_copies(self._recipe, soon)
        if notify:
            write_shard_request(self._recipe, request)

    def _reader(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        begin, waited = time.monotonic(), 0.0
        while (reader := self._open.get(shard)) is None:
            if (record := self._find_record(shard)) and (reader := self._try_open(record, waited)) is not None:
                self._open[shard] = reader
                break
            time.sleep(POLL_SECONDS)
            before, waited = waited, time.monotonic() - begin
            if before // WARNING_SECONDS < waited // WARNING_SECONDS:
                request_file = shard_request_file(self._recipe)
                log.warning(
                    "training waits for shard %d: does preprocess/feed.py run, and see %s?", shard, request_file
                )
        return reader

    def _find_record(self, index: int) -> ShardRecord | None:
        shards = Manifest.load(self._recipe.paths.features).shards_of("train")
        return next((record for record in shards if record.index == index), None)

    def _try_open(self, record: ShardRecord, waited: float, tries: int = 2) -> pa.ipc.RecordBatchFileReader | None:
        """Return a reader of the shard, None if it was removed at this moment: the feeder makes it again. Raise
        PipelineError for a damaged shard, for one that cannot be fetched, and for one that a shared folder lacks for
        long: it may show a new file late.
        """
        path = self._folder / record.name
        try:
            if self._source is not None:
                with download_lock(self._folder):  # once for all ranks of this node
                    if find_damage(self._folder, record):
                        self._source.get(record.name, self._folder, record.sha256)
            elif reason := find_damage(self._folder, record):
                raise PipelineError(f"feature shard {path}: {reason}. Run again")
            return open_shard(self._folder, record, self.stored)
        except (PipelineError, OSError) as error:
            if record != self._find_record(record.index):
                return None
            may_come_late = not self._recipe.features.store and not (self._recipe.paths.features / record.name).exists()
            if may_come_late and waited < WARNING_SECONDS:
                return None
            if tries == 1:  # otherwise it was removed and made again
                raise PipelineError(f"feature shard {record.name}: {error}") from None
            time.sleep(POLL_SECONDS)
            return self._try_open(record, waited, tries - 1)


def remove_copies(recipe: Recipe, needed: set[int]) -> None:
    """Remove this node's copies of all shards but the needed ones. A rank that still reads one can continue."""
    names = {shard_name("train", index) for index in needed}
    for path in recipe.paths.shards.glob("features-train-*") if recipe.paths.copies else ():
        if path.name not in names:
            path.unlink(missing_ok=True)


Stores = tuple[FeatureStore, FeatureStore, FeatureStore | None]


def open_checked(recipe: Recipe, expected: FeatureSpec) -> Stores:
    """Return the dump's training and held-out dialogues, and the target's answers to calibration prompts if it has any.
    All ranks take part.

    Raise PipelineError, on all ranks, if a rank's host has a damaged shard, if there is nothing to train on, or if the
    recipe's keys require answers that are missing.
    """
    with fail_together():
        _require_intact(recipe)
        return open_stores(recipe, expected)


def _require_intact(recipe: Recipe) -> None:
    """Check the shards of this host; its ranks share the work."""
    number, count = local_rank_and_size()
    folder, is_copied = recipe.paths.shards, recipe.features.store or recipe.train.shards
    files = Manifest.load(folder).permanent_files(recipe.features.keep)  # fed shards are checked as they arrive
    files = files[number::count]
    for record, reason in zip(files, find_all_damage(folder, files), strict=True):
        if reason:
            command = f"jakiro verify {folder} --recipe RECIPE --repair"
            raise PipelineError(
                f"{file_kind(record)} {folder / record.name} on {socket.gethostname()}: {reason}. "
                + (
                    "Remove it and run again: it is fetched again"
                    if is_copied
                    else f"It can be dumped again: {command}"
                )
            )


def open_stores(recipe: Recipe, expected: FeatureSpec) -> Stores:
    folder = recipe.paths.shards
    manifest = Manifest.load(folder)
    if note := describe_engine_change(manifest.spec, expected):
        log.warning("%s: %s", folder, note)
    fed, heldout = recipe.features.keep == "window", FeatureStore(folder, "validation", expected)
    if not fed and manifest.missing_rows("train"):
        raise PipelineError(f"{folder} was dumped for features.keep='window': run the dump again, or set that")
    store = FedStore(recipe, expected) if fed else FeatureStore(folder, "train", expected)
    if not fed and manifest.total("train", "trained_tokens") == 0:
        raise PipelineError(
            f"{folder}: its {len(store)} training dialogues have no trained position: no token of theirs is the "
            "assistant's. Look at the chat template, and dump again into another folder"
        )
    if manifest.total(ANSWERS, "rows"):
        if manifest.answers_hash != answers_hash(recipe, manifest.spec.recipe):
            dump_provenance = read_recorded(recipe.paths.features)
            keys = (
                dump_provenance.differences(recipe, ANSWERS_KEYS)
                if dump_provenance
                else f"one of {', '.join(ANSWERS_KEYS)}"
            )
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
    """Check that every rank sees what rank 0 writes into `folder`, else raise PipelineError. All ranks take part."""

    def leave_mark() -> Path:
        mark = folder / f".seen-{uuid.uuid4().hex}.tmp"
        mark.touch()
        return mark

    mark = run_on_rank_0(leave_mark)
    with fail_together():
        if not mark.exists():
            raise PipelineError(
                f"{folder} on {socket.gethostname()} is not the one of rank 0, but resume states need an output that "
                "all nodes see"
            )
    mark.unlink(missing_ok=True)  # every rank has checked
