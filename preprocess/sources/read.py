"""Where dialogues come from: files and data sets -> records, one by one, never the whole source in memory.

    embedded:sharegpt                       the embedded default
    PATH or fsspec address                  a JSON list, JSON lines, or Parquet; also .gz, .zst, .xz, .bz2
    datasets:NAME                           a data set of the Hugging Face Hub, or a folder that `datasets` can load

Which of JSON list and JSON lines a file is, its first lines say (`json_records.py`). A record is whatever the source
holds: `dialogues.py` judges it. Messages name a source without its credentials.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
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
from preprocess.sources.json_records import (
    NoList,
    Unparsable,
    Watched,
    holds_lines,
    list_items,
    parsed_line,
    shown_line,
)

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

    Raises PipelineError when the source is missing, is of no known form, is damaged before its end, or is not what the
    regeneration beside it wrote. A line of JSON lines that cannot be parsed is yielded as text, to be counted as
    malformed.
    """
    source = data.source
    if source.startswith(DATASETS) or source.endswith(".parquet"):
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
            wide, lines = file.is_wide(), holds_lines(file)
        except _DAMAGE as error:
            raise PipelineError(_unusable(source, f"it cannot be read ({error})")) from None
        if wide:
            raise PipelineError(
                _unusable(source, "it is not UTF-8 text, but UTF-16 or the like: convert it (iconv -f UTF-16 -t UTF-8)")
            )
        yield from (_lines if lines else _items)(source, file, tail)


def _items(source: str, file: Watched, tail: Tail) -> Iterator[Any]:
    """The elements of one JSON list."""
    count = 0
    try:
        for record in list_items(file):
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
        for line in file.lines():
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
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PipelineError(
            f"data.source {data.source} (subset {data.subset!r}, split {data.split!r}) cannot be read: {why}"
        ) from None


def _open(source: str) -> BinaryIO:
    try:
        raw = fsspec.open(source, "rb").open()
        return next((wrap(raw) for ending, wrap in _OPENERS.items() if source.endswith(ending)), raw)
    except FileNotFoundError as error:
        why = _absence(error)
    except (OSError, ValueError, ImportError, httpx2.HTTPError) as error:
        why = f"cannot be opened: {error}"
    raise PipelineError(f"data.source {source} {why}")


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
        f"data.source {source}: {why}. Expected a JSON list or JSON lines of "
        '{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or '
        '{"id": ..., "messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
    )
