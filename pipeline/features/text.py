"""A set's dialogues without their states: ids, loss masks and document ids, known before any state is computed.

Vocabulary statistics, packing, the order of batches and the number of steps depend only on these.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import with_config

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path
from pipeline.features.schema import Count, FeatureSpec, text_schema

SOME_TOKENS = 1024  # the most tokens that `first_texts` returns
REMEDY = "Remove the file and run the dump again; if it is a downloaded copy, download it again"


@with_config(extra="forbid")
@dataclass(frozen=True)
class TextRecord:
    """The manifest's record of a text table or of a part of one."""

    name: str
    rows: Count
    bytes: Count
    sha256: str


class HashedFile:
    """A file whose SHA-256 is computed in a thread while it is written: both release the GIL."""

    def __init__(self, path: Path):
        self._file, self._sha256, self._thread = path.open("wb", buffering=0), hashlib.sha256(), ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        """Write and hash all of `data`."""
        rest = memoryview(data).cast("B")
        size, hashing = len(rest), self._thread.submit(self._sha256.update, rest)
        while rest:
            rest = rest[self._file.write(rest) :]
        hashing.result()
        return size

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


class ArrowFile(NamedTuple):
    """An Arrow file that is being written."""

    batches: pa.ipc.RecordBatchFileWriter
    hashed: HashedFile


@contextmanager
def arrow_file(path: Path, schema: pa.Schema) -> Iterator[ArrowFile]:
    """Yield a writer for an Arrow file that appears under its name only after the block has succeeded; its hash is
    whole by then. Raises PipelineError when the disk is full.
    """
    with (
        atomic_path(path) as temporary,
        HashedFile(temporary) as file,
        pa.PythonFile(file, mode="w") as sink,
        pa.ipc.new_file(sink, schema) as batches,
    ):
        yield ArrowFile(batches, file)


def text_batch(texts: Iterable[Any], spec: FeatureSpec) -> pa.RecordBatch:
    """Return the texts, which have a `doc_id`, `input_ids` and a `loss_mask`, as rows of a table."""
    texts = list(texts)
    offsets = np.cumsum([0, *(len(text.input_ids) for text in texts)])
    columns = [pa.array([text.doc_id for text in texts], pa.string())]
    for name, dtype in (("input_ids", np.int32), ("loss_mask", np.uint8)):
        values = np.concatenate([np.empty(0, dtype), *(getattr(text, name).astype(dtype) for text in texts)])
        columns.append(pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values)))
    return pa.RecordBatch.from_arrays(columns, schema=text_schema(spec))


def write_text_table(path: Path, texts: Iterable[Any], spec: FeatureSpec) -> TextRecord:
    with arrow_file(path, text_schema(spec)) as file:
        file.batches.write_batch(text_batch(texts, spec))
    return make_record(path, file)


def make_record(path: Path, file: ArrowFile) -> TextRecord:
    """Return the manifest's record of a table that was just written by `file`."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        rows = sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
    return TextRecord(path.name, rows, path.stat().st_size, file.hashed.sha256)


class TextTable:
    """Some rows of a text table, numbered from 0 in its order. Ids and masks are views into the mapped file."""

    def __init__(self, table: pa.Table, rows_N: np.ndarray | None = None):
        self._table = table
        self.rows_N = np.arange(table.num_rows) if rows_N is None else rows_N  # number -> row of the table

    @classmethod
    def open(cls, folder: Path, records: list[TextRecord], spec: FeatureSpec) -> "TextTable":
        """Return the complete table, made of its parts. Raises PipelineError for a part that is missing, or whose size,
        row count or schema is not the manifest's.
        """
        parts: list[pa.RecordBatch] = []
        for record in records:
            path = folder / record.name
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise PipelineError(f"text table {path} is not a complete Arrow file: {error}. {REMEDY}") from None
            complete = path.stat().st_size == record.bytes and sum(part.num_rows for part in batches) == record.rows
            if not complete or not reader.schema.equals(text_schema(spec), check_metadata=True):
                raise PipelineError(f"text table {path} differs from the manifest's record. {REMEDY}")
            parts += batches
        return cls(pa.Table.from_batches(parts, text_schema(spec)))

    def select(self, rows_N: np.ndarray) -> "TextTable":
        """Return the same table with only these rows numbered."""
        return TextTable(self._table, rows_N)

    def __len__(self) -> int:
        return len(self.rows_N)

    def _cell(self, name: str, number: int) -> pa.Scalar:
        return self._table.column(name)[int(self.rows_N[number])]

    def doc_id(self, number: int) -> str:
        return self._cell("doc_id", number).as_py()

    def ids(self, number: int) -> np.ndarray:
        return self._cell("input_ids", number).values.to_numpy(zero_copy_only=True)

    def mask(self, number: int) -> np.ndarray:
        return self._cell("loss_mask", number).values.to_numpy(zero_copy_only=True)

    @property
    def lengths_N(self) -> np.ndarray:
        """The number of tokens of each numbered row."""
        return pc.list_value_length(self._table.column("input_ids")).to_numpy()[self.rows_N]


def first_texts(texts: TextTable, tokens: int = SOME_TOKENS) -> list[list[int]]:
    """Return the first dialogues, cut to `tokens` tokens in total, for a draft's `start_from_target`."""
    dialogues: list[list[int]] = []
    for number in range(len(texts)):
        if (room := tokens - sum(map(len, dialogues))) <= 0:
            break
        dialogues.append(texts.ids(number)[:room].tolist())
    return dialogues
