"""The feature contract: the bits read are the bits written, and foreign, damaged or incomplete files are refused."""

import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import allow_open_files, sha256
from pipeline.features import schema, shards
from pipeline.features.schema import FeatureSpec, TextRow, describe_engine_change, to_stored_row
from pipeline.features.shards import (
    MANIFEST,
    FeatureStore,
    Manifest,
    find_damage,
    shard_name,
    text_name,
    usable_texts,
    write_features,
    write_shard,
)
from pipeline.features.text import first_texts
from tests.kit import ROOT, change_sealed, flip, replace_once

D = 6
SPEC = FeatureSpec(D, "bfloat16", target="T", tokenizer="K", template="M", recipe="R", stop_ids="2")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WORDS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


def rows_of(count: int, dtype: str = "bfloat16", seed: int = 0) -> list[TextRow]:
    """Return rows with hidden states of random BITS: NaN with payloads, infinities, subnormals and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    word = WORDS[dtype]
    limits = torch.iinfo(word)
    rows = []
    for number in range(count):
        length = 3 + number
        bits = torch.randint(limits.min, limits.max, (length, D), generator=generator).to(word)
        bits[0, 0] = limits.min  # minus zero
        mask = np.arange(length, dtype=np.uint8) % 2
        rows.append(
            TextRow(f"doc{seed}-{number}", np.arange(length, dtype=np.int32) + seed, mask, bits.view(DTYPES[dtype]))
        )
    return rows


def bits_of(hidden_TD: torch.Tensor) -> torch.Tensor:
    return hidden_TD.view(WORDS[str(hidden_TD.dtype).removeprefix("torch.")])


def assert_same(got: TextRow, expected: TextRow) -> None:
    assert got.doc_id == expected.doc_id
    assert (got.input_ids.dtype, got.loss_mask.dtype) == (np.int32, np.uint8)
    assert got.input_ids.tolist() == expected.input_ids.tolist()
    assert got.loss_mask.tolist() == expected.loss_mask.tolist()
    assert got.hidden_TD.dtype == expected.hidden_TD.dtype
    assert torch.equal(bits_of(got.hidden_TD), bits_of(expected.hidden_TD))


@pytest.fixture(scope="module")
def complete_folder(tmp_path_factory) -> Path:
    """Two training shards of 3 and 2 dialogues, one validation shard of 1, and their manifest."""
    folder = tmp_path_factory.mktemp("complete")
    write_features(folder, SPEC, {"train": [rows_of(3), rows_of(2, seed=1)], "validation": [rows_of(1, seed=2)]})
    return folder


@pytest.fixture
def folder(complete_folder, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(complete_folder, tmp_path, dirs_exist_ok=True)


def written(folder: Path, spec: FeatureSpec, rows: list[TextRow]) -> FeatureStore:
    write_features(folder, spec, {"train": [rows]})
    return FeatureStore(folder, "train", spec)


def shard_of(folder: Path, rows: list[TextRow], spec: FeatureSpec = SPEC) -> shards.ShardRecord:
    """Write the first training shard again, and return its record."""
    return write_shard(folder, "train", 0, spec, (to_stored_row(row, n, spec) for n, row in enumerate(rows)), {})


def refusal(folder: Path, expected: FeatureSpec = SPEC) -> str:
    with pytest.raises(PipelineError) as caught:
        FeatureStore(folder, "train", expected)
    return str(caught.value)


def replace_shard(folder: Path, path: Path) -> None:
    """Make the manifest agree with size and checksum of a changed first shard."""
    manifest = Manifest.load(folder)
    manifest.shards[0] = replace(manifest.shards[0], bytes=path.stat().st_size, sha256=sha256(path))
    manifest.save(folder)


# -- what is read is what was written --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_bit_survives(tmp_path, dtype):
    spec, rows = replace(SPEC, stored_dtype=dtype), rows_of(5, dtype)
    store = written(tmp_path, spec, rows)
    assert len(store) == 5
    for index, row in enumerate(rows):
        assert_same(store.row(index), row)


def plausible_rows(seed: int = 0) -> list[TextRow]:
    """Return rows with hidden states of magnitudes from 1e-9 to 1e9, a token of zeros, single large channels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(4):
        length = 5 + number
        hidden_TD = torch.randn(length, D, generator=generator) * 10.0 ** torch.randint(
            -9, 9, (length, 1), generator=generator
        )
        hidden_TD[0] = 0
        hidden_TD[1, 2] *= 1000
        mask = np.arange(length, dtype=np.uint8) % 2
        rows.append(TextRow(f"doc{number}", np.arange(length, dtype=np.int32), mask, hidden_TD.bfloat16()))
    return rows


