"""One worker: a target and the shards it writes. A plain class; `driver.py` makes a Ray actor of it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pipeline.features.schema import FeatureSpec, Row
from pipeline.features.shards import ShardRecord, write_shard
from pipeline.recipe import Recipe
from pipeline.target import DTYPES, Target


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


class FeatureWorker:
    """Runs the frozen target; its tensors go to its own shards only."""

    def __init__(self, recipe: Recipe, folder: Path, spec: FeatureSpec):
        self._recipe, self._folder, self._spec, self._settings = recipe, folder, spec, recipe.features

    def ready(self) -> None:
        """Loads the target. A call of its own: what goes wrong in a Ray actor's constructor loses its message."""
        torch.set_num_threads(self._settings.cpus_per_worker)
        _ = self._target

    @cached_property
    def _target(self) -> Target:
        return Target(self._recipe.target, self._recipe.target.dtype)

    def dump(self, task: ShardTask) -> ShardRecord:
        """Writes the task's shard: the same bytes whoever writes it, and however often."""
        rejected: dict[str, str] = {}
        rows = self._rows(task.documents, rejected)
        record = write_shard(self._folder, task.split, task.index, self._spec, rows, rejected)
        return replace(record, documents=task.fingerprint)

    def _rows(self, documents: list[Document], rejected: dict[str, str]) -> Iterator[Row]:
        stored = DTYPES[self._spec.stored_dtype]
        for batch in length_sorted_batches(documents, self._settings.batch_tokens):
            tokens = torch.zeros(len(batch), len(batch[0].input_ids), dtype=torch.long)
            for b, document in enumerate(batch):
                tokens[b, : len(document.input_ids)] = torch.from_numpy(document.input_ids.astype(np.int64))
            hidden_BTD = self._target.capture(tokens).to(stored).cpu()
            for b, document in enumerate(batch):
                hidden_TD = hidden_BTD[b, : len(document.input_ids)]
                if not hidden_TD.isfinite().all():
                    rejected[document.doc_id] = "features_not_finite"
                    continue
                yield Row(document.doc_id, document.input_ids, document.loss_mask, hidden_TD)
