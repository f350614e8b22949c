"""Which dialogues are parts of one conversation or begin with one question, and so fall on one side of the split; the
split itself.
"""

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

import regex

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue, record_id
from preprocess.sources.read import Tail, read_records

_PART = re.compile(r"\A([A-Za-z0-9]{7})_\d+\Z")  # ShareGPT's id of a part of a long conversation
_AGAIN = re.compile(r"@[0-9a-f]{32}\Z")  # what `intake` puts behind a repeated id; regenerated files hold it
LOOKED_AT = 1000  # records by which a source is judged
MOST_PARTS = 8  # of a conversation, on average: ShareGPT's have 1.9. More, and the ids only count: example_0, example_1
SEARCH_SECONDS = 5  # of an expression of `data.group` in one id, whose worst case may be exponential
LONGEST = 128  # parts of one conversation: ShareGPT's longest has 89. Those behind are of an id that only counts


@dataclass(slots=True)
class Question:
    """The use of one first question so far."""

    group: str  # of the first dialogue that begins with it
    dialogues: int = 0  # that begin with it and are used


class Groups:
    """By `data.group`: a record's key (`_group_name` of its value), or a regular expression on its id (its first group,
    else all that it matches); a record that has none is a conversation of its own. Without `data.group`, by ShareGPT's
    ids of parts (hRPPgZT_0, hRPPgZT_11) that follow each other, as long as the source's first records look like it, and
    by the first question: a dialogue, or a conversation's first part, that begins with a question of before joins its
    group. A group is named by its first record. Records come in the source's order.
    """

    def __init__(self, data: DataConfig):
        """Reads the source's first records. Raises PipelineError for an unusable source."""
        self._data, self._key = data, data.group_key
        self._pattern = regex.compile(data.group) if data.group is not None and self._key is None else None
        self._parts = data.group is None and _holds_parts(data)
        self._before: str | None = None  # the conversation of which the part before was
        self._lengths: Counter = Counter()  # parts by conversation
        self._first_groups: dict[str, str] = {}  # the group of a conversation that begins with a question of before
        self._questions: dict[bytes, Question] = {}
        self._asked = self._matched = 0  # records; those of which `data.group` says something
        self._seen: Counter = Counter()  # used dialogues by conversation, or by the value of `data.group`
        self._last: tuple[str | None, Question | None] = (None, None)  # of the dialogue that was grouped last

    def of(self, record: Any, dialogue: Dialogue) -> str:
        """Return the name of the dialogue's group; its id where it is alone. Raises Unusable("on_both_sides") for a
        part whose conversation is on one side of the split and whose first question on the other.
        """
        doc_id = dialogue.doc_id
        if self._data.group is not None:
            name = self._named(record, doc_id)
            self._last = (name, None)
            return name or doc_id
        conversation = self._conversation(doc_id) if self._parts else None
        later = conversation is not None and self._lengths[conversation] > 1
        name = doc_id if conversation is None else self._first_groups.get(conversation, conversation)
        if dialogue.question is None:
            self._last = (conversation, None)
            return name
        question = self._questions.setdefault(question_key(dialogue.question), Question(name))
        self._last = (conversation, question)
        if not later:
            if conversation is not None and question.group != conversation:
                self._first_groups[conversation] = question.group
            return question.group
        if len({held_out(group, self._data.heldout_fraction) for group in (name, question.group)}) > 1:
            raise Unusable("on_both_sides")
        return name

    def _named(self, record: Any, doc_id: str) -> str | None:
        """Return what `data.group` says of the record."""
        self._asked += 1
        name = None
        if self._key is not None:
            name = _group_name(record.get(self._key)) if isinstance(record, dict) else None
        elif self._pattern is not None and (found := self._search(doc_id)):
            name = found[1] if self._pattern.groups else found[0]
        self._matched += bool(name)
        return name or None

    def _search(self, doc_id: str) -> regex.Match | None:
        try:
            return self._pattern.search(_AGAIN.sub("", doc_id), timeout=SEARCH_SECONDS)
        except TimeoutError:
            raise PipelineError(
                f"data.group={self._data.group!r} takes more than {SEARCH_SECONDS} s on the id {doc_id[:80]!r}: "
                "expected an expression that says at once whether it matches. Write it without a repeat inside of a "
                "repeat, as in (a+)+ or (a|aa)+, or name a key of the records"
            ) from None

    def _conversation(self, doc_id: str) -> str | None:
        found = _PART.search(_AGAIN.sub("", doc_id))
        name = found[1] if found else None
        if name is None or (name != self._before and name in self._lengths):  # it was over
            self._before = None
            return None
        self._before = name
        self._lengths[name] += 1
        return name if self._lengths[name] <= LONGEST else None

    def count_last(self) -> None:
        """Count the dialogue that was grouped last as used."""
        name, question = self._last
        if name is not None:
            self._seen[name] += 1
        if question is not None:
            question.dialogues += 1

    def counts(self) -> dict[str, int]:
        """``{"conversations", "dialogues"}``: of those with more than one dialogue. Without a `data.group` also the
        "shared_questions", with which more than one dialogue begins, and the "sharing_dialogues". With one, the
        "without_group", records that are well formed and have none. Raises PipelineError for one that no record has.
        """
        several = [parts for parts in self._seen.values() if parts > 1]
        counts = {"conversations": len(several), "dialogues": sum(several)}
        if self._data.group is None:
            shared = [question.dialogues for question in self._questions.values() if question.dialogues > 1]
            return counts | {"shared_questions": len(shared), "sharing_dialogues": sum(shared)}
        if self._data.group == "id":
            return counts
        if self._asked and not self._matched:
            raise PipelineError(
                f"data.group={self._data.group!r} is in none of {self._asked} records: expected a key of theirs "
                "(letters, digits and _) whose value is a text, a number, a list or an object, or a regular expression "
                "on their ids"
            )
        return counts | {"without_group": self._asked - self._matched}


def _group_name(value: Any) -> str | None:
    """The group of records with this value: that of a list or an object is its JSON with sorted keys. None where it
    says nothing (null, NaN, empty), or is of a Parquet column's own types.
    """
    value = _plain(value)
    if value in (None, "", [], {}) or value != value:
        return None
    if isinstance(value, str | int | float):
        return str(value).encode(errors="replace").decode()
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """With each number as what it is worth: pandas makes 12.0 of 12 where another record has none."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float | Decimal):
        return int(value) if math.isfinite(value) and value == int(value) else float(value)
    return value


def _holds_parts(data: DataConfig) -> bool:
    ids = (_AGAIN.sub("", record_id(record)) for record in islice(read_records(data, Tail()), LOOKED_AT))
    parts = Counter(found[1] for found in map(_PART.search, ids) if found)
    return len(parts) < parts.total() <= MOST_PARTS * len(parts)


def question_key(question: str) -> bytes:
    """Return 16 bytes that stand for a question, whatever white space is between its words."""
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=16).digest()


def held_out(group: str, fraction: float) -> bool:
    """Split by the hash of the group's name (`Groups.of`), never by order."""
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) < fraction * 2**32
