"""Dialogues with tools: the call is trained as the assistant's words, the result is not, and what is hostile costs its
record.
"""

import json

import pytest

from pipeline.lm import chat
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.template import apply_settings
from preprocess.sources.dialogues import clean
from preprocess.sources.tools import calls_of, tools_of
from tests.pipeline.test_chat import masked_runs, text_of
from tests.preprocess.records import encoded
from tests.templates import QWEN_3 as WITHOUT_TOOLS
from tests.templates import tokenizer_with_settings
from tests.tool_templates import GPT_OSS, HERMES, LLAMA_3_1, QWEN_3, tools_shown_by

WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "function": WEATHER}


def call(city: str = "Oslo", **more) -> dict:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}, **more}


def tool_record(*turns: dict, **columns) -> dict:
    return {"id": "doc", "messages": list(turns), "tools": [TOOL], **columns}


QUESTION = {"role": "user", "content": "Rain?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "content": "12 C\nwet"}
ANSWER = {"role": "assistant", "content": "Yes."}
THANKS = {"role": "user", "content": "Thanks"}
BYE = {"role": "assistant", "content": "Bye"}


def sequences(record: dict, template: str, **settings) -> tuple[list, list[str], object]:
    tokenizer = tools_shown_by(template)
    return *encoded(record, tokenizer, **{"max_length": 4000, **settings}), tokenizer


TRAINED = {
    QWEN_3: [
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|im_end|>",
        "<think>\n\n</think>\n\nYes.<|im_end|>",
    ],
    LLAMA_3_1: ['{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>', "Yes.<|eot_id|>"],
    GPT_OSS: [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        "<|channel|>final<|message|>Yes.<|return|>",
    ],
    HERMES: [
        '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "weather"}\n</tool_call><|im_end|>',
        "Yes.<|im_end|>",
    ],
}
FORMS = pytest.mark.parametrize("template", TRAINED, ids=["qwen-3", "llama-3.1", "gpt-oss", "hermes"])


@FORMS
@pytest.mark.parametrize("written", [False, True], ids=["objects", "JSON in strings"])
def test_a_call_is_trained_as_the_assistants_words_and_its_result_is_not(template, written):
    record = tool_record(QUESTION, CALL, RESULT, ANSWER)
    if written:
        arguments = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        record = tool_record(QUESTION, CALL | {"tool_calls": [{"function": arguments}]}, RESULT, ANSWER)
        record["tools"] = json.dumps([WEATHER])
    encoded_sequences, _, tokenizer = sequences(record, template)
    assert [run for sequence in encoded_sequences for run in masked_runs(tokenizer, sequence)] == TRAINED[template]
    last, _, _ = sequences(record, template, train_turns="last")
    assert [run for sequence in last for run in masked_runs(tokenizer, sequence)] == TRAINED[template][1:]
    full_text = text_of(tokenizer, encoded_sequences[-1].input_ids)
    assert "city" in full_text[: full_text.index("Rain?")] or template == LLAMA_3_1  # the tool's description
    assert "12 C" in full_text and full_text.index("12 C") < full_text.index("Yes.")


@pytest.mark.parametrize("template", [LLAMA_3_1, HERMES], ids=["llama-3.1", "hermes"])
def test_a_long_dialogue_is_cut_between_questions_and_never_between_call_and_result(template):
    record = tool_record(QUESTION, CALL, RESULT, ANSWER, THANKS, BYE)
    (full_sequence,), _, tokenizer = sequences(record, template)
    (first,), edits, _ = sequences(record, template, long="turns", max_length=len(full_sequence.input_ids) - 1)
    assert edits == ["cut_at_a_turn"] and masked_runs(tokenizer, first) == TRAINED[template]
    windows, edits, _ = sequences(record, template, long="windows", max_length=len(full_sequence.input_ids) - 1)
    assert edits[0] == "cut_into_windows"
    runs = [run for sequence in windows for run in masked_runs(tokenizer, sequence)]
    assert runs[:2] == TRAINED[template] and len(runs) == 3


def test_several_calls_at_once_are_trained_together():
    twice = CALL | {"tool_calls": [call("Oslo", id="a"), call("Rome", id="b")]}
    results = [{**RESULT, "tool_call_id": "b"}, {"role": "function", "content": "", "tool_call_id": "a"}]
    record = tool_record(QUESTION, twice, *results, ANSWER)
    (first, _), _, tokenizer = sequences(record, QWEN_3)
    (run,) = masked_runs(tokenizer, first)
    assert run.count("<tool_call>") == 2
    assert [turn.get("name") for turn in clean(record).messages[2:4]] == ["weather"] * 2


def test_words_beside_a_call_are_trained_with_it():
    turns = [QUESTION, CALL | {"content": "Let me look."}]
    ((first, *_), _, tokenizer) = sequences(tool_record(*turns, RESULT, ANSWER), QWEN_3)
    (run,) = masked_runs(tokenizer, first)
    assert "Let me look.\n<tool_call>" in run
    (last,), _, _ = sequences(tool_record(*turns), GPT_OSS)  # which drops them later
    assert last.loss_mask.any()


def test_tools_that_a_template_leaves_out_are_counted():
    sequences, edits = encoded(tool_record(QUESTION, ANSWER), tokenizer_with_settings(WITHOUT_TOOLS))
    assert len(sequences) == 1 and "tools_not_shown" in edits


def test_thoughts_that_are_dropped_leave_the_call():
    tokenizer = tools_shown_by(QWEN_3)
    apply_settings(tokenizer, TargetConfig(model="some/model", template_keywords={"enable_thinking": False}))
    (first, *_), edits = encoded(tool_record(QUESTION, CALL | {"reasoning_content": "hm"}, RESULT, ANSWER), tokenizer)
    assert "thoughts_dropped" in edits and "<tool_call>" in tokenizer.decode(first.input_ids)


def test_dialogues_that_differ_in_their_calls_alone_are_no_duplicates():
    texts = {clean(tool_record(QUESTION, CALL | {"tool_calls": [call(city)]})).text for city in ("Oslo", "Rome")}
    assert len(texts) == 2


def test_what_is_said_of_tools_is_read_in_every_form():
    """Older names, JSON in strings, Parquet's nulls; another column may be called functions."""
    padded = call() | {"index": None}
    padded["function"] = {"name": "weather", "arguments": {"city": "Oslo", "of_another_tool": None}}
    written = call() | {"function": {"name": "weather", "arguments": '{"city": null}'}}
    assert calls_of({"tool_calls": [padded]}) == [call()]
    assert calls_of({"tool_calls": [written]})[0]["function"]["arguments"] == {"city": None}
    assert calls_of({"function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}}) == [call()]
    nulls = {"tools": [{**TOOL, "function": {**WEATHER, "strict": None}}]}
    for columns in (nulls, {"functions": [WEATHER]}, {"tools": WEATHER}, {"functions": json.dumps([WEATHER])}):
        assert tools_of(columns) == [TOOL]
    for value in ("algebra", 3, {"a": 1}, "{}"):
        assert tools_of({"functions": value}) is None
        assert tools_of({"tools": [WEATHER], "functions": value}) == [TOOL]
    for nothing in (None, [], {}, "", " ", "[]", "null"):
        assert tools_of({"tools": nothing}) is None and calls_of({"tool_calls": nothing}) == []


def test_calls_and_results_are_looked_for_in_as_many_renderings_as_there_are_turns(monkeypatch):
    """However many they are: these had been 130."""
    rendered = []
    render = chat.render
    monkeypatch.setattr(chat, "render", lambda *arguments: rendered.append(1) or render(*arguments))
    turn = CALL | {"tool_calls": [call(str(number)) for number in range(64)]}
    sequences(tool_record(QUESTION, turn, *[RESULT] * 64, ANSWER), QWEN_3)
    assert len(rendered) < 16


def test_a_result_of_no_call_gets_no_name():
    turn = CALL | {"tool_calls": [call(id="a")]}
    for mark, name in (("a", "weather"), (None, "weather"), ("b", None)):
        dialogue = clean(tool_record(QUESTION, turn, RESULT | {"tool_call_id": mark}, ANSWER))
        assert dialogue.messages[2].get("name") == name


@pytest.mark.parametrize(
    ("function", "refused_by"),
    [
        ({"name": "f"}, (GPT_OSS, HERMES)),
        ({"name": "f", "parameters": 3}, (GPT_OSS, HERMES)),
        ({"name": "f", "parameters": {"properties": {"a": {"type": 3}}}}, (HERMES,)),
    ],
    ids=["no parameters", "parameters that are none", "a type that is none"],
)
@FORMS
def test_tools_that_a_template_cannot_show_are_a_reason(template, function, refused_by):
    record = tool_record(QUESTION, CALL, RESULT, ANSWER, tools=[function])
    if template in refused_by:
        with pytest.raises(Unusable, match=r"^template_refuses$"):
            sequences(record, template)
    else:
        assert sequences(record, template)[0]
