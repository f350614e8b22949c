"""Writing, listing and reading feature shards.

Guarantees: a shard is whole or absent; the manifest is the only truth about what is finished; a reader refuses
anything whose size, checksum, structure or origin differs from the manifest and from its own recipe.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path, read_sealed, sha256, write_sealed
from pipeline.features.schema import (
    FeatureSpec,
    Row,
    StoredRow,
    arrow_schema,
    from_batch,
    require_same,
    spec_of,
    to_batch,
)

SOME_TOKENS = 1024  # of `some_texts`
MANIFEST = "manifest.json"
HELDOUT_PROMPTS = "heldout_prompts.jsonl"  # first questions of held-out dialogues, for evaluation
SPLITS = ("train", "validation")
UNREADABLE = (
    f"Restore the {MANIFEST} that the dump wrote, or remove it and dump again: every shard is then written anew"
)
ANSWERS = "answers"  # a split beside these: the target's own greedy answers to the calibration prompts


@dataclass(frozen=True)
class ShardRecord:
    """One line of the manifest. Counts are of dialogues (rows), tokens and tokens with a loss."""

    name: str
    split: str
    index: int
    rows: int
    tokens: int
    trained_tokens: int
    bytes: int
    sha256: str
    rejected: dict[str, str] = field(default_factory=dict)  # document id -> reason, found while dumping this shard
    documents: str = ""  # fingerprint of the encoded dialogues that it was dumped from


@dataclass
class Manifest:
    """What a feature folder holds; ``complete`` only after the last shard and the final accounting."""

    spec: FeatureSpec
    shards: list[ShardRecord] = field(default_factory=list)
    accounting: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    answers: str = ""  # Recipe.answers_hash, of the shards of that split
    prompts_sha256: str = ""  # of heldout_prompts.jsonl, once that is written

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        if not path.exists():
            raise PipelineError(
                f"{folder} has no {MANIFEST}: no features were dumped here. Run: python preprocess/dump_features.py "
                "RECIPE"
            )
        return cls.parse(read_sealed(path, UNREADABLE), path)

    @classmethod
    def parse(cls, raw: dict[str, Any], path: object) -> "Manifest":
        """Raises PipelineError for what is no manifest, and for a shard whose name is not that of its split and
        index.
        """
        try:
            found = cls(
                spec=FeatureSpec(**raw["spec"]),
                shards=[ShardRecord(**record) for record in raw["shards"]],
                accounting=raw["accounting"],
                complete=raw["complete"],
                answers=raw["answers"],
                prompts_sha256=raw["prompts_sha256"],
            )
        except (KeyError, TypeError) as error:
            raise PipelineError(
                f"{path} is no manifest of this version ({error}); dump again into another folder"
            ) from None
        names = set()
        for record in found.shards:
            if not _is_named_rightly(record) or record.name in names:
                raise PipelineError(
                    f"{path}: shard {record.name!r} (split {record.split!r}, index {record.index!r}) is not one that "
                    f"a dump writes, or is there twice. {UNREADABLE}"
                )
            names.add(record.name)
        return found

    def save(self, folder: Path) -> None:
        self.shards.sort(key=lambda record: (record.split, record.index))
        write_sealed(folder / MANIFEST, asdict(self))

    def total(self, split: str, count: str) -> int:
        return sum(getattr(record, count) for record in self.shards if record.split == split)


def link_features(source: Path, folder: Path) -> None:
    """Another run's dump as this one's, without a copy of its bytes; what is in `folder` already stays."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.linking")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, unfinished, copy_function=os.link)
        unfinished.replace(folder)


def shard_name(split: str, index: int) -> str:
    return f"features-{split}-{index:06d}.arrow"


def _is_named_rightly(record: ShardRecord) -> bool:
    """Whether it names the file that its split and index make, and no other place; and whether its counts are such."""
    counts = (record.index, record.rows, record.tokens, record.trained_tokens, record.bytes)
    known = record.split in (*SPLITS, ANSWERS) and all(type(count) is int and count >= 0 for count in counts)
    return known and record.name == shard_name(record.split, record.index)


