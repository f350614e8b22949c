"""One worker of the dump: a target and the shards it writes. A plain class; `pool.py` makes a Ray actor of it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import torch

from pipeline.artifacts.features import store_of
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines import identity_of, open_source
from pipeline.features.schema import FeatureSpec, StoredRow, row_dtype, stored_columns
from pipeline.features.shards import ANSWERS, ShardRecord, text_name, write_shard
from pipeline.features.source import Answer, FeatureSource, Prompt
from pipeline.features.text import write_text_table
from pipeline.recipe.recipe import Recipe
from pipeline.running.cores import asked_threads
from pipeline.running.crew import Heartbeat
from preprocess.dump.compare import Sample, require_alike
from preprocess.dump.task import ShardTask, in_flight, longest_first, nobody_listens

S, T = TypeVar("S"), TypeVar("T")
NOT_ANSWERED = "not_answered"
ASKED_AT_ONCE = 64  # prompts, of an engine that batches by itself


@dataclass(frozen=True)
class Document:
    """An encoded dialogue on its way to a worker."""

    doc_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states_TSD: torch.Tensor | None = None  # where the target's answer brought them

    def content(self) -> bytes:
        ids, mask = self.input_ids.astype("<i4"), self.loss_mask.astype("u1")
        return f"{len(ids)}\0".encode() + ids.tobytes() + mask.tobytes()


def length_sorted_batches(documents: list[Document], batch_tokens: int) -> Iterator[list[Document]]:
    """Longest first; a batch holds at most `batch_tokens` padded tokens (or one dialogue that is longer)."""
    batch: list[Document] = []
    for document in longest_first(documents):
        if batch and len(batch[0].input_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def ahead(make: Callable[[S], T], items: Iterable[S], threads: Executor, count: int) -> Iterator[tuple[S, T]]:
    """``(item, make(item))`` in order; the next `count` are made in the threads while the caller is busy with one."""
    making: deque[tuple[S, Future[T]]] = deque()
    for item in items:
        making.append((item, threads.submit(make, item)))
        if len(making) > count:
            first, future = making.popleft()
            yield first, future.result()
    for item, future in making:
        yield item, future.result()


def to_host(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event | None]:
    """The tensors, of one device, on the host once the event has happened (None: they are there)."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors, None
    # Into pinned memory, which torch keeps for the batches to come.
    sent = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    event = torch.Event(device, blocking=True)  # whoever waits sleeps
    event.record(torch.accelerator.current_stream(device))
    return sent, event


@dataclass(frozen=True)
class _Stored:
    """A batch in the form in which its shard stores it."""

    doc_ids: tuple[str, ...]
    columns: list[list[torch.Tensor]]  # of each dialogue
    finite_B: torch.Tensor
    event: torch.Event | None  # of `to_host`


def take_threads(most: int) -> None:
    """The calling thread computes with so many: the recipe's cpus_per_worker, or the user's OMP_NUM_THREADS where that
    is fewer.
    """
    torch.set_num_threads(min(most, asked_threads() or most))


