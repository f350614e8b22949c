"""The sources of dialogues: files and data sets -> records, one by one, never the whole source in memory.

    embedded:sharegpt                       the embedded default
    PATH or fsspec address                  JSON, .csv or .parquet; JSON and CSV also with .gz, .zst, .xz, .bz2
    datasets:NAME                           a data set of the Hugging Face Hub, or a folder that `datasets` can load
    FOLDER                                  the same as datasets:FOLDER

The first lines of a JSON file show its layout (`json_records.py`). A record may have any form: `dialogues.py` checks
it. Messages name a source without its credentials.
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

from pipeline.artifacts.regenerated import require_unchanged
from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.recipe.sections import DataConfig
from preprocess.sources.forms import BrokenLine
from preprocess.sources.json_records import (
    LONGEST,
    SHOWN,
    NotAList,
    PeekableFile,
    Unparsable,
    layout_of,
    list_items,
    objects,
    parsed_line,
    shown_line,
    wrapped_items,
)

DATASETS = "datasets:"
MAX_FILES = 100  # of a local folder, whose first records are read before any is yielded
csv.field_size_limit(LONGEST)
_OPENERS = {  # by the file name's suffix; each reads through several members or frames
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}
MAX_ERROR_CHARACTERS = 600  # characters of a library's error
_PARSERS = {"list": list_items, "wrapped": wrapped_items, "objects": objects}
# Errors of reading a damaged file, or a file over a bad connection.
_DAMAGE = (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, httpx2.HTTPError)


@dataclass
class TornTail:
    """The torn end of a file: filled when it ends in the middle of a record."""

    torn_after: int | None = None  # complete records before the tear


def read_records(data: DataConfig, tail: TornTail) -> Iterator[Any]:
    """Yield the source's records in its order.

    Raise PipelineError when the source is missing, has no known form, is damaged before its end, or differs from the
    output of the regeneration in its folder. A line of JSON lines that cannot be parsed is yielded as text, to be
    counted as malformed.
    """
    source = data.source
    if source.startswith(DATASETS) or source.endswith(".parquet") or Path(source).is_dir():
        yield from _read_dataset(data)
        return
    if source.startswith(embedded.PREFIX):
        if source != "embedded:sharegpt":
            raise PipelineError(f"data.source={source!r} is not known; there is 'embedded:sharegpt'")
        source = str(embedded.dialogues_path())
    require_unchanged(source)
    with _open(source) as raw:
        try:
            file = PeekableFile(raw)
            wide, layout = file.is_wide(), layout_of(file)
        except _DAMAGE as error:
            raise PipelineError(_describe_unusable(source, f"it cannot be read ({error})")) from None
        if wide:
            raise PipelineError(
                _describe_unusable(
                    source, "it is not UTF-8 text, but UTF-16 or the like: convert it (iconv -f UTF-16 -t UTF-8)"
                )
            )
        if source.removesuffix(_compression_suffix(source)).endswith(".csv"):
            yield from _read_rows(source, file, tail)
        elif layout == "lines":
            yield from _read_lines(source, file, tail)
        else:
            yield from _read_items(source, file, tail, _PARSERS[layout])


def _read_items(
    source: str, file: PeekableFile, tail: TornTail, parser: Callable[[PeekableFile], Iterator[Any]]
) -> Iterator[Any]:
    """Yield the records of JSON other than JSON lines."""
    count = 0
    try:
        for record in parser(file):
            count += 1
            yield record
    except NotAList:
        raise PipelineError(_describe_unusable(source, "it is JSON, but no list of records")) from None
    except (Unparsable, *_DAMAGE) as error:
        torn = isinstance(error, Unparsable) and error.torn
        if count and torn:
            tail.torn_after = count
            return
        if count:
            reason = f"it is damaged after {count} records"
        else:
            reason = "it ends in its first record" if torn else "its first record cannot be parsed"
        raise PipelineError(_describe_unusable(source, f"{reason} ({error})")) from None
    if file.torn:
        tail.torn_after = count


def _read_lines(source: str, file: PeekableFile, tail: TornTail) -> Iterator[Any]:
    """Yield the records of JSON lines. A last line without a line end that cannot be parsed is a torn tail."""
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
                        raise PipelineError(_describe_unusable(source, "it ends in its first record")) from None
                    tail.torn_after = count
                    return
                record = shown_line(line)
            record = BrokenLine(record, number) if isinstance(record, str) else record
            count += 1
            yield record
    except _DAMAGE as error:
        raise PipelineError(_describe_unusable(source, f"it is damaged after {count} records ({error})")) from None
    if file.torn:
        tail.torn_after = count


def _read_rows(source: str, file: PeekableFile, tail: TornTail) -> Iterator[Any]:
    """Yield the rows of a CSV file by its header, all values as texts. A row with more values than the header is
    broken.
    """
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
        raise PipelineError(_describe_unusable(source, f"it is damaged after {count} rows ({error})")) from None
    if not count:
        raise PipelineError(_describe_unusable(source, "it has no row after a header"))
    if file.torn:
        tail.torn_after = count


class _Stream(io.RawIOBase):
    """A peekable file for Python's own readers."""

    def __init__(self, file: PeekableFile):
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _read_dataset(data: DataConfig) -> Iterator[Any]:
    name = data.source.removeprefix(DATASETS)
    where = (
        {"path": "parquet", "data_files": data.source}
        if data.source.endswith(".parquet") and not Path(name).is_dir()
        else {"path": name, "name": data.subset, "revision": data.revision}
    )
    count = 0
    try:
        rows = load_dataset(**where, split=data.split, streaming=True)
        if Path(name).is_dir():  # files whose columns differ are found now, not after hours
            for file in range(1, min(rows.num_shards, MAX_FILES)):
                next(iter(rows.shard(rows.num_shards, file)), None)
        for row in rows:
            count += 1
            yield row
    except (OSError, ValueError, TypeError, NotImplementedError, DatasetsError, httpx2.HTTPError) as error:
        reason = (
            " ".join(str(error).partition("\nExample of usage")[0].split())[:MAX_ERROR_CHARACTERS]
            or type(error).__name__
        )
        raise PipelineError(
            f"data.source {data.source} (subset {data.subset!r}, split {data.split!r}) cannot be read"
            f"{f' after its first {count} records' if count else ''}: {reason}{_remedy(reason)}"
        ) from None


