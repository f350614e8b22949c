"""A target's identity: its configuration and every byte of its weights.

A large file's SHA-256, and what else follows from files alone, is computed once on a machine and kept in the cache
folder ($JAKIRO_CACHE), by the files' paths, sizes, times and inodes. What a disk loses without touching these shows
only where the file is read `anew`.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import file_identity, in_turn, read_sealed, settled, write_sealed
from pipeline.basics.progress import Progress

VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")  # no part of what a target is
KEPT_FROM = 1 << 26  # bytes of a file from which on its sum is kept
SHOWN_FROM = 1 << 30  # bytes of a file from which on its progress is shown
PART = 1 << 24  # bytes that are read at once


def identity(config: dict[str, Any], weights: Iterable[Path]) -> str:
    """Sixteen hex digits of configuration and weights; what files are called, and where they are, is no part of it."""
    lasting = {key: value for key, value in config.items() if key not in VOLATILE}
    state = hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode())
    for path in sorted(weights):
        state.update(known_sha256(path).encode())
    return state.hexdigest()[:16]


def cached_by_files(
    kind: str, asked: Any, files: Iterable[Path], compute: Callable[[], dict[str, Any]], anew: bool = False
) -> dict[str, Any]:
    """What `compute` returns, a JSON object that follows from what is `asked` (JSON) and the content of `files`; not
    computed again, unless `anew`, as long as no file is changed, added or removed. Where several processes ask for the
    same at once, one computes it.
    """
    begin, paths = time.time(), sorted(path.absolute() for path in files)
    stats = list(map(file_identity, paths))
    states = [[str(path), *stat] for path, stat in zip(paths, stats, strict=True)]
    name = hashlib.sha256(json.dumps([asked, states], sort_keys=True, default=str).encode()).hexdigest()[:32]
    place = embedded.cache_dir() / kind / f"{name}.json"
    with ExitStack() as held:
        with suppress(OSError):  # a cache folder that may not be written to
            held.enter_context(in_turn(place))
        with suppress(PipelineError):  # none there, or damaged
            if not anew:
                return read_sealed(place, "")
        value = compute()
        if all(settled(stat, begin) for stat in stats) and stats == list(map(file_identity, paths)):
            with suppress(OSError):
                write_sealed(place, value)
    return value


def known_sha256(path: Path, anew: bool = False, quiet: bool = False) -> str:
    """The SHA-256 of a whole file."""
    path = path.resolve()
    if path.stat().st_size < KEPT_FROM:
        return _computed(path, quiet)
    return cached_by_files("sha256", None, [path], lambda: {"sha256": _computed(path, quiet)}, anew)["sha256"]


def _computed(path: Path, quiet: bool) -> str:
    state, size = hashlib.sha256(), path.stat().st_size
    quiet = quiet or size < SHOWN_FROM
    with path.open("rb") as file, Progress(f"hash {path.name}", size, "bytes", quiet=quiet) as progress:
        while part := file.read(PART):
            state.update(part)
            progress.advance(len(part))
    return state.hexdigest()
