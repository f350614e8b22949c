"""Files that are complete or absent: write under a temporary name, fsync, rename. Journals that only grow."""

import errno
import hashlib
import json
import logging
import os
import resource
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.basics.errors import PipelineError

ROOT = Path(__file__).resolve().parent.parent.parent  # the checkout
SETTLE_SECONDS = 2.0  # seconds after which another change of a file changes its timestamp: clocks are that coarse
SPARE_FILES = 256  # that a process may open later: libraries, sockets, logs
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}  # a disk, a quota, a limit on a file's size


def python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH for a child process of this project: the checkout, then the user's own."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files where `count` more do not fit. Raise PipelineError where the hard limit
    is lower.
    """
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len([*Path("/dev/fd").iterdir()]) + count + SPARE_FILES
    if hard_limit != resource.RLIM_INFINITY and needed > hard_limit:
        raise PipelineError(
            f"{count:,} feature shards are to be open at once, but this process may open {hard_limit:,} files (ulimit "
            f"-Hn): raise that to {needed:,}, or dump larger shards (features.rows_per_shard)"
        )
    if needed > limit != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard_limit))


def file_identity(path: Path) -> list[int]:
    """Return what always changes with a file's content, unless the disk corrupts it: its size; when its content and its
    inode changed, in nanoseconds (a copy has its own); inode and device.
    """
    with path.open("rb") as file:  # opening makes NFS ask its server
        stat = os.fstat(file.fileno())
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def is_settled(identity: list[int], begin: float) -> bool:
    """Return whether a file of this `file_identity` was old enough, when reading began, for a later change to show."""
    return begin - max(identity[1:3]) / 1e9 > SETTLE_SECONDS


@contextmanager
def atomic_path(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield a temporary name next to `path`; rename it to `path` when the block succeeds, remove it otherwise. The
    file's mode follows the umask, whichever library writes it (safetensors creates its files with 0600); with `private`
    no other user can read it.

    Raise PipelineError when the disk (or a quota or file-size limit) is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.touch(mode=0o600 if private else 0o666)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _fsync(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno in FULL:
            raise PipelineError(
                f"no space to write {path.name} in {path.parent} ({os.strerror(error.errno or 0)}): "
                "free some, or point the recipe's output elsewhere, and run again; finished files are kept"
            ) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)  # renamed by now, or left after an error


@contextmanager
def lock_folder(folder: Path, work: str) -> Iterator[None]:
    """Create the folder, lock it for this process and remove the half-written files of earlier ones. Raise
    PipelineError when another process holds it.
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
        for leftover in folder.rglob(".*.tmp"):  # written by `atomic_path`
            leftover.unlink()
        yield


def is_held(folder: Path) -> bool:
    """Return whether a process of this machine holds the folder by `lock_folder`. The check itself takes no lock."""
    lock, locks = folder / ".lock", Path("/proc/locks")
    if not (lock.exists() and locks.exists()):
        return False
    return any(f":{lock.stat().st_ino} " in line and "FLOCK" in line for line in locks.read_text().splitlines())


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Lock a file that is read and then rewritten, while other processes wait for it; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def flush_folder(folder: Path) -> None:
    """Flush all files of the folder, and the folder itself, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Load a JSON object. Raise PipelineError when the file is missing or holds something else."""
    return parse_object(_read_bytes(path), path)


def parse_object(content: bytes, where: object) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raise PipelineError, which names `where`, for anything else."""
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise PipelineError(f"{where} is not JSON: it is not UTF-8 ({error})") from None
    except RecursionError:
        raise PipelineError(f"{where} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise PipelineError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PipelineError(f"{where} is a JSON {type(value).__name__}, expected an object")
    return value


def _read_bytes(path: Path, tries: int = 5) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PipelineError(f"{path} does not exist") from None
    except OSError as error:  # a folder, no permission
        if error.errno == errno.ESTALE and tries > 1:  # another node replaced the file while this one read it over NFS
            return _read_bytes(path, tries - 1)
        raise PipelineError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from None


# -- sealed JSON: it holds its own checksum, and readers refuse a changed or damaged file ------------------------------

SEAL = "seal"  # the key; its value is the SHA-256 of the canonical JSON of all other keys
_compact = json.JSONEncoder(ensure_ascii=False).encode


def compute_seal(value: dict[str, Any]) -> str:
    """Compute the seal of `value` after a round trip through JSON, without its own seal; the order of keys does not
    count.
    """
    unsealed_value = json.loads(json.dumps({key: item for key, item in value.items() if key != SEAL}))
    return hashlib.sha256(_canonical(unsealed_value).encode()).hexdigest()


def _canonical(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def add_seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return the object with its seal as its last key."""
    return {key: item for key, item in value.items() if key != SEAL} | {SEAL: compute_seal(value)}


def write_sealed(path: Path, value: dict[str, Any], wide: bool = False) -> None:
    """Write a sealed JSON object. With `wide` each item of its lists and objects has a line of its own, which is
    several times as fast for many items.
    """
    sealed_value = add_seal(value)
    if wide:
        write_text(path, _encode_wide(sealed_value) + "\n")
    else:
        write_json(path, sealed_value)


def _encode_wide(value: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_compact(key)}: {_encode_by_line(item)}" for key, item in value.items()) + "\n}"


