"""Files that are whole or absent: write under a temporary name, fsync, rename; and journals that only grow."""

import errno
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.basics.errors import PipelineError

ROOT = Path(__file__).resolve().parent.parent.parent  # the checkout
SETTLED = 2.0  # seconds after which a file that changes again has another time of change: clocks are that coarse
FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}  # a disk, a quota, a limit on a file's size


def python_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH for a process of ours: the checkout, then the user's own."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


def file_identity(path: Path) -> list[int]:
    """What a file's content cannot change without, but for what a disk loses: its size; when its content and its inode
    changed, in nanoseconds (a copy has its own); inode and device.
    """
    with path.open("rb") as file:  # opened, NFS asks its server
        found = os.fstat(file.fileno())
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def settled(found: list[int], begin: float) -> bool:
    """Whether a file of this `file_identity` was old enough, when it began to be read, for a later change to show."""
    return begin - max(found[1:3]) / 1e9 > SETTLED


@contextmanager
def atomic_path(path: Path, private: bool = False) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renames it over `path` when the block succeeds, removes it otherwise. The
    file's mode is the umask's, whoever writes it (safetensors makes its files 0600); `private`: no other user reads it.

    Raises PipelineError when the disk (or a quota or file-size limit) is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.touch(mode=0o600 if private else 0o666)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _to_disk(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno in FULL:
            raise PipelineError(
                f"no space to write {path.name} in {path.parent} ({os.strerror(error.errno or 0)}): "
                "free some, or point the recipe's output elsewhere, and run again; finished files are kept"
            ) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)  # renamed by now, or not wanted


@contextmanager
def exclusive(folder: Path, work: str) -> Iterator[None]:
    """Makes the folder, holds it for one process and clears what another left half-written in it. Raises PipelineError
    when another one has it.
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


def is_held(folder: Path) -> bool:
    """Whether a process of this machine holds the folder by `exclusive`. The question itself holds nothing."""
    lock, known = folder / ".lock", Path("/proc/locks")
    if not (lock.exists() and known.exists()):
        return False
    return any(f":{lock.stat().st_ino} " in line and "FLOCK" in line for line in known.read_text().splitlines())


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Holds a file that is read and then written anew, while other processes that want it wait; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
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
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises PipelineError when the file is missing or is no JSON object."""
    return parse_object(_bytes_of(path), path)


def parse_object(content: bytes, where: object) -> dict[str, Any]:
    """Raises PipelineError that names `where` for anything but a JSON object in UTF-8."""
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


def _bytes_of(path: Path, tries: int = 5) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise PipelineError(f"{path} does not exist") from None
    except OSError as error:  # a folder, no permission
        if error.errno == errno.ESTALE and tries > 1:  # another node replaced it while this one, over NFS, read it
            return _bytes_of(path, tries - 1)
        raise PipelineError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from None


# -- JSON that seals itself: a changed or damaged one is refused by whoever reads it ----------------------------------

SEAL = "seal"  # the key: SHA-256 of the canonical JSON of the rest
_compact = json.JSONEncoder(ensure_ascii=False).encode


def seal_of(value: dict[str, Any]) -> str:
    """The seal of what `value` is after a round trip through JSON, without its own seal; the order of keys does not
    count.
    """
    rest = json.loads(json.dumps({key: item for key, item in value.items() if key != SEAL}))
    return hashlib.sha256(_canonical(rest).encode()).hexdigest()


def _canonical(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """The object with its seal as its last key."""
    return {key: item for key, item in value.items() if key != SEAL} | {SEAL: seal_of(value)}


def write_sealed(path: Path, value: dict[str, Any], wide: bool = False) -> None:
    """`wide`: with a line for each item of its lists and objects; many are written several times as fast so."""
    whole = sealed(value)
    if wide:
        write_text(path, _wide(whole) + "\n")
    else:
        write_json(path, whole)


def _wide(value: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_compact(key)}: {_by_line(item)}" for key, item in value.items()) + "\n}"


