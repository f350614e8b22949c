"""ShareGPT files as they are found: streamed, torn, damaged; and the rules that make a dialogue of a record."""

import json
import random
from pathlib import Path

import pytest

from pipeline.chat import Unusable
from pipeline.errors import PipelineError
from preprocess import sharegpt
from preprocess.sharegpt import Tail, clean, held_out, read_records, record_id


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"from": role, "value": text} for role, text in pairs]


def record(*pairs: tuple[str, str], doc_id: object = "doc") -> dict:
    return {"id": doc_id, "conversations": turns(*pairs)}


Q, A = ("human", "why?"), ("gpt", "because.")
RECORDS = [record(("human", f"q{number}" * 20), A, doc_id=f"doc{number}") for number in range(5)]
TEXT = json.dumps(RECORDS)


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "data.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(source: str) -> tuple[list, Tail]:
    tail = Tail()
    return list(read_records(source, tail)), tail


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_whole_file_is_read_and_has_no_torn_tail(tmp_path):
    assert read(write(tmp_path, TEXT)) == (RECORDS, Tail(None))


def test_an_fsspec_address_is_read(tmp_path):
    assert read(f"file://{write(tmp_path, TEXT)}") == (RECORDS, Tail(None))


def test_records_arrive_as_the_file_is_read(tmp_path, monkeypatch):
    """Never more than two buffers of the parser (64 KiB) ahead of the record at hand."""
    records = [record(("human", "q" * 1000), ("gpt", "a" * 1000), doc_id=f"doc{n}") for n in range(1000)]
    lines = [json.dumps(item) for item in records]
    source = write(tmp_path, "[" + ",\n".join(lines) + "]")

    end = 1
    with Path(source).open("rb", buffering=0) as file:
        monkeypatch.setattr(sharegpt, "_open", lambda _: file)
        for line, _ in zip(lines, read_records(source, Tail()), strict=False):
            end += len(line) + 2
            assert file.tell() <= end + 2 * 65536
    assert end > 2_000_000


def test_a_torn_tail_is_reported_and_the_whole_records_are_kept(tmp_path):
    start_of_last = TEXT.index('{"id": "doc4"')
    for cut in range(start_of_last + 1, len(TEXT) - 2):
        assert read(write(tmp_path, TEXT[:cut])) == (RECORDS[:4], Tail(4)), TEXT[cut:]


def test_a_file_that_only_lacks_its_last_bracket_is_torn_after_every_record(tmp_path):
    assert read(write(tmp_path, TEXT[:-1])) == (RECORDS, Tail(5))


@pytest.mark.parametrize("content", ["", "   \n", "[", '[{"id": "doc0", "conv'])
def test_a_file_without_one_whole_record_is_refused(tmp_path, content):
    source = write(tmp_path, content)
    with pytest.raises(PipelineError, match="Expected ShareGPT JSON") as caught:
        read(source)
    assert source in str(caught.value)


@pytest.mark.parametrize("content", ["hello", "<html></html>", "\x89PNG", "\n".join(map(json.dumps, RECORDS))])
def test_a_file_that_is_not_json_is_refused(tmp_path, content):
    with pytest.raises(PipelineError, match="Expected ShareGPT JSON"):
        read(write(tmp_path, content))


@pytest.mark.parametrize("content", ['{"conversations": []}', "3", '"text"', "null", "[]"])
def test_json_that_holds_no_list_of_records_is_refused(tmp_path, content):
    with pytest.raises(PipelineError, match="it is JSON, but no list of records"):
        read(write(tmp_path, content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"doc2"', b'"doc2'),
        lambda text: text.replace(b'"doc2"', b'@@"doc2"'),
        lambda text: text.replace(b'"doc2"', b"\0\0\0\0\0\0"),
        lambda text: text.replace(b'"doc2"', b'"\xff\xfe"'),
        lambda text: text.replace(b', {"id": "doc2"', b' {"id": "doc2"'),
        lambda text: text + b"garbage",
    ],
    ids=["quote", "garbage", "zeros", "utf-8", "comma", "behind the end"],
)
def test_damage_in_the_middle_is_refused_and_not_taken_for_a_torn_tail(tmp_path, damage):
    """Otherwise everything behind the damage would be missing without a word."""
    with pytest.raises(PipelineError, match=r"it is damaged after \d records"):
        read(write(tmp_path, damage(TEXT.encode())))


def test_half_an_emoji_is_refused_without_a_traceback(tmp_path):
    """JavaScript cuts strings between the two halves of an emoji; ijson's parser cannot pass the second half."""
    source = write(tmp_path, TEXT.replace("because.", "\\ude00 because.", 1))
    with pytest.raises(PipelineError, match="its first record cannot be parsed"):
        read(source)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PipelineError, match=rf"data\.source {tmp_path}/absent\.json does not exist"):
        read(str(tmp_path / "absent.json"))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=str(tmp_path)):
        read(str(tmp_path))


def test_an_address_of_an_unknown_kind_is_refused():
    with pytest.raises(PipelineError, match="nosuch"):
        read("nosuch://bucket/data.json")


def test_an_unknown_embedded_name_is_refused():
    with pytest.raises(PipelineError, match="there is 'embedded:sharegpt'"):
        read("embedded:alpaca")


