"""A target's identity: its configuration and every byte of its weights.

A file's SHA-256, and what else follows from files alone, is computed once on a machine and kept in the cache folder
($JAKIRO_CACHE), by the files' paths, sizes, times and inodes.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import file_identity, read_sealed, settled, write_json, write_sealed
from pipeline.basics.progress import Progress

VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")  # no part of what a target is
KEPT_FROM = 1 << 26  # bytes of a file from which on its sum is kept
SHOWN_FROM = 1 << 30  # bytes of a file from which on its progress is shown
PART = 1 << 24  # bytes that are read at once
_SHA256 = re.compile(r"[0-9a-f]{64}")


def identity(config: dict[str, Any], weights: Iterable[Path]) -> str:
    """Sixteen hex digits of configuration and weights; what files are called, and where they are, is no part of it."""
    lasting = {key: value for key, value in config.items() if key not in VOLATILE}
    state = hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode())
    for path in sorted(weights):
        state.update(weights_sha256(path).encode())
    return state.hexdigest()[:16]


def cached_by_files(
    kind: str, asked: Any, files: Iterable[Path], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `compute` returns, a JSON object that follows from what is `asked` (JSON) and the content of `files`; not
    computed again as long as no file is changed, added or removed.
    """
    begin, paths = time.time(), sorted(path.absolute() for path in files)
    stats = [file_identity(path) for path in paths]
    states = [[str(path), *stat] for path, stat in zip(paths, stats, strict=True)]
    name = hashlib.sha256(json.dumps([asked, states], sort_keys=True, default=str).encode()).hexdigest()[:32]
    place = embedded.cache_dir() / kind / f"{name}.json"
    try:
        value = read_sealed(place, "")
    except PipelineError:  # none there, or damaged
        value = compute()
        if all(settled(stat, begin) for stat in stats):
            with suppress(OSError):  # a cache folder that may not be written to
                write_sealed(place, value)
    return value


def weights_sha256(path: Path) -> str:
    """The SHA-256 of a whole file. Several processes may ask for the same at once: one computes it."""
    path = path.resolve()
    if path.stat().st_size < KEPT_FROM:
        return _computed(path)
    known = embedded.cache_dir() / "sha256" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(known.with_suffix(".lock")):
            return _known_or_computed(path, known)
    except OSError:  # a cache folder that may not be written to
        return _computed(path)


def _known_or_computed(path: Path, known: Path) -> str:
    begin, before = time.time(), file_identity(path)
    if (kept := _read(known)) is not None and kept["file"] == [str(path), *before]:
        return kept["sha256"]
    found = _computed(path)
    if settled(before, begin) and file_identity(path) == before:
        write_json(known, {"file": [str(path), *before], "sha256": found})
    return found


def _read(known: Path) -> dict[str, Any] | None:
    """What was kept of a file; None where nothing was, or where it is damaged."""
    try:
        kept = json.loads(known.read_text())
        return kept if _SHA256.fullmatch(kept["sha256"]) and "file" in kept else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _computed(path: Path) -> str:
    state, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file, Progress(f"hash {path.name}", size, "bytes", quiet=size < SHOWN_FROM) as progress:
        while part := file.read(PART):
            state.update(part)
            progress.advance(len(part))
    return state.hexdigest()
