"""Files and data sets as they are found: streamed, compressed, torn, damaged."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources import json_records
from preprocess.sources import read as sources
from preprocess.sources.dialogues import clean
from preprocess.sources.read import TornTail, read_records
from tests.preprocess.records import A, record

RECORDS = [record(("human", f"q{number}" * 20), A, doc_id=f"doc{number}") for number in range(5)]
TEXT = json.dumps(RECORDS)
LINES = "".join(f"{json.dumps(item)}\n" for item in RECORDS)


PACK = {".gz": gzip.compress, ".zst": zstandard.compress}


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "data.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(source: str) -> tuple[list, TornTail]:
    tail = TornTail()
    return list(read_records(DataConfig(source=source), tail)), tail


# -- the file --------------------------------------------------------------------------------------------------------


ON_LINES = "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]"
BLANK_LINES = "\n\n" + LINES.replace("\n", "\n\n")


@pytest.mark.parametrize("text", [TEXT, ON_LINES, LINES, LINES[:-1], LINES.replace("\n", "\r\n"), BLANK_LINES])
def test_a_whole_list_and_json_lines_are_read_and_have_no_torn_tail(tmp_path, text):
    """A source is read by path and by fsspec address, with a byte order mark or without, packed, and as
    `cat a.gz b.gz` makes it.
    """
    assert read(write(tmp_path, text)) == read(f"file://{write(tmp_path, text)}") == (RECORDS, TornTail(None))
    assert read(write(tmp_path, text.encode("utf-8-sig"))) == (RECORDS, TornTail(None))
    half = len(text) // 2
    for ending, pack in PACK.items():
        path = tmp_path / f"data.json{ending}"
        path.write_bytes(pack(text[:half].encode()) + pack(text[half:].encode()))
        assert read(str(path)) == (RECORDS, TornTail(None)), ending


def test_records_arrive_as_the_file_is_read(tmp_path, monkeypatch):
    """Never more than two buffers of the parser (64 KiB) ahead of the record at hand."""
    records = [record(("human", "q" * 1000), ("gpt", "a" * 1000), doc_id=f"doc{n}") for n in range(1000)]
    lines = [json.dumps(item) for item in records]
    source = write(tmp_path, "[" + ",\n".join(lines) + "]")

    end = 1
    with Path(source).open("rb", buffering=0) as file:
        monkeypatch.setattr(sources, "_open", lambda _: file)
        for line, _ in zip(lines, read_records(DataConfig(source=source), TornTail()), strict=False):
            end += len(line) + 2
            assert file.tell() <= end + 2 * 65536
    assert end > 2_000_000


NO_RECORD = "Expected a JSON list or JSON lines"
NO_LIST = f"it is JSON, but no list of records.*{NO_RECORD}"
DAMAGED = r"it is damaged after \d records"
INDENTED = "\n".join(json.dumps(item, indent=2) for item in RECORDS)
WRAPPED = json.dumps({"version": "1.0", "size": 5, "data": RECORDS, "more": {"a": [1]}})
DATA = json.dumps({"data": RECORDS}, indent=1)

# The content of a file, and the words of its refusal. Otherwise all records after the damage would be missing silently.
FILES = {
    "nothing": ("", NO_RECORD),
    "blanks": ("   \n", NO_RECORD),
    "a bracket": ("[", NO_RECORD),
    "half a record": ('[{"id": "doc0", "conv', NO_RECORD),
    "a word": ("hello", NO_RECORD),
    "a page": ("<html></html>", NO_RECORD),
    "an image": ("\x89PNG", NO_RECORD),
    "a number": ("3", NO_LIST),
    "a text": ('"text"', NO_LIST),
    "null": ("null", NO_LIST),
    "an empty list": ("[]", NO_LIST),
    "an empty list under data": ('{"data": []}', NO_LIST),
    "an empty list under data in a line": ('{"data": [] }\n', NO_LIST),
    "a list without a quote": (TEXT.replace('"doc2"', '"doc2'), DAMAGED),
    "a list with garbage": (TEXT.replace('"doc2"', '@@"doc2"'), DAMAGED),
    "a list with zeros": (TEXT.encode().replace(b'"doc2"', bytes(6)), DAMAGED),
    "a list with no UTF-8": (TEXT.encode().replace(b'"doc2"', b'"\xff\xfe"'), DAMAGED),
    "a list without a comma": (TEXT.replace(', {"id": "doc2"', ' {"id": "doc2"'), DAMAGED),
    "a list and garbage": (f"{TEXT}garbage", DAMAGED),
    "objects without a quote": (INDENTED.replace('"doc2"', '"doc2'), DAMAGED),
    "data without a quote": (DATA.replace('"doc2"', '"doc2'), DAMAGED),
    "data in a line without a quote": (WRAPPED.replace('"doc2"', '"doc2'), DAMAGED),
    "a log's first line": (f"[INFO] fetched\n{LINES}", "its first record cannot be parsed"),
    "a list, and lines": (f"[1, 2]\n{LINES}", "it is damaged after 2"),
    "a list of lists, and lines": (f"[[1], [2]]\n{LINES}", "it is damaged after 2"),
    "an empty list, and lines": (f"[]\n{LINES}", NO_LIST),
    "UTF-16": (TEXT.encode("utf-16"), "convert it"),
    "UTF-16 without a mark, little": (LINES.encode("utf-16-le"), "convert it"),
    "UTF-16 without a mark, big": (TEXT.encode("utf-16-be"), "convert it"),
    "UTF-32": (LINES.encode("utf-32"), "convert it"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_that_is_damaged_or_holds_no_record_is_refused_by_its_name(tmp_path, content, message):
    source = write(tmp_path, content)
    with pytest.raises(PipelineError, match=message) as caught:
        read(source)
    assert source in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/absent.json", r"data\.source .*/absent\.json does not exist"),
        ("{}", "cannot be read"),
        ("nosuch://bucket/data.json", "nosuch"),
        ("embedded:alpaca", "there is 'embedded:sharegpt'"),
        ("datasets:no/such-data-set", "cannot be read"),
        ("absent.parquet", "cannot be read"),
    ],
)
def test_a_source_that_is_not_there_is_one_clear_error(tmp_path, source, message):
    with pytest.raises(PipelineError, match=message):
        read(source.format(tmp_path))


def test_half_an_emoji_costs_one_record(tmp_path):
    """JavaScript cuts strings between the two halves of an emoji."""
    got, tail = read(write(tmp_path, TEXT.replace("because.", "\\ude00 because.", 1)))
    assert got[1:] == RECORDS[1:] and tail == TornTail(None) and fate(got[0]) == "not_unicode"


def fate(item) -> str:
    with pytest.raises(Unusable) as reason:
        clean(item)
    return str(reason.value)


# Every cut has to be told from damage: escapes, numbers, words, other alphabets, a string of white space.
AWKWARD = [
    {"id": "a", "conversations": [], "x": [1.5e-3, -12, True, False, None, {"k": []}]},
    {"id": 'q"uo\\te\u0001', "y": "größer 漢字 😀\n\t  "},
    {"id": "b", "z": [[["deep"]]], "n": {"m": {"l": -0.0}}},
]


@pytest.mark.parametrize(("ascii_only", "indent"), [(True, 1), (False, None)])
def test_every_cut_of_a_list_is_a_torn_tail(tmp_path, ascii_only, indent):
    text = json.dumps(AWKWARD, ensure_ascii=ascii_only, indent=indent).encode()
    record_ends = [
        len(json.dumps(AWKWARD[:n], ensure_ascii=ascii_only, indent=indent).rstrip("]\n").encode()) for n in (1, 2, 3)
    ]
    for cut in range(record_ends[0], len(text) - 1):
        complete = sum(cut >= end for end in record_ends)
        assert read(write(tmp_path, text[:cut])) == (AWKWARD[:complete], TornTail(complete)), text[:cut]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(("depth", "place"), [(json_records.MAX_DEPTH, 2), (1_100, 0), (200_000, 2), (200_000, 5)])
@pytest.mark.parametrize("form", ["list", "lines"])
def test_a_record_that_is_nested_deep_is_one_malformed_record(tmp_path, depth, form, place):
    deep = f'{{"id": "deep \\"]}}\\\\", "conversations": {nested(depth)}}}'
    items = [json.dumps(item) for item in RECORDS]
    items.insert(place, deep)
    got, tail = read(write(tmp_path, f"[{', '.join(items)}]" if form == "list" else "\n".join(items) + "\n"))
    assert got[:place] + got[place + 1 :] == RECORDS and tail == TornTail(None)
    assert isinstance(got[place], str) and len(got[place]) <= json_records.SHOWN and fate(got[place]) == "malformed"
    if form == "list" and depth > 1_100:  # a file that ends in such a record is torn
        assert read(write(tmp_path, f"[{json.dumps(RECORDS[0])}, {deep[: depth + 400]}")) == (RECORDS[:1], TornTail(1))
        with pytest.raises(PipelineError, match="it ends in its first record"):
            read(write(tmp_path, f"[{deep[:depth]}"))
    item = {"id": "x", "conversations": json.loads(nested(json_records.MAX_DEPTH - 1))}  # as deep as allowed
    assert read(write(tmp_path, json.dumps([item] if form == "list" else item)))[0] == [item]


@pytest.mark.parametrize("form", ["list", "lines"])
def test_a_record_that_is_too_long_is_passed_over_in_bounded_memory(tmp_path, monkeypatch, form):
    monkeypatch.setattr(json_records, "LONGEST", 300_000)
    longest = []
    grow = json_records._Text._read_more

    def watched(text):
        grown = grow(text)
        longest.append(len(text.text))
        return grown

    monkeypatch.setattr(json_records._Text, "_read_more", watched)
    long = json.dumps(record(("human", 'q"\\' * 1_000_000), A, doc_id="long"))
    items = [json.dumps(RECORDS[0]), long, json.dumps(RECORDS[1])]
    got, tail = read(write(tmp_path, f"[{','.join(items)}]" if form == "list" else "\n".join(items)))
    assert [got[0], got[2]] == RECORDS[:2] and tail == TornTail(None) and fate(got[1]) == "malformed"
    assert max(longest, default=0) < 1_200_000 < len(long)


def test_a_number_of_thousands_of_digits_is_one_malformed_record(tmp_path):
    items = [json.dumps(RECORDS[0]), "9" * 5000, f'{{"id": {"9" * 5000}}}', json.dumps(RECORDS[1])]
    for text in (f"[{', '.join(items)}]", "\n".join(items)):
        got, tail = read(write(tmp_path, text))
        assert [got[0], got[3]] == RECORDS[:2] and tail == TornTail(None)
        assert [fate(item) for item in got[1:3]] == ["malformed"] * 2


@pytest.mark.parametrize("garbage", [b"hello", b"null", b"3", b"\xff\x89PNG"])
def test_a_first_line_that_is_garbage_is_one_malformed_record(tmp_path, garbage):
    got, tail = read(write(tmp_path, garbage + b"\n" + LINES.encode()))
    assert got[1:] == RECORDS and tail == TornTail(None) and fate(got[0]) == "malformed"


# -- JSON lines ------------------------------------------------------------------------------------------------------


def test_line_separators_inside_a_text_are_text(tmp_path):
    item = record(("human", "a\u2028b\x85c"), A)
    assert read(write(tmp_path, json.dumps(item, ensure_ascii=False) + "\n"))[0] == [item]


def test_torn_json_lines_keep_their_whole_records(tmp_path):
    last = LINES.index('{"id": "doc4"')
    for cut in range(last + 1, len(LINES) - 1):
        got = read(write(tmp_path, LINES[:cut]))
        assert got == ((RECORDS, TornTail(None)) if cut == len(LINES) - 1 else (RECORDS[:4], TornTail(4)))


def test_a_bad_line_is_one_malformed_record_and_no_more(tmp_path):
    got, tail = read(write(tmp_path, LINES.replace('{"id": "doc2"', '@{"id": "doc2"')))
    assert [item for item in got if isinstance(item, dict)] == [*RECORDS[:2], *RECORDS[3:]]
    assert got[2].startswith('@{"id": "doc2"') and tail == TornTail(None)
    assert got[2].number == 3
    blank, _ = read(write(tmp_path, "\n\n{oops\n" + LINES))
    assert blank[0].number == 3 and blank[1:] == RECORDS


# -- JSON in other shapes, CSV ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        INDENTED,
        INDENTED.replace("\n", "\r\n"),
        f"\n {INDENTED}\n\n",
        WRAPPED,
        DATA,
        '{"data": [\n' + ",\n".join(map(json.dumps, RECORDS)) + "\n]}\n",
    ],
)
@pytest.mark.parametrize("window", [json_records.LOOKAHEAD, 700])
def test_objects_over_several_lines_and_a_list_under_data_are_read(tmp_path, monkeypatch, text, window):
    """`window`: of the file's beginning, less than a line of it, or than all its records."""
    monkeypatch.setattr(json_records, "LOOKAHEAD", window)
    assert read(write(tmp_path, text)) == (RECORDS, TornTail(None))
    path = tmp_path / "data.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read(str(path)) == (RECORDS, TornTail(None))


