"""THE feature contract, version 2. Everything that writes or reads a text table or a shard goes through this file.

Both are uncompressed Arrow IPC files. A text table holds the dialogues of a set (training, validation, answers), one
row each, in batches of any size:

    doc_id      string              stable id of the dialogue
    input_ids   large_list<int32>   t_0 .. t_{L-1}
    loss_mask   large_list<uint8>   1 where t_i was written by the assistant

A shard holds the target's states of some of a table's rows; each of its record batches has one row:

    row         int64                                the row of the table; if a part of it came with the shard, the
                                                     row of that part
    hidden      large_list<fixed_size_list<W>[d]>    f_0 .. f_{L-1} as raw words (Arrow has no bfloat16)
    scale       large_list<float32>                  float8_e4m3fn only: f_i is its words times this
    auxiliary   large_list<fixed_size_list<W>[K d]>  with K auxiliary layers only: their outputs at t_i, in a row
    auxiliary_scale  large_list<float32>             float8_e4m3fn only: K a token

W is uint16 for bfloat16 and float16, uint32 for float32, uint8 for float8_e4m3fn. A shard's metadata carries the fields
of `FeatureSpec`, a table's those that its text depends on. A row that no shard names (its states were not finite) is
not used; the manifest lists these rows.
"""

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config

from pipeline.basics.errors import PipelineError

# Shards are mapped read-only, and no code writes to a Row, so torch's warning about this is not needed.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

VERSION = 2
POST_FINAL_NORM = "post-final-norm"
_BLOCK = 1 << 19  # numbers that are quantised at a time
_WORDS: dict[str, tuple[torch.dtype, Any, Any]] = {  # stored dtype -> (torch dtype, NumPy word, Arrow word)
    "bfloat16": (torch.bfloat16, np.uint16, pa.uint16()),
    "float16": (torch.float16, np.uint16, pa.uint16()),
    "float32": (torch.float32, np.uint32, pa.uint32()),
    "float8_e4m3fn": (torch.float8_e4m3fn, np.uint8, pa.uint8()),
}
_TORCH_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # for reinterpreting a torch tensor's bits
FP8 = "float8_e4m3fn"


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("is not printable")
    return text


# Types of values in a manifest that somebody else may have written: pydantic checks them in `Manifest.parse`.
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
Counts = dict[Annotated[str, Field(pattern=r"^[ -~]{1,200}$")], Count]  # keyed by reason
Words = Annotated[str, Field(max_length=10_000), AfterValidator(_check_printable)]
Numbers = Annotated[str, Field(max_length=10_000, pattern=r"^([0-9]{1,9}( [0-9]{1,9})*)?$")]


@with_config(extra="forbid")
@dataclass(frozen=True)
class FeatureSpec:
    """The properties that make two shards interchangeable if all are equal."""

    hidden_size: Annotated[int, Field(strict=True, gt=0, lt=1 << 24)]
    stored_dtype: Words
    target: Words  # fingerprint of configuration and weights
    tokenizer: Words
    template: Words
    recipe: Words  # the recipe's `dump_hash`
    norm_stage: Words = POST_FINAL_NORM
    auxiliary_layers: Numbers = ""  # "2 15 27", counted from 1; their states follow the last hidden state
    template_settings: Words = ""  # whether the target reasons, the date in its prompt, its template's keywords
    dtype: Words = "bfloat16"  # the dtype in which the target computed
    engine: Words = "transformers"  # the engine that computed the states
    engine_version: Words = ""
    stop_ids: Numbers = ""  # the target's, if its own answers are the texts; in the manifest only, not in a shard
    version: int = VERSION

    @property
    def auxiliary_numbers(self) -> list[int]:
        return [int(layer) for layer in self.auxiliary_layers.split()]

    @property
    def auxiliary(self) -> int:
        """The number of auxiliary layers."""
        return len(self.auxiliary_numbers)


