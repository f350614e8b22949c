"""What the dump will do: one pass over the source gives shard tasks, and accounts for every record.

Shard k holds the k-th group of accepted dialogues, in the order of the source, so a plan is the same on every run.
Knows no Ray.
"""

import ctypes
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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
from pipeline.running.cores import require_few
from pipeline.running.signals import deaf_children
from preprocess.dump.interview import not_asked
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FURTHER, Document
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.groups import held_out, question_key
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences

Encoded = tuple[list[tuple[str, chat.Encoded]], list[str]]  # what `encode_sequences` returns
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
AHEAD = 8  # dialogues a planning process that are encoded before they are asked for
_here: dict[str, Any] = {}  # a planning process's own tokenizer


def _exchanges(messages: chat.Messages) -> list[tuple[str, str]]:
    """Questions with their answers: what evaluation fills a context with."""
    pairs = [(one, next_) for one, next_ in pairwise(messages) if (one["role"], next_["role"]) == ("user", "assistant")]
    texts = [(one["content"], next_["content"]) for one, next_ in pairs]
    return [pair for pair in texts if all(text.strip() for text in pair)]


def _start_planner(target: TargetConfig) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a driver that is killed leaves no planner behind
    _here["tokenizer"] = load_tokenizer(target)


def _encode_there(dialogue: Dialogue, data: DataConfig) -> Encoded:
    return encode_sequences(_here["tokenizer"], dialogue, data)


def _begin(processes: ProcessPoolExecutor, dialogue: Dialogue, data: DataConfig) -> Callable[[], Encoded]:
    """Call it for the result. Raises what `encode_sequences` does."""
    with _alive(), deaf_children():  # it may start the process
        future = processes.submit(_encode_there, dialogue, data)

    def result() -> Encoded:
        with _alive():
            return future.result()

    return result


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise PipelineError(
            "a planning process died: is there memory for features.planners of them? Run the dump again to continue"
        ) from None


