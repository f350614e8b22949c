"""Feeds a training while it runs: makes the train shards that it wants next, and removes others to make room.

What training wants is in a file that its rank 0 keeps (`pipeline.artifacts.features.Wanted`). A shard is a function of
the text table and its number, so one that is wanted again is made again, byte for byte.

Shards lie in the run's folder or in the recipe's store; the manifest that names them is the run's in either case, and
the store's names what lasts.

Guarantees: no more train shards lie there, or are being made, than training has room for; the manifest never names a
shard that is not there. In the end none is left.
"""

import time
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

from pipeline.artifacts.features import read_wanted, store_of, wanted_file
from pipeline.artifacts.provenance import recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive
from pipeline.basics.progress import Progress
from pipeline.features.shards import Manifest, ShardRecord, damage, damages
from pipeline.features.text import TextTable
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import NOT_YET
from preprocess.dump.driver import require_its_own, require_lasting, sweep, worker_of
from preprocess.dump.pool import records
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import Document

LOOK_SECONDS = 0.05  # between two looks at what is wanted


def feed(recipe: Recipe) -> list[str]:
    """Until training wants no more. Raises PipelineError, also for a text without finite states: training has counted
    on it.
    """
    folder = recipe.paths.features
    require_lasting(folder)
    with exclusive(folder, "dump"):
        manifest = Manifest.load(folder)
        require_its_own(recipe, manifest.spec, partial(recorded, folder), folder)
        manifest.require_complete(folder)
        return _Feeder(recipe, folder, manifest).run()


def _require_all(record: ShardRecord) -> None:
    for doc_id, reason in record.rejected.items():
        raise PipelineError(
            f"dialogue {doc_id}: {reason}. A training that is fed while it runs takes all dialogues: take this out of "
            "data.source, or set features.keep='all'"
        )


class _Feeder:
    def __init__(self, recipe: Recipe, folder: Path, manifest: Manifest):
        self._recipe, self._folder, self._manifest = recipe, folder, manifest
        self._store = store_of(recipe)
        for table in manifest.text.values() if self._store is not None else ():
            if damage(folder, table):
                self._store.get(table.name, folder, table.sha256)
        self._texts = TextTable.open(folder, manifest.text_of("train"), manifest.spec)
        self._making = set[int]()
        self._made = self._tokens = 0
        self._began = self._counted = self._idle = 0.0  # when the first shard was begun; up to when; seconds a worker

    def run(self) -> list[str]:
        shards = self._manifest.of("train")
        if self._store is None:
            broken = [shard for shard, why in zip(shards, damages(self._folder, shards), strict=True) if why]
        else:  # nobody reads them all back: what a feeder that was killed left there is made again
            broken = shards if self._manifest.fed else []
        if broken and not self._manifest.fed:
            raise PipelineError(
                f"{self._folder} kept all shards, but {len(broken)} of them are missing or damaged, as "
                f"{broken[0].name} is. Dump them again: run preprocess/dump_features.py with features.keep='all'"
            )
        self._remove({shard.index for shard in broken})
        sweep(self._folder, self._manifest, self._store)
        make = worker_of(self._recipe, self._folder, self._manifest.spec)
        for record in self._manifest.of("train"):
            _require_all(record)
        with Progress("feed", 0, "tokens") as progress:
            batches, tokens = "features.batch_tokens", attrgetter("tokens")
            for record in records(self._recipe, make, self._tasks(), batches, progress, tokens):
                _require_all(record)
                self._count()
                self._making.discard(record.index)
                self._manifest.shards.append(record)
                self._manifest.save(self._folder)
                self._made += 1
                self._tokens += record.tokens
        self._remove(self._held)
        wanted_file(self._recipe).unlink(missing_ok=True)
        return [f"{self._made} train shards made, {len(self._held) or 'none'} left{self._waited()}"]

    def _count(self) -> None:
        """The time that workers had nothing to make, up to now: what is being made is about to change."""
        now, workers = time.monotonic(), self._recipe.features.workers
        self._began = self._began or now
        self._idle += (now - (self._counted or now)) * max(1 - len(self._making) / workers, 0)
        self._counted = now

    def _waited(self) -> str:
        self._count()
        seconds = self._counted - self._began
        if not self._made:
            return ""
        return f"; {self._tokens / (seconds - self._idle):,.0f} tokens/s, waiting {self._idle / seconds:.0%} for room"

    @property
    def _held(self) -> set[int]:
        return {record.index for record in self._manifest.of("train")}

    def _tasks(self) -> Iterator[ShardTask]:
        """The next one where there is room."""
        while (wanted := read_wanted(self._recipe)) is None or wanted.shards:
            if wanted is not None:
                gone, index = wanted.next(self._held, self._making)
                self._remove(gone)
                if index is not None:
                    self._count()
                    self._making.add(index)
                    yield self._task(index)
                    continue
            time.sleep(LOOK_SECONDS)
            yield NOT_YET

    def _task(self, index: int) -> ShardTask:
        """As the plan made it."""
        size, texts = self._recipe.features.rows_per_shard, self._texts
        rows = range(index * size, min((index + 1) * size, len(texts)))
        return ShardTask("train", index, [Document(texts.doc_id(n), texts.ids(n), texts.mask(n)) for n in rows])

    def _remove(self, indices: set[int]) -> None:
        gone = [record for record in self._manifest.of("train") if record.index in indices]
        if not gone or not self._manifest.fed:  # a dump that kept all
            return
        self._manifest.shards = [record for record in self._manifest.shards if record not in gone]
        self._manifest.save(self._folder)
        for record in gone:
            if self._store is not None:
                self._store.delete(record.name)
            else:
                (self._folder / record.name).unlink(missing_ok=True)
