"""Where dialogues come from: files and data sets -> records, one by one, never the whole source in memory.

    embedded:sharegpt                       the embedded default
    PATH or fsspec address                  JSON, .csv or .parquet; JSON and CSV also with .gz, .zst, .xz, .bz2
    datasets:NAME                           a data set of the Hugging Face Hub, or a folder that `datasets` can load
    FOLDER                                  the same as datasets:FOLDER

How a JSON file holds its records, its first lines say (`json_records.py`). A record is whatever the source holds:
`dialogues.py` judges it. Messages name a source without its credentials.
"""

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import httpx2
import zstandard
from datasets import load_dataset
from datasets.exceptions import DatasetsError

from pipeline.artifacts.regenerated import require_whole
from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.recipe.sections import DataConfig
from preprocess.sources.forms import BrokenLine
from preprocess.sources.json_records import (
    LONGEST,
    SHOWN,
    NoList,
    Unparsable,
    Watched,
    layout_of,
    list_items,
    objects,
    parsed_line,
    shown_line,
    wrapped_items,
)

DATASETS = "datasets:"
MOST_FILES = 100  # of a local folder, whose first records are looked at before the first is given
csv.field_size_limit(LONGEST)
_OPENERS = {  # by the end of the name; each reads on through several members or frames
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}
MOST_WORDS = 600  # characters of a library's error
_PARSERS = {"list": list_items, "wrapped": wrapped_items, "objects": objects}
# What reading a damaged file, or one over a bad connection, raises.
_DAMAGE = (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, httpx2.HTTPError)


@dataclass
class Tail:
    """Filled when the file ends in the middle of a record."""

    torn_after: int | None = None  # whole records before the tear


def read_records(data: DataConfig, tail: Tail) -> Iterator[Any]:
    """Yields the source's records in its order.

    Raises PipelineError when the source is missing, is of no known form, is damaged before its end, or is not what the
    regeneration beside it wrote. A line of JSON lines that cannot be parsed is yielded as text, to be counted as
    malformed.
    """
    source = data.source
    if source.startswith(DATASETS) or source.endswith(".parquet") or Path(source).is_dir():
        yield from _of_datasets(data)
        return
    if source.startswith(embedded.PREFIX):
        if source != "embedded:sharegpt":
            raise PipelineError(f"data.source={source!r} is not known; there is 'embedded:sharegpt'")
        source = str(embedded.dialogues())
    require_whole(source)
    with _open(source) as raw:
        try:
            file = Watched(raw)
            wide, layout = file.is_wide(), layout_of(file)
        except _DAMAGE as error:
            raise PipelineError(_unusable(source, f"it cannot be read ({error})")) from None
        if wide:
            raise PipelineError(
                _unusable(source, "it is not UTF-8 text, but UTF-16 or the like: convert it (iconv -f UTF-16 -t UTF-8)")
            )
        if source.removesuffix(_packed(source)).endswith(".csv"):
            yield from _rows(source, file, tail)
        elif layout == "lines":
            yield from _lines(source, file, tail)
        else:
            yield from _items(source, file, tail, _PARSERS[layout])


def _items(source: str, file: Watched, tail: Tail, parser: Callable[[Watched], Iterator[Any]]) -> Iterator[Any]:
    """The records of JSON that is no JSON lines."""
    count = 0
    try:
        for record in parser(file):
            count += 1
            yield record
    except NoList:
        raise PipelineError(_unusable(source, "it is JSON, but no list of records")) from None
    except (Unparsable, *_DAMAGE) as error:
        torn = isinstance(error, Unparsable) and error.torn
        if count and torn:
            tail.torn_after = count
            return
        if count:
            why = f"it is damaged after {count} records"
        else:
            why = "it ends in its first record" if torn else "its first record cannot be parsed"
        raise PipelineError(_unusable(source, f"{why} ({error})")) from None
    if file.torn:
        tail.torn_after = count