@dataclass
class Plan:
    """Reads the source once, yields shard tasks, and accounts for every record."""

    recipe: Recipe
    tokenizer: object
    further: int = 0  # sequences beyond the first of a record
    edits: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)  # by split
    prompts: list[dict] = field(default_factory=list)
    calibration: list[Document] = field(default_factory=list)  # prompts that the target answers for training's sake
    _open: dict[str, list[Document | Dialogue]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    _indices: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)  # by split, so far; the last dialogue may go beyond max_tokens
    _read: bool = False  # all of the source
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
        """(document id, reason), before anything was dumped: by the intake, then for what their encoding is."""
        return [*self._intake.rejected, *self._unusable]

    @property
    def expected_tokens(self) -> int:
        """Tokens of all shards of the dump, about; 0 where nobody knows: of answers that the target is to give, and of
        a source without ``data.max_tokens`` until it is read.
        """
        data, features = self.recipe.data, self.recipe.features
        if data.answers == "target" or not (self._read or data.max_tokens or features.keep == "window"):
            return 0
        expected = Counter(self.tokens)
        prompts = len(self.calibration)
        if not self._read:
            prompts = data.calibration_prompts
            expected["train"] = max(self.tokens["train"], data.max_tokens or 0)
            mean = self.tokens.total() / max(self.accepted.total(), 1)
            expected["validation"] += round(mean * (data.validation_dialogues - self.accepted["validation"]))
        if features.keep == "window":  # they are made while training reads them
            del expected["train"]
        asked = sum(len(prompt.input_ids) for prompt in self.calibration)
        return expected.total() + asked + prompts * features.answer_tokens

    def tasks(self) -> Iterator[ShardTask]:
        """Shard by shard. Raises PipelineError for an unusable source."""
        for dialogue, encode in self._dialogues():
            try:
                split, documents = self._place(dialogue, encode)
            except chat.Unusable as reason:
                self._unusable.append((dialogue.doc_id, str(reason)))
                continue
            for document in documents:
                if self._full(split):  # after another sequence of the same record
                    self.skipped[f"{split} is full"] += 1
                    continue
                self._open[split].append(document)
                self.accepted[split] += 1
                if isinstance(document, Document):
                    self.tokens[split] += len(document.input_ids)
                if len(self._open[split]) == self.recipe.features.rows_per_shard:
                    yield self._close(split)
        self._read = True
        for split, documents in self._open.items():
            if documents:
                yield self._close(split)
        size = self.recipe.features.rows_per_shard
        for index, first in enumerate(range(0, len(self.calibration), size)):
            yield ShardTask(ANSWERS, index, self.calibration[first : first + size])

    def _dialogues(self) -> Iterator[tuple[Dialogue, Callable[[], Encoded]]]:
        """Every dialogue of the intake, in order, and what gives its sequences: here and now, or from the planning
        processes.
        """
        data, planners = self.recipe.data, self.recipe.features.planners
        if planners == 1 or data.answers == "target":
            for dialogue in self._intake:
                yield dialogue, partial(encode_sequences, self.tokenizer, dialogue, data)
            return
        require_few("features.planners", planners)
        spawn, target = get_context("spawn"), self.recipe.target
        # A driver that is interrupted leaves its semaphores to multiprocessing's tracker, which removes them but
        # complains.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        with ProcessPoolExecutor(planners, spawn, initializer=_start_planner, initargs=(target,)) as processes:
            waiting: deque = deque()
            for dialogue in self._intake:
                wanted = not self._full(self._split(dialogue))  # a split that is full stays full
                waiting.append((dialogue, _begin(processes, dialogue, data) if wanted else None))
                if len(waiting) > AHEAD * planners:
                    yield waiting.popleft()
            yield from waiting

    def _split(self, dialogue: Dialogue) -> str:
        return "validation" if held_out(dialogue.group, self.recipe.data.heldout_fraction) else "train"

    def _place(self, dialogue: Dialogue, encode: Callable[[], Encoded]) -> tuple[str, list[Document | Dialogue]]:
        """The dialogue's split and its documents: one, several (windows, answers apart), or none when the split is full
        (counted as skipped). Where the target is to answer it, the dialogue itself, or none where nobody can ask it.

        Raises chat.Unusable.
        """
        split = self._split(dialogue)
        if split == "validation":
            self._offer_prompt(dialogue)
        if self._full(split):
            self.skipped[f"{split} is full"] += 1
            return split, []
        if self.recipe.data.answers == "target":
            if reason := not_asked(dialogue):
                self.skipped[reason] += 1
                return split, []
            self.edits.update(dialogue.edits)
            return split, [dialogue]
        sequences, edits = encode()
        self.further += len(sequences) - 1
        self.edits.update([*dialogue.edits, *edits])
        return split, [Document(doc_id, encoded.input_ids, encoded.loss_mask) for doc_id, encoded in sequences]

    def _full(self, split: str) -> bool:
        data = self.recipe.data
        if split == "validation":
            return self.accepted[split] >= data.validation_dialogues
        tokens = data.max_tokens is not None and self.tokens["train"] >= data.max_tokens
        return tokens or (data.max_dialogues is not None and self.accepted[split] >= data.max_dialogues)

    def _offer_prompt(self, dialogue) -> None:
        """The first question of a held-out dialogue becomes an evaluation prompt, as long as some are wanted; after
        these, as long as it leaves room to answer, a calibration prompt. Each question is one prompt only, unless
        `data.group` says what belongs together. So no figure of training looks at what evaluation measures.
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
                one = {"question_id": dialogue.doc_id, "category": "sharegpt", "turns": [question]}
                self.prompts.append(one | {"exchanges": _exchanges(dialogue.messages)})
                self._prompt_keys.add(question_key(question))
        elif len(ids) + self.recipe.features.answer_tokens <= data.max_length:
            mask = np.zeros(len(ids), np.uint8)
            self.calibration.append(Document(dialogue.doc_id, np.array(ids, np.int32), mask))
            self._prompt_keys.add(question_key(question))

    def _close(self, split: str) -> ShardTask:
        task = ShardTask(split, self._indices[split], self._open[split])
        self._indices[split] += 1
        self._open[split] = []
        return task

    def accounting(self, shards: list[ShardRecord]) -> dict:
        """Counts of the source's dialogues by fate: records + further sequences = accepted + rejected + skipped,
        exactly.
        """
        late = [(doc_id, reason) for shard in shards for doc_id, reason in shard.rejected.items()]
        rejected = [*self.rejected, *late]
        accepted = sum(shard.rows for shard in shards)
        edits = sum((Counter(shard.edits) for shard in shards), self.edits)
        further = self.further + edits.pop(FURTHER, 0)
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
