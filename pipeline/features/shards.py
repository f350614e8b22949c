"""The manifest of a feature folder; writing and reading its shards.

Guarantees: a shard is whole or absent; the manifest is the only truth about what is finished; a reader refuses
anything whose size, checksum, structure or origin differs from the manifest and from its own recipe.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import StrictBool, TypeAdapter, ValidationError, with_config

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import Digest, allow_open_files, describe_difference, read_sealed, sha256, write_sealed
from pipeline.basics.fingerprint import cached_sha256
from pipeline.features.schema import (
    VERSION,
    Accounting,
    Count,
    FeatureSpec,
    StoredRow,
    TextRow,
    arrow_schema,
    from_record_batch,
    read_spec,
    require_readable,
    require_same,
    select_layers,
    to_record_batch,
    to_stored_row,
)
from pipeline.features.text import REMEDY, TextRecord, TextTable, arrow_file, write_text_table

MANIFEST = "manifest.json"
HELDOUT_PROMPTS = "heldout_prompts.jsonl"  # first questions of held-out dialogues, for evaluation
SPLITS = ("train", "validation")  # the sets of the source's dialogues
ANSWERS = "answers"  # the set of the target's own greedy answers to the calibration prompts
FILES = ("text-*.arrow", "features-*.arrow")  # tables and shards of a folder
THREADS = 8  # hashing threads: hashlib releases the GIL
UNREADABLE = (
    f"Restore the {MANIFEST} that the dump wrote, or remove it and dump again: every shard is then written again"
)


@with_config(extra="forbid")
@dataclass(frozen=True)
class ShardRecord:
    """One line of the manifest. Counts are of dialogues (rows), tokens and tokens with a loss."""

    name: str
    split: str  # its set
    index: Count
    rows: Count
    tokens: Count
    trained_tokens: Count
    bytes: Count
    sha256: str
    rejected: dict[str, str] = field(default_factory=dict)  # document id -> reason, of dialogues of this shard
    documents: str = ""  # fingerprint of the encoded dialogues that it was dumped from
    text: TextRecord | None = None  # of the target's own answers: the part of their table that came with the shard
    edits: dict[str, int] = field(default_factory=dict)  # the number of edits to those dialogues, by reason
    off: float | None = None  # relative error of a sample's states, measured when the engine of this shard started

    @property
    def files(self) -> list["Record"]:
        """The shard itself, and the part of a table that came with it."""
        return [self] if self.text is None else [self, self.text]


Record = ShardRecord | TextRecord  # the manifest's record of a file


def file_kind(record: Record) -> str:
    """Return the name of the file's kind for messages."""
    return "feature shard" if isinstance(record, ShardRecord) else "text table"


