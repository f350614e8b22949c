"""One worker: a target and the shards it writes. A plain class; `pool.py` makes a Ray actor of it."""

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from pipeline.features.schema import FeatureSpec, Row, row_dtype
from pipeline.features.shards import ShardRecord, write_shard
from pipeline.recipe import Recipe
from pipeline.target import Target

T = TypeVar("T")
BEATS = ".beats"  # folder of the workers' signs of life, gone with the job
KILLS_WORKERS = "kills_workers"


@dataclass(frozen=True)
class Document:
    """An encoded dialogue on its way to a worker."""

    doc_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class ShardTask:
    split: str
    index: int
    documents: list[Document]
    suspects: tuple[str, ...] = ()  # ids of dialogues to be forwarded alone first: one of them kills workers
    set_aside: dict[str, str] = field(default_factory=dict)  # id -> reason: dialogues that are not forwarded

    @property
    def fingerprint(self) -> str:
        """Of the dialogues as they are encoded."""
        state = hashlib.sha256()
        for document in sorted(self.documents, key=lambda document: document.doc_id):
            ids, mask = document.input_ids.astype("<i4"), document.loss_mask.astype("u1")
            state.update(f"{document.doc_id}\0{len(ids)}\0".encode() + ids.tobytes() + mask.tobytes())
        return state.hexdigest()[:16]


def length_sorted_batches(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Longest first; a batch holds at most `batch_tokens` padded tokens (or one dialogue that is longer)."""
    batch: list[Document] = []
    for document in sorted(documents, key=lambda d: (-len(d.input_ids), d.doc_id)):
        if batch and len(batch[0].input_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def one_ahead(items: Iterator[T], thread: Executor) -> Iterator[T]:
    """The same items; the next one is made in the thread while the caller is busy with this one."""
    upcoming = thread.submit(next, items, None)
    while (item := upcoming.result()) is not None:
        upcoming = thread.submit(next, items, None)
        yield item


def beat_path(folder: Path, task: ShardTask) -> Path:
    return folder / BEATS / f"{task.split}-{task.index:06d}.json"


def read_beat(folder: Path, task: ShardTask) -> str:
    """The task's last sign of life, "" before the first. May be torn: it is written without ceremony."""
    try:
        return beat_path(folder, task).read_text()
    except OSError:
        return ""


class FeatureWorker:
    """Runs the frozen target; its tensors go to its own shards only."""

    def __init__(self, recipe: Recipe, folder: Path, spec: FeatureSpec):
        self._recipe, self._folder, self._spec, self._settings = recipe, folder, spec, recipe.features
        self._computing = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(self._settings.cpus_per_worker,)
        )

    def ready(self) -> None:
        """Loads the target. A call of its own: what goes wrong in a Ray actor's constructor loses its message."""
        torch.set_num_threads(self._settings.cpus_per_worker)
        _ = self._target

    @cached_property
    def _target(self) -> Target:
        return Target(self._recipe.target, self._recipe.target.dtype)

    def dump(self, task: ShardTask) -> ShardRecord:
        """Writes the task's shard: the same bytes whoever writes it, and however often."""
        (self._folder / BEATS).mkdir(parents=True, exist_ok=True)
        for document in task.documents:
            if document.doc_id in task.suspects:
                self._forward(task, [document]).cpu()  # waits: the next beat must not come before this one is through
        rejected = dict(task.set_aside)
        rows = self._rows(task, rejected)
        record = write_shard(self._folder, task.split, task.index, self._spec, rows, rejected)
        return replace(record, documents=task.fingerprint)

    def _forward(self, task: ShardTask, batch: list[Document]) -> torch.Tensor:
        """``hidden_BTD`` of a batch, in the target's dtype, on its device. Says first what it is busy with."""
        beat = {"time": time.monotonic(), "documents": [document.doc_id for document in batch]}
        beat_path(self._folder, task).write_text(json.dumps(beat))
        tokens = torch.zeros(len(batch), len(batch[0].input_ids), dtype=torch.long)
        for b, document in enumerate(batch):
            tokens[b, : len(document.input_ids)] = torch.from_numpy(document.input_ids.astype(np.int64))
        return self._target.capture(tokens)

    def _computed(self, task: ShardTask) -> Iterator[tuple[list[Document], torch.Tensor]]:
        """Each batch with its hidden states, in the stored dtype, on the CPU."""
        stored = row_dtype(self._spec.stored_dtype)
        documents = [document for document in task.documents if document.doc_id not in task.set_aside]
        for batch in length_sorted_batches(documents, self._settings.batch_tokens):
            yield batch, self._forward(task, batch).to(stored).cpu()

    def _rows(self, task: ShardTask, rejected: dict[str, str]) -> Iterator[Row]:
        for batch, hidden_BTD in one_ahead(self._computed(task), self._computing):
            for b, document in enumerate(batch):
                hidden_TD = hidden_BTD[b, : len(document.input_ids)]
                if not hidden_TD.isfinite().all():
                    rejected[document.doc_id] = "features_not_finite"
                    continue
                yield Row(document.doc_id, document.input_ids, document.loss_mask, hidden_TD)
