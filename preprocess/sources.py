"""Where dialogues come from: files and data sets -> records, one by one, never the whole source in memory.

    embedded:sharegpt                       the embedded default
    PATH or fsspec address                  a JSON list, JSON lines, or Parquet; also .gz, .zst, .xz, .bz2
    datasets:NAME                           a data set of the Hugging Face Hub, or a folder that `datasets` can load

Which of JSON list and JSON lines a file is, its first character says. A record is whatever the source holds: `dialogues.py`
judges it.
"""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import httpx2
import ijson
import zstandard
from datasets import load_dataset
from datasets.exceptions import DatasetsError

from pipeline import embedded
from pipeline.errors import PipelineError
from pipeline.sections import DataConfig

DATASETS = "datasets:"
_OPENERS = {  # by the end of the name; each reads on through several members or frames
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}
# What reading a damaged file, or one over a bad connection, raises.
_DAMAGE = (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, httpx2.HTTPError)


@dataclass
class Tail:
    """Filled when the file ends in the middle of a record."""

    torn_after: int | None = None  # whole records before the tear


def read_records(data: DataConfig, tail: Tail) -> Iterator[Any]:
    """Yields the source's records in its order.

    Raises PipelineError when the source is missing, is of no known form, or is damaged before its end. A line of JSON
    lines that cannot be parsed is yielded as text, to be counted as malformed.
    """
    source = data.source
    if source.startswith(DATASETS) or source.endswith(".parquet"):
        yield from _of_datasets(data)
        return
    if source.startswith(embedded.PREFIX):
        if source != "embedded:sharegpt":
            raise PipelineError(f"data.source={source!r} is not known; there is 'embedded:sharegpt'")
        source = str(embedded.dialogues())
    with _open(source) as raw:
        file = _Watched(raw)
        try:
            first = file.first_character()
        except _DAMAGE as error:
            raise PipelineError(_unusable(source, f"it cannot be read ({error})")) from None
        if first == b"{":
            yield from _lines(source, file, tail)
        else:
            yield from _items(source, file, tail)


def _items(source: str, file: "_Watched", tail: Tail) -> Iterator[Any]:
    """The elements of one JSON list."""
    count = 0
    try:
        for record in ijson.items(file, "item", use_float=True):
            count += 1
            yield record
    except (ijson.JSONError, UnicodeDecodeError, *_DAMAGE) as error:
        if count == 0:
            why = "it ends in its first record" if file.ended else "its first record cannot be parsed"
        elif file.ended:
            tail.torn_after = count
            return
        else:
            why = f"it is damaged after {count} records"
        raise PipelineError(_unusable(source, f"{why} ({str(error).splitlines()[0]})")) from None
    if count == 0:
        raise PipelineError(_unusable(source, "it is JSON, but no list of records"))
    if file.torn:
        tail.torn_after = count


def _lines(source: str, file: "_Watched", tail: Tail) -> Iterator[Any]:
    """One JSON object a line. A last line without its end that cannot be parsed is a torn tail."""
    count, whole = 0, False
    try:
        for line in file.lines():
            whole = line.endswith(b"\n")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                if not whole:
                    if count == 0:
                        raise PipelineError(_unusable(source, "it ends in its first record")) from None
                    tail.torn_after = count
                    return
                record = line.decode(errors="replace")
            count += 1
            yield record
    except _DAMAGE as error:
        raise PipelineError(_unusable(source, f"it is damaged after {count} records ({error})")) from None
    if file.torn:
        tail.torn_after = count


def _of_datasets(data: DataConfig) -> Iterator[Any]:
    name = data.source.removeprefix(DATASETS)
    where = (
        {"path": "parquet", "data_files": data.source}
        if data.source.endswith(".parquet")
        else {"path": name, "name": data.subset, "revision": data.revision}
    )
    try:
        yield from load_dataset(**where, split=data.split, streaming=True)
    except (OSError, ValueError, DatasetsError, httpx2.HTTPError) as error:
        raise PipelineError(
            f"data.source {data.source} (subset {data.subset!r}, split {data.split!r}) cannot be read: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None


class _Watched:
    """A file that remembers having been read to its end: only there is a parse error a torn tail.

    ``torn``: it is compressed, and stops before the end of its stream.
    """

    def __init__(self, raw: BinaryIO):
        # read1 gives what one block holds: nothing of it is lost when the next one is torn.
        self._read = getattr(raw, "read1", raw.read)
        self._ahead, self.ended, self.torn = b"", False, False

    def first_character(self) -> bytes:
        """The first byte that is no white space; nothing is lost for `read`."""
        while not self._ahead.strip():
            more = self._fetch(64)
            if not more:
                return b""
            self._ahead += more
        return self._ahead.strip()[:1]

    def read(self, size: int = -1) -> bytes:
        if self._ahead:
            content = self._ahead if size < 0 else self._ahead[:size]
            self._ahead = self._ahead[len(content) :]
            return content
        return self._fetch(size)

    def _fetch(self, size: int) -> bytes:
        try:
            content = self._read(size)
        except EOFError:
            self.torn, content = True, b""
        self.ended |= size != 0 and not content
        return content

    def lines(self) -> Iterator[bytes]:
        rest = b""
        while content := self.read(1 << 20):
            *whole, rest = (rest + content).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest


def _open(source: str) -> BinaryIO:
    try:
        raw = fsspec.open(source, "rb").open()
        return next((wrap(raw) for ending, wrap in _OPENERS.items() if source.endswith(ending)), raw)
    except FileNotFoundError:
        raise PipelineError(f"data.source {source} does not exist") from None
    except (OSError, ValueError, ImportError, httpx2.HTTPError) as error:
        raise PipelineError(f"data.source {source} cannot be opened: {error}") from None


def _unusable(source: str, why: str) -> str:
    return (
        f"data.source {source}: {why}. Expected a JSON list or JSON lines of "
        '{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or '
        '{"id": ..., "messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
    )