# -- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (None, "malformed"),
        ("text", "malformed"),
        ([], "malformed"),
        ({"id": "x"}, "malformed"),
        ({"id": "x", "conversations": {}}, "malformed"),
        ({"id": "x", "conversations": ["hi"]}, "malformed"),
        ({"id": "x", "conversations": [{"from": "human"}]}, "malformed"),
        ({"id": "x", "conversations": [{"from": "human", "value": 3}]}, "malformed"),
        ({"id": "x", "conversations": [{"from": None, "value": "hi"}]}, "malformed"),
        (record(Q, ("tool", "x"), A), "unknown_role"),
        (record(("Human", "hi"), A), "unknown_role"),
        (record(("human", " \n\t"), A), "blank_turn"),
        (record(Q, ("gpt", "")), "blank_turn"),
        (record(("system", " "), Q, A), "blank_turn"),
        (record(Q, A, ("human", " ")), "blank_turn"),
        (record(Q, Q, A), "repeated_role"),
        (record(Q, A, A), "repeated_role"),
        (record(Q, ("system", "x"), A), "repeated_role"),
        (record(Q, A, Q, Q), "repeated_role"),
        (record(), "no_exchange"),
        (record(Q), "no_exchange"),
        (record(A), "no_exchange"),
        (record(A, Q), "no_exchange"),
        (record(("system", "x")), "no_exchange"),
        (record(("system", "x"), Q), "no_exchange"),
    ],
)
def test_unusable_records_are_rejected_for_the_first_reason_that_applies(item, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        clean(item)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([("tool", " "), ("human", " ")], "unknown_role"),
        ([("human", " "), Q, A], "blank_turn"),
        ([Q, Q], "repeated_role"),
    ],
)
def test_reasons_come_in_the_documented_order(pairs, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        clean(record(*pairs))


@pytest.mark.parametrize(
    "pairs",
    [[("system", "a"), ("system", "b"), Q, A], [("system", "a"), A, ("system", "b"), Q, A]],
    ids=["in a row", "after an answer"],
)
def test_a_second_system_turn_is_no_part_of_a_clean_dialogue(pairs):
    """The documented rule: a system turn that is not first is a repeated_role."""
    with pytest.raises(Unusable, match=r"^repeated_role$"):
        clean(record(*pairs))


@pytest.mark.parametrize("asker", ["human", "user"])
@pytest.mark.parametrize("answerer", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_every_known_role_has_one_of_three_names(asker, answerer):
    dialogue = clean(record(("system", "s"), (asker, "q"), (answerer, "a")))
    assert dialogue.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert dialogue.edits == ()


def test_white_space_around_a_turn_is_kept():
    assert [m["content"] for m in clean(record(("human", " q\n"), ("gpt", "\ta "))).messages] == [" q\n", "\ta "]


@pytest.mark.parametrize(
    ("pairs", "kept", "edits"),
    [
        ([A, Q, A], [Q, A], ("leading_assistant_dropped",)),
        ([A, A, Q, A], [Q, A], ("leading_assistant_dropped",)),
        ([("gpt", " "), Q, A], [Q, A], ("leading_assistant_dropped",)),
        ([("system", "s"), A, Q, A], [("system", "s"), Q, A], ("leading_assistant_dropped",)),
        ([Q, A, Q], [Q, A], ("trailing_user_dropped",)),
        ([A, Q, A, Q], [Q, A], ("leading_assistant_dropped", "trailing_user_dropped")),
        ([Q, A, Q, A], [Q, A, Q, A], ()),
    ],
)
def test_edits_are_made_and_named(pairs, kept, edits):
    dialogue = clean(record(*pairs))
    assert [m["content"] for m in dialogue.messages] == [text for _, text in kept]
    assert dialogue.edits == edits


def test_cleaning_leaves_the_record_as_it_was():
    item = record(A, Q, A, Q)
    before = json.dumps(item)
    clean(item)
    assert json.dumps(item) == before


# -- ids and the split -----------------------------------------------------------------------------------------------


def test_a_record_keeps_its_id():
    assert record_id({"id": "abc_0"}) == "abc_0"
    assert record_id({"id": 7}) == "7"
    assert record_id({"id": 0}) == "0"


@pytest.mark.parametrize("item", [{"a": 1}, {"id": "", "a": 1}, {"id": None, "a": 1}, {"id": [1]}, [1], "text", None])
def test_a_record_without_an_id_gets_one_from_its_content(item):
    found = record_id(item)
    assert found.startswith("sha-")
    assert found == record_id(json.loads(json.dumps(item)))


def test_ids_from_content_differ_with_the_content():
    assert record_id({"conversations": turns(Q, A)}) != record_id({"conversations": turns(A, Q)})


IDS = [f"conv{number:05x}" for number in range(20_000)]


@pytest.mark.parametrize("fraction", [0.02, 0.25])
def test_the_held_out_fraction_is_about_what_was_asked_for(fraction):
    share = sum(held_out(doc_id, fraction) for doc_id in IDS) / len(IDS)
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / len(IDS)) ** 0.5


def test_nothing_or_everything_can_be_held_out():
    assert not any(held_out(doc_id, 0.0) for doc_id in IDS[:1000])
    assert all(held_out(doc_id, 1.0) for doc_id in IDS[:1000])


def test_parts_of_one_conversation_fall_on_one_side():
    for root in IDS[:500]:
        assert len({held_out(f"{root}{part}", 0.5) for part in ("", "_0", "_1", "_17")}) == 1
    assert {held_out(f"{root}_0", 0.5) for root in IDS[:500]} == {True, False}


def test_the_split_is_a_function_of_the_id_alone():
    """By the hash of the id: the same in any order, in any process, on any machine."""
    expected = {doc_id for doc_id in IDS if held_out(doc_id, 0.02)}
    shuffled = random.Random(0).sample(IDS, len(IDS))
    assert {doc_id for doc_id in shuffled if held_out(doc_id, 0.02)} == expected
    assert sorted(expected)[:3] == ["conv0001c", "conv0002a", "conv0004d"]


def test_a_larger_fraction_holds_out_more_of_the_same():
    small, large = ({doc_id for doc_id in IDS[:2000] if held_out(doc_id, fraction)} for fraction in (0.02, 0.1))
    assert small < large