def test_float8_keeps_each_token_to_its_own_scale(tmp_path):
    """e4m3 has 3 bits of mantissa: 1/16 of a number, or 2^-10 of the token's scale for the smallest; bfloat16 adds
    2^-8.
    """
    spec, rows = replace(SPEC, stored_dtype=schema.FP8), plausible_rows()
    store = written(tmp_path, spec, rows)
    for index, row in enumerate(rows):
        got, exact = store.row(index).hidden_TD, row.hidden_TD.float()
        assert got.dtype == torch.bfloat16
        allowed = (
            torch.maximum(exact.abs() / 16, exact.abs().amax(-1, keepdim=True) / 448 * 2**-10) * 1.01
            + exact.abs() / 128
        )
        assert ((got.float() - exact).abs() <= allowed).all()
        assert (got[0] == 0).all()
        again, scale_T = schema.quantise(row.hidden_TD)
        assert again.float().abs().amax(-1)[1:].eq(448).all() and scale_T.isfinite().all()


@pytest.mark.parametrize("shape", [(37, 16), (37, 3, 16), (1, 16), (0, 16)])
def test_blocks_of_tokens_are_quantised_to_the_same_bits(monkeypatch, shape):
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = schema.quantise(states)
    for numbers in (1, 48, 200):
        monkeypatch.setattr(schema, "_BLOCK", numbers)
        words, scales = schema.quantise(states)
        assert torch.equal(words.view(torch.uint8), whole[0].view(torch.uint8)) and torch.equal(scales, whole[1])


@pytest.mark.parametrize("dtype", [*DTYPES, schema.FP8])
def test_auxiliary_states_are_stored_beside_the_last_one(tmp_path, dtype):
    """Each layer has the last state's row under another name, so each must come back as that row does."""
    spec = replace(SPEC, stored_dtype=dtype, auxiliary_layers="1 4")
    plain = [replace(row, hidden_TD=row.hidden_TD.float().clamp(-6e4, 6e4)) for row in plausible_rows()]
    plain = [replace(row, hidden_TD=row.hidden_TD.to(schema.row_dtype(dtype))) for row in plain]
    both = [replace(row, auxiliary_TKD=torch.stack([row.hidden_TD, row.hidden_TD.flip(0)], 1)) for row in plain]
    store = written(tmp_path, spec, both)
    size = sum(record.bytes for record in Manifest.load(tmp_path).files)
    assert size - 4 * 3000 < sum(len(row.input_ids) for row in plain) * schema.token_bytes(dtype, D, 3)
    for index in range(len(plain)):
        row = store.row(index)
        assert torch.equal(row.auxiliary_TKD[:, 0], row.hidden_TD)
        assert torch.equal(row.auxiliary_TKD[:, 1], row.hidden_TD.flip(0))


@pytest.mark.parametrize("dtype", [*DTYPES, schema.FP8])
def test_the_documented_reader_reads_what_was_written(tmp_path, dtype):
    page = (ROOT / "docs/feature-shards.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    assert set(re.findall(r"^ *(?:import|from) (.*?)(?: as| import|$)", code, re.MULTILINE)) == {
        "json, sys", "pathlib", "numpy", "pyarrow"
    }  # fmt: skip
    rows = [replace(row, hidden_TD=row.hidden_TD.to(schema.row_dtype(dtype))) for row in plausible_rows()]
    if dtype == "float16":
        rows = [replace(row, hidden_TD=row.hidden_TD.clamp(-6e4, 6e4)) for row in rows]
    spec = replace(SPEC, stored_dtype=dtype)
    write_features(tmp_path, spec, {"train": [rows[:2], rows[2:]]})
    store, reader = FeatureStore(tmp_path, "train", spec), {"__name__": "reader"}
    exec(code, reader)
    documents = list(reader["read"](tmp_path))
    assert len(documents) == len(store) == 4
    for index, (doc_id, ids, mask, hidden) in enumerate(documents):
        row = store.row(index)
        assert doc_id == row.doc_id and np.array_equal(ids, row.input_ids) and np.array_equal(mask, row.loss_mask)
        assert torch.equal(torch.from_numpy(hidden).to(row.hidden_TD.dtype), row.hidden_TD)


