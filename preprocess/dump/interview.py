"""The target's own answers to the questions of dialogues, one after the other; and the worker that asks them.

The questions stay the source's; each follows the target's own answers to earlier ones. A dialogue ends before an answer
that is empty, repeats itself or stops inside its reasoning, and after one that reaches `regenerate.max_new_tokens`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from torch import Tensor

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling, repeats_itself
from pipeline.features.engines import open_source
from pipeline.features.schema import FP8, Float8States
from pipeline.features.source import Answer, FeatureSource, GenerationPrompt
from pipeline.lm.chat import Messages, Unusable, is_cut_in_thoughts, parse_answer, prompt_ids
from pipeline.lm.template import bind_keywords
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.task import ActiveWork, ShardTask, map_ahead, no_heartbeat, set_threads
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import accepted_messages, keywords_not_shown

NOT_ANSWERED = "not_answered"
MAX_CONCURRENT_PROMPTS = 64  # prompts, of an engine that batches by itself


@dataclass(frozen=True)
class AnsweredPrompt:
    """The tokens of a prompt and its answer, and their states where they were captured ([T, S, D])."""

    tokens: list[int]
    states_TSD: Tensor | Float8States | None


@dataclass
class AnsweredDialogue:
    """A dialogue while its questions are asked again."""

    doc_id: str
    messages: Messages  # so far
    questions: list[str]  # still to be asked
    tools: list[dict] | None = None  # shown to the target
    keywords: dict[str, Any] | None = None  # passed to its template
    answered_prompts: list[AnsweredPrompt] = field(default_factory=list)  # without those that a later prompt contains
    answers: int = 0
    tokens: int = 0
    end: str | None = None  # reason of an end before its last question
    edits: list[str] = field(default_factory=list)  # changes against the source's dialogue

    @property
    def is_open(self) -> bool:
        return self.end is None and bool(self.questions)


def skip_reason(dialogue: Dialogue) -> str | None:
    """Return the reason to skip a dialogue: it has no questions, or calls tools, whose results nothing would give."""
    if dialogue.raw is not None:
        return "no_turns"
    called = any("tool_calls" in turn or turn["role"] == "tool" for turn in dialogue.messages)
    return "tool_calls" if called else None


class Interview:
    """An interview of a feature source. On the same hardware, every worker and every try gives the same answers."""

    def __init__(
        self,
        recipe: Recipe,
        source: FeatureSource,
        active_work: ActiveWork,
        count: Callable[[AnsweredDialogue, Answer], int],
    ):
        """`count` returns an answer's amount in the task's progress."""
        self._recipe, self._settings, self._source, self._active_work = recipe, recipe.regenerate, source, active_work
        self._count, self._float8 = count, recipe.features.stored_dtype == FP8
        self.tokenizer_lock = Lock()  # tokenizers are not thread-safe

    @property
    def _sampling(self) -> Sampling:
        settings = self._settings
        return Sampling(
            settings.max_new_tokens, self._source.stop_ids, settings.temperature, settings.top_k, settings.top_p
        )

    @cached_property
    def longest_prompt(self) -> int:
        """The longest prompt, in tokens. Raise PipelineError where answers leave no room for one."""
        longest = min(self._recipe.data.max_length - 1, self._source.positions - self._settings.max_new_tokens)
        if longest < 1:
            raise PipelineError(
                f"regenerate.max_new_tokens={self._settings.max_new_tokens} leaves no room for a question in the "
                f"target's {self._source.positions} positions: lower it"
            )
        return longest

    def answer_all(self, dialogues: list[Dialogue], capture: bool = False) -> Iterator[list[AnsweredDialogue]]:
        """Yield the finished conversations, in the dialogues' order. With `capture` they have states where the engine
        gives them in one pass. Such an engine batches by itself: each dialogue continues as soon as it is answered.
        With transformers they are asked in rounds, prompts of similar length together, and yielded all at once.
        """
        if not self._source.one_pass:
            yield self._answer_dialogues(dialogues, False)
            return
        with ThreadPoolExecutor(MAX_CONCURRENT_PROMPTS) as threads:
            for _, finished in map_ahead(
                lambda dialogue: self._answer_dialogues([dialogue], capture), dialogues, threads, MAX_CONCURRENT_PROMPTS
            ):
                yield finished

    def _answer_dialogues(self, dialogues: list[Dialogue], capture: bool) -> list[AnsweredDialogue]:
        with self.tokenizer_lock:
            conversations = [self._begin(dialogue) for dialogue in dialogues]
        while any(conversation.is_open for conversation in conversations):
            with self.tokenizer_lock:
                requests = [
                    (prompt, conversation)
                    for conversation in conversations
                    if conversation.is_open and (prompt := self._prompt(conversation))
                ]
            requests.sort(key=lambda pair: (-len(pair[0]), pair[1].doc_id))
            for first in range(0, len(requests), self._settings.batch):
                batch = requests[first : first + self._settings.batch]
                for (prompt, conversation), answer in zip(batch, self._answers(batch, capture), strict=True):
                    with self.tokenizer_lock:
                        self._add_answer(conversation, prompt, answer)
                    self._active_work.add(self._count(conversation, answer))
        return conversations

    def _begin(self, dialogue: Dialogue) -> AnsweredDialogue:
        tokenizer, keywords = bind_keywords(self._source.tokenizer, dialogue.keywords)
        messages, edits = accepted_messages(tokenizer, dialogue)
        system = messages[:1] if messages[0]["role"] == "system" else []
        questions = [message["content"] for message in messages if message["role"] == "user"]
        edits = [*edits, *keywords_not_shown(dialogue, keywords)]
        edits = [*edits, *["later_system_dropped"] * any(message["role"] == "system" for message in messages[1:])]
        return AnsweredDialogue(dialogue.doc_id, list(system), questions, dialogue.tools, keywords or None, edits=edits)

    def _prompt(self, conversation: AnsweredDialogue) -> list[int] | None:
        """Return the next question's prompt; None where it cannot be asked, which ends the conversation."""
        messages = [*conversation.messages, {"role": "user", "content": conversation.questions[0]}]
        try:
            tokenizer, _ = bind_keywords(self._source.tokenizer, conversation.keywords)
            prompt = prompt_ids(tokenizer, messages, conversation.tools)
        except Unusable as reason:
            conversation.end = str(reason)
            return None
        if len(prompt) > self.longest_prompt:
            conversation.end = "too_long"
            return None
        return prompt

    def _answers(self, batch: list[tuple[list[int], AnsweredDialogue]], capture: bool) -> list[Answer]:
        """Return the answer of each row; without tokens where the target's logits are not finite."""
        prompts = [GenerationPrompt(tokens, self._seed(conversation)) for tokens, conversation in batch]
        with self._active_work.mark(tuple(conversation.doc_id for _, conversation in batch)):
            try:
                return list(
                    self._source.answers(prompts, self._sampling, capture, self._active_work.beat, float8=self._float8)
                )
            except NoAnswer:  # for at least one row
                if len(batch) == 1:
                    return [Answer([])]
        return [answer for row in batch for answer in self._answers([row], capture)]

    def _seed(self, conversation: AnsweredDialogue) -> int:
        """Return a seed from the recipe's seed, the dialogue's id and the question's number."""
        question = f"{self._recipe.seed}\0{conversation.doc_id}\0{conversation.answers}"
        return int.from_bytes(hashlib.sha256(question.encode()).digest()[:7], "big")

    def _add_answer(self, conversation: AnsweredDialogue, prompt: list[int], answer: Answer) -> None:
        """Add an answer, or end the conversation: before an answer that is missing, empty, repetitive or stops inside
        its reasoning, and after one that was cut.
        """
        tokens = answer.tokens
        if not tokens:
            conversation.end = NOT_ANSWERED
            return
        conversation.tokens += len(tokens)
        stopped = tokens[-1] in self._source.stop_ids
        message = parse_answer(self._source.tokenizer, tokens)
        if not stopped:
            message["content"] = message["content"].rstrip("\ufffd")  # half of a character
        if not stopped and is_cut_in_thoughts(self._source.tokenizer, message):
            conversation.end = "cut_in_thoughts"
        elif not message["content"].strip():
            conversation.end = "empty_answer"
        elif repeats_itself(tokens[:-1] if stopped else tokens):
            conversation.end = "repetitive_answer"
        else:
            question = {"role": "user", "content": conversation.questions.pop(0)}
            conversation.messages += [question, message]
            earlier = [
                answered
                for answered in conversation.answered_prompts
                if answered.tokens[:-1] != prompt[: len(answered.tokens) - 1]
            ]
            conversation.answered_prompts = [*earlier, AnsweredPrompt([*prompt, *tokens], answer.states_TSD)]
            conversation.answers += 1
            if not stopped:
                conversation.end = "cut_answer"