def _by_line(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(_compact({key: item})[1:-1] for key, item in value.items()) + "\n}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_sealed` wrote, without the seal. Raises PipelineError, which ends with `remedy`, where it is anything
    else.
    """
    return unsealed(_bytes_of(path), path, remedy)


def unsealed(content: bytes, where: object, remedy: str) -> dict[str, Any]:
    """`read_sealed` of what is in memory; `where` is named in the error."""
    try:
        value = parse_object(content, where)
    except PipelineError as error:
        raise PipelineError(f"{error}. {remedy}") from None
    return checked(value, where, remedy)


def checked(value: dict[str, Any], where: object, remedy: str) -> dict[str, Any]:
    """The object without its seal. Raises PipelineError where that is missing or not the content's."""
    found = value.pop(SEAL, None)
    if found is None:
        raise PipelineError(f"{where} has no {SEAL!r}: it was written by hand or by another version. {remedy}")
    try:
        wanted = hashlib.sha256(_canonical(value).encode()).hexdigest()  # `seal_of` what is JSON already
    except RecursionError:  # just not too deep to be read
        wanted = None
    if found != wanted:
        raise PipelineError(f"{where} was changed or damaged after it was written: its {SEAL!r} is another. {remedy}")
    return value


def sealed_line(value: dict[str, Any]) -> str:
    """One line of a file of sealed objects, with its end."""
    return json.dumps(sealed(value)) + "\n"


CLOSING = "lines"  # the key of a sealed file's last line: how many stand before it; "sha256" is that of their bytes


def sealed_lines(values: Iterable[dict[str, Any]]) -> str:
    """A whole file: a line for each value, and a closing one."""
    lines = [sealed_line(value) for value in values]
    content = "".join(lines)
    closing = {CLOSING: len(lines), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    return content + sealed_line(closing)


def read_sealed_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The values of `sealed_lines`; nothing where there is no file. Raises PipelineError, which ends with `remedy`,
    where a line was changed, added or lost, the last one included, and names one that was changed.
    """
    if not path.exists():
        return []
    *lines, closing = path.read_bytes().splitlines(keepends=True) or [b""]
    values, marks = list[dict[str, Any]](), dict[str, Any]()
    with suppress(PipelineError):
        for line in lines:
            values.append(unsealed(line, path, ""))
        marks = unsealed(closing, path, "")
    whole = {CLOSING: len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
    if marks != whole or not closing.endswith(b"\n"):
        place = f"line {len(values) + 1} is not the one that was written"
        if len(values) == len(lines):
            place = "its last line is not that of the lines before it"
        raise PipelineError(
            f"{path} was changed or damaged after it was written, or is of another version: {place}. {remedy}"
        )
    return values


# -- files that a sealed list names: a manifest, a resume state ------------------------------------------------------


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Digest = Callable[[Path], str]  # the SHA-256 of a file


def difference(
    path: Path, wanted: str, size: int | None, by: str = "the manifest", digest: Digest | None = sha256
) -> str | None:
    """Why a file is not the one whose SHA-256, and size, are listed `by` that; None when it is. Without a `digest` it
    is not read.
    """
    if not path.is_file():
        return "it is missing"
    if size is not None and (now := path.stat().st_size) != size:
        return f"it has {now} bytes, {by} says {size}: it was truncated or overwritten"
    if digest and digest(path) != wanted:
        return f"its SHA-256 is not {by}'s: its content was changed or damaged"
    return None


log = logging.getLogger(__name__)


class Journal:
    """A file of finished tasks, one sealed line each, that only grows: a job that continues does not repeat them.

    A line is whole or does not count: one that was torn when its writer was killed, or damaged since, is removed, and
    its task is repeated. Lines of another `key` stay and do not count: the key is the digest of all that outcomes
    depend on.
    """

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