def test_the_record_counts_what_the_shard_holds(tmp_path):
    rejected = {"bad": "features_not_finite"}
    rows = (to_stored_row(row, number, SPEC) for number, row in enumerate(rows_of(4)))
    record = write_shard(tmp_path, "validation", 7, SPEC, rows, rejected)
    path = tmp_path / "features-validation-000007.arrow"
    counts = {"rows": 4, "tokens": 3 + 4 + 5 + 6, "trained_tokens": 1 + 2 + 2 + 3, "bytes": path.stat().st_size}
    where = {"name": path.name, "split": "validation", "index": 7, "sha256": sha256(path)}
    nothing = {"documents": "", "text": None, "edits": {}, "off": None}
    assert asdict(record) == where | counts | {"rejected": rejected} | nothing


def test_a_shard_costs_a_manifest_a_few_calls_and_a_line(folder, tmp_path):
    """Saving 50,000 shards took four seconds when each shard cost 500 calls."""
    manifest = shards.Manifest.load(folder)
    (shard, *_), calls = manifest.shards_of("train"), []

    def count(_frame, event, _argument):
        calls.append(event)

    def cost(number: int) -> int:
        manifest.shards = [replace(shard, name=shards.shard_name("train", n), index=n) for n in range(number)]
        calls.clear()
        sys.setprofile(count)
        try:
            manifest.save(tmp_path)
            assert shards.Manifest.load(tmp_path).shards == manifest.shards
        finally:
            sys.setprofile(None)
        return len(calls)

    assert cost(1100) - cost(100) < 1000 * 120
    lines = (tmp_path / "manifest.json").read_text().splitlines()
    assert sum(line.startswith('{"name": "features-train-') for line in lines) == 100


def test_rows_are_numbered_in_the_order_of_the_table(folder):
    manifest = Manifest.load(folder)
    manifest.shards.reverse()  # workers finish in any order
    manifest.save(folder)
    store = FeatureStore(folder, "train", SPEC)
    expected = rows_of(3, seed=0) + rows_of(2, seed=1)
    assert len(store) == 5
    for index, row in enumerate(expected):
        assert_same(store.row(index), row)
    assert [FeatureStore(folder, "validation", SPEC).row(0).doc_id] == ["doc2-0"]


def test_a_row_that_no_shard_names_stays_in_the_table_and_is_not_used(folder):
    """Its states were not finite, or it killed workers. So a shard may have no row at all."""
    rows = [*rows_of(3), *rows_of(2, seed=1), *rows_of(1, seed=3)]
    manifest = Manifest.load(folder)
    kept_rows = [0, 2], [], [5]
    rejected = {"doc0-1": "features_not_finite"}, {"doc1-0": "kills_workers", "doc1-1": "kills_workers"}, {}
    manifest.text["train"] = shards.write_text_table(folder / text_name("train"), rows, SPEC)
    manifest.shards = [
        write_shard(folder, "train", index, SPEC, (to_stored_row(rows[n], n, SPEC) for n in numbers), rejected[index])
        for index, numbers in enumerate(kept_rows)
    ]
    manifest.save(folder)
    store = FeatureStore(folder, "train", SPEC)
    assert [store.row(index).doc_id for index in range(len(store))] == ["doc0-0", "doc0-2", "doc3-0"]
    assert store.texts.lengths_N.tolist() == [3, 5, 3]
    for shard in manifest.shards:
        (folder / shard.name).unlink()
    texts = usable_texts(folder, manifest, "train")  # needs no shard
    assert texts.rows_N.tolist() == [0, 2, 5] and texts.doc_id(1) == "doc0-2"
    assert first_texts(texts, 5) == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("number", "row", "message"),
    [
        (4, rows_of(3)[2], "it names row 4 of the text table where the manifest says 2"),
        (2, rows_of(4)[3], "it holds 6 states for row 2, whose text has 5 tokens"),
    ],
)
def test_a_shard_that_names_another_row_or_has_states_of_another_length_is_refused(folder, number, row, message):
    rows = [*(to_stored_row(row, n, SPEC) for n, row in enumerate(rows_of(2))), to_stored_row(row, number, SPEC)]
    write_shard(folder, "train", 0, SPEC, rows, {})
    replace_shard(folder, folder / shard_name("train", 0))
    store = FeatureStore(folder, "train", SPEC)
    assert store.row(1).doc_id == "doc0-1"
    with pytest.raises(PipelineError, match=f"features-train-000000.arrow: {message}"):
        store.row(2)


