"""The feeder of a running training: it makes the train shards that training requests next, and removes read ones.

The requests are in a file that training's rank 0 writes (`pipeline.artifacts.features.ShardRequest`). A shard is a
function of the text table and its number, so one that is requested again is made again, byte for byte.

Shards lie in the run's folder or in the recipe's store; the run's manifest lists them in either case, and the store's
manifest lists only permanent files.

Guarantees: never do more train shards exist, or are being made, than training has room for; the manifest never lists a
shard that does not exist. In the end none is left.
"""

import time
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

from pipeline.artifacts.features import SHARDS_MADE, open_store, read_shard_request, shard_request_file
from pipeline.artifacts.provenance import read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import lock_folder
from pipeline.basics.progress import Progress
from pipeline.features.shards import Manifest, ShardRecord, find_all_damage, find_damage
from pipeline.features.text import TextTable
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import NO_TASK_YET
from preprocess.dump.driver import remove_unlisted, require_permanent_output, require_same_dump, worker_factory
from preprocess.dump.pool import run_tasks
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import EncodedDocument

POLL_SECONDS = 0.05  # between two reads of the request file


def feed(recipe: Recipe) -> list[str]:
    """Make shards until training requests no more; return the lines of the report. Raise PipelineError, also for a text
    without finite states: training counts on every text.
    """
    folder = recipe.paths.features
    require_permanent_output(folder)
    with lock_folder(folder, "dump"):
        manifest = Manifest.load(folder)
        require_same_dump(recipe, manifest.spec, partial(read_recorded, folder), folder)
        manifest.require_complete(folder)
        return _Feeder(recipe, folder, manifest).run()


def _require_none_rejected(record: ShardRecord) -> None:
    for doc_id, reason in record.rejected.items():
        raise PipelineError(
            f"dialogue {doc_id}: {reason}. A training that is fed while it runs reads all dialogues: remove this one "
            "from data.source, or set features.keep='all'"
        )


class _Feeder:
    def __init__(self, recipe: Recipe, folder: Path, manifest: Manifest):
        self._recipe, self._folder, self._manifest = recipe, folder, manifest
        self._store = open_store(recipe)
        for table in manifest.text.values() if self._store is not None else ():
            if find_damage(folder, table):
                self._store.get(table.name, folder, table.sha256)
        self._texts = TextTable.open(folder, manifest.text_of("train"), manifest.spec)
        self._in_progress = set[int]()
        self._finished = self._tokens = 0
        self._started = self._counted = 0.0  # time of the first shard's start; of the last count
        self._idle = 0.0  # seconds without work, as a mean over the workers

    def run(self) -> list[str]:
        shards = self._manifest.shards_of("train")
        if self._store is None:
            broken = [
                shard for shard, reason in zip(shards, find_all_damage(self._folder, shards), strict=True) if reason
            ]
        else:  # the store is not read in full: shards that a killed feeder left there are made again
            broken = shards if self._manifest.fed else []
        if broken and not self._manifest.fed:
            raise PipelineError(
                f"{self._folder} kept all shards, but {len(broken)} of them are missing or damaged, such as "
                f"{broken[0].name}. Dump them again: run preprocess/dump_features.py with features.keep='all'"
            )
        self._remove({shard.index for shard in broken})
        remove_unlisted(self._folder, self._manifest, self._store)
        factory = worker_factory(self._recipe, self._folder, self._manifest.spec)
        for record in self._manifest.shards_of("train"):
            _require_none_rejected(record)
        with Progress("feed", 0, "tokens") as progress:
            batches, tokens = "features.batch_tokens", attrgetter("tokens")
            for record in run_tasks(self._recipe, factory, self._tasks(), batches, progress, tokens):
                _require_none_rejected(record)
                self._add_idle_time()
                self._in_progress.discard(record.index)
                self._manifest.shards.append(record)
                self._manifest.save(self._folder)
                self._finished += 1
                self._tokens += record.tokens
        self._remove(self._available)
        shard_request_file(self._recipe).unlink(missing_ok=True)
        return [f"{self._finished} {SHARDS_MADE}, {len(self._available) or 'none'} left{self._describe_waiting()}"]

    def _add_idle_time(self) -> None:
        """Add the workers' idle time up to now. Call it before the set of shards in work changes."""
        now, workers = time.monotonic(), self._recipe.features.workers
        self._started = self._started or now
        self._idle += (now - (self._counted or now)) * max(1 - len(self._in_progress) / workers, 0)
        self._counted = now

    def _describe_waiting(self) -> str:
        self._add_idle_time()
        seconds = self._counted - self._started
        if not self._finished:
            return ""
        return f"; {self._tokens / (seconds - self._idle):,.0f} tokens/s, waiting {self._idle / seconds:.0%} for room"

    @property
    def _available(self) -> set[int]:
        return {record.index for record in self._manifest.shards_of("train")}

    def _tasks(self) -> Iterator[ShardTask]:
        """Yield the next task once there is room, else NOT_YET, until training requests no more."""
        while (request := read_shard_request(self._recipe)) is None or request.shards:
            if request is not None:
                surplus, index = request.next(self._available, self._in_progress)
                self._remove(surplus)
                if index is not None:
                    self._add_idle_time()
                    self._in_progress.add(index)
                    yield self._make_task(index)
                    continue
            time.sleep(POLL_SECONDS)
            yield NO_TASK_YET

    def _make_task(self, index: int) -> ShardTask:
        """Return the task of a shard, as the plan made it."""
        size, texts = self._recipe.features.rows_per_shard, self._texts
        rows = range(index * size, min((index + 1) * size, len(texts)))
        return ShardTask("train", index, [EncodedDocument(texts.doc_id(n), texts.ids(n), texts.mask(n)) for n in rows])

    def _remove(self, indices: set[int]) -> None:
        removed = [record for record in self._manifest.shards_of("train") if record.index in indices]
        if not removed or not self._manifest.fed:  # a dump that kept all shards keeps them
            return
        self._manifest.shards = [record for record in self._manifest.shards if record not in removed]
        self._manifest.save(self._folder)
        for record in removed:
            if self._store is not None:
                self._store.delete(record.name)
            else:
                (self._folder / record.name).unlink(missing_ok=True)
