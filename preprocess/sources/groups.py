"""Groups of dialogues that are parts of one conversation or begin with the same question, so that the split keeps them
on one side; and the split itself.
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
from preprocess.sources.read import TornTail, read_records

_PART = re.compile(r"\A([A-Za-z0-9]{7})_\d+\Z")  # ShareGPT's id of a part of a long conversation
_REPEAT_SUFFIX = re.compile(r"@[0-9a-f]{32}\Z")  # appended by `intake` to a repeated id; regenerated files have it
SAMPLED_RECORDS = 1000  # first records, which show whether ids name parts
MOST_PARTS = 8  # parts of a conversation on average: ShareGPT has 1.9. With more, ids just count: example_0, example_1
SEARCH_SECONDS = 5  # time limit for `data.group`'s expression in one id: its worst case may be exponential
LONGEST = 128  # parts of one conversation: ShareGPT's longest has 89. With further parts, the id just counts


@dataclass(slots=True)
class Question:
    """A first question and its use so far."""

    group: str  # group of the first dialogue that begins with it
    dialogues: int = 0  # used dialogues that begin with it


class Groups:
    """The groups of a source's dialogues. `data.group` names a record's key (`_group_name` of its value), or a regular
    expression on its id (its first group, or else the whole match); a record without one is a conversation of its own.
    Without `data.group`, parts are recognised by ShareGPT's ids (hRPPgZT_0, hRPPgZT_11) that follow each other, if the
    source's first records have such ids, and by the first question: a dialogue, or a conversation's first part, that
    begins with an earlier question joins its group. A group is named by its first record. Records come in the source's
    order.
    """

    def __init__(self, data: DataConfig):
        """Read the source's first records. Raise PipelineError for an unusable source."""
        self._data, self._key = data, data.group_key
        self._pattern = regex.compile(data.group) if data.group is not None and self._key is None else None
        self._parts = data.group is None and _holds_parts(data)
        self._before: str | None = None  # conversation of the previous part
        self._lengths: Counter = Counter()  # parts by conversation
        self._first_groups: dict[str, str] = {}  # group of a conversation that begins with an earlier question
        self._questions: dict[bytes, Question] = {}
        self._records = self._matched = 0  # records; those that have a group by `data.group`
        self._used: Counter = Counter()  # used dialogues by conversation, or by the value of `data.group`
        self._last: tuple[str | None, Question | None] = (None, None)  # name and question of the last grouped dialogue

    def find_group(self, record: Any, dialogue: Dialogue) -> str:
        """Return the name of the dialogue's group; its id where it is alone. Raise Unusable("on_both_sides") for a
        part whose conversation and whose first question are on different sides of the split.
        """
        doc_id = dialogue.doc_id
        if self._data.group is not None:
            name = self._name_by_setting(record, doc_id)
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

    def _name_by_setting(self, record: Any, doc_id: str) -> str | None:
        """Return the record's group by `data.group`; None where it has none."""
        self._records += 1
        name = None
        if self._key is not None:
            name = _group_name(record.get(self._key)) if isinstance(record, dict) else None
        elif self._pattern is not None and (match := self._search(doc_id)):
            name = match[1] if self._pattern.groups else match[0]
        self._matched += bool(name)
        return name or None

    def _search(self, doc_id: str) -> regex.Match | None:
        try:
            return self._pattern.search(_REPEAT_SUFFIX.sub("", doc_id), timeout=SEARCH_SECONDS)
        except TimeoutError:
            raise PipelineError(
                f"data.group={self._data.group!r} takes more than {SEARCH_SECONDS} s on the id {doc_id[:80]!r}: "
                "expected an expression that matches, or fails, at once. Write it without a repeat inside of a "
                "repeat, as in (a+)+ or (a|aa)+, or name a key of the records"
            ) from None

    def _conversation(self, doc_id: str) -> str | None:
        match = _PART.search(_REPEAT_SUFFIX.sub("", doc_id))
        name = match[1] if match else None
        if name is None or (name != self._before and name in self._lengths):  # it had ended
            self._before = None
            return None
        self._before = name
        self._lengths[name] += 1
        return name if self._lengths[name] <= LONGEST else None

    def count_last(self) -> None:
        """Count the last grouped dialogue as used."""
        name, question = self._last
        if name is not None:
            self._used[name] += 1
        if question is not None:
            question.dialogues += 1

    def counts(self) -> dict[str, int]:
        """Return ``{"conversations", "dialogues"}``: numbers of conversations with more than one dialogue, and of their
        dialogues. Without `data.group` also "shared_questions", with which more than one dialogue begins, and
        "sharing_dialogues". With it, "without_group": well-formed records that have none. Raise PipelineError where no
        record has a group.
        """
        several = [parts for parts in self._used.values() if parts > 1]
        counts = {"conversations": len(several), "dialogues": sum(several)}
        if self._data.group is None:
            shared = [question.dialogues for question in self._questions.values() if question.dialogues > 1]
            return counts | {"shared_questions": len(shared), "sharing_dialogues": sum(shared)}
        if self._data.group == "id":
            return counts
        if self._records and not self._matched:
            raise PipelineError(
                f"data.group={self._data.group!r} is in none of {self._records} records: expected a key of theirs "
                "(letters, digits and _) whose value is a text, a number, a list or an object, or a regular expression "
                "on their ids"
            )
        return counts | {"without_group": self._records - self._matched}


def _group_name(value: Any) -> str | None:
    """Return the group of records with this value: of a list or an object, its JSON with sorted keys. None for an empty
    value (null, NaN, ""), or one of a Parquet column's own types.
    """
    value = _normalize_numbers(value)
    if value in (None, "", [], {}) or value != value:
        return None
    if isinstance(value, str | int | float):
        return str(value).encode(errors="replace").decode()
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        return None


def _normalize_numbers(value: Any) -> Any:
    """Return the value with whole numbers as integers: pandas turns 12 into 12.0 where another record has none."""
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(inner) for inner in value]
    if isinstance(value, float | Decimal):
        return int(value) if math.isfinite(value) and value == int(value) else float(value)
    return value


def _holds_parts(data: DataConfig) -> bool:
    ids = (
        _REPEAT_SUFFIX.sub("", record_id(record)) for record in islice(read_records(data, TornTail()), SAMPLED_RECORDS)
    )
    parts = Counter(match[1] for match in map(_PART.search, ids) if match)
    return len(parts) < parts.total() <= MOST_PARTS * len(parts)


def question_key(question: str) -> bytes:
    """Return a hash of 16 bytes for a question, whatever white space is between its words."""
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=16).digest()


def held_out(group: str, fraction: float) -> bool:
    """Return whether a group is held out: by the hash of its name (`Groups.of`), never by order."""
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) < fraction * 2**32