def test_rows_are_views_into_the_mapped_file(folder):
    store = FeatureStore(folder, "train", SPEC)
    before = pa.total_allocated_bytes()
    row = store.row(4)
    assert pa.total_allocated_bytes() == before
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [
        tuple(int(end, 16) for end in m[0].split("-")) for m in maps if m[-1] == str(folder / shard_name("train", 1))
    ]
    assert any(low <= row.hidden_TD.data_ptr() < high for low, high in spans)


# -- what is damaged or unfinished is refused ------------------------------------------------------------------------


def test_a_shard_that_is_missing_or_truncated_or_has_a_flipped_byte_is_refused(folder):
    truncated, missing, flipped = Manifest.load(folder).shards
    for record in (truncated, missing, flipped):
        assert find_damage(folder, record) is None
    flip(folder / flipped.name)
    assert find_damage(folder, flipped, digest=None) is None
    assert "its SHA-256 is not the manifest's" in find_damage(folder, flipped)
    (folder / missing.name).unlink()
    assert find_damage(folder, missing) == "it is missing" and f"{missing.name}: it is missing" in refusal(folder)
    size = truncated.bytes - 1
    os.truncate(folder / truncated.name, size)
    reason = f"it has {size} bytes, the manifest says {truncated.bytes}: it was truncated or overwritten"
    assert find_damage(folder, truncated, digest=None) == reason
    message = refusal(folder)
    assert f"feature shard {folder / truncated.name}: {reason}" in message
    assert f"jakiro verify {folder} --recipe RECIPE --repair" in message


# -- what is foreign is refused --------------------------------------------------------------------------------------


FOREIGN = [
    ("target", "X", "another target model or revision (target is 'T', this run expects 'X')"),
    ("tokenizer", "X", "another tokenizer (tokenizer is 'K', this run expects 'X')"),
    ("template_settings", "X", "other settings of the chat template (template_settings is '', this run"),
    ("template", "X", "another chat template (template is 'M', this run expects 'X')"),
    ("stored_dtype", "float16", "another stored dtype (stored_dtype is 'bfloat16', this run expects 'float16')"),
    ("hidden_size", 8, "another hidden size (hidden_size is 6, this run expects 8)"),
    ("norm_stage", "pre", "hidden states of another stage of the target (norm_stage is 'post-final-norm'"),
    ("auxiliary_layers", "2", "other auxiliary layers (auxiliary_layers is '', this run expects '2')"),
    ("dtype", "float32", "another dtype of the target's forward (dtype is 'bfloat16', this run expects 'float32')"),
    ("recipe", "X", "other data or feature settings (recipe is 'R', this run expects 'X')"),
    ("stop_ids", "7", "a target whose answers end at other tokens (stop_ids is '2', this run expects '7')"),
]


@pytest.mark.parametrize(("field", "value", "meaning"), FOREIGN, ids=[field for field, *_ in FOREIGN])
def test_features_of_another_origin_are_refused_by_what_differs(folder, field, value, meaning):
    message = refusal(folder, replace(SPEC, **{field: value}))
    assert f"{folder}: features of {meaning}" in message