@pytest.mark.parametrize("text", [INDENTED, DATA, WRAPPED])
def test_these_have_a_torn_tail_too(tmp_path, text):
    assert read(write(tmp_path, text[: text.index('"doc4"')])) == (RECORDS[:4], TornTail(4))


def test_json_lines_that_hold_data_or_begin_with_a_broken_line_stay_json_lines(tmp_path):
    lines = [{"id": str(number), "data": [{"a": 1}]} for number in range(2)]
    assert read(write(tmp_path, "\n".join(map(json.dumps, lines))))[0] == lines
    for broken in ('{"id": "doc9', '{"id": "doc9", @', "{", "{'id': 1}"):
        got, tail = read(write(tmp_path, f"{broken}\n{LINES}"))
        assert got[1:] == RECORDS and got[0].number == 1 and tail == TornTail(None)


CSV = 'question,answer\r\n"why, so?","be\ncause"\r\nhow many?,42\r\n'
ROWS = [{"question": "why, so?", "answer": "be\ncause"}, {"question": "how many?", "answer": "42"}]


@pytest.mark.parametrize("ending", ["", *PACK])
def test_csv_is_read_as_texts(tmp_path, ending):
    path = tmp_path / f"data.csv{ending}"
    path.write_bytes(PACK.get(ending, bytes)(CSV.encode("utf-8-sig")))
    got, tail = read(str(path))
    assert got == ROWS and tail == TornTail(None) and clean(got[1]).messages[1]["content"] == "42"


