"""The target answers the questions of dialogues in its own words, one after the other; and the worker that asks them.

The questions stay the source's; each follows the target's own answers to those before. A dialogue ends before an answer
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
from pipeline.features.source import Answer, FeatureSource, Prompt
from pipeline.lm.chat import Messages, Unusable, as_message, cut_in_thoughts, prompt_ids
from pipeline.lm.template import with_keywords
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.task import Busy, ShardTask, ahead, nobody_listens, take_threads
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import accepted_messages, keywords_not_shown

NOT_ANSWERED = "not_answered"
ASKED_AT_ONCE = 64  # prompts, of an engine that batches by itself


@dataclass(frozen=True)
class Said:
    """What the target read and said, and the states of both where they were captured ([T, S, D])."""

    tokens: list[int]
    states_TSD: Tensor | None


@dataclass
class Conversation:
    """A dialogue while its questions are asked again."""

    doc_id: str
    messages: Messages  # so far
    questions: list[str]  # still to be asked
    tools: list[dict] | None = None  # that the target is shown
    keywords: dict[str, Any] | None = None  # that its template is given
    said: list[Said] = field(default_factory=list)  # the answers so far, without those that a later prompt repeats
    answers: int = 0
    tokens: int = 0
    end: str | None = None  # why it ended before its last question
    edits: list[str] = field(default_factory=list)  # what it lacks of the source's

    @property
    def open(self) -> bool:
        return self.end is None and bool(self.questions)


def not_asked(dialogue: Dialogue) -> str | None:
    """Why nobody asks a dialogue's questions again: it has none, or tools were called whose results nobody gives."""
    if dialogue.raw is not None:
        return "no_turns"
    called = any("tool_calls" in turn or turn["role"] == "tool" for turn in dialogue.messages)
    return "tool_calls" if called else None


class Interview:
    """Asks a source. The answers are the same whoever asks, and however often, on the same hardware."""

    def __init__(self, recipe: Recipe, source: FeatureSource, busy: Busy, count: Callable[[Conversation, Answer], int]):
        """`count`: what an answer is to the task's progress."""
        self._recipe, self._settings, self._source, self._busy = recipe, recipe.regenerate, source, busy
        self._count = count
        self.reading = Lock()  # tokenizers are not made for threads

    @property
    def _sampling(self) -> Sampling:
        chosen = self._settings
        return Sampling(chosen.max_new_tokens, self._source.stop_ids, chosen.temperature, chosen.top_k, chosen.top_p)

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens. Raises PipelineError where answers leave no room for one."""
        longest = min(self._recipe.data.max_length - 1, self._source.positions - self._settings.max_new_tokens)
        if longest < 1:
            raise PipelineError(
                f"regenerate.max_new_tokens={self._settings.max_new_tokens} leaves no room for a question in the "
                f"target's {self._source.positions} positions: lower it"
            )
        return longest

    def hold(self, dialogues: list[Dialogue], capture: bool = False) -> Iterator[list[Conversation]]:
        """The finished conversations, in the dialogues' order. With `capture` they bring their states where the engine
        gives them in one pass. Such an engine batches by itself: each dialogue goes on as soon as it is answered. For
        the other they are asked in rounds, prompts of similar length together, and come all at once.
        """
        if not self._source.one_pass:
            yield self._converse(dialogues, False)
            return
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            for _, held in ahead(lambda one: self._converse([one], capture), dialogues, threads, ASKED_AT_ONCE):
                yield held

    def _converse(self, dialogues: list[Dialogue], capture: bool) -> list[Conversation]:
        with self.reading:
            conversations = [self._opened(dialogue) for dialogue in dialogues]
        while any(conversation.open for conversation in conversations):
            with self.reading:
                asked = [
                    (prompt, conversation)
                    for conversation in conversations
                    if conversation.open and (prompt := self._prompt(conversation))
                ]
            asked.sort(key=lambda pair: (-len(pair[0]), pair[1].doc_id))
            for first in range(0, len(asked), self._settings.batch):
                batch = asked[first : first + self._settings.batch]
                for (prompt, conversation), answer in zip(batch, self._answers(batch, capture), strict=True):
                    with self.reading:
                        self._take(conversation, prompt, answer)
                    self._busy.add(self._count(conversation, answer))
        return conversations

    def _opened(self, dialogue: Dialogue) -> Conversation:
        tokenizer, keywords = with_keywords(self._source.tokenizer, dialogue.keywords)
        messages, edits = accepted_messages(tokenizer, dialogue)
        system = messages[:1] if messages[0]["role"] == "system" else []
        questions = [message["content"] for message in messages if message["role"] == "user"]
        edits = [*edits, *keywords_not_shown(dialogue, keywords)]
        edits = [*edits, *["later_system_dropped"] * any(message["role"] == "system" for message in messages[1:])]
        return Conversation(dialogue.doc_id, list(system), questions, dialogue.tools, keywords or None, edits=edits)

    def _prompt(self, conversation: Conversation) -> list[int] | None:
        """The next question's prompt; None, and the conversation ended, where it cannot be asked."""
        messages = [*conversation.messages, {"role": "user", "content": conversation.questions[0]}]
        try:
            tokenizer, _ = with_keywords(self._source.tokenizer, conversation.keywords)
            prompt = prompt_ids(tokenizer, messages, conversation.tools)
        except Unusable as reason:
            conversation.end = str(reason)
            return None
        if len(prompt) > self.longest_prompt:
            conversation.end = "too_long"
            return None
        return prompt

    def _answers(self, batch: list[tuple[list[int], Conversation]], capture: bool) -> list[Answer]:
        """Of each row; without tokens where the target's logits are not finite."""
        prompts = [Prompt(tokens, self._seed(conversation)) for tokens, conversation in batch]
        with self._busy.on(tuple(conversation.doc_id for _, conversation in batch)):
            try:
                return list(self._source.answers(prompts, self._sampling, capture=capture, alive=self._busy.beat))
            except NoAnswer:  # of one row at least
                if len(batch) == 1:
                    return [Answer([])]
        return [answer for row in batch for answer in self._answers([row], capture)]

    def _seed(self, conversation: Conversation) -> int:
        """Of the recipe's seed, the dialogue and the question's number."""
        question = f"{self._recipe.seed}\0{conversation.doc_id}\0{conversation.answers}"
        return int.from_bytes(hashlib.sha256(question.encode()).digest()[:7], "big")

    def _take(self, conversation: Conversation, prompt: list[int], answer: Answer) -> None:
        """Adds an answer, or ends the conversation: before one that the target could not give, an empty one, a loop or
        mere thoughts, after one that was cut.
        """
        tokens = answer.tokens
        if not tokens:
            conversation.end = NOT_ANSWERED
            return
        conversation.tokens += len(tokens)
        stopped = tokens[-1] in self._source.stop_ids
        message = as_message(self._source.tokenizer, tokens)
        if not stopped:
            message["content"] = message["content"].rstrip("\ufffd")  # a character cut in two
        if not stopped and cut_in_thoughts(self._source.tokenizer, message):
            conversation.end = "cut_in_thoughts"
        elif not message["content"].strip():
            conversation.end = "empty_answer"
        elif repeats_itself(tokens[:-1] if stopped else tokens):
            conversation.end = "repetitive_answer"
        else:
            question = {"role": "user", "content": conversation.questions.pop(0)}
            conversation.messages += [question, message]
            rest = [one for one in conversation.said if one.tokens[:-1] != prompt[: len(one.tokens) - 1]]
            conversation.said = [*rest, Said([*prompt, *tokens], answer.states_TSD)]
            conversation.answers += 1
            if not stopped:
                conversation.end = "cut_answer"