def test_every_field_of_the_spec_is_compared_and_another_engine_only_told(folder):
    assert {field for field, *_ in FOREIGN} == set(asdict(SPEC)) - {"version", "engine", "engine_version"}
    spec, newer = (replace(SPEC, engine_version=version) for version in ("5.0", "6.0"))
    assert "computed by transformers 5.0, here is transformers 6.0" in describe_engine_change(spec, newer)
    assert "here is vllm 5.0" in describe_engine_change(spec, replace(spec, engine="vllm"))
    for unknown in (spec, replace(spec, engine_version="")):  # an engine that is not installed where training runs
        assert describe_engine_change(spec, unknown) is None
    assert len(FeatureStore(folder, "train", newer)) == 5


Change = Callable[[Path], object]


def sealed(change: Callable[[dict], object]) -> Change:
    """Return a change of a manifest that keeps its seal valid, as an attacker would."""
    return lambda folder: change_sealed(folder / MANIFEST, change)


def of_spec(**values: object) -> Change:
    return sealed(lambda raw: raw["spec"].update(values))


def of_shard(**values: object) -> Change:
    return sealed(lambda raw: raw["shards"][0].update(values))


def overwritten(text: str) -> Change:
    return lambda folder: (folder / MANIFEST).write_text(text)


COUNTED = {"records": 6, "further_sequences": 0, "accepted": 6, "torn_tail_after": None}
COUNTED |= {name: {} for name in ("rejected", "skipped", "edits", "grouped")}


def counted(**values: object) -> Change:
    """Return a change to an accounting with a value that no dump writes."""
    return sealed(lambda raw: raw.update(accounting=COUNTED | values))


def answers_elsewhere(raw: dict) -> None:
    shard = raw["shards"][0] | {"split": "answers", "name": "features-answers-000000.arrow"}
    raw["answers"].append(shard | {"text": raw["text"]["train"] | {"name": "../text-answers-0.arrow"}})


def slip(folder: Path) -> None:
    """Move a shard to another split: training would silently lose it."""
    replace_once(folder / MANIFEST, '"train"', '"validation"')


def refused_value(place: str, of: str = "Manifest") -> str:
    return f"'{of}.{place}' is not a value that a dump writes"


ODD = rf"{MANIFEST}: '.*' .* is not one that a dump writes, or is listed twice\. Restore"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "no features were dumped here. Run: jakiro dump RECIPE"),
        (overwritten("{"), MANIFEST),
        (overwritten("[]"), MANIFEST),
        (overwritten("null"), MANIFEST),
        (overwritten("{}"), f"{MANIFEST} has no "),
        (slip, rf"{MANIFEST} was changed or damaged after it was written.*remove it and dump again"),
        (sealed(lambda raw: raw.update(complete=False)), "the dump is not finished. Run it again"),
        (sealed(lambda raw: raw.update(shards=raw["shards"][2:])), "holds no 'train' dialogues"),
        (of_spec(version=1), "features of version 1, expected 2: .*; dump again"),
        (of_spec(evil=1), refused_value("spec.evil")),
        (of_spec(hidden_size="32"), refused_value("spec.hidden_size")),
        (of_spec(engine="\x1b[2J"), refused_value("spec.engine")),
        (of_spec(stop_ids="x"), refused_value("spec.stop_ids")),
        (sealed(lambda raw: raw.update(complete="yes")), refused_value("complete")),
        (sealed(lambda raw: raw.update(accounting=[1])), refused_value("accounting")),
        (sealed(lambda raw: raw.pop("fed")), f"{MANIFEST} is not a manifest of this version .'fed'"),
        (counted(records=None), refused_value("records", "Accounting")),
        (counted(rejected={"\x1b[2J": 1}), r"'Accounting.rejected.\\x1b\[2J.*' is not a value that a dump writes"),
        (counted(skipped=["x"]), refused_value("skipped", "Accounting")),
        (counted(edits={"x": "1"}), refused_value("edits.x", "Accounting")),
        # a file that is listed twice, or in another folder
        (sealed(lambda raw: raw["shards"].append(raw["shards"][0])), ODD),
        (of_shard(name="../../evil.arrow"), ODD),
        (of_shard(name="/tmp/evil"), ODD),
        (of_shard(name="features-train-000001.arrow"), ODD),
        (of_shard(split="validation"), ODD),
        (of_shard(split="../train", name="features-../train-000000.arrow"), ODD),
        (of_shard(index=-1, name="features-train--00001.arrow"), refused_value("shards.0.index")),
        (of_shard(index=True, name="features-train-000001.arrow"), refused_value("shards.0.index")),
        (of_shard(rows="3"), refused_value("shards.0.rows")),
        (of_shard(bytes=-1), refused_value("shards.0.bytes")),
        (of_shard(rows=10**400), refused_value("shards.0.rows")),
        (sealed(lambda raw: raw["text"].update({"../x": raw["text"]["train"]})), ODD),
        (sealed(lambda raw: raw["text"]["train"].update(name="../evil.arrow")), ODD),
        (sealed(answers_elsewhere), ODD),
    ],
)
def test_a_manifest_that_no_dump_wrote_is_refused(folder, change, words):
    change(folder)
    assert re.match(f"{re.escape(str(folder))}.*{words}", refusal(folder))


