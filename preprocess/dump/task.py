"""What a worker is given to do, and how it says what it is busy with."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.basics.errors import PipelineError
from pipeline.basics.public import scrubbed
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import FeaturesConfig

KILLS_WORKERS = "kills_workers"  # why a dialogue was set aside
Tell = Callable[[tuple[str, ...]], None]  # takes the ids of the dialogues that are being worked on from now on


def nobody_listens(_: tuple[str, ...]) -> None:
    """For a worker outside of a pool."""


def in_flight(settings: FeaturesConfig) -> int:
    """Batches that a worker forwards at a time: one for every GPU of a spread target."""
    return max(1, int(settings.gpus_per_worker or 0))


class Item(Protocol):
    doc_id: str

    def content(self) -> bytes:
        """Everything but the id that the result depends on."""


def longest_first(documents: Iterable[Any]) -> list[Any]:
    """Whatever order they come in."""
    return sorted(documents, key=lambda document: (-len(document.input_ids), document.doc_id))


@dataclass(frozen=True)
class ShardTask:
    """One output file: its dialogues, in the form in which the worker takes them."""

    split: str
    index: int
    documents: list[Any]  # of Item
    suspects: tuple[str, ...] = ()  # ids of dialogues to be worked on alone first: one of them kills workers
    set_aside: dict[str, str] = field(default_factory=dict)  # id -> reason: dialogues that are left out

    @property
    def in_order(self) -> list[Any]:
        """Documents as the text table and the shard have them: the longest first, which are forwarded together."""
        return longest_first(self.documents)

    @property
    def fingerprint(self) -> str:
        state = hashlib.sha256()
        for document in sorted(self.documents, key=lambda document: document.doc_id):
            state.update(f"{document.doc_id}\0".encode() + document.content())
        return state.hexdigest()[:16]

    def is_done(self, record: Any, recipe: Recipe) -> bool:
        """Whether there is a record of it from an earlier run: None, or what has the `name` of its file and the
        fingerprint `documents`. Raises PipelineError when that was made from other dialogues: the source changed
        between two runs.
        """
        if record is not None and record.documents != self.fingerprint:
            raise PipelineError(
                f"{record.name} was made from other dialogues than {scrubbed(recipe.data.source)} has now: the source "
                "changed since this job was started. Restore it, or use another output folder"
            )
        return record is not None


class Worker(Protocol):
    """What a pool employs."""

    def ready(self) -> None:
        """Loads the target. A call of its own: what goes wrong in a constructor on another machine loses its
        message.
        """

    def work(self, task: ShardTask) -> Any:
        """Writes the task's file and returns its record: the same whoever does it, and however often."""