def _lines(source: str, file: Watched, tail: Tail) -> Iterator[Any]:
    """One JSON object a line. A last line without its end that cannot be parsed is a torn tail."""
    count = 0
    try:
        for number, line in enumerate(file.lines(), 1):
            if not line.strip():
                continue
            try:
                record = parsed_line(line)
            except ValueError:
                if not line.endswith(b"\n"):
                    if count == 0:
                        raise PipelineError(_unusable(source, "it ends in its first record")) from None
                    tail.torn_after = count
                    return
                record = shown_line(line)
            record = BrokenLine(record, number) if isinstance(record, str) else record
            count += 1
            yield record
    except _DAMAGE as error:
        raise PipelineError(_unusable(source, f"it is damaged after {count} records ({error})")) from None
    if file.torn:
        tail.torn_after = count


def _rows(source: str, file: Watched, tail: Tail) -> Iterator[Any]:
    """The rows of a CSV file by its header, all values as texts. A row of more values than the header is broken."""
    count = 0
    try:
        rows = csv.DictReader(io.TextIOWrapper(_Stream(file), "utf-8", newline=""), strict=True)
        for row in rows:
            record = row if None not in row else BrokenLine(",".join(map(str, row.values()))[:SHOWN], rows.line_num)
            count += 1
            yield record
    except (csv.Error, UnicodeDecodeError, *_DAMAGE) as error:
        if count and str(error) == "unexpected end of data":
            tail.torn_after = count
            return
        raise PipelineError(_unusable(source, f"it is damaged after {count} rows ({error})")) from None
    if not count:
        raise PipelineError(_unusable(source, "it has no row behind a header"))
    if file.torn:
        tail.torn_after = count


class _Stream(io.RawIOBase):
    """A watched file for Python's own readers."""

    def __init__(self, file: Watched):
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _of_datasets(data: DataConfig) -> Iterator[Any]:
    name = data.source.removeprefix(DATASETS)
    where = (
        {"path": "parquet", "data_files": data.source}
        if data.source.endswith(".parquet") and not Path(name).is_dir()
        else {"path": name, "name": data.subset, "revision": data.revision}
    )
    count = 0
    try:
        rows = load_dataset(**where, split=data.split, streaming=True)
        if Path(name).is_dir():  # files that do not go together are told before, not after hours
            for file in range(1, min(rows.num_shards, MOST_FILES)):
                next(iter(rows.shard(rows.num_shards, file)), None)
        for row in rows:
            count += 1
            yield row
    except (OSError, ValueError, TypeError, NotImplementedError, DatasetsError, httpx2.HTTPError) as error:
        why = " ".join(str(error).partition("\nExample of usage")[0].split())[:MOST_WORDS] or type(error).__name__
        raise PipelineError(
            f"data.source {data.source} (subset {data.subset!r}, split {data.split!r}) cannot be read"
            f"{f' behind its first {count} records' if count else ''}: {why}{_remedy(why)}"
        ) from None


def _remedy(why: str) -> str:
    """Return what to do about an error of `datasets`, where that is known."""
    if "cast" in why:
        return (
            ". Its files do not hold the same columns, or hold one column in different ways: give data.source one of "
            "them, or write their records into one file of JSON lines, where each may be another"
        )
    if "Config name is missing" in why or "BuilderConfig" in why:
        return ". Set data.subset to one of these"
    return ". Set data.split to one of these" if "Bad split" in why or "Unknown split" in why else ""


def _open(source: str) -> BinaryIO:
    try:
        raw = fsspec.open(source, "rb").open()
        return _OPENERS.get(_packed(source), lambda raw: raw)(raw)
    except FileNotFoundError as error:
        why = _absence(error)
    except (OSError, ValueError, ImportError, httpx2.HTTPError) as error:
        why = f"cannot be opened: {error}"
    raise PipelineError(f"data.source {source} {why}")


def _packed(source: str) -> str:
    """Return the ending that names a file's compression; empty where there is none."""
    return next((ending for ending in _OPENERS if source.endswith(ending)), "")


def _absence(error: FileNotFoundError) -> str:
    """fsspec calls everything that a server does not give not found; what stands behind it tells more."""
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return "does not exist"
    status = getattr(cause, "status", None)
    if status in (401, 403):
        return f"is refused by the server (HTTP {status}): are its credentials right?"
    if status is not None:
        return f"cannot be had: the server answers HTTP {status}"
    return f"cannot be reached: {str(cause) or type(cause).__name__}"


def _unusable(source: str, why: str) -> str:
    return (
        f"data.source {source}: {why}. Expected a JSON list or JSON lines (or CSV with a header, or Parquet) of "
        '{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or '
        '{"id": ..., "messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
    )
