"""One worker of a regeneration: a target that answers the questions of dialogues in its own words. It writes no
file.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling, repeats_itself
from pipeline.features.engines import open_source
from pipeline.features.source import FeatureSource, Prompt
from pipeline.lm.chat import Messages, Unusable, as_message, cut_in_thoughts, prompt_ids
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.task import ShardTask, nobody_listens
from preprocess.dump.worker import NOT_ANSWERED, take_threads
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import accepted_messages


@dataclass(frozen=True)
class Part:
    """What came of one task."""

    index: int
    dialogues: list[dict]  # {"id", "messages"}, and what `data.group` names
    answers: int
    tokens: int  # generated
    documents: str  # fingerprint of the dialogues that were asked
    rejected: dict[str, str]  # document id -> reason
    edits: dict[str, int]  # what dialogues that are kept lack, by reason


@dataclass
class Conversation:
    """A dialogue while its questions are asked again."""

    doc_id: str
    messages: Messages  # so far
    questions: list[str]  # still to be asked
    answers: int = 0
    tokens: int = 0
    end: str | None = None  # why it ended before its last question
    edits: list[str] = field(default_factory=list)  # what it lacks of the source's

    @property
    def open(self) -> bool:
        return self.end is None and bool(self.questions)


class AnswerWorker:
    def __init__(self, recipe: Recipe, heartbeat: Heartbeat = nobody_listens):
        self._recipe, self._settings, self._heartbeat = recipe, recipe.regenerate, heartbeat

    def ready(self) -> None:
        take_threads(self._recipe.features.cpus_per_worker)
        _ = self._longest_prompt

    @cached_property
    def _source(self) -> FeatureSource:
        return open_source(self._recipe.target)

    @property
    def _sampling(self) -> Sampling:
        chosen = self._settings
        return Sampling(chosen.max_new_tokens, self._source.stop_ids, chosen.temperature, chosen.top_k, chosen.top_p)

    @cached_property
    def _longest_prompt(self) -> int:
        """Tokens. Raises PipelineError where answers leave no room for one."""
        longest = min(self._recipe.data.max_length - 1, self._source.positions - self._settings.max_new_tokens)
        if longest < 1:
            raise PipelineError(
                f"regenerate.max_new_tokens={self._settings.max_new_tokens} leaves no room for a question in the "
                f"target's {self._source.positions} positions: lower it"
            )
        return longest

    def work(self, task: ShardTask) -> Part:
        """The same whoever does it, and however often, on the same hardware."""
        left = [dialogue for dialogue in task.documents if dialogue.doc_id not in task.set_aside]
        for dialogue in left:
            if dialogue.doc_id in task.suspects:
                self._converse([dialogue])
        done = self._converse(left)
        kept = [conversation for conversation in done if conversation.answers]
        unanswered = {conversation.doc_id: conversation.end for conversation in done if not conversation.answers}
        edits = Counter(edit for c in kept for edit in (*c.edits, *filter(None, [c.end])))
        key = self._recipe.data.group_key  # kept, so that the same dialogues are held out
        groups = {dialogue.doc_id: {key: dialogue.group} if key else {} for dialogue in left}
        return Part(
            index=task.index,
            dialogues=[{**groups[c.doc_id], "id": c.doc_id, "messages": c.messages} for c in kept],
            answers=sum(conversation.answers for conversation in done),
            tokens=sum(conversation.tokens for conversation in done),
            documents=task.fingerprint,
            rejected={**task.set_aside, **unanswered},
            edits=dict(sorted(edits.items())),
        )

    def _opened(self, dialogue: Dialogue) -> Conversation:
        messages, edits = accepted_messages(self._source.tokenizer, dialogue)
        system = messages[:1] if messages[0]["role"] == "system" else []
        questions = [message["content"] for message in messages if message["role"] == "user"]
        edits = [*edits, *["later_system_dropped"] * any(message["role"] == "system" for message in messages[1:])]
        return Conversation(dialogue.doc_id, list(system), questions, edits=edits)

    def _converse(self, dialogues: list[Dialogue]) -> list[Conversation]:
        """Asks every dialogue's questions, one round after the other, in batches of prompts of similar length."""
        conversations = [self._opened(dialogue) for dialogue in dialogues]
        while any(conversation.open for conversation in conversations):
            asked = [
                (prompt, conversation)
                for conversation in conversations
                if conversation.open and (prompt := self._prompt(conversation))
            ]
            asked.sort(key=lambda pair: (-len(pair[0]), pair[1].doc_id))
            for first in range(0, len(asked), self._settings.batch):
                batch = asked[first : first + self._settings.batch]
                for (_, conversation), answer in zip(batch, self._answers(batch), strict=True):
                    self._take(conversation, answer)
        return conversations

    def _prompt(self, conversation: Conversation) -> list[int] | None:
        """The next question's prompt; None, and the conversation ended, where it cannot be asked."""
        messages = [*conversation.messages, {"role": "user", "content": conversation.questions[0]}]
        try:
            prompt = prompt_ids(self._source.tokenizer, messages)
        except Unusable as reason:
            conversation.end = str(reason)
            return None
        if len(prompt) > self._longest_prompt:
            conversation.end = "too_long"
            return None
        return prompt

    def _answers(self, batch: list[tuple[list[int], Conversation]]) -> list[list[int]]:
        """Each row's new tokens, a stop id included; none where the target's logits are not finite."""
        doc_ids = tuple(conversation.doc_id for _, conversation in batch)
        self._heartbeat(doc_ids)
        prompts = [Prompt(tokens, self._seed(conversation)) for tokens, conversation in batch]
        try:
            answers = self._source.answers(prompts, self._sampling, alive=lambda: self._heartbeat(doc_ids))
            return [answer.tokens for answer in answers]
        except NoAnswer:  # of one row at least
            return [[]] if len(batch) == 1 else [answer for row in batch for answer in self._answers([row])]

    def _seed(self, conversation: Conversation) -> int:
        """Of the recipe's seed, the dialogue and the question's number."""
        question = f"{self._recipe.seed}\0{conversation.doc_id}\0{conversation.answers}"
        return int.from_bytes(hashlib.sha256(question.encode()).digest()[:7], "big")

    def _take(self, conversation: Conversation, answer: list[int]) -> None:
        """Adds an answer, or ends the conversation: before one that the target could not give, an empty one, a loop or
        mere thoughts, after one that was cut.
        """
        if not answer:
            conversation.end = NOT_ANSWERED
            return
        conversation.tokens += len(answer)
        stopped = answer[-1] in self._source.stop_ids
        message = as_message(self._source.tokenizer, answer)
        if not stopped:
            message["content"] = message["content"].rstrip("\ufffd")  # a character cut in two
        if not stopped and cut_in_thoughts(self._source.tokenizer, message):
            conversation.end = "cut_in_thoughts"
        elif not message["content"].strip():
            conversation.end = "empty_answer"
        elif repeats_itself(answer[:-1] if stopped else answer):
            conversation.end = "repetitive_answer"
        else:
            question = {"role": "user", "content": conversation.questions.pop(0)}
            conversation.messages += [question, message]
            conversation.answers += 1
            if not stopped:
                conversation.end = "cut_answer"
