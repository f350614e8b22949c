"""The source's usable dialogues: clean, of a wanted language, not there before. What became of the others is
counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.recipe.sections import DataConfig
from pipeline.target import chat
from preprocess.sources.dialogues import Dialogue, clean, record_id
from preprocess.sources.duplicates import Duplicates
from preprocess.sources.pieces import language
from preprocess.sources.read import Tail, read_records


def clean_in_language(record: Any, data: DataConfig) -> Dialogue:
    """Raises chat.Unusable by the rules of `dialogues.clean`, or as "language"."""
    dialogue = clean(record)
    if data.languages and language(dialogue) not in data.languages:
        raise chat.Unusable("language")
    return dialogue


@dataclass
class Intake:
    """One pass over the source; each record is either yielded or rejected."""

    data: DataConfig
    records: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)  # (document id, reason)
    tail: Tail = field(default_factory=Tail)

    def __iter__(self) -> Iterator[Dialogue]:
        """Raises PipelineError for an unusable source."""
        duplicates = Duplicates(self.data.near_duplicates)
        for record in read_records(self.data, self.tail):
            self.records += 1
            try:
                dialogue = clean_in_language(record, self.data)
                duplicates.refuse_repeated(dialogue)
            except chat.Unusable as reason:
                self.rejected.append((record_id(record), str(reason)))
                continue
            yield dialogue
