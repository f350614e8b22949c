"""The source's usable dialogues: clean, of a wanted language, not there before. What became of the others is
counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.lm import chat
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue, clean, record_id
from preprocess.sources.duplicates import Duplicates
from preprocess.sources.groups import Groups
from preprocess.sources.pieces import language
from preprocess.sources.read import Tail, read_records


def clean_in_language(record: Any, data: DataConfig, groups: Groups) -> Dialogue:
    """Raises chat.Unusable by the rules of `dialogues.clean`, or as "language": that of mere tokens is not known."""
    dialogue = clean(record, data.repeated)
    if data.languages and (isinstance(dialogue.raw, chat.Encoded) or language(dialogue) not in data.languages):
        raise chat.Unusable("language")
    return replace(dialogue, group=groups.of(record, dialogue.doc_id))


@dataclass
class Intake:
    """One pass over the source; each record is either yielded or rejected."""

    data: DataConfig
    records: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)  # (document id, reason)
    tail: Tail = field(default_factory=Tail)
    grouped: dict[str, int] = field(default_factory=dict)  # `Groups.counts`, once the pass is over

    def __iter__(self) -> Iterator[Dialogue]:
        """Raises PipelineError for an unusable source."""
        duplicates, groups = Duplicates(self.data.near_duplicates), Groups(self.data)
        for record in read_records(self.data, self.tail):
            self.records += 1
            try:
                dialogue = clean_in_language(record, self.data, groups)
                duplicates.refuse_repeated(dialogue)
            except chat.Unusable as reason:
                self.rejected.append((record_id(record), str(reason)))
                continue
            groups.count(dialogue.group, dialogue.doc_id)
            yield dialogue
        self.grouped = groups.counts()
