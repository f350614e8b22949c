"""One worker of the dump: a target and the shards it writes. A plain class; `pool.py` makes a Ray actor of it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pipeline.artifacts.features import store_of
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines import identity_of, open_source
from pipeline.features.schema import FeatureSpec, StoredRow, row_dtype, stored_columns
from pipeline.features.shards import ANSWERS, ShardRecord, shard_name, text_name, write_shard
from pipeline.features.source import Answer, FeatureSource, Prompt
from pipeline.features.text import write_text_table
from pipeline.lm.chat import Encoded, Unusable
from pipeline.lm.config import BATCH_INVARIANT
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.compare import Sample, require_alike
from preprocess.dump.interview import ASKED_AT_ONCE, NOT_ANSWERED, Conversation, Interview, Said
from preprocess.dump.task import Busy, ShardTask, ahead, in_flight, longest_first, nobody_listens, take_threads
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import encode_sequences

RENDERED_OTHERWISE = "rendered_otherwise"  # what the target said has other tokens in the dialogue's rendering
FURTHER = "further_sequences"


@dataclass(frozen=True)
class Document:
    """An encoded dialogue on its way to a worker."""

    doc_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states_TSD: torch.Tensor | None = None  # where the target's answer brought them
    asked: str | None = None  # the dialogue that the target answered, where this is what it said

    counted: int = 0  # of its tokens, in the progress already: the target's answers are, as it gives them

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
    tokens: int  # that are not in the progress yet
    columns: list[list[torch.Tensor]]  # of each dialogue
    finite_B: torch.Tensor
    event: torch.Event | None  # of `to_host`


@dataclass
class _Own:
    """What a task's texts became."""

    rejected: dict[str, str]
    texts: list[Document] = field(default_factory=list)  # in the order of their rows
    edits: Counter = field(default_factory=Counter)


def as_said(doc_id: str, encoded: Encoded, said: list[Said]) -> Document | None:
    """A dialogue's sequence as far as the target read and said it, with the states of that, where they were captured.
    None where the target read other tokens: those of an answer may differ from those of its text.

    What the template puts behind the last answer is left out: nothing was computed there. Nor was behind the answer's
    last token, whose state is 0; where an answer was cut, the rendering may have another one there, which goes, too.
    """
    ids, mask = encoded.input_ids, encoded.loss_mask
    for one in reversed(said):
        length = min(len(ids), len(one.tokens))
        known = min(length, len(one.tokens) - 1)
        if length > known and ids[known] != one.tokens[known]:
            length = known
        another = np.diff(mask[max(known, length) - 1 :].astype(int)) > 0  # answer begins behind it
        if ids[:known].tolist() == one.tokens[:known] and mask[:length].any() and not another.any():
            return Document(doc_id, ids[:length], mask[:length], _head(one.states_TSD, length))
    return None


