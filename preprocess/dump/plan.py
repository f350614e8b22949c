"""The plan of a dump: one pass over the source gives shard tasks, and accounts for every record.

Shard k holds the k-th group of accepted dialogues, in the order of the source, so a plan is the same on every run. This
file does not import Ray.
"""

import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import numpy as np

from pipeline.basics.errors import PipelineError
from pipeline.features.shards import ANSWERS, SPLITS, ShardRecord
from pipeline.lm import chat
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import DataConfig
from pipeline.running.children import end_with_parent, ignore_sigint_in_children
from pipeline.running.cores import check_process_count
from preprocess.dump.interview import skip_reason
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FURTHER_SEQUENCES, EncodedDocument
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.groups import held_out, question_key
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences

Encoded = tuple[list[tuple[str, chat.Encoded]], list[str]]  # the return value of `encode_sequences`
ENCODED_AHEAD = 8  # dialogues that each planning process encodes ahead
_process_state: dict[str, Any] = {}  # a planning process's own tokenizer


def _exchanges(messages: chat.Messages) -> list[tuple[str, str]]:
    """Return questions with their answers: evaluation fills a context with them."""
    pairs = [
        (question, answer)
        for question, answer in pairwise(messages)
        if (question["role"], answer["role"]) == ("user", "assistant")
    ]
    texts = [(question["content"], answer["content"]) for question, answer in pairs]
    return [pair for pair in texts if all(text.strip() for text in pair)]


def _start_planner(target: TargetConfig) -> None:
    end_with_parent(signal.SIGKILL)
    _process_state["tokenizer"] = load_tokenizer(target)


def _encode_in_process(dialogue: Dialogue, data: DataConfig) -> Encoded:
    return encode_sequences(_process_state["tokenizer"], dialogue, data)


