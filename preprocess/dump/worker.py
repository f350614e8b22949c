"""One worker of the dump: a target and the shards it writes. It is a plain class; `pool.py` makes a Ray actor of it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.artifacts.features import open_store
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines import open_source, source_identity
from pipeline.features.schema import FP8, FeatureSpec, Float8States, StoredRow, row_dtype, stored_columns
from pipeline.features.shards import ANSWERS, ShardRecord, shard_name, text_name, write_shard
from pipeline.features.source import Answer, FeatureSource, GenerationPrompt
from pipeline.features.text import write_text_table
from pipeline.lm.chat import Encoded, Unusable
from pipeline.lm.config import BATCH_INVARIANT
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.compare import Sample, require_matching_states
from preprocess.dump.interview import MAX_CONCURRENT_PROMPTS, NOT_ANSWERED, AnsweredDialogue, AnsweredPrompt, Interview
from preprocess.dump.task import (
    ActiveWork,
    ShardTask,
    count_batches_in_flight,
    longest_first,
    map_ahead,
    no_heartbeat,
    set_threads,
)
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import encode_sequences

RENDERED_OTHERWISE = "rendered_otherwise"  # the rendered dialogue has other tokens than the target's answer
FURTHER_SEQUENCES = "further_sequences"


@dataclass(frozen=True)
class EncodedDocument:
    """An encoded dialogue on its way to a worker."""

    doc_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states_TSD: torch.Tensor | Float8States | None = None  # where they came with the target's answer
    answered_dialogue: str | None = None  # id of the dialogue, where this is the target's answer to it
    counted_tokens: int = 0  # tokens counted in the progress already: answers are counted as the target gives them

    def content(self) -> bytes:
        ids, mask = self.input_ids.astype("<i4"), self.loss_mask.astype("u1")
        return f"{len(ids)}\0".encode() + ids.tobytes() + mask.tobytes()


def length_sorted_batches(documents: list[EncodedDocument], batch_tokens: int) -> Iterator[list[EncodedDocument]]:
    """Yield batches, longest first, of at most `batch_tokens` padded tokens (or one dialogue that is longer)."""
    batch: list[EncodedDocument] = []
    for document in longest_first(documents):
        if batch and len(batch[0].input_ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def to_host(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event | None]:
    """Copy tensors of one device to the host. They are complete after the event; None: they are complete now."""
    device = tensors[0].device
    if device.type == "cpu":
        return tensors, None
    # torch keeps the pinned memory for later batches.
    on_host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    event = torch.Event(device, blocking=True)  # a waiting thread sleeps
    event.record(torch.accelerator.current_stream(device))
    return on_host, event


@dataclass(frozen=True)
class _StoredBatch:
    """A batch in the format of its shard."""

    doc_ids: tuple[str, ...]
    tokens: int  # tokens that are not in the progress yet
    columns: list[list[torch.Tensor]]  # of each dialogue
    finite_B: torch.Tensor
    event: torch.Event | None  # of `to_host`


@dataclass
class TaskResult:
    """Accepted texts and rejections of one task."""

    rejected: dict[str, str]
    texts: list[EncodedDocument] = field(default_factory=list)  # in the order of their rows
    edits: Counter = field(default_factory=Counter)


def align_to_target_tokens(doc_id: str, encoded: Encoded, answered: list[AnsweredPrompt]) -> EncodedDocument | None:
    """Return a dialogue's sequence cut to the tokens that the target read and generated, with their states where these
    were captured; None where the target read other tokens: the tokens of an answer may differ from those of its text.

    The template's tokens after the last answer are left out: no states were computed there. The answer's last token has
    no state either (it is 0); where an answer was cut, the rendering may have another token there, which is dropped,
    too.
    """
    ids, mask = encoded.input_ids, encoded.loss_mask
    for prompt in reversed(answered):
        length = min(len(ids), len(prompt.tokens))
        with_state = min(length, len(prompt.tokens) - 1)
        if length > with_state and ids[with_state] != prompt.tokens[with_state]:
            length = with_state
        answer_begins = np.diff(mask[max(with_state, length) - 1 :].astype(int)) > 0  # another answer begins after it
        if ids[:with_state].tolist() == prompt.tokens[:with_state] and mask[:length].any() and not answer_begins.any():
            return EncodedDocument(doc_id, ids[:length], mask[:length], _first_states(prompt.states_TSD, length))
    return None


def _first_states(states_TSD: torch.Tensor | Float8States | None, length: int) -> torch.Tensor | Float8States | None:
    return None if states_TSD is None else states_TSD[:length]


class FeatureWorker:
    """A worker that runs the frozen target; its tensors go to its own shards only."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        spec: FeatureSpec,
        heartbeat: Heartbeat = no_heartbeat,
        sample: Sample | None = None,
    ):
        """`sample`: states with which an engine's states are compared before it works."""
        self._sample = sample
        self._state_error: float | None = None
        self._recipe, self._folder, self._spec, self._settings = recipe, folder, spec, recipe.features
        self._float8 = spec.stored_dtype == FP8
        self._active_work, self._store = ActiveWork(heartbeat), open_store(recipe)
        self._threads = ThreadPoolExecutor(
            count_batches_in_flight(recipe), initializer=set_threads, initargs=(self._settings.cpus_per_worker,)
        )

    def ready(self) -> None:
        """Load the target."""
        set_threads(self._settings.cpus_per_worker)
        if self._sample:
            self._state_error = require_matching_states(self._source, self._sample, self._recipe.target)
        _ = self._source
        if self._recipe.data.answers == "target":
            _ = self._interview.longest_prompt

    @cached_property
    def _source(self) -> FeatureSource:
        identity, spec = source_identity(self._recipe.target, self._spec.auxiliary_numbers), self._spec
        if identity.engine != "transformers" and identity.version != spec.engine_version:
            raise PipelineError(
                f"this node has {identity.engine} {identity.version}, but the dump is one of {spec.engine_version}: "
                f"install the same version on all nodes, and set {BATCH_INVARIANT} on all or on none"
            )
        source = open_source(self._recipe.target, self._spec.auxiliary_numbers)
        if identity.engine != "transformers" and self._recipe.data.max_length > source.positions:
            raise PipelineError(
                f"data.max_length={self._recipe.data.max_length}, but {source.identity.engine} takes texts of at most "
                f"{source.positions} tokens here: lower it, or raise target.engine_options.max_model_len"
            )
        return source

    def close(self) -> None:
        self._source.close()

    @cached_property
    def _interview(self) -> Interview:
        return Interview(self._recipe, self._source, self._active_work, lambda _, answer: len(answer.tokens))

    def work(self, task: ShardTask) -> ShardRecord:
        """Write the task's shard: the same bytes for every worker and every try (with an engine that batches by itself,
        up to the states' rounding). A shard whose texts are the target's own has a table of them.
        """
        for name in (shard_name(task.split, task.index), text_name(task.split, task.index)):
            for leftover in self._folder.glob(f".{name}.*.tmp"):  # of a worker that failed
                leftover.unlink(missing_ok=True)
        self._active_work.begin()
        for document in task.documents:
            if document.doc_id in task.suspects:
                is_encoded = isinstance(document, EncodedDocument)
                for batch in [[document]] if is_encoded else self._answer_dialogues([document], TaskResult({})):
                    self._wait_for(self._compute(batch))
        self._active_work.begin()  # the suspects' progress does not count
        result, first = TaskResult(dict(task.set_aside)), 0
        if task.split == ANSWERS:
            result.texts = longest_first(self._answer_prompts(task, result.rejected))
            batches = self.batches(result.texts, result.rejected)
        elif self._recipe.data.answers == "target":
            batches = self._answer_dialogues(task.documents, result)
        else:
            result.texts, first = task.in_order, task.index * self._settings.rows_per_shard
            batches = self.batches(result.texts, result.rejected)
        rows = self.rows(batches, result.texts, result.rejected, first)
        record = write_shard(self._folder, task.split, task.index, self._spec, rows, result.rejected)
        edits = dict(sorted(result.edits.items()))
        record = replace(record, documents=task.fingerprint, edits=edits, off=self._state_error)
        if task.split == ANSWERS or self._recipe.data.answers == "target":
            name = text_name(task.split, task.index)
            record = replace(record, text=write_text_table(self._folder / name, result.texts, self._spec))
        if self._store is not None:
            self._active_work.beat()  # without items: an error from here on is no dialogue's fault
            for file in record.files:
                self._store.put(self._folder / file.name)
                (self._folder / file.name).unlink()
        return record

    def batches(self, documents: list[EncodedDocument], rejected: dict[str, str]) -> Iterator[list[EncodedDocument]]:
        """Yield batches of the documents that are not rejected, for `rows`."""
        remaining = [document for document in documents if document.doc_id not in rejected]
        return length_sorted_batches(remaining, self._settings.batch_tokens)

    def _answer_dialogues(self, dialogues: list[Dialogue], result: "TaskResult") -> Iterator[list[EncodedDocument]]:
        """Yield batches of the dialogues that the target answers, as its answers come, and add them to `result`."""
        remaining = [dialogue for dialogue in dialogues if dialogue.doc_id not in result.rejected]
        for finished in self._interview.answer_all(remaining, capture=True):
            documents = []
            for conversation in finished:
                try:
                    documents += self._encode(conversation, result.edits)
                except Unusable as reason:
                    result.rejected[conversation.doc_id] = str(reason)
            for batch in self.batches(documents, {}):
                result.texts += [replace(document, states_TSD=None) for document in batch]
                yield batch

    def _encode(self, conversation: AnsweredDialogue, edits: Counter) -> list[EncodedDocument]:
        """Return the documents of an answered dialogue. Raise Unusable."""
        if not conversation.answers:
            raise Unusable(conversation.end)
        turns, keywords = conversation.messages, conversation.keywords
        dialogue = Dialogue(conversation.doc_id, turns, (), conversation.tools, keywords=keywords)
        with self._interview.tokenizer_lock:
            sequences, sequence_edits = encode_sequences(self._source.tokenizer, dialogue, self._recipe.data)
        edits.update([*conversation.edits, *filter(None, [conversation.end]), *sequence_edits])
        edits.update({FURTHER_SEQUENCES: len(sequences) - 1} if len(sequences) > 1 else {})
        documents, uncounted = [], conversation.tokens
        for doc_id, encoded in sequences:
            document = align_to_target_tokens(doc_id, encoded, conversation.answered_prompts)
            edits.update([] if document else [RENDERED_OTHERWISE])
            document = document or EncodedDocument(doc_id, encoded.input_ids, encoded.loss_mask)
            counted_tokens = min(uncounted, len(document.input_ids))
            uncounted -= counted_tokens
            documents.append(replace(document, answered_dialogue=conversation.doc_id, counted_tokens=counted_tokens))
        return documents

    def _answer_prompts(self, task: ShardTask, rejected: dict[str, str]) -> list[EncodedDocument]:
        """Return the prompts followed by the target's greedy answers; the mask is on the answers. A prompt that cannot
        be answered stays as it is, and is added to `rejected`.
        """
        sampling = Sampling(self._settings.answer_tokens, self._source.stop_ids)

        def answer_prompt(document: EncodedDocument) -> EncodedDocument:
            answer = Answer([])
            if document.doc_id not in rejected:
                with self._active_work.mark((document.doc_id,)), suppress(NoAnswer):
                    prompt, capture = GenerationPrompt(document.input_ids.tolist()), self._source.one_pass
                    (answer,) = self._source.answers(
                        [prompt], sampling, capture, self._active_work.beat, plainly=True, float8=self._float8
                    )
                if not answer.tokens:
                    rejected[document.doc_id] = NOT_ANSWERED
            self._active_work.add(len(answer.tokens))
            ids = np.concatenate([document.input_ids, np.array(answer.tokens, np.int32)])
            mask = np.arange(len(ids)) >= len(document.input_ids)
            return replace(
                document,
                input_ids=ids,
                loss_mask=mask.astype(np.uint8),
                states_TSD=answer.states_TSD,
                counted_tokens=len(answer.tokens),
            )

        if not self._source.one_pass:  # this thread computes
            return list(map(answer_prompt, task.documents))
        with ThreadPoolExecutor(MAX_CONCURRENT_PROMPTS) as threads:
            return list(threads.map(answer_prompt, task.documents))

    def _forward(self, batch: list[EncodedDocument]) -> list[torch.Tensor] | list[Float8States]:
        """Return ``states_TSD`` of each dialogue on the target's device, in float8 or in the target's dtype."""
        captured: list[Any] = [document.states_TSD for document in batch]
        texts = [document.input_ids for document in batch if document.states_TSD is None]
        computed: Any = self._source.float8_states(texts) if self._float8 else self._source.states(texts)
        return [next(computed) if states_TSD is None else states_TSD for states_TSD in captured]

    def _compute(self, batch: list[EncodedDocument]) -> _StoredBatch:
        """Return the batch's states in the format of its shard; from an accelerator they may still be copied when this
        returns, so that the next batch's forward follows at once. First report the batch in the heartbeat.
        """
        doc_ids = tuple(document.answered_dialogue or document.doc_id for document in batch)
        self._active_work.take(doc_ids)
        rows = [self._to_columns(states_TSD) for states_TSD in self._forward(batch)]
        finite_B = torch.stack([finite for _, finite in rows])
        on_host, event = to_host([finite_B, *(column for columns, _ in rows for column in columns)])
        tensors = iter(on_host[1:])
        tokens = sum(len(document.input_ids) - document.counted_tokens for document in batch)
        stored = _StoredBatch(
            doc_ids, tokens, [[next(tensors) for _ in columns] for columns, _ in rows], on_host[0], event
        )
        if event is None:
            self._active_work.free(doc_ids, tokens)
        return stored

    def _wait_for(self, stored: _StoredBatch) -> _StoredBatch:
        """Wait for the batch's copy to the host; errors on an accelerator are raised here."""
        if stored.event is not None:
            stored.event.synchronize()
            self._active_work.free(stored.doc_ids, stored.tokens)
        return stored

    def _to_columns(self, states_TSD: torch.Tensor | Float8States) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return ``(columns of the shard, whether all is finite)`` of a dialogue, on its device."""
        if isinstance(states_TSD, Float8States):
            return stored_columns(states_TSD), states_TSD.is_finite
        states_TSD = states_TSD.to(row_dtype(self._spec.stored_dtype))
        parts = [states_TSD[:, 0]] + ([states_TSD[:, 1:]] if self._spec.auxiliary else [])
        return stored_columns(parts), states_TSD.isfinite().all()

    def rows(
        self,
        batches: Iterable[list[EncodedDocument]],
        texts: list[EncodedDocument],
        rejected: dict[str, str],
        first: int = 0,
    ) -> Iterator[StoredRow]:
        """Yield the batches' dialogues in the format of the shard; those that are not finite are added to `rejected`.
        Their numbers are their places among `texts`, which may grow with the batches, counted from `first`.
        """
        numbers: dict[str, int] = {}
        for batch, stored in map_ahead(self._compute, batches, self._threads, count_batches_in_flight(self._recipe)):
            numbers |= {texts[place].doc_id: first + place for place in range(len(numbers), len(texts))}
            finite_B = self._wait_for(stored).finite_B.tolist()
            for document, columns, finite in zip(batch, stored.columns, finite_B, strict=True):
                if finite:
                    trained = int(document.loss_mask.sum())
                    yield StoredRow(numbers[document.doc_id], len(document.input_ids), trained, columns)
                else:
                    rejected[document.doc_id] = "features_not_finite"