def _remedy(reason: str) -> str:
    """Return what to do about an error of `datasets`, where that is known."""
    if "cast" in reason:
        return (
            ". Its files do not hold the same columns, or hold one column in different types: name one of them in "
            "data.source, or write their records into one file of JSON lines, where each may differ"
        )
    if "Config name is missing" in reason or "BuilderConfig" in reason:
        return ". Set data.subset to one of these"
    return ". Set data.split to one of these" if "Bad split" in reason or "Unknown split" in reason else ""


def _open(source: str) -> BinaryIO:
    try:
        raw = fsspec.open(source, "rb").open()
        return _OPENERS.get(_compression_suffix(source), lambda raw: raw)(raw)
    except FileNotFoundError as error:
        reason = _describe_missing(error)
    except (OSError, ValueError, ImportError, httpx2.HTTPError) as error:
        reason = f"cannot be opened: {error}"
    raise PipelineError(f"data.source {source} {reason}")


def _compression_suffix(source: str) -> str:
    """Return the ending that names a file's compression; empty where there is none."""
    return next((ending for ending in _OPENERS if source.endswith(ending)), "")


def _describe_missing(error: FileNotFoundError) -> str:
    """Describe why a file is missing. fsspec raises FileNotFoundError for every server error; its cause tells more."""
    cause = error.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return "does not exist"
    status = getattr(cause, "status", None)
    if status in (401, 403):
        return f"is refused by the server (HTTP {status}): are its credentials right?"
    if status is not None:
        return f"cannot be fetched: the server answers HTTP {status}"
    return f"cannot be reached: {str(cause) or type(cause).__name__}"


def _describe_unusable(source: str, reason: str) -> str:
    return (
        f"data.source {source}: {reason}. Expected a JSON list or JSON lines (or CSV with a header, or Parquet) of "
        '{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or '
        '{"id": ..., "messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
    )
