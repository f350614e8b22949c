"""Tables and shards that were read back and found whole, and what is known of them without reading them again.

Guarantees: a file counts as whole without being read only while its size and times of change (of content, of inode:
a copy has its own) are those it had when its SHA-256 was made, and was the manifest's. What a disk loses without
touching these is found by `preprocess.verify` alone, which always reads everything. What is remembered is lost or
damaged without harm: files are then read again. (Whoever writes it by hand could write the manifest as well.)
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import file_identity, read_sealed, settled, write_sealed
from pipeline.features.shards import Record, damage

CHECKED = "checked.json"
THREADS = 8  # that hash: hashlib lets the others go on


def checked(folder: Path, records: Iterable[Record]) -> Iterator[tuple[Record, str | None]]:
    """Each file, in order, and why the one on disk is not the manifest's, or None when it is."""
    known, found = _known(folder), dict[str, list]()

    def look(record: Record) -> tuple[Record, str | None]:
        reason = damage(folder, record, checksum=False)
        if reason:
            return record, reason
        begin, stamp = time.time(), _stamp(folder / record.name)
        if known.get(record.name) == [*stamp, record.sha256]:
            return record, None
        reason = damage(folder, record)
        if not reason and settled(stamp, begin) and _stamp(folder / record.name) == stamp:
            found[record.name] = [*stamp, record.sha256]
        return record, reason

    try:
        with ThreadPoolExecutor(THREADS) as threads:
            yield from threads.map(look, records)
    finally:
        if found:
            _remember(folder, found)


def forget(folder: Path) -> None:
    """Every file is read again when it is asked for next."""
    with suppress(OSError):  # another user's folder
        (folder / CHECKED).unlink(missing_ok=True)


def _stamp(path: Path) -> list[int]:
    """What all nodes see of the identity of a shared folder's file."""
    return file_identity(path)[:3]


def _known(folder: Path) -> dict[str, Any]:
    with suppress(PipelineError):  # none, or damaged
        shards = read_sealed(folder / CHECKED, "").get("shards")
        return shards if isinstance(shards, dict) else {}
    return {}


def _remember(folder: Path, found: dict[str, list]) -> None:
    """Beside what other ranks have found; nothing where the folder may only be read, or is full."""
    with suppress(OSError, PipelineError), FileLock(folder / ".checked.lock"):
        write_sealed(folder / CHECKED, {"shards": _known(folder) | found}, wide=True)
