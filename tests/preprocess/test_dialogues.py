"""The rules that make a clean dialogue of a record, or reject it for a reason."""

import json
import random

import pytest

from pipeline.target.chat import Unusable
from preprocess.sources.dialogues import clean, held_out, record_id


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"from": role, "value": text} for role, text in pairs]


def record(*pairs: tuple[str, str], doc_id: object = "doc") -> dict:
    return {"id": doc_id, "conversations": turns(*pairs)}


def asked(**columns) -> dict:
    return {"id": "doc", **columns}


Q, A = ("human", "why?"), ("gpt", "because.")


def test_openai_messages_are_the_same_as_sharegpts_turns():
    expected = clean(record(("system", "s"), ("human", "why?"), ("gpt", "because.")))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "why"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "because.", "tool_calls": None},
    ]
    assert clean(asked(messages=messages)) == expected
    assert clean(asked(conversations=messages)) == expected  # some data sets mix the two
    nulls = [{"from": None, "value": None, **message} for message in messages]  # and fill absent columns
    assert clean(asked(conversations=None, messages=nulls)) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_beside_an_answer_are_kept_and_those_of_others_are_not(name):
    messages = [
        {"role": "user", "content": "why?", name: "x"},
        {"role": "assistant", "content": "because.", name: "hm"},
    ]
    kept = [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because.", "reasoning_content": "hm"},
    ]
    assert clean(asked(messages=messages)).messages == kept
    for nothing in (None, " ", 3):
        messages[1][name] = nothing
        assert clean(asked(messages=messages)).messages == [kept[0], {"role": "assistant", "content": "because."}]
    messages[1][name] = "\ud83d"
    with pytest.raises(Unusable, match="not_unicode"):
        clean(asked(messages=messages))


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
        (asked(messages=[{"role": "user"}]), "malformed"),
        (record(("human", "half an emoji: \ud83d"), A), "not_unicode"),
        (asked(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]), "not_text"),
        (
            asked(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [1]}]),
            "not_text",
        ),
        (asked(messages=[{"role": "user", "content": "q"}, {"role": "developer", "content": "x"}]), "unknown_role"),
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