@dataclass(frozen=True)
class Part:
    """The result of one task."""

    index: int
    dialogues: list[dict]  # {"id", "messages"}, its tools and keywords, and what `data.group` names
    answers: int
    tokens: int  # generated
    documents: str  # fingerprint of the dialogues that were asked
    rejected: dict[str, str]  # document id -> reason
    edits: dict[str, int]  # changes of the answered dialogues, by reason


class AnswerWorker:
    def __init__(self, recipe: Recipe, heartbeat: Heartbeat = no_heartbeat):
        self._recipe, self._active_work = recipe, ActiveWork(heartbeat)

    def ready(self) -> None:
        set_threads(self._recipe.features.cpus_per_worker)
        _ = self._interview.longest_prompt

    @cached_property
    def _interview(self) -> Interview:
        source = open_source(self._recipe.target)
        return Interview(self._recipe, source, self._active_work, lambda conversation, _: int(not conversation.is_open))

    def work(self, task: ShardTask) -> Part:
        """Answer a task's dialogues: the same for every worker and every try, on the same hardware."""
        dialogues = [dialogue for dialogue in task.documents if dialogue.doc_id not in task.set_aside]
        for dialogue in dialogues:
            if dialogue.doc_id in task.suspects:
                list(self._interview.answer_all([dialogue]))
        self._active_work.begin()
        finished = [conversation for batch in self._interview.answer_all(dialogues) for conversation in batch]
        answered = [conversation for conversation in finished if conversation.answers]
        unanswered = {conversation.doc_id: conversation.end for conversation in finished if not conversation.answers}
        edits = Counter(edit for c in answered for edit in (*c.edits, *filter(None, [c.end])))
        key = self._recipe.data.group_key  # copied, so that the same dialogues are held out
        extra_fields = {
            d.doc_id: ({key: d.group} if key else {}) | ({"tools": d.tools} if d.tools else {}) for d in dialogues
        }
        keyword_fields = {c.doc_id: {"chat_template_kwargs": c.keywords} if c.keywords else {} for c in answered}
        return Part(
            index=task.index,
            dialogues=[
                {**extra_fields[c.doc_id], **keyword_fields[c.doc_id], "id": c.doc_id, "messages": c.messages}
                for c in answered
            ],
            answers=sum(conversation.answers for conversation in finished),
            tokens=sum(conversation.tokens for conversation in finished),
            documents=task.fingerprint,
            rejected={**task.set_aside, **unanswered},
            edits=dict(sorted(edits.items())),
        )
