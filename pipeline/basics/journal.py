"""Finished tasks, one sealed line each, in a file that only grows: what a job that continues need not do again.

A line is whole or does not count: one that was torn when its writer was killed, or damaged since, is removed, and its
task is done again. Lines of another `key` stay and do not count: the key is the digest of all that outcomes depend on.
"""

import json
import logging
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path, sealed_line, unsealed

log = logging.getLogger(__name__)


class Journal:
    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        self._places: dict[Hashable, int] = {}  # where a task's newest line begins, in bytes
        path.touch()
        left_out, place = set(), 0
        for number, line, found in self._lines():
            if found is None:
                left_out.add(number)
                continue
            if found.get("key") == key:
                self._places[_name(found["task"])] = place
            place += len(line)
        if left_out:
            with path.open("rb") as old, atomic_path(path) as temporary, temporary.open("wb") as file:
                file.writelines(line for number, line in enumerate(old, start=1) if number not in left_out)

    def _lines(self) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
        """(number from 1, line, its content, or None where it is not whole)."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, line, unsealed(line, self._path, "") if line.endswith(b"\n") else None
                except PipelineError:
                    log.warning("%s: line %d is damaged and removed: what it held is done again", self._path, number)
                    yield number, line, None

    def __contains__(self, task: Hashable) -> bool:
        return task in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._places)

    def __getitem__(self, task: Hashable) -> dict[str, Any]:
        """The outcome, read from the file: it may be large."""
        with self._path.open("rb") as file:
            file.seek(self._places[task])
            return json.loads(file.readline())["outcome"]

    def add(self, task: Hashable, outcome: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            self._places[task] = file.tell()
            file.write(sealed_line({"key": self._key, "task": task, "outcome": outcome}).encode())


def _name(task: Any) -> Hashable:
    return tuple(task) if isinstance(task, list) else task