@dataclass
class DumpPlan:
    """A plan reads the source once, yields shard tasks, and accounts for every record."""

    recipe: Recipe
    tokenizer: object
    further: int = 0  # sequences beyond the first of a record
    edits: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)  # by split
    prompts: list[dict] = field(default_factory=list)
    calibration: list[EncodedDocument] = field(default_factory=list)  # prompts that the target answers for training
    _open_tasks: dict[str, list[EncodedDocument | Dialogue]] = field(
        default_factory=lambda: {split: [] for split in SPLITS}
    )
    _indices: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)  # by split, so far; the last dialogue may go beyond max_tokens
    _is_read: bool = False  # True once the whole source is read
    _unusable: list[tuple[str, str]] = field(default_factory=list)
    _prompt_keys: set[bytes] = field(default_factory=set)  # questions that are prompts already
    _intake: Intake = field(init=False)

    def __post_init__(self) -> None:
        self._intake = Intake(self.recipe.data)

    @property
    def records(self) -> int:
        return self._intake.records

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(document id, reason) of records rejected before the dump: by the intake, then by their encoding."""
        return [*self._intake.rejected, *self._unusable]

    @property
    def expected_tokens(self) -> int:
        """The approximate number of tokens of the dump's shards; 0 where it is not known: for answers that the target
        is to give, and for a source without ``data.max_tokens`` until it is read.
        """
        data, features = self.recipe.data, self.recipe.features
        if data.answers == "target" or not (self._is_read or data.max_tokens or features.keep == "window"):
            return 0
        expected = Counter(self.tokens)
        prompts = len(self.calibration)
        if not self._is_read:
            prompts = data.calibration_prompts
            expected["train"] = max(self.tokens["train"], data.max_tokens or 0)
            mean = self.tokens.total() / max(self.accepted.total(), 1)
            expected["validation"] += round(mean * (data.validation_dialogues - self.accepted["validation"]))
        if features.keep == "window":  # train shards are made while training reads them
            del expected["train"]
        prompt_tokens = sum(len(prompt.input_ids) for prompt in self.calibration)
        return expected.total() + prompt_tokens + prompts * features.answer_tokens

    def tasks(self) -> Iterator[ShardTask]:
        """Yield the shard tasks. Raise PipelineError for an unusable source."""
        try:
            yield from self._tasks()
        except BrokenProcessPool:
            raise PipelineError(
                "a planning process died: check the memory for features.planners of them, and run the dump again to "
                "continue"
            ) from None

    def _tasks(self) -> Iterator[ShardTask]:
        for dialogue, encode in self._dialogues():
            try:
                split, documents = self._assign(dialogue, encode)
            except chat.Unusable as reason:
                self._unusable.append((dialogue.doc_id, str(reason)))
                continue
            for document in documents:
                if self._is_full(split):  # after another sequence of the same record
                    self.skipped[f"{split} is full"] += 1
                    continue
                self._open_tasks[split].append(document)
                self.accepted[split] += 1
                if isinstance(document, EncodedDocument):
                    self.tokens[split] += len(document.input_ids)
                if len(self._open_tasks[split]) == self.recipe.features.rows_per_shard:
                    yield self._finish_task(split)
        self._is_read = True
        for split, documents in self._open_tasks.items():
            if documents:
                yield self._finish_task(split)
        size = self.recipe.features.rows_per_shard
        for index, first in enumerate(range(0, len(self.calibration), size)):
            yield ShardTask(ANSWERS, index, self.calibration[first : first + size])

    def _dialogues(self) -> Iterator[tuple[Dialogue, Callable[[], Encoded]]]:
        """Yield every dialogue of the intake, in order, with a function that returns its sequences: computed in this
        process, or by the planning processes.
        """
        data, planners = self.recipe.data, self.recipe.features.planners
        if planners == 1 or data.answers == "target":
            for dialogue in self._intake:
                yield dialogue, partial(encode_sequences, self.tokenizer, dialogue, data)
            return
        check_process_count("features.planners", planners)
        spawn, target = get_context("spawn"), self.recipe.target
        # A driver that is interrupted leaves its semaphores to multiprocessing's tracker, which removes them but
        # complains.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        with ProcessPoolExecutor(planners, spawn, initializer=_start_planner, initargs=(target,)) as processes:
            waiting: deque = deque()
            for dialogue in self._intake:
                is_needed = not self._is_full(self._split_of(dialogue))  # a split that is full stays full
                with ignore_sigint_in_children():  # it may start a process
                    encode = processes.submit(_encode_in_process, dialogue, data).result if is_needed else None
                waiting.append((dialogue, encode))
                if len(waiting) > ENCODED_AHEAD * planners:
                    yield waiting.popleft()
            yield from waiting

    def _split_of(self, dialogue: Dialogue) -> str:
        return "validation" if held_out(dialogue.group, self.recipe.data.heldout_fraction) else "train"

    def _assign(
        self, dialogue: Dialogue, encode: Callable[[], Encoded]
    ) -> tuple[str, list[EncodedDocument | Dialogue]]:
        """Return the dialogue's split and its documents: one, several (windows, one for each answer), or none when the
        split is full (counted as skipped). Where the target is to answer it, return the dialogue itself, or none where
        it cannot be asked.

        Raise chat.Unusable.
        """
        split = self._split_of(dialogue)
        if split == "validation":
            self._add_prompt(dialogue)
        if self._is_full(split):
            self.skipped[f"{split} is full"] += 1
            return split, []
        if self.recipe.data.answers == "target":
            if reason := skip_reason(dialogue):
                self.skipped[reason] += 1
                return split, []
            self.edits.update(dialogue.edits)
            return split, [dialogue]
        sequences, edits = encode()
        self.further += len(sequences) - 1
        self.edits.update([*dialogue.edits, *edits])
        return split, [EncodedDocument(doc_id, encoded.input_ids, encoded.loss_mask) for doc_id, encoded in sequences]

    def _is_full(self, split: str) -> bool:
        data = self.recipe.data
        if split == "validation":
            return self.accepted[split] >= data.validation_dialogues
        tokens = data.max_tokens is not None and self.tokens["train"] >= data.max_tokens
        return tokens or (data.max_dialogues is not None and self.accepted[split] >= data.max_dialogues)

    def _add_prompt(self, dialogue) -> None:
        """Make the first question of a held-out dialogue an evaluation prompt, until there are enough; after these, if
        it leaves room for an answer, a calibration prompt. Each question is one prompt only, unless `data.group` is
        set. So no figure of training uses a prompt of the evaluation.
        """
        data = self.recipe.data
        if len(self.prompts) == data.heldout_prompts and len(self.calibration) == data.calibration_prompts:
            return
        question = dialogue.question
        if question is None or (data.group is None and question_key(question) in self._prompt_keys):
            return
        ids = chat.prompt_ids(self.tokenizer, [{"role": "user", "content": question}])
        if len(self.prompts) < data.heldout_prompts:
            if len(ids) <= data.max_length:
                prompt = {"question_id": dialogue.doc_id, "category": "sharegpt", "turns": [question]}
                self.prompts.append(prompt | {"exchanges": _exchanges(dialogue.messages)})
                self._prompt_keys.add(question_key(question))
        elif len(ids) + self.recipe.features.answer_tokens <= data.max_length:
            mask = np.zeros(len(ids), np.uint8)
            self.calibration.append(EncodedDocument(dialogue.doc_id, np.array(ids, np.int32), mask))
            self._prompt_keys.add(question_key(question))

    def _finish_task(self, split: str) -> ShardTask:
        task = ShardTask(split, self._indices[split], self._open_tasks[split])
        self._indices[split] += 1
        self._open_tasks[split] = []
        return task

    def accounting(self, shards: list[ShardRecord]) -> dict:
        """Return counts of the source's dialogues by outcome: records + further sequences = accepted + rejected +
        skipped, exactly.
        """
        rejected_by_workers = [(doc_id, reason) for shard in shards for doc_id, reason in shard.rejected.items()]
        rejected = [*self.rejected, *rejected_by_workers]
        accepted = sum(shard.rows for shard in shards)
        edits = sum((Counter(shard.edits) for shard in shards), self.edits)
        further = self.further + edits.pop(FURTHER_SEQUENCES, 0)
        if accepted + len(rejected) + self.skipped.total() != self.records + further:
            raise PipelineError(
                f"{accepted} accepted, {len(rejected)} rejected and {self.skipped.total()} skipped dialogues are not "
                f"the {self.records} records of {self.recipe.data.source}: dump again into another folder"
            )
        return {
            "records": self.records,
            "further_sequences": further,
            "accepted": accepted,
            "rejected": dict(sorted(Counter(reason for _, reason in rejected).items())),
            "skipped": dict(self.skipped),
            "edits": dict(sorted(edits.items())),
            "grouped": self._intake.grouped,
            "examples": self._intake.examples,
            "torn_tail_after": self._intake.tail.torn_after,
        }