@dataclass
class Manifest:
    """The content of a feature folder; ``complete`` only after the last shard, the tables and the final accounting."""

    spec: FeatureSpec
    shards: list[ShardRecord] = field(default_factory=list)  # of the source's dialogues
    accounting: dict[str, Any] = field(default_factory=dict)
    complete: StrictBool = False
    text: dict[str, TextRecord] = field(default_factory=dict)  # the tables of the source's dialogues, by split
    answers: list[ShardRecord] = field(default_factory=list)  # each with its part of the answers' table
    answers_hash: str = ""  # `artifacts.features.answers_hash` of these answers
    prompts_sha256: str = ""  # of heldout_prompts.jsonl, after it is written
    fed: StrictBool = False  # the training shards are made and deleted during training (features.keep = "window")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        if not path.exists():
            raise PipelineError(f"{folder} has no {MANIFEST}: no features were dumped here. Run: jakiro dump RECIPE")
        return cls.parse(read_sealed(path, UNREADABLE), path)

    @classmethod
    def parse(cls, raw: dict[str, Any], path: object) -> "Manifest":
        """Return the manifest in `raw`. Raises PipelineError if it is not a manifest, or if the name of a file does not
        follow from its set and number.
        """
        try:
            if raw["spec"]["version"] != VERSION:
                raise PipelineError(
                    f"{path}: features of version {raw['spec']['version']!r}, expected {VERSION!r}: they were dumped "
                    "by another version of this project; dump again into another folder"
                )
            manifest = _MANIFEST.validate_python({column.name: raw[column.name] for column in fields(cls)})
            if manifest.accounting and manifest.complete:  # a folder that no job made has no accounting
                Accounting.model_validate(manifest.accounting)
        except (KeyError, TypeError) as error:
            raise PipelineError(
                f"{path} is not a manifest of this version ({error}); dump again into another folder"
            ) from None
        except ValidationError as error:
            place = ".".join(map(str, (error.title, *error.errors()[0]["loc"])))
            raise PipelineError(f"{path}: {place!r} is not a value that a dump writes. {UNREADABLE}") from None
        odd = {*manifest.text, *(shard.split for shard in manifest.shards)}.difference(SPLITS)
        odd |= {shard.split for shard in manifest.answers} - {ANSWERS}
        names = set[str]()
        for split, name, record in manifest._iterate_files():
            if split in odd or record.name != name or name in names:
                raise PipelineError(
                    f"{path}: {record.name!r} (of {split!r}) is not one that a dump writes, or is listed twice. "
                    f"{UNREADABLE}"
                )
            names.add(name)
        return manifest

    def require_complete(self, where: object) -> None:
        if not self.complete:
            raise PipelineError(f"{where}: the dump is not finished. Run it again: it resumes where it stopped")

    def _iterate_files(self) -> Iterator[tuple[str, str, Record]]:
        """Yield (set, expected name, record) of every file; the expected name follows from set and number."""
        for split, table in self.text.items():
            yield split, text_name(split), table
        for shard in (*self.shards, *self.answers):
            yield shard.split, shard_name(shard.split, shard.index), shard
            if shard.text is not None:
                yield shard.split, text_name(shard.split, shard.index), shard.text

    @property
    def files(self) -> list[Record]:
        """The records of all tables and shards."""
        return [record for _, _, record in self._iterate_files()]

    def permanent_files(self, keep: str) -> list[Record]:
        """Return the files that stay on disk. With `keep` = "window" (`features.keep`), training's shards do not."""
        temporary = (
            {record.name for shard in self.shards_of("train") for record in shard.files} if keep == "window" else set()
        )
        return [record for record in self.files if record.name not in temporary]

    def save(self, folder: Path) -> None:
        for shards in (self.shards, self.answers):
            shards.sort(key=lambda record: (record.split, record.index))
        tables = {name: asdict(table) for name, table in self.text.items()}
        fields = vars(self) | {"spec": asdict(self.spec), "text": tables}
        fields |= {"shards": list(map(_as_json, self.shards)), "answers": list(map(_as_json, self.answers))}
        write_sealed(folder / MANIFEST, fields, wide=True)

    def shards_of(self, name: str) -> list[ShardRecord]:
        """Return the shards of a set."""
        return [record for record in (*self.shards, *self.answers) if record.split == name]

    def text_of(self, name: str) -> list[TextRecord]:
        """Return the parts of a set's table, in the order of its shards."""
        parts = [record.text for record in self.shards_of(name) if record.text is not None]
        return [self.text[name]] if name in self.text else parts

    def missing_rows(self, name: str) -> int:
        """Return the number of rows of a set's table that no shard holds: their shards were made while a training read
        them, and were deleted.
        """
        held = sum(record.rows + len(record.rejected) for record in self.shards_of(name))
        return self.text[name].rows - held if name in self.text else 0

    def total(self, name: str, count: str) -> int:
        return sum(getattr(record, count) for record in self.shards_of(name))


_MANIFEST = TypeAdapter(Manifest)


def _as_json(record: ShardRecord) -> dict[str, Any]:
    """Return the record's fields, as `asdict` does, without copying the values."""
    return vars(record) if record.text is None else vars(record) | {"text": vars(record.text)}