class Accounting(BaseModel):
    """The numbers of the source's records that were accepted, rejected and skipped."""

    model_config = ConfigDict(strict=True, extra="ignore")

    records: Count
    further_sequences: Count
    accepted: Count
    rejected: Counts
    skipped: Counts
    edits: Counts
    grouped: Counts
    examples: dict[Annotated[str, Field(pattern=r"^[ -~]{1,200}$")], Annotated[str, Field(max_length=2000)]] = {}
    torn_tail_after: Count | None


@dataclass(frozen=True)
class TextRow:
    """One dialogue: T tokens, their assistant mask, and the hidden states of all T positions."""

    doc_id: str
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    hidden_TD: torch.Tensor  # stored dtype; bfloat16 where that is FP8 and `scales_TS` is None
    auxiliary_TKD: torch.Tensor | None = None  # the auxiliary layers' states, in the same dtype
    scales_TS: torch.Tensor | None = None  # of stored float8: the factor of each state


@dataclass(frozen=True)
class StoredRow:
    """A row as a shard holds it, on the host: `columns` are those of `stored_columns`."""

    number: int  # row of the text table
    tokens: int
    trained_tokens: int
    columns: list[torch.Tensor]


def row_dtype(stored_dtype: str) -> torch.dtype:
    """Return the dtype of a `TextRow`'s hidden states, both when it is written and when it is read."""
    return torch.bfloat16 if stored_dtype == FP8 else _WORDS[stored_dtype][0]


def token_bytes(stored_dtype: str, hidden_size: int, states: int = 1) -> int:
    """Return the bytes of one token on disk: its id and mask in a text table, and in a shard the words of each stored
    state, with a scale for float8.
    """
    _, word, _ = _WORDS[stored_dtype]
    return 5 + states * (hidden_size * word().itemsize + (4 if stored_dtype == FP8 else 0))


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(float8 [T, ..., D], scale float32 [T, ...])``. Each vector's largest magnitude becomes the largest
    finite float8 number. On a CPU a block of tokens after the other, so that each stays in the processor's cache.
    """
    tokens = max(_BLOCK // max(states[:1].numel(), 1), 1)
    if states.device.type != "cpu" or len(states) <= tokens:
        return _quantise(states)
    words = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32)
    for first in range(0, len(states), tokens):
        block = slice(first, first + tokens)
        words[block], scales[block] = _quantise(states[block])
    return words, scales


def _quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = states.float()
    scale = (exact.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
    return (exact / scale[..., None]).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Float8States:
    """The states of T tokens in float8: the last state, then the auxiliary layers' if there are any, each as words
    [T, ..., D] and their scales [T, ...]. A scale is finite if its state is.
    """

    parts: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def from_columns(cls, columns: dict[str, torch.Tensor]) -> "Float8States":
        """Return the states from tensors by the names of a shard's columns."""
        names = [("hidden", "scale"), ("auxiliary", "auxiliary_scale")]
        return cls([(columns[words], columns[scale]) for words, scale in names if words in columns])

    def __len__(self) -> int:
        return len(self.parts[0][0])

    def __getitem__(self, tokens: slice) -> "Float8States":
        return Float8States([(words[tokens], scale[tokens]) for words, scale in self.parts])

    @property
    def is_finite(self) -> torch.Tensor:
        """True if all states are finite: a bool on their device."""
        return torch.stack([scale.isfinite().all() for _, scale in self.parts]).all()


def quantise_states(states_TSD: torch.Tensor) -> Float8States:
    """Return the states in float8, rounded to the dtype of rows first; the last state is the first of S."""
    states_TSD = states_TSD.to(row_dtype(FP8))
    parts = [states_TSD[:, 0]] + ([states_TSD[:, 1:]] if states_TSD.shape[1] > 1 else [])
    return Float8States([quantise(part) for part in parts])


def text_schema(spec: FeatureSpec) -> pa.Schema:
    """Return the schema of the text tables that go with shards of this spec."""
    fields = [
        ("doc_id", pa.string()),
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.uint8())),
    ]
    of_text = ("version", "tokenizer", "template", "template_settings")
    return pa.schema(fields, metadata={name: str(getattr(spec, name)) for name in of_text})


