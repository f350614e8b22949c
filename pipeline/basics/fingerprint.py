"""A target's identity: its configuration and every byte of its weights.

A large file's SHA-256, and other values that follow from files alone, are computed once on a machine and stored in the
cache folder ($JAKIRO_CACHE), by the files' paths, sizes, times and inodes. Corruption by the disk, which changes none
of these, shows only where the file is read again (`recompute`).
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
from pipeline.basics.files import file_identity, is_settled, lock_file, read_sealed, write_sealed
from pipeline.basics.progress import Progress

# Keys of a configuration that are not part of a target's identity.
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
CACHED_FROM = 1 << 26  # bytes; the sums of files of at least this size are cached
PROGRESS_FROM = 1 << 30  # bytes; progress is shown for files of at least this size
PART = 1 << 24  # bytes per read


def identity(config: dict[str, Any], weights: Iterable[Path]) -> str:
    """Hash configuration and weights to sixteen hex digits; names and places of the files do not count."""
    stable = {key: value for key, value in config.items() if key not in VOLATILE}
    state = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    for path in sorted(weights):
        state.update(cached_sha256(path).encode())
    return state.hexdigest()[:16]


def cache_by_files(
    kind: str, key: Any, files: Iterable[Path], compute: Callable[[], dict[str, Any]], recompute: bool = False
) -> dict[str, Any]:
    """Return the JSON object of `compute`, which follows from `key` (JSON) and the content of `files`. It is not
    computed again, unless `recompute`, as long as no file is changed, added or removed. Where several processes call
    this for the same at once, one computes it.
    """
    begin, paths = time.time(), sorted(path.absolute() for path in files)
    stats = list(map(file_identity, paths))
    states = [[str(path), *stat] for path, stat in zip(paths, stats, strict=True)]
    name = hashlib.sha256(json.dumps([key, states], sort_keys=True, default=str).encode()).hexdigest()[:32]
    cached = embedded.cache_dir() / kind / f"{name}.json"
    with ExitStack() as stack:
        with suppress(OSError):  # the cache folder is not writable
            stack.enter_context(lock_file(cached))
        with suppress(PipelineError):  # it does not exist, or is damaged
            if not recompute:
                return read_sealed(cached, "")
        value = compute()
        if all(is_settled(stat, begin) for stat in stats) and stats == list(map(file_identity, paths)):
            with suppress(OSError):
                write_sealed(cached, value)
    return value


def cached_sha256(path: Path, recompute: bool = False, quiet: bool = False) -> str:
    """Return the SHA-256 of a complete file."""
    path = path.resolve()
    if path.stat().st_size < CACHED_FROM:
        return _compute_sha256(path, quiet)
    return cache_by_files("sha256", None, [path], lambda: {"sha256": _compute_sha256(path, quiet)}, recompute)["sha256"]


def _compute_sha256(path: Path, quiet: bool) -> str:
    state, size = hashlib.sha256(), path.stat().st_size
    quiet = quiet or size < PROGRESS_FROM
    with path.open("rb") as file, Progress(f"hash {path.name}", size, "bytes", quiet=quiet) as progress:
        while part := file.read(PART):
            state.update(part)
            progress.advance(len(part))
    return state.hexdigest()
