"""A task of the dump or of a regeneration, the threads and progress of its worker, and the next try after a failure."""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar

import torch

from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.running.cores import read_omp_threads
from pipeline.running.crew import Heartbeat, WorkerFailure

S, T = TypeVar("S"), TypeVar("T")
KILLS_WORKERS = "kills_workers"  # reason for setting a dialogue aside
log = logging.getLogger(__name__)


def no_heartbeat(items: tuple[str, ...], done: int = 0) -> None:
    """Do nothing: the heartbeat of a worker outside of a pool."""


def set_threads(limit: int) -> None:
    """Set the number of threads that the calling thread computes with: `limit`, the recipe's cpus_per_worker, or the
    user's OMP_NUM_THREADS where that is less.
    """
    torch.set_num_threads(min(limit, read_omp_threads() or limit))


def map_ahead(make: Callable[[S], T], items: Iterable[S], threads: Executor, count: int) -> Iterator[tuple[S, T]]:
    """Yield ``(item, make(item))`` in order; the threads make the next `count` while the caller works on one."""
    making: deque[tuple[S, Future[T]]] = deque()
    for item in items:
        making.append((item, threads.submit(make, item)))
        if len(making) > count:
            first, future = making.popleft()
            yield first, future.result()
    for item, future in making:
        yield item, future.result()


class ActiveWork:
    """The batches in work of a worker's threads, and the finished amount of its task; the heartbeat names them all."""

    def __init__(self, heartbeat: Heartbeat):
        self._heartbeat, self._lock = heartbeat, Lock()
        self.now: list[tuple[str, ...]] = []
        self.done = 0

    def take(self, doc_ids: tuple[str, ...]) -> None:
        with self._lock:
            self.now.append(doc_ids)
        self.beat()

    def free(self, doc_ids: tuple[str, ...], done: int = 0) -> None:
        with self._lock:
            self.now.remove(doc_ids)
            self.done += done

    def begin(self) -> None:
        """Reset the finished amount at the start of a task."""
        self.done = 0

    def add(self, done: int) -> None:
        """Add to the finished amount; the next heartbeat reports it."""
        with self._lock:
            self.done += done

    @contextmanager
    def mark(self, doc_ids: tuple[str, ...]) -> Iterator[None]:
        """Name the batch during the block. After an error it stays named."""
        self.take(doc_ids)
        yield
        self.free(doc_ids)

    def beat(self) -> None:
        with self._lock:
            self._heartbeat(tuple(dict.fromkeys(doc_id for batch in self.now for doc_id in batch)), self.done)


def count_batches_in_flight(recipe: Recipe) -> int:
    """Return the number of batches that a worker forwards at a time: one for every GPU of a spread target, several for
    an engine, which batches requests by itself.
    """
    if recipe.target.engine != "transformers":
        return 4
    return max(1, int(recipe.features.gpus_per_worker or 0))


def longest_first(documents: Iterable[Any]) -> list[Any]:
    """Sort documents by length, the longest first, whatever order they come in."""
    return sorted(documents, key=lambda document: (-len(document.input_ids), document.doc_id))


@dataclass(frozen=True)
class ShardTask:
    """One output file: its dialogues, in the form in which the worker takes them."""

    split: str
    index: int
    documents: list[Any]  # each with a `doc_id`, and `content()`: everything else that its result depends on
    failures: list[tuple[str, ...]] = field(default_factory=list)  # ids of the batch in work of each failed worker
    suspects: tuple[str, ...] = ()  # ids of dialogues to be processed alone first: one of them kills workers
    set_aside: dict[str, str] = field(default_factory=dict)  # id -> reason: dialogues that are left out

    @property
    def in_order(self) -> list[Any]:
        """The documents in the order of the text table and the shard: longest first, so that similar lengths share a
        batch.
        """
        return longest_first(self.documents)

    @property
    def title(self) -> str:
        return f"shard {self.split}-{self.index}"

    @property
    def fingerprint(self) -> str:
        state = hashlib.sha256()
        for document in sorted(self.documents, key=lambda document: document.doc_id):
            state.update(f"{document.doc_id}\0".encode() + document.content())
        return state.hexdigest()[:16]

    def is_done(self, record: Any, recipe: Recipe) -> bool:
        """Return whether an earlier run finished the task. `record`: its record, which has the fingerprint `documents`,
        or None. Raise PipelineError when it was made from other dialogues: the source changed between two runs.
        """
        if record is not None and record.documents != self.fingerprint:
            raise PipelineError(
                f"{self.title} was made from other dialogues than {recipe.data.source} has now: the source "
                "changed since this job was started. Restore it, or use another output folder"
            )
        return record is not None


def next_try(task: ShardTask, failure: WorkerFailure, batch_key: str) -> ShardTask:
    """Return the task for the next try after a worker failed on the failure's items, which are dialogues. Raise
    PipelineError where no single dialogue is the cause.

    A single failure proves nothing (a node may fail at any time), so the first on a batch changes nothing. After the
    second its dialogues are processed one by one; a dialogue on which workers fail twice while it is alone is set
    aside. The same holds for exceptions: a dialogue may cause them. `batch_key`: the recipe's key for the size of a
    batch.
    """
    busy = failure.items
    if not busy:  # between two batches
        return task
    failed_batches = Counter(doc_id for batch in task.failures if len(batch) > 1 for doc_id in batch)
    if len(busy) > 1 and all(failed_batches[doc_id] > 1 for doc_id in busy):
        raise PipelineError(
            f"{task.title}: workers failed on the same dialogues again and again, the last one because: "
            f"{failure.reason.rstrip('.')}. Each of them succeeds alone, so the batch is too large: lower "
            f"{batch_key} and run the job again"
        )
    has_failed_alone = busy in task.failures
    task = replace(task, failures=[*task.failures, busy])
    if len(busy) > 1:
        return replace(task, suspects=tuple(doc_id for doc_id in busy if failed_batches[doc_id]))
    (doc_id,) = busy
    suspects = task.suspects[task.suspects.index(doc_id) :] if doc_id in task.suspects else busy
    if not has_failed_alone:
        return replace(task, suspects=suspects)
    log.warning("%s: dialogue set aside, since it kills workers: %s", task.title, doc_id)
    return replace(task, suspects=suspects[1:], set_aside={**task.set_aside, doc_id: KILLS_WORKERS})