def test_what_became_of_the_records_may_stand_in_a_manifest(folder):
    counted()(folder)
    assert Manifest.load(folder).accounting == COUNTED


def write_table(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def break_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    footer = int.from_bytes(content[-10:-6], "little")
    content[-10 - footer : -10 - footer + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)


FOREIGN_TABLE = pa.table({"text": ["a", "b", "c"]})
COLUMNS = schema.arrow_schema(SPEC).set(0, pa.field("row", pa.int32())).empty_table()
SHARD, TABLE = shard_name("train", 0), text_name("train")


def shard_with(**values: object) -> Change:
    """Return a change that copies in a shard of another run."""
    return lambda path: shard_of(path.parent, rows_of(3), replace(SPEC, **values))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (shard_with(version=1), "version '1', expected 2"),
        (shard_with(target="X"), "(target is 'X', this run expects"),
        (shard_with(recipe="X"), "(recipe is 'X', this run expects"),
        (lambda path: shard_of(path.parent, rows_of(2)), "2 rows, the manifest says 3"),
        (lambda path: write_table(path, FOREIGN_TABLE), "it is not a feature shard"),
        (
            lambda path: write_table(path, FOREIGN_TABLE.replace_schema_metadata({"version": "2"})),
            "is not a feature shard's",
        ),
        (lambda path: write_table(path, COLUMNS), "but not of the types of version"),
        (lambda path: path.write_bytes(b"not arrow at all"), "is not a complete Arrow file"),
        (break_footer, ""),  # read by a dump that does not check checksums
    ],
)
def test_a_shard_that_is_none_of_this_run_is_refused_by_name(folder, write, words):
    write(folder / SHARD)
    replace_shard(folder, folder / SHARD)
    assert str(folder / SHARD) in refusal(folder) and words in refusal(folder)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: path.unlink(), f"{TABLE} is not a complete Arrow file"),
        (lambda path: os.truncate(path, 300), f"{TABLE} is not a complete Arrow file"),
        (lambda path: as_table(path, 5, tokenizer="X"), f"{TABLE} differs from the manifest's record"),
        (lambda path: as_table(path, 3), "the train table holds 3 dialogues"),
    ],
)
def test_a_table_that_is_not_the_manifests_is_refused(folder, write, words):
    write(folder / TABLE)
    assert words in refusal(folder)


def as_table(path: Path, count: int, **values: object) -> None:
    """Write another table, with its record in the manifest."""
    manifest = Manifest.load(path.parent)
    manifest.text["train"] = shards.write_text_table(path, rows_of(count), replace(SPEC, **values))
    manifest.save(path.parent)


def test_more_shards_than_open_files_are_allowed_are_read_or_refused(tmp_path):
    """Each shard is open while it is mapped; `ulimit -n` is 1024 in most shells."""
    write_features(tmp_path, SPEC, {"train": [[row] for row in rows_of(200)]})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    now_open = len([*Path("/dev/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (now_open + 100, limits[1]))
    try:
        assert len(FeatureStore(tmp_path, "train", SPEC)) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_hard_limit_of_open_files_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("pipeline.basics.files.resource.getrlimit", lambda _: (1024, 4096))
    with pytest.raises(PipelineError, match=r"5,000 feature shards .* 4,096 files .*: raise that to "):
        allow_open_files(5000)