@dataclass(frozen=True)
class Part:
    """What came of one task."""

    index: int
    dialogues: list[dict]  # {"id", "messages"}, its tools and keywords, and what `data.group` names
    answers: int
    tokens: int  # generated
    documents: str  # fingerprint of the dialogues that were asked
    rejected: dict[str, str]  # document id -> reason
    edits: dict[str, int]  # what dialogues that are kept lack, by reason


class AnswerWorker:
    def __init__(self, recipe: Recipe, heartbeat: Heartbeat = nobody_listens):
        self._recipe, self._busy = recipe, Busy(heartbeat)

    def ready(self) -> None:
        take_threads(self._recipe.features.cpus_per_worker)
        _ = self._interview.longest_prompt

    @cached_property
    def _interview(self) -> Interview:
        source = open_source(self._recipe.target)
        return Interview(self._recipe, source, self._busy, lambda conversation, _: int(not conversation.open))

    def work(self, task: ShardTask) -> Part:
        """The same whoever does it, and however often, on the same hardware."""
        left = [dialogue for dialogue in task.documents if dialogue.doc_id not in task.set_aside]
        for dialogue in left:
            if dialogue.doc_id in task.suspects:
                list(self._interview.hold([dialogue]))
        self._busy.begin()
        done = [conversation for held in self._interview.hold(left) for conversation in held]
        kept = [conversation for conversation in done if conversation.answers]
        unanswered = {conversation.doc_id: conversation.end for conversation in done if not conversation.answers}
        edits = Counter(edit for c in kept for edit in (*c.edits, *filter(None, [c.end])))
        key = self._recipe.data.group_key  # kept, so that the same dialogues are held out
        more = {d.doc_id: ({key: d.group} if key else {}) | ({"tools": d.tools} if d.tools else {}) for d in left}
        given = {c.doc_id: {"chat_template_kwargs": c.keywords} if c.keywords else {} for c in kept}
        return Part(
            index=task.index,
            dialogues=[{**more[c.doc_id], **given[c.doc_id], "id": c.doc_id, "messages": c.messages} for c in kept],
            answers=sum(conversation.answers for conversation in done),
            tokens=sum(conversation.tokens for conversation in done),
            documents=task.fingerprint,
            rejected={**task.set_aside, **unanswered},
            edits=dict(sorted(edits.items())),
        )
