"""Which dialogues are parts of one conversation, and so fall on one side of the split; the split itself."""

import hashlib
import re
from collections import Counter
from itertools import islice
from typing import Any

from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import record_id
from preprocess.sources.read import Tail, read_records

_PART = re.compile(r"\A([A-Za-z0-9]{7})_\d+\Z")  # ShareGPT's id of a part of a long conversation
LOOKED_AT = 1000  # records by which a source is judged
MOST_PARTS = 8  # of a conversation, on average: ShareGPT's have 1.9. More, and the ids only count: example_0, example_1


class Groups:
    """By `data.group`: a record's key, or a regular expression on its id (its first group, else all that it matches).
    Without it, by ShareGPT's ids of parts (hRPPgZT_0, hRPPgZT_11), as long as the source's first records look like it.
    """

    def __init__(self, data: DataConfig):
        """Reads the source's first records. Raises PipelineError for an unusable source."""
        self._key, pattern = data.group_key, data.group
        if data.group is None and _holds_parts(data):
            pattern = _PART.pattern
        self._pattern = re.compile(pattern) if pattern is not None and self._key is None else None
        self._seen: Counter = Counter()  # of those whose group is not their id

    def of(self, record: Any, doc_id: str) -> str:
        """The name of the record's group; its id where it is a conversation of its own."""
        if self._key is not None:
            value = record.get(self._key) if isinstance(record, dict) else None
            named = isinstance(value, str | int) and str(value)
            return str(value).encode(errors="replace").decode() if named else doc_id
        if self._pattern is None:
            return doc_id
        found = self._pattern.search(doc_id)
        return doc_id if found is None else (found[1] if self._pattern.groups else found[0]) or doc_id

    def count(self, group: str, doc_id: str) -> None:
        if group != doc_id:
            self._seen[group] += 1

    def counts(self) -> dict[str, int]:
        """``{"conversations", "dialogues"}``: of those with more than one dialogue."""
        several = [parts for parts in self._seen.values() if parts > 1]
        return {"conversations": len(several), "dialogues": sum(several)}


def _holds_parts(data: DataConfig) -> bool:
    ids = map(record_id, islice(read_records(data, Tail()), LOOKED_AT))
    parts = Counter(found[1] for found in map(_PART.search, ids) if found)
    return parts.total() <= MOST_PARTS * len(parts)


def held_out(group: str, fraction: float) -> bool:
    """Split by the hash of the group's name (`Groups.of`), never by order."""
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) < fraction * 2**32
