"""Files that are whole or absent: write under a temporary name, fsync, rename."""

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.errors import PipelineError

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renames it over `path` when the block succeeds, removes it otherwise.

    Raises PipelineError when the disk (or a quota or file-size limit) is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        _to_disk(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno in _FULL:
            raise PipelineError(
                f"no space to write {path.name} in {path.parent} ({os.strerror(error.errno)}): "
                "free some, or point the recipe's output elsewhere, and run again; finished files are kept"
            ) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)  # renamed by now, or not wanted


@contextmanager
def exclusive(folder: Path, work: str) -> Iterator[None]:
    """Makes the folder, holds it for one process and clears what another left half-written in it. Raises PipelineError when
    another one has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise PipelineError(
            f"{folder}: another {work} is writing here. Wait for it, or give this run its own output"
        ) from None
    with lock:
        for leftover in folder.rglob(".*.tmp"):  # of `atomic_path`
            leftover.unlink()
        yield


def sync(folder: Path) -> None:
    """What this machine has written into the folder is on the disk when it returns."""
    for path in [*folder.rglob("*"), folder]:
        _to_disk(path)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises PipelineError when the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise PipelineError(f"{path} does not exist") from None
    except ValueError as error:
        raise PipelineError(f"{path} is not JSON: {error}") from None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
