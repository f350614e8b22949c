"""The source's usable dialogues: clean, of a requested language, without duplicates (by id, by content, nearly by
MinHash). All other records are counted by reason.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import py3langid
from rensa import RMinHash, RMinHashLSH

from pipeline.lm.chat import Encoded, Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue, clean, record_id
from preprocess.sources.forms import describe_record
from preprocess.sources.groups import Groups
from preprocess.sources.read import TornTail, read_records

DESCRIBED_REASONS = ("malformed", "unknown_role")  # reasons that the record's description explains
LANGUAGE_CHARACTERS = 4000  # characters of a dialogue that show its language
PERMUTATIONS, BANDS, SHINGLE = 128, 32, 5  # words a shingle


def detect_language(dialogue: Dialogue) -> str:
    """Return the ISO 639-1 code of a dialogue's language."""
    return str(py3langid.classify(dialogue.text[:LANGUAGE_CHARACTERS])[0])


def clean_in_language(record: Any, data: DataConfig, groups: Groups) -> Dialogue:
    """Return the record's dialogue with its group. Raise Unusable by the rules of `dialogues.clean`, as "language" (the
    language of bare tokens is not known), or by `Groups.of`.
    """
    dialogue = clean(record, data.repeated)
    if data.languages and (isinstance(dialogue.raw, Encoded) or detect_language(dialogue) not in data.languages):
        raise Unusable("language")
    return replace(dialogue, group=groups.find_group(record, dialogue))


class Duplicates:
    """The hashes of earlier dialogues: 16 bytes a dialogue, and with `near` about 2 KB more."""

    def __init__(self, near: float | None):
        """`near`: the estimated Jaccard similarity of word 5-grams from which two dialogues count as one; None: off."""
        self._near, self._ids, self._contents = near, set(), set()
        self._signatures: list[RMinHash] = []
        self._index = RMinHashLSH(threshold=near, num_perm=PERMUTATIONS, num_bands=BANDS) if near else None

    def deduplicate(self, dialogue: Dialogue) -> Dialogue:
        """Return the dialogue and remember it. A repeated id with another content gets a suffix; the group stays. Raise
        Unusable("duplicate" | "duplicate_text" | "near_duplicate").
        """
        content, repeated = _digest(dialogue.identity()), _digest(dialogue.doc_id.encode()) in self._ids
        if content in self._contents:
            raise Unusable("duplicate" if repeated else "duplicate_text")
        if repeated:
            doc_id, edits = f"{dialogue.doc_id}@{content.hex()}", (*dialogue.edits, "id_repeated")
            dialogue = replace(dialogue, doc_id=doc_id, edits=edits)
        self._ids.add(_digest(dialogue.doc_id.encode()))
        self._contents.add(content)
        if self._index is not None:
            signature = RMinHash(num_perm=PERMUTATIONS, seed=0)
            signature.update(shingles(dialogue.text))
            for number in self._index.query(signature):
                if signature.jaccard(self._signatures[number]) >= self._near:
                    raise Unusable("near_duplicate")
            self._index.insert(len(self._signatures), signature)
            self._signatures.append(signature)
        return dialogue


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def shingles(text: str) -> list[str]:
    """Return all runs of five words, in lower case; the whole text where it is shorter."""
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[at : at + SHINGLE]) for at in range(max(len(words) - SHINGLE + 1, 1))]


@dataclass
class Intake:
    """One pass over the source; each record is either yielded or rejected."""

    data: DataConfig
    records: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)  # (document id, reason)
    tail: TornTail = field(default_factory=TornTail)
    grouped: dict[str, int] = field(default_factory=dict)  # `Groups.counts`, once the pass is over
    examples: dict[str, str] = field(default_factory=dict)  # by reason: a description of its first record

    def __iter__(self) -> Iterator[Dialogue]:
        """Yield the usable dialogues. Raise PipelineError for an unusable source."""
        duplicates, groups = Duplicates(self.data.near_duplicates), Groups(self.data)
        for record in read_records(self.data, self.tail):
            self.records += 1
            try:
                dialogue = duplicates.deduplicate(clean_in_language(record, self.data, groups))
            except Unusable as reason:
                self.rejected.append((record_id(record), str(reason)))
                if str(reason) in DESCRIBED_REASONS:
                    self.examples.setdefault(str(reason), describe_record(record))
                continue
            groups.count_last()
            yield dialogue
        self.grouped = groups.counts()