def _head(states_TSD: torch.Tensor | None, length: int) -> torch.Tensor | None:
    return None if states_TSD is None else states_TSD[:length]


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
        self._off: float | None = None
        self._recipe, self._folder, self._spec, self._settings = recipe, folder, spec, recipe.features
        self._busy, self._store = Busy(heartbeat), store_of(recipe)
        self._computing = ThreadPoolExecutor(
            in_flight(recipe), initializer=take_threads, initargs=(self._settings.cpus_per_worker,)
        )

    def ready(self) -> None:
        """Loads the target."""
        take_threads(self._settings.cpus_per_worker)
        if self._sample:
            self._off = require_alike(self._source, self._sample, self._recipe.target)
        _ = self._source
        if self._recipe.data.answers == "target":
            _ = self._interview.longest_prompt

    @cached_property
    def _source(self) -> FeatureSource:
        here, spec = identity_of(self._recipe.target, self._spec.auxiliary_numbers), self._spec
        if here.engine != "transformers" and here.version != spec.engine_version:
            raise PipelineError(
                f"this node has {here.engine} {here.version}, but the dump is one of {spec.engine_version}: install "
                f"the same version on all nodes, and set {BATCH_INVARIANT} on all or on none"
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

    @cached_property
    def _interview(self) -> Interview:
        return Interview(self._recipe, self._source, self._busy, lambda _, answer: len(answer.tokens))

    def work(self, task: ShardTask) -> ShardRecord:
        """Writes the task's shard: the same bytes whoever writes it, and however often (by an engine that batches by
        itself, but for the states' rounding). A shard whose texts are the target's own brings them in a table.
        """
        for name in (shard_name(task.split, task.index), text_name(task.split, task.index)):
            for leftover in self._folder.glob(f".{name}.*.tmp"):  # of a worker that failed
                leftover.unlink(missing_ok=True)
        self._busy.begin()
        for one in task.documents:
            if one.doc_id in task.suspects:
                for batch in [[one]] if isinstance(one, Document) else self._held([one], _Own({})):
                    self._arrived(self._compute(batch))
        self._busy.begin()  # what the suspects took does not count
        own, first = _Own(dict(task.set_aside)), 0
        if task.split == ANSWERS:
            own.texts = longest_first(self._answered(task, own.rejected))
            batches = self.batches(own.texts, own.rejected)
        elif self._recipe.data.answers == "target":
            batches = self._held(task.documents, own)
        else:
            own.texts, first = task.in_order, task.index * self._settings.rows_per_shard
            batches = self.batches(own.texts, own.rejected)
        rows = self.rows(batches, own.texts, own.rejected, first)
        record = write_shard(self._folder, task.split, task.index, self._spec, rows, own.rejected)
        edits = dict(sorted(own.edits.items()))
        record = replace(record, documents=task.fingerprint, edits=edits, off=self._off)
        if task.split == ANSWERS or self._recipe.data.answers == "target":
            name = text_name(task.split, task.index)
            record = replace(record, text=write_text_table(self._folder / name, own.texts, self._spec))
        if self._store is not None:
            self._busy.beat()  # with nothing: what goes wrong from here on is no dialogue's fault
            for file in record.files:
                self._store.put(self._folder / file.name)
                (self._folder / file.name).unlink()
        return record

    def batches(self, documents: list[Document], rejected: dict[str, str]) -> Iterator[list[Document]]:
        """Of those that are not rejected, for `rows`."""
        left = [document for document in documents if document.doc_id not in rejected]
        return length_sorted_batches(left, self._settings.batch_tokens)

    def _held(self, dialogues: list[Dialogue], own: "_Own") -> Iterator[list[Document]]:
        """Batches of what the target answers anew, as its answers come; `own` learns of them."""
        left = [dialogue for dialogue in dialogues if dialogue.doc_id not in own.rejected]
        for held in self._interview.hold(left, capture=True):
            documents = []
            for conversation in held:
                try:
                    documents += self._encoded(conversation, own.edits)
                except Unusable as reason:
                    own.rejected[conversation.doc_id] = str(reason)
            for batch in self.batches(documents, {}):
                own.texts += [replace(document, states_TSD=None) for document in batch]
                yield batch

    def _encoded(self, conversation: Conversation, edits: Counter) -> list[Document]:
        """Raises Unusable."""
        if not conversation.answers:
            raise Unusable(conversation.end)
        turns, keywords = conversation.messages, conversation.keywords
        dialogue = Dialogue(conversation.doc_id, turns, (), conversation.tools, keywords=keywords)
        with self._interview.reading:
            sequences, more = encode_sequences(self._source.tokenizer, dialogue, self._recipe.data)
        edits.update([*conversation.edits, *filter(None, [conversation.end]), *more])
        edits.update({FURTHER: len(sequences) - 1} if len(sequences) > 1 else {})
        documents, left = [], conversation.tokens
        for doc_id, encoded in sequences:
            document = as_said(doc_id, encoded, conversation.said)
            edits.update([] if document else [RENDERED_OTHERWISE])
            document = document or Document(doc_id, encoded.input_ids, encoded.loss_mask)
            counted = min(left, len(document.input_ids))
            left -= counted
            documents.append(replace(document, asked=conversation.doc_id, counted=counted))
        return documents

    def _answered(self, task: ShardTask, rejected: dict[str, str]) -> list[Document]:
        """The prompts with the target's greedy answers behind them; the mask is on the answers. What cannot be answered
        stays a prompt, and is entered into `rejected`.
        """
        sampling = Sampling(self._settings.answer_tokens, self._source.stop_ids)

        def answered(document: Document) -> Document:
            answer = Answer([])
            if document.doc_id not in rejected:
                with self._busy.on((document.doc_id,)), suppress(NoAnswer):
                    prompt, capture = Prompt(document.input_ids.tolist()), self._source.one_pass
                    (answer,) = self._source.answers([prompt], sampling, capture, self._busy.beat, plainly=True)
                if not answer.tokens:
                    rejected[document.doc_id] = NOT_ANSWERED
            self._busy.add(len(answer.tokens))
            ids = np.concatenate([document.input_ids, np.array(answer.tokens, np.int32)])
            mask = np.arange(len(ids)) >= len(document.input_ids)
            return replace(
                document,
                input_ids=ids,
                loss_mask=mask.astype(np.uint8),
                states_TSD=answer.states_TSD,
                counted=len(answer.tokens),
            )

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
        doc_ids = tuple(document.asked or document.doc_id for document in batch)
        self._busy.take(doc_ids)
        found = [self._stored(states_TSD) for states_TSD in self._forward(batch)]
        finite_B = torch.stack([finite for _, finite in found])
        sent, event = to_host([finite_B, *(column for columns, _ in found for column in columns)])
        rest = iter(sent[1:])
        tokens = sum(len(document.input_ids) - document.counted for document in batch)
        stored = _Stored(doc_ids, tokens, [[next(rest) for _ in columns] for columns, _ in found], sent[0], event)
        if event is None:
            self._busy.free(doc_ids, tokens)
        return stored

    def _arrived(self, stored: _Stored) -> _Stored:
        """What went wrong on an accelerator is raised here."""
        if stored.event is not None:
            stored.event.synchronize()
            self._busy.free(stored.doc_ids, stored.tokens)
        return stored

    def _stored(self, states_TSD: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """``(columns of the shard, whether all is finite)`` of a dialogue, on its device: dialogue by dialogue, so that
        what float8 is made of takes little of its memory.
        """
        states_TSD = states_TSD.to(row_dtype(self._spec.stored_dtype))
        parts = [states_TSD[:, 0]] + ([states_TSD[:, 1:]] if self._spec.auxiliary else [])
        return stored_columns(parts, self._spec.stored_dtype), states_TSD.isfinite().all()

    def rows(
        self, batches: Iterable[list[Document]], texts: list[Document], rejected: dict[str, str], first: int = 0
    ) -> Iterator[StoredRow]:
        """The batches' dialogues as the shard holds them; what is not finite is entered into `rejected`. Their numbers
        are their places among `texts`, which may grow with the batches, counted from `first`.
        """
        numbers: dict[str, int] = {}
        for batch, stored in ahead(self._compute, batches, self._computing, in_flight(self._recipe)):
            numbers |= {texts[place].doc_id: first + place for place in range(len(numbers), len(texts))}
            finite_B = self._arrived(stored).finite_B.tolist()
            for document, columns, finite in zip(batch, stored.columns, finite_B, strict=True):
                if finite:
                    trained = int(document.loss_mask.sum())
                    yield StoredRow(numbers[document.doc_id], len(document.input_ids), trained, columns)
                else:
                    rejected[document.doc_id] = "features_not_finite"