def shard_name(split: str, index: int) -> str:
    return f"features-{split}-{index:06d}.arrow"


def text_name(split: str, index: int | None = None) -> str:
    """Return the file name of a table, or of the part of a table that comes with a shard."""
    return f"text-{split}.arrow" if index is None else f"text-{split}-{index:06d}.arrow"


def write_shard(
    folder: Path, split: str, index: int, spec: FeatureSpec, rows: Iterable[StoredRow], rejected: dict[str, str]
) -> ShardRecord:
    """Write a shard atomically and return its manifest record. Raises PipelineError when the disk is full.

    `rows` may fill `rejected` while it is consumed.
    """
    path = folder / shard_name(split, index)
    count = tokens = trained = 0
    with arrow_file(path, arrow_schema(spec)) as file:
        for row in rows:
            file.batches.write_batch(to_record_batch(row, spec))
            count += 1
            tokens += row.tokens
            trained += row.trained_tokens
    return ShardRecord(
        path.name, split, index, count, tokens, trained, path.stat().st_size, file.hashed.sha256, rejected
    )


def write_features(
    folder: Path, spec: FeatureSpec, sets: dict[str, list[list[TextRow]]], answers_hash: str = ""
) -> Manifest:
    """Write a complete feature folder from dialogues in memory and return its manifest. `sets` has, by set, the rows of
    each shard.
    """
    manifest = Manifest(spec, complete=True, answers_hash=answers_hash)
    for name, shards in sets.items():
        first = 0
        if name in SPLITS:
            rows = [row for shard in shards for row in shard]
            manifest.text[name] = write_text_table(folder / text_name(name), rows, spec)
        for index, rows in enumerate(shards):
            numbered = (to_stored_row(row, first + place, spec) for place, row in enumerate(rows))
            record = write_shard(folder, name, index, spec, numbered, {})
            if name in SPLITS:
                first += len(rows)
                manifest.shards.append(record)
            else:
                part = write_text_table(folder / text_name(name, index), rows, spec)
                manifest.answers.append(replace(record, text=part))
    manifest.save(folder)
    return manifest


def find_damage(folder: Path, record: Record, digest: Digest | None = sha256) -> str | None:
    """Return how the file on disk differs from the manifest's record, or None if it does not. Without a `digest` the
    file is not read.
    """
    return describe_difference(folder / record.name, record.sha256, record.bytes, digest=digest)


def find_all_damage(folder: Path, records: Sequence[Record], recompute: bool = False) -> Iterator[str | None]:
    """Yield the damage of each file. A file that this machine has read before is not read again while its size and
    times are the same. Only `recompute` finds damage that leaves size and times unchanged.
    """
    digest = partial(cached_sha256, recompute=recompute, quiet=True)
    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(lambda record: find_damage(folder, record, digest), records)


def find_prompts_damage(folder: Path, manifest: Manifest) -> str | None:
    """Return how the held-out prompts on disk differ from those of a finished dump, or None if they do not."""
    return describe_difference(folder / HELDOUT_PROMPTS, manifest.prompts_sha256, None)


def open_shard(folder: Path, record: ShardRecord, spec: FeatureSpec) -> pa.ipc.RecordBatchFileReader:
    """Return the shard, memory-mapped, after checks of size, structure and origin. Raises PipelineError."""
    path = folder / record.name
    if reason := find_damage(folder, record, digest=None):
        raise PipelineError(
            f"{file_kind(record)} {path}: {reason}. To dump it again: jakiro verify {folder} --recipe RECIPE --repair"
        )
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"feature shard {path} is not a complete Arrow file: {error}. {REMEDY}") from None
    require_same(read_spec(reader.schema, path), spec, path)
    if reader.num_record_batches != record.rows:
        raise PipelineError(f"feature shard {path}: {reader.num_record_batches} rows, the manifest says {record.rows}")
    return reader


