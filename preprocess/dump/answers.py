"""One worker of a regeneration: a target that answers the questions of dialogues in its own words. It writes no
file.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from pipeline.features.engines import open_source
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.interview import Interview
from preprocess.dump.task import Busy, ShardTask, nobody_listens, take_threads


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