def test_csv_that_is_torn_broken_or_empty(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text(f'{CSV}more,"and')
    assert read(str(path)) == (ROWS, TornTail(2))
    path.write_text(CSV + "a,b,c\n" + "d,e\n")
    got, _ = read(str(path))
    assert got[:2] == ROWS and got[2].number == 5 and got[3] == {"question": "d", "answer": "e"}
    for content, message in ((b"question,answer\n", "no row after a header"), (b"q,a\n1,\xff\n", "it is damaged")):
        path.write_bytes(content)
        with pytest.raises(PipelineError, match=message):
            read(str(path))


# -- compressed files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("form", ["list", "lines"])
def test_a_compressed_file_that_is_cut_short_keeps_its_whole_records(tmp_path, ending, form):
    """Random texts, so that a block of the compressed file holds few records."""
    items = [record(("human", f"{number * 7919**9}"), A, doc_id=str(number)) for number in range(6_000)]
    text = json.dumps(items) if form == "list" else "".join(f"{json.dumps(item)}\n" for item in items)
    packed = PACK[ending](text.encode())
    path = tmp_path / f"data.json{ending}"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    got, tail = read(str(path))
    assert 0 < len(got) < 6_000 and got == items[: len(got)] and tail == TornTail(len(got))


# -- data sets -------------------------------------------------------------------------------------------------------


def test_parquet_is_read(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    assert read(str(path)) == (RECORDS, TornTail(None))


def test_a_folder_of_a_data_set_is_read_by_split(tmp_path):
    (tmp_path / "set").mkdir()
    for split, items in (("train", RECORDS[:3]), ("test", RECORDS[3:])):
        (tmp_path / "set" / f"{split}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    source = f"datasets:{tmp_path / 'set'}"
    for split, items in (("train", RECORDS[:3]), ("test", RECORDS[3:])):
        assert list(read_records(DataConfig(source=source, split=split), TornTail())) == items
    with pytest.raises(PipelineError, match="split 'nosuch'"):
        list(read_records(DataConfig(source=source, split="nosuch"), TornTail()))


@pytest.mark.parametrize("prefix", ["", "datasets:"])
def test_a_folder_of_parquet_is_read_in_the_order_of_its_names(tmp_path, prefix):
    folder = tmp_path / "parts.parquet"
    folder.mkdir()
    for number, items in enumerate((RECORDS[:3], RECORDS[3:])):
        pyarrow.parquet.write_table(pa.Table.from_pylist(items), folder / f"part-{number}.parquet")
    assert read(f"{prefix}{folder}") == (RECORDS, TornTail(None))


def test_files_that_do_not_go_together_are_refused_before_the_first_record(tmp_path):
    """One file's contents are texts, the other's lists of parts: a TypeError's traceback, where the first one ended."""
    parts = [{"type": "text", "text": "because."}]
    for name, content in (("a", "because."), ("b", parts)):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 3)
    with pytest.raises(PipelineError, match=r"cannot be read: .*do not hold the same columns.*one file of JSON lines"):
        next(read_records(DataConfig(source=f"datasets:{tmp_path}"), TornTail()))


def test_a_data_set_of_several_subsets_names_them(tmp_path):
    for subset in ("english", "german"):
        (tmp_path / subset).mkdir()
        (tmp_path / subset / "train.jsonl").write_text(LINES)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("english", "german"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for subset, split in ((None, "train"), ("french", "train")):
        with pytest.raises(PipelineError, match=r"'english', 'german'\]\. Set data\.subset to one of these"):
            list(read_records(DataConfig(source=f"datasets:{tmp_path}", subset=subset, split=split), TornTail()))
    with pytest.raises(PipelineError, match=r"\['train'\]\. Set data\.split to one of these"):
        list(read_records(DataConfig(source=f"datasets:{tmp_path}", subset="german", split="dev"), TornTail()))
    assert list(read_records(DataConfig(source=f"datasets:{tmp_path}", subset="german"), TornTail())) == RECORDS


def test_damaged_compressed_files_are_one_clear_error(tmp_path):
    page, flipped = tmp_path / "page.json.gz", tmp_path / "flipped.json.gz"
    page.write_text("<html></html>")
    items = [record(("human", f"{number * 7919**9}"), A, doc_id=str(number)) for number in range(3000)]
    packed = bytearray(gzip.compress(json.dumps(items).encode()))
    for place in range(len(packed) // 2, len(packed) // 2 + 50):
        packed[place] ^= 255
    flipped.write_bytes(packed)
    for path in (page, flipped):
        with pytest.raises(PipelineError, match=r"cannot be read|it is damaged after \d+ records"):
            read(str(path))