def _encode_by_line(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(_compact({key: item})[1:-1] for key, item in value.items()) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Load a file of `write_sealed`, without the seal. Raise PipelineError, which ends with `remedy`, for any other
    content.
    """
    return parse_sealed(_read_bytes(path), path, remedy)


def parse_sealed(content: bytes, where: object, remedy: str) -> dict[str, Any]:
    """Parse a sealed object in memory, as `read_sealed` does; errors name `where`."""
    try:
        value = parse_object(content, where)
    except PipelineError as error:
        raise PipelineError(f"{error}. {remedy}") from None
    return verify_seal(value, where, remedy)


def verify_seal(value: dict[str, Any], where: object, remedy: str) -> dict[str, Any]:
    """Return the object without its seal. Raise PipelineError when the seal is missing or does not match the
    content.
    """
    seal = value.pop(SEAL, None)
    if seal is None:
        raise PipelineError(f"{where} has no {SEAL!r}: it was written by hand or by another version. {remedy}")
    try:
        expected_seal = hashlib.sha256(_canonical(value).encode()).hexdigest()  # as `compute_seal`
    except RecursionError:  # nested too deeply to encode, though not to parse
        expected_seal = None
    if seal != expected_seal:
        raise PipelineError(f"{where} was changed or damaged after it was written: its {SEAL!r} is another. {remedy}")
    return value


def format_sealed_line(value: dict[str, Any]) -> str:
    """Return one line of a file of sealed objects, with its line break."""
    return json.dumps(add_seal(value)) + "\n"


CLOSING = "lines"  # key of a sealed file's last line: the number of lines before it; "sha256" is that of their bytes


def format_sealed_lines(values: Iterable[dict[str, Any]]) -> str:
    """Return the text of a complete sealed file: a line for each value, and a closing line."""
    lines = [format_sealed_line(value) for value in values]
    content = "".join(lines)
    closing = {CLOSING: len(lines), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    return content + format_sealed_line(closing)


def read_sealed_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """Load the values of a file of `format_sealed_lines`; an empty list where there is no file. Raise PipelineError,
    which ends with `remedy` and names a changed line, when a line was changed, added or lost, the last one included.
    """
    if not path.exists():
        return []
    *lines, closing = path.read_bytes().splitlines(keepends=True) or [b""]
    values, closing_values = list[dict[str, Any]](), dict[str, Any]()
    with suppress(PipelineError):
        for line in lines:
            values.append(parse_sealed(line, path, ""))
        closing_values = parse_sealed(closing, path, "")
    expected = {CLOSING: len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
    if closing_values != expected or not closing.endswith(b"\n"):
        problem = f"line {len(values) + 1} is not the one that was written"
        if len(values) == len(lines):
            problem = "its last line is not that of the lines before it"
        raise PipelineError(
            f"{path} was changed or damaged after it was written, or is of another version: {problem}. {remedy}"
        )
    return values


# -- files listed in a sealed file: a manifest, a resume state --------------------------------------------------------


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Digest = Callable[[Path], str]  # computes the SHA-256 of a file


def describe_difference(
    path: Path, expected: str, size: int | None, listed_by: str = "the manifest", digest: Digest | None = sha256
) -> str | None:
    """Return why a file is not the one listed `by` the manifest (or another list) with this SHA-256 and size; None when
    it is. Without a `digest` the file is not read.
    """
    if not path.is_file():
        return "it is missing"
    if size is not None and (actual_size := path.stat().st_size) != size:
        return f"it has {actual_size} bytes, {listed_by} says {size}: it was truncated or overwritten"
    if digest and digest(path) != expected:
        return f"its SHA-256 is not {listed_by}'s: its content was changed or damaged"
    return None


log = logging.getLogger(__name__)


class Journal:
    """A file of finished tasks, one sealed line each, that only grows: a resumed job does not repeat them.

    Only complete lines count: a line that was torn when its writer was killed, or damaged since, is removed, and its
    task is repeated. Lines of another `key` stay and do not count: the key is the digest of everything that outcomes
    depend on.
    """

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        self._offsets: dict[Hashable, int] = {}  # task -> where its newest line begins, in bytes
        path.touch()
        damaged, offset = set(), 0
        for number, line, content in self._lines():
            if content is None:
                damaged.add(number)
                continue
            if content.get("key") == key:
                self._offsets[_hashable(content["task"])] = offset
            offset += len(line)
        if damaged:
            with path.open("rb") as old, atomic_path(path) as temporary, temporary.open("wb") as file:
                file.writelines(line for number, line in enumerate(old, start=1) if number not in damaged)

    def _lines(self) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
        """Yield (number from 1, line, its content, or None where it is incomplete or damaged)."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, line, parse_sealed(line, self._path, "") if line.endswith(b"\n") else None
                except PipelineError:
                    log.warning("%s: line %d is damaged and removed: its task is repeated", self._path, number)
                    yield number, line, None

    def __contains__(self, task: Hashable) -> bool:
        return task in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._offsets)

    def __getitem__(self, task: Hashable) -> dict[str, Any]:
        """Load the outcome from the file, as it may be large."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[task])
            return json.loads(file.readline())["outcome"]

    def add(self, task: Hashable, outcome: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            self._offsets[task] = file.tell()
            file.write(format_sealed_line({"key": self._key, "task": task, "outcome": outcome}).encode())


def _hashable(task: Any) -> Hashable:
    return tuple(task) if isinstance(task, list) else task