def arrow_schema(spec: FeatureSpec) -> pa.Schema:
    """Return the schema of a shard."""
    word = _WORDS[spec.stored_dtype][2]
    fields = [("row", pa.int64()), ("hidden", pa.large_list(pa.list_(word, spec.hidden_size)))]
    if spec.stored_dtype == FP8:
        fields.append(("scale", pa.large_list(pa.float32())))
    if spec.auxiliary:
        fields.append(("auxiliary", pa.large_list(pa.list_(word, spec.auxiliary * spec.hidden_size))))
        if spec.stored_dtype == FP8:
            fields.append(("auxiliary_scale", pa.large_list(pa.float32())))
    return pa.schema(fields, metadata={key: str(value) for key, value in asdict(spec).items() if key != "stop_ids"})


def read_spec(schema: pa.Schema, path: object) -> FeatureSpec:
    """Return the spec that a shard's schema declares. Raises PipelineError if it is no shard of this version."""
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    if metadata.get("version") != str(VERSION):
        raise PipelineError(
            f"{path}: feature-shard version {metadata.get('version')!r}, expected {VERSION!r}: "
            "it is not a feature shard, or another version of this project wrote it; dump it again"
        )
    try:
        spec = FeatureSpec(**{**metadata, "hidden_size": int(metadata["hidden_size"]), "version": VERSION})
        fits = schema.equals(arrow_schema(spec))
    except (KeyError, TypeError, ValueError) as error:
        raise PipelineError(f"{path}: its metadata is not a feature shard's ({error}); dump it again") from None
    if not fits:
        raise PipelineError(
            f"{path}: the columns are {schema.names}, but not of the types of version {VERSION}; dump it again"
        )
    return spec


def require_same(got: FeatureSpec, expected: FeatureSpec, where: object) -> None:
    """Raise PipelineError for features that were not made with this recipe and target, naming the difference. A
    different engine, or another version of it, is allowed here (see `describe_engine_change`).
    """
    meanings = {
        "target": "another target model or revision",
        "tokenizer": "another tokenizer",
        "template_settings": "other settings of the chat template",
        "template": "another chat template",
        "norm_stage": "hidden states of another stage of the target",
        "stored_dtype": "another stored dtype",
        "hidden_size": "another hidden size",
        "auxiliary_layers": "other auxiliary layers",
        "dtype": "another dtype of the target's forward",
        "stop_ids": "a target whose answers end at other tokens",
        "recipe": "other data or feature settings",
    }
    for field, meaning in meanings.items():
        have, want = getattr(got, field), getattr(expected, field)
        if have != want and not (field == "stop_ids" and not (have and want)):
            raise PipelineError(
                f"{where}: features of {meaning} ({field} is {have!r}, this run expects {want!r}). "
                "Use the recipe they were dumped with, or dump again into another output folder"
            )


def require_readable(got: FeatureSpec, expected: FeatureSpec, where: object) -> None:
    """Raise PipelineError as `require_same` does, but not for more auxiliary layers than are expected."""
    holds_all = set(expected.auxiliary_numbers) <= set(got.auxiliary_numbers)
    require_same(got, replace(expected, auxiliary_layers=got.auxiliary_layers) if holds_all else expected, where)


def describe_engine_change(got: FeatureSpec, expected: FeatureSpec) -> str | None:
    """Return a message if the states were computed by an engine other than the expected one; None if it is the same."""
    computed_by, this_engine = ((spec.engine, spec.engine_version) for spec in (got, expected))
    unknown = computed_by[0] == this_engine[0] and "" in (
        computed_by[1],
        this_engine[1],
    )  # the engine is not installed on this machine
    return (
        None
        if computed_by == this_engine or unknown
        else f"features were computed by {' '.join(computed_by)}, here is {' '.join(this_engine)}"
    )


def stored_columns(states: list[torch.Tensor] | Float8States) -> list[torch.Tensor]:
    """Return the columns that a shard stores for a `TextRow`'s states, in the shard's order and on the states' device:
    the words of each state, [T, D] or [T, K D], and for float8 a scale for each vector after them.
    """
    if isinstance(states, Float8States):
        return [column for words, scale in states.parts for column in (_words(words), scale.flatten())]
    return [_words(state) for state in states]