def write_shard(
    folder: Path, split: str, index: int, spec: FeatureSpec, rows: Iterable[Row | StoredRow], rejected: dict[str, str]
) -> ShardRecord:
    """Writes one shard atomically and returns its manifest record. Raises PipelineError when the disk is full.

    `rejected` may be filled by `rows` while it is consumed.
    """
    path = folder / shard_name(split, index)
    count = tokens = trained = 0
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        sink = _Hashed(file)
        with pa.ipc.new_file(pa.PythonFile(sink, "w"), arrow_schema(spec)) as writer:
            for row in rows:
                writer.write_batch(to_batch(row, spec))
                count += 1
                tokens += len(row.input_ids)
                trained += int(row.loss_mask.sum())
        size, checksum = sink.tell(), sink.state.hexdigest()
    return ShardRecord(path.name, split, index, count, tokens, trained, size, checksum, rejected)


class _Hashed(io.RawIOBase):
    """A file that is hashed as it is written, so that nothing is read back."""

    def __init__(self, file: BinaryIO):
        self._file, self.state = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, content) -> int:
        self.state.update(content)
        return self._file.write(content)


_OTHER = "its SHA-256 is not the manifest's: its content was changed or damaged"


def damage(folder: Path, record: ShardRecord, checksum: bool = True) -> str | None:
    """Why the shard on disk is not the one of the manifest, or None when it is."""
    path = folder / record.name
    if not path.exists():
        return "it is missing"
    size = path.stat().st_size
    if size != record.bytes:
        return f"it has {size} bytes, the manifest says {record.bytes}: it was truncated or overwritten"
    if checksum and sha256(path) != record.sha256:
        return _OTHER
    return None


def prompts_damage(folder: Path, manifest: Manifest) -> str | None:
    """Why the held-out prompts on disk are not those of a finished dump, or None when they are."""
    path = folder / HELDOUT_PROMPTS
    if not path.exists():
        return "it is missing"
    return None if sha256(path) == manifest.prompts_sha256 else _OTHER


def require_whole(folder: Path, record: ShardRecord, checksum: bool = True) -> None:
    reason = damage(folder, record, checksum)
    if reason:
        raise PipelineError(
            f"feature shard {folder / record.name}: {reason}. It can be dumped again: "
            f"python -m preprocess.verify {folder} --recipe RECIPE --repair"
        )


def open_shard(folder: Path, record: ShardRecord, spec: FeatureSpec) -> pa.ipc.RecordBatchFileReader:
    """The shard, memory-mapped, after checks of size, structure and origin. Raises PipelineError."""
    require_whole(folder, record, checksum=False)
    path = folder / record.name
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"feature shard {path} is not a whole Arrow file: {error}. Run the dump again") from None
    require_same(spec_of(reader.schema, path), spec, path)
    if reader.num_record_batches != record.rows:
        raise PipelineError(f"feature shard {path}: {reader.num_record_batches} rows, the manifest says {record.rows}")
    return reader


class FeatureStore:
    """The dialogues of one split, memory-mapped; rows are numbered across shards in manifest order."""

    def __init__(self, folder: Path, split: str, expected: FeatureSpec):
        """Opens every shard and checks size, structure and origin (not checksums: see `require_whole`).

        Raises PipelineError for an unfinished or foreign dump, and for a missing or damaged shard.
        """
        manifest = Manifest.load(folder)
        require_same(manifest.spec, expected, folder)
        if not manifest.complete:
            raise PipelineError(f"{folder}: the dump is not finished. Run it again: it continues where it stopped")
        self.spec = manifest.spec
        self.records = [record for record in manifest.shards if record.split == split]
        if not self.records:
            raise PipelineError(
                f"{folder}: holds no {split!r} dialogues: give data.max_tokens or the held-out split more room"
            )
        self._readers = [open_shard(folder, record, self.spec) for record in self.records]
        self._starts = np.cumsum([0] + [record.rows for record in self.records])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _batch(self, index: int) -> pa.RecordBatch:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._readers[shard].get_batch(index - int(self._starts[shard]))

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``(input_ids, loss_mask)`` of a row, without its hidden states."""
        batch = self._batch(index)
        return tuple(batch.column(name).flatten().to_numpy(zero_copy_only=True) for name in ("input_ids", "loss_mask"))

    def row(self, index: int, decode: bool = True) -> Row:
        return from_batch(self._batch(index), self.spec, decode)


def some_texts(store: FeatureStore, tokens: int = SOME_TOKENS) -> list[list[int]]:
    """The first dialogues, so many tokens of them: what a draft at step 0 may be made of."""
    found: list[list[int]] = []
    for number in range(len(store)):
        if (room := tokens - sum(map(len, found))) <= 0:
            break
        found.append(store.text(number)[0][:room].tolist())
    return found