class FeatureStore:
    """The dialogues of one set, memory-mapped: its usable texts, numbered in the order of the table, and their states.
    `spec` describes the rows that `row` returns; shards may hold more auxiliary layers.

    A dialogue is usable if a shard has its row. The manifest lists the rejected ones, so no shard is opened for this.
    """

    seconds_waited = 0.0  # seconds that trainings in this process waited for batches of this store

    def __init__(self, folder: Path, split: str, expected: FeatureSpec):
        """Open the table and every shard, and check size, structure and origin (not checksums: see `find_all_damage`).

        Raises PipelineError for an unfinished dump, a dump of another recipe, and a missing or damaged file.
        """
        manifest = Manifest.load(folder)
        require_readable(manifest.spec, expected, folder)
        manifest.require_complete(folder)
        self.stored = manifest.spec
        self.spec = replace(manifest.spec, auxiliary_layers=expected.auxiliary_layers)
        self.records, self.texts = self._open_set(folder, manifest, split)
        self._starts = np.cumsum([0] + [record.rows for record in self.records])
        self._parts = part_starts(self.records)

    def _open_set(self, folder: Path, manifest: Manifest, split: str) -> tuple[list[ShardRecord], TextTable]:
        """Return the records of the set's shards, and its texts, after opening the shards."""
        if not (records := manifest.shards_of(split)):
            raise PipelineError(
                f"{folder} holds no {split!r} dialogues: raise data.max_tokens or enlarge the held-out split"
            )
        texts = usable_texts(folder, manifest, split)
        allow_open_files(len(records))  # each stays open while it is mapped
        self._readers = [open_shard(folder, record, self.stored) for record in records]
        return records, texts

    def _reader(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        return self._readers[shard]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int, decode: bool = True) -> TextRow:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._reader(shard).get_batch(index - int(self._starts[shard]))
        if fault := find_row_fault(batch, self.texts, index, self._parts[shard]):
            raise PipelineError(f"feature shard {self.records[shard].name}: {fault}. {REMEDY}")
        text = self.texts.doc_id(index), self.texts.ids(index), self.texts.mask(index)
        return select_layers(from_record_batch(batch, self.stored, text, decode), self.stored, self.spec)


def part_starts(records: list[ShardRecord]) -> list[int]:
    """Return, for each shard of a set, the row of the table from which the shard numbers its rows: the first row of its
    text part, or 0.
    """
    rows = [record.text.rows if record.text else 0 for record in records]
    return [0, *accumulate(rows)][: len(records)]


def find_row_fault(batch: pa.RecordBatch, texts: TextTable, number: int, part: int) -> str | None:
    """Return the reason why `batch` does not hold the states of the set's text `number`, or None if it does."""
    row, states, tokens = batch.column("row")[0].as_py() + part, len(batch.column("hidden")[0]), len(texts.ids(number))
    if row != texts.rows_N[number]:
        return f"it names row {row} of the text table where the manifest says {texts.rows_N[number]}"
    return None if states == tokens else f"it holds {states} states for row {row}, whose text has {tokens} tokens"


def usable_texts(folder: Path, manifest: Manifest, split: str) -> TextTable:
    """Return the texts of a set whose states are, or will be, in its shards. No shard is read: shard k has the next
    rows of the table, as many as it holds and rejects, or as many as its own text part has. Raises PipelineError.
    """
    table, usable, first = TextTable.open(folder, manifest.text_of(split), manifest.spec), [], 0
    for record in manifest.shards_of(split):
        last = first + (record.text.rows if record.text else record.rows + len(record.rejected))
        rows = range(first, min(last, len(table)))
        usable += [row for row in rows if not record.rejected or table.doc_id(row) not in record.rejected]
        first = last
    if first != len(table) or len(usable) != manifest.total(split, "rows"):
        raise PipelineError(
            f"{folder}: the {split} table holds {len(table)} dialogues, {len(usable)} of them usable, but its shards "
            f"have {first} and {manifest.total(split, 'rows')}. Dump again into another folder"
        )
    return table.select(np.array(usable, np.int64))