def _words(state: torch.Tensor) -> torch.Tensor:
    return state.contiguous().view(_TORCH_WORD[state.dtype.itemsize]).flatten(1)


def to_stored_row(row: TextRow, number: int, spec: FeatureSpec) -> StoredRow:
    """Return a dialogue in memory as the shard of this spec holds it, for row `number` of its table."""
    states = [row.hidden_TD] + ([] if row.auxiliary_TKD is None else [row.auxiliary_TKD])
    assert all(state.dtype == row_dtype(spec.stored_dtype) for state in states), row.doc_id
    columns = stored_columns(Float8States(list(map(quantise, states))) if spec.stored_dtype == FP8 else states)
    return StoredRow(number, len(row.hidden_TD), int(row.loss_mask.sum()), columns)


def to_record_batch(row: StoredRow, spec: FeatureSpec) -> pa.RecordBatch:
    word = _WORDS[spec.stored_dtype][1]

    def single_list(values: pa.Array) -> pa.Array:
        return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)

    columns = [pa.array([row.number], pa.int64())]
    for column in row.columns:
        if column.dim() == 1:
            columns.append(single_list(pa.array(column.numpy())))
        else:
            words = pa.array(column.numpy().view(word).reshape(-1))
            columns.append(single_list(pa.FixedSizeListArray.from_arrays(words, column.shape[1])))
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(spec))


def from_record_batch(
    batch: pa.RecordBatch, spec: FeatureSpec, text: tuple[str, np.ndarray, np.ndarray], decode: bool = True
) -> TextRow:
    """Return the dialogue `text` (id, tokens, mask) with its states: zero-copy views into the batch's (memory-mapped)
    buffers. With `decode`, FP8 is decoded; without it, the caller decodes it with the row's scales.
    """
    torch_dtype, word, _ = _WORDS[spec.stored_dtype]
    scales_of: list[torch.Tensor] = []

    def states(column: str, scales: str, shape: tuple[int, ...]) -> torch.Tensor:
        words = batch.column(column).flatten().flatten().to_numpy(zero_copy_only=True)
        signed = words.view({1: np.uint8, 2: np.int16, 4: np.int32}[word().itemsize]).reshape(shape)
        read = torch.from_numpy(signed).view(torch_dtype)
        if spec.stored_dtype != FP8:
            return read
        scale = torch.from_numpy(batch.column(scales).flatten().to_numpy(zero_copy_only=True)).reshape(read.shape[:-1])
        scales_of.append(scale.reshape(len(read), -1))
        return dequantise(read, scale) if decode else read

    hidden_TD, auxiliary_TKD = states("hidden", "scale", (-1, spec.hidden_size)), None
    if spec.auxiliary:
        auxiliary_TKD = states("auxiliary", "auxiliary_scale", (-1, spec.auxiliary, spec.hidden_size))
    scales_TS = None if decode or not scales_of else torch.cat(scales_of, dim=1)
    return TextRow(*text, hidden_TD=hidden_TD, auxiliary_TKD=auxiliary_TKD, scales_TS=scales_TS)


def select_layers(row: TextRow, spec: FeatureSpec, required: FeatureSpec) -> TextRow:
    """Return a row of `spec` bit for bit as a dump of `wanted`, which has some of its auxiliary layers, holds it."""
    if required.auxiliary_layers == spec.auxiliary_layers:
        return row
    places = list(map(spec.auxiliary_numbers.index, required.auxiliary_numbers))
    auxiliary_TKD = row.auxiliary_TKD[:, places] if row.auxiliary_TKD is not None and places else None
    scales_TS = None if row.scales_TS is None else row.scales_TS[:, [0, *(1 + place for place in places)]]
    return replace(row, auxiliary_TKD=auxiliary_TKD, scales_TS=scales_TS)


def dequantise(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return states (..., D) from float8 (..., D) and a scale (...), on their device."""
    return (words.float() * scale[..., None]).to(row_dtype(FP8))