class FeatureWorker:
    """Runs the frozen target; its tensors go to its own shards only."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        spec: FeatureSpec,
        heartbeat: Heartbeat = nobody_listens,
        sample: Sample | None = None,
    ):
        """`sample`: states that an engine's are compared with before it works."""
        self._sample = sample
        self._recipe, self._folder, self._spec, self._settings = recipe, folder, spec, recipe.features
        self._heartbeat, self._store = heartbeat, store_of(recipe)
        self._computing = ThreadPoolExecutor(
            in_flight(recipe), initializer=take_threads, initargs=(self._settings.cpus_per_worker,)
        )
        self._busy: list[tuple[str, ...]] = []  # the batches that are being forwarded
        self._busy_lock = Lock()

    def ready(self) -> None:
        """Loads the target."""
        take_threads(self._settings.cpus_per_worker)
        if self._sample:
            require_alike(self._source, self._sample, self._recipe.target)
        _ = self._source

    @cached_property
    def _source(self) -> FeatureSource:
        here, spec = identity_of(self._recipe.target, self._spec.auxiliary_numbers), self._spec
        if here.engine != "transformers" and here.version != spec.engine_version:
            raise PipelineError(
                f"this node has {here.engine} {here.version}, but the dump is one of {spec.engine_version}: install "
                "the same version on all nodes, and set VLLM_BATCH_INVARIANT on all or on none"
            )
        source = open_source(self._recipe.target, self._spec.auxiliary_numbers)
        if here.engine != "transformers" and self._recipe.data.max_length > source.positions:
            raise PipelineError(
                f"data.max_length={self._recipe.data.max_length}, but {source.identity.engine} takes texts of at most "
                f"{source.positions} tokens here: lower it, or raise target.engine_options.max_model_len"
            )
        return source

    def close(self) -> None:
        self._source.close()

    def work(self, task: ShardTask) -> ShardRecord:
        """Writes the task's shard: the same bytes whoever writes it, and however often."""
        for document in task.documents:
            if document.doc_id in task.suspects:
                self._arrived(self._compute([document]))
        rejected, text = dict(task.set_aside), None
        made = task
        if task.split == ANSWERS:  # its texts are the target's own, so they are not in a table yet
            made = replace(task, documents=self._answered(task, rejected))
            text = write_text_table(self._folder / text_name(task.split, task.index), made.in_order, self._spec)
        rows = self.rows(made, rejected)
        record = write_shard(self._folder, task.split, task.index, self._spec, rows, rejected)
        if self._store is not None:
            self._heartbeat(())  # what goes wrong from here on is no dialogue's fault
            for name in (record.name, *([text.name] if text else [])):
                self._store.put(self._folder / name)
                (self._folder / name).unlink()
        return replace(record, documents=task.fingerprint, text=text)

    def _answered(self, task: ShardTask, rejected: dict[str, str]) -> list[Document]:
        """The prompts with the target's greedy answers behind them; the mask is on the answers. What cannot be answered
        stays a prompt, and is entered into `rejected`.
        """
        sampling = Sampling(self._settings.answer_tokens, self._source.stop_ids)

        def answered(document: Document) -> Document:
            answer, doc_ids = Answer([]), (document.doc_id,)
            if document.doc_id not in rejected:
                self._take(doc_ids)
                try:
                    prompt, capture = Prompt(document.input_ids.tolist()), self._source.one_pass
                    (answer,) = self._source.answers([prompt], sampling, capture, self._beat, plainly=True)
                except NoAnswer:
                    rejected[document.doc_id] = NOT_ANSWERED
                self._free(doc_ids)
            ids = np.concatenate([document.input_ids, np.array(answer.tokens, np.int32)])
            mask = np.arange(len(ids)) >= len(document.input_ids)
            return Document(document.doc_id, ids, mask.astype(np.uint8), answer.states_TSD)

        if not self._source.one_pass:  # this thread computes
            return list(map(answered, task.documents))
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            return list(threads.map(answered, task.documents))

    def _forward(self, batch: list[Document]) -> list[torch.Tensor]:
        """``states_TSD`` of each dialogue, in the target's dtype, on its device."""
        known = [document.states_TSD for document in batch]
        rest = self._source.states([one.input_ids for one in batch if one.states_TSD is None])
        return [next(rest) if states_TSD is None else states_TSD for states_TSD in known]

    def _compute(self, batch: list[Document]) -> _Stored:
        """The batch's states as its shard stores them; of an accelerator they are still on their way when it returns,
        so that the next batch's forward follows at once. Says first what this worker is busy with.
        """
        doc_ids = tuple(document.doc_id for document in batch)
        self._take(doc_ids)
        found = [self._stored(states_TSD) for states_TSD in self._forward(batch)]
        finite_B = torch.stack([finite for _, finite in found])
        sent, event = to_host([finite_B, *(column for columns, _ in found for column in columns)])
        rest = iter(sent[1:])
        stored = _Stored(doc_ids, [[next(rest) for _ in columns] for columns, _ in found], sent[0], event)
        if event is None:
            self._free(doc_ids)
        return stored

    def _take(self, doc_ids: tuple[str, ...]) -> None:
        with self._busy_lock:
            self._busy.append(doc_ids)
        self._beat()

    def _beat(self) -> None:
        """Names all that is worked on."""
        with self._busy_lock:
            self._heartbeat(tuple(doc_id for busy in self._busy for doc_id in busy))

    def _free(self, doc_ids: tuple[str, ...]) -> None:
        with self._busy_lock:
            self._busy.remove(doc_ids)

    def _arrived(self, stored: _Stored) -> _Stored:
        """What went wrong on an accelerator is raised here."""
        if stored.event is not None:
            stored.event.synchronize()
            self._free(stored.doc_ids)
        return stored

    def _stored(self, states_TSD: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """``(columns of the shard, whether all is finite)`` of a dialogue, on its device: dialogue by dialogue, so that
        what float8 is made of takes little of its memory.
        """
        states_TSD = states_TSD.to(row_dtype(self._spec.stored_dtype))
        parts = [states_TSD[:, 0]] + ([states_TSD[:, 1:]] if self._spec.auxiliary else [])
        return stored_columns(parts, self._spec.stored_dtype), states_TSD.isfinite().all()

    def rows(self, task: ShardTask, rejected: dict[str, str]) -> Iterator[StoredRow]:
        """The task's dialogues as the shard holds them, all but those in `rejected`; what is not finite is entered
        there. Shard k's are the k-th `rows_per_shard` rows of the table.
        """
        first = task.index * self._settings.rows_per_shard
        numbers = {document.doc_id: first + place for place, document in enumerate(task.in_order)}
        documents = [document for document in task.documents if document.doc_id not in rejected]
        batches = length_sorted_batches(documents, self._settings.batch_tokens)
        for batch, stored in ahead(self._compute, batches, self._computing, in_flight(self._recipe)):
            finite_B = self._arrived(stored).finite_B.tolist()
            for document, columns, finite in zip(batch, stored.columns, finite_B, strict=True):
                if finite:
                    trained = int(document.loss_mask.sum())
                    yield StoredRow(numbers[document.doc_id], len(document.input_ids), trained, columns)
                else:
                    rejected[document.doc_id] = "features_not_finite"
