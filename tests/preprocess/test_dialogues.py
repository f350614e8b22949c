"""The rules that make a clean dialogue of a record, or reject it for a reason."""

import json

import pytest

from pipeline.lm.chat import Unusable
from preprocess.sources.dialogues import clean, record_id
from preprocess.sources.forms import BrokenLine
from preprocess.sources.groups import held_out
from tests.preprocess.records import A, Q, record, turns


def question_record(**columns) -> dict:
    return {"id": "doc", **columns}


def test_openai_messages_are_the_same_as_sharegpts_turns():
    expected = clean(record(("system", "s"), ("human", "why?"), ("gpt", "because.")))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "why"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "because.", "tool_calls": None},
    ]
    assert clean(question_record(messages=messages)) == expected
    assert clean(question_record(conversations=messages)) == expected  # some data sets mix the two
    stripped = clean(record(("user", " q\n"), ("bing", "\ta "))).messages  # white space is
    assert stripped == [{"role": "user", "content": " q\n"}, {"role": "assistant", "content": "\ta "}]
    nulls = [{"from": None, "value": None, **message} for message in messages]  # and fill absent columns
    assert clean(question_record(conversations=None, messages=nulls)) == expected


@pytest.mark.parametrize(("asking", "answering"), [("User", "Assistant"), ("USER", "GPT"), ("Human", "Model")])
def test_a_role_is_known_in_any_case(asking, answering):
    item = record(("System", "s"), (asking, "why?"), (answering, "because."))
    assert clean(item) == clean(record(("system", "s"), Q, A))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_beside_an_answer_are_kept_and_those_of_others_are_not(name):
    messages = [
        {"role": "user", "content": "why?", name: "x"},
        {"role": "assistant", "content": "because.", name: "hm"},
    ]
    thoughts = [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "because.", "reasoning_content": "hm"},
    ]
    assert clean(question_record(messages=messages)).messages == thoughts
    for nothing in (None, " ", 3):
        messages[1][name] = nothing
        answer = {"role": "assistant", "content": "because."}
        assert clean(question_record(messages=messages)).messages == [thoughts[0], answer]


# -- the rules -------------------------------------------------------------------------------------------------------


S, B = ("system", "s"), ("gpt", "more.")
TURNS = {Q: "Q", A: "A", B: "B", S: "S"}


@pytest.mark.parametrize(
    ("pairs", "join", "cut", "reject"),
    [
        ([Q, Q, A], "user:why?/why? A", None, "repeated_role"),
        ([Q, A, B], "Q assistant:because./more.", "Q A", "repeated_role"),
        ([Q, A, B, B, Q, A], "Q assistant:because./more./more. Q A", "Q A", "repeated_role"),
        ([S, S, Q, A], "system:s/s Q A", None, "repeated_role"),
        ([Q, S, A], "Q S A", "Q S A", "repeated_role"),
        ([S, A, S, Q, A], "system:s/s Q A", None, "repeated_role"),
        ([("system", " "), Q, A], "Q A", "Q A", "blank_turn"),
        ([Q, A, ("human", " ")], "Q A", "Q A", "blank_turn"),
        ([Q, A, Q, ("gpt", "\n"), Q, A], "Q A", "Q A", "blank_turn"),
        ([Q, ("gpt", " "), Q, A], None, None, "blank_turn"),
        ([Q, A, Q, ("tool", "x"), A], "Q A", "Q A", "stray_tool_result"),
        ([("developer", "s"), ("user", "why?"), ("bard", "because.")], "S Q A", "S Q A", None),
    ],
)
def test_a_turn_out_of_order_is_joined_or_costs_what_follows_or_the_record(pairs, join, cut, reject):
    before = json.dumps(pairs)
    for repeated, expected in (("join", join), ("cut", cut), ("reject", None if reject else join)):
        if expected is None:
            with pytest.raises(Unusable, match=f"^{reject}$"):
                clean(record(*pairs), repeated)
            continue
        dialogue = clean(record(*pairs), repeated)
        names = {text: name for (_, text), name in TURNS.items()}
        outcomes = [
            names.get(m["content"], f"{m['role']}:{m['content'].replace(chr(10) * 2, '/')}") for m in dialogue.messages
        ]
        assert " ".join(outcomes) == expected
        assert reject is None or dialogue.edits  # what was done is told
    assert json.dumps(pairs) == before


def test_a_joined_answer_keeps_its_thoughts_and_its_call():
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "c"},
    ]
    dialogue = clean(question_record(messages=messages))
    assert dialogue.edits == ("turns_joined", "cut_before_repeated_role")  # nothing answers the call
    joined = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert dialogue.messages[1:] == [joined | {"tool_calls": [{"type": "function", **call}]}]


@pytest.mark.parametrize(
    ("pairs", "expected", "edits"),
    [
        ([A, Q, A], [Q, A], ("leading_assistant_dropped",)),
        ([("gpt", " "), Q, A], [Q, A], ("leading_assistant_dropped",)),
        ([("tool", "x"), Q, A], [Q, A], ("leading_tool_dropped",)),
        ([("system", "s"), A, Q, A], [("system", "s"), Q, A], ("leading_assistant_dropped",)),
        ([A, Q, A, Q], [Q, A], ("leading_assistant_dropped", "trailing_user_dropped")),
        ([Q, A, Q, A], [Q, A, Q, A], ()),
    ],
)
def test_edits_are_made_and_named(pairs, expected, edits):
    item = record(*pairs)
    before = json.dumps(item)
    dialogue = clean(item)
    assert [m["content"] for m in dialogue.messages] == [text for _, text in expected]
    assert dialogue.edits == edits and json.dumps(item) == before  # the record stays as it was


# -- ids and the split -----------------------------------------------------------------------------------------------


def test_a_record_keeps_its_id_or_gets_one_from_its_content():
    assert [record_id({"id": value}) for value in ("abc_0", 7, 0)] == ["abc_0", "7", "0"]
    for item in [{"a": 1}, {"id": "", "a": 1}, {"id": None, "a": 1}, {"id": [1]}, [1], "text", None]:
        assert record_id(item).startswith("sha-") and record_id(item) == record_id(json.loads(json.dumps(item)))
    assert record_id({"conversations": turns(Q, A)}) != record_id({"conversations": turns(A, Q)})
    assert record_id(BrokenLine("text", 7)) == "line 7"


IDS = [f"conv{number:05x}" for number in range(20_000)]


def test_the_split_is_a_function_of_the_id_alone():
    """The hash of the id decides: the same in any order, in any process, on any machine."""
    held = {f: {doc_id for doc_id in IDS if held_out(doc_id, f)} for f in (0.0, 0.02, 0.25, 1.0)}
    assert sorted(held[0.02])[:3] == ["conv0001c", "conv0002a", "conv0004d"]
    assert not held[0.0] and held[0.02] < held[0.25] < held[1.0] == set(IDS)
    for fraction in (0.02, 0.25):
        allowed = 4 * (fraction * (1 - fraction) / len(IDS)) ** 0.5
        assert abs(len(held[fraction]) / len(IDS) - fraction) < allowed
