"""The table of what costs a record: what it holds, and the reason that it is counted under."""

import json

import pytest

from pipeline.lm import chat
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.template import apply_settings
from preprocess.sources.dialogues import clean
from preprocess.sources.tools import LONGEST
from tests.pipeline.test_chat import TWO_TURNS
from tests.preprocess.records import TOKENIZER, A, Q, encoded, messages, record, turns
from tests.preprocess.test_tools import ANSWER, CALL, QUESTION, RESULT, call, tool_record
from tests.templates import GPT_OSS, LLAMA_3_2, QWEN_3, SMOLLM_3, tokenizer_with_settings
from tests.tool_templates import GPT_OSS as GPT_OSS_TOOLS
from tests.tool_templates import LLAMA_3_1, tools_shown_by

STUB = turns(("human", "another"))
PLACES = ["<image>", "<video>", "<|image_1|>", "<image 1>", "[IMG]", "<|vision_start|>"]


def answered(**keys) -> dict:
    """An exchange whose answer has these keys."""
    return {"messages": [*messages("q"), {"role": "assistant", "content": "a", **keys}]}


def shows(place: str, **columns) -> dict:
    return {"messages": messages(f"{place}\nWhat is this?", "A cat."), **columns}


def calls(*functions: dict) -> dict:
    return answered(tool_calls=list(functions))


# What a record holds: the record, its reason. Of the rules of `dialogues.py` the first that applies is the reason.
RECORDS = {
    "null": (None, "malformed"),
    "a text alone": ("text", "malformed"),
    "a list": ([], "malformed"),
    "no known key": ({"id": "x"}, "malformed"),
    "an object for turns": ({"conversations": {}}, "malformed"),
    "a turn that is a text": ({"conversations": ["hi"]}, "malformed"),
    "a turn without its text": ({"conversations": [{"from": "human"}]}, "malformed"),
    "a turn whose text is a number": ({"conversations": [{"from": "human", "value": 3}]}, "malformed"),
    "a turn without its role": ({"conversations": [{"from": None, "value": "hi"}]}, "malformed"),
    "a prompt that is a number": ({"prompt": 3, "completion": "x"}, "malformed"),
    "an output that is an object": ({"instruction": "why?", "output": {"a": 1}}, "malformed"),
    "a list under text": ({"text": ["x"]}, "malformed"),
    "tokens without a mask": ({"input_ids": [1, 2]}, "malformed"),  # nobody says what is the assistant's
    "a message without its content": ({"messages": [{"role": "user"}]}, "malformed"),
    "an unknown role": (record(Q, ("critic", "x"), A), "unknown_role"),
    "an unknown role in capitals": (record(("Critic", "hi"), A), "unknown_role"),
    "a tool's result without a call": (record(Q, ("tool", "x"), A), "stray_tool_result"),
    "half an emoji in a turn": (record(("human", "half an emoji: \ud83d"), A), "not_unicode"),
    "half an emoji in a text": ({"text": "\ud83d"}, "not_unicode"),
    "half an emoji in a keyword": (answered() | {"chat_template_kwargs": {"k": "\ud83d"}}, "not_unicode"),
    "half an emoji in reasoning_content": (answered(reasoning_content="\ud83d"), "not_unicode"),
    "half an emoji in thinking": (answered(thinking="\ud83d"), "not_unicode"),
    "half an emoji in reasoning": (answered(reasoning="\ud83d"), "not_unicode"),
    "an image among the parts": (answered(content=[{"type": "image"}]), "not_text"),
    "an image's address": (answered(content=[{"type": "image_url", "image_url": "x"}]), "not_text"),
    "a part of thoughts that are a number": (answered(content=[{"type": "thinking", "thinking": 3}]), "not_text"),
    "a part that uses a tool": (answered(content=[{"type": "tool_use", "text": "x"}]), "not_text"),
    "a part that is empty": (answered(content=[{}]), "not_text"),
    "a blank question": (record(("human", " \n\t"), A), "blank_turn"),
    "an empty answer": (record(Q, ("gpt", "")), "blank_turn"),
    "a blank completion": ({"prompt": "why?", "completion": " "}, "blank_turn"),
    "a blank text": ({"text": " \n"}, "blank_turn"),
    "no turn": (record(), "no_exchange"),
    "an answer before its question": (record(A, Q), "no_exchange"),
    "no answer": (record(("system", "x"), Q), "no_exchange"),
    "a stub beside no turn": ({"conversations": STUB, "messages": []}, "no_exchange"),
    "a stub beside a text": ({"conversations": STUB, "text": "x"}, "no_exchange"),
    "flags of a turn's pieces": (answered(train_detail=[{"end_offset": 3, "train": False}]), "unknown_train_detail"),
    "a turn's scale of the loss": (answered(loss_scale=2.0), "unknown_loss_scale"),
    "a turn's mask of the loss": (answered(loss_mask=[0, 1]), "unknown_loss_mask"),
    "a turn's mask": (answered(mask=True), "unknown_mask"),
    "half a weight": (answered(weight=0.5), "unknown_weight"),
    "a flag in words": (answered(train="false"), "unknown_train"),
    "a flag in a list": (answered(loss=[0]), "unknown_loss"),
    "a record's mask of answers": (answered() | {"mask": "Assistant"}, "unknown_mask"),
    "a record's mask of numbers": (answered() | {"mask": [0, 1]}, "unknown_mask"),
    "keywords that are no JSON": (answered() | {"chat_template_kwargs": "no JSON"}, "malformed_keywords"),
    "keywords in a list": (answered() | {"chat_template_kwargs": [1]}, "malformed_keywords"),
    "keywords that are a number": (answered() | {"chat_template_kwargs": 3}, "malformed_keywords"),
    "keywords that are nested deep": (answered() | {"chat_template_kwargs": "[" * 1000}, "malformed_keywords"),
    **{f"{place} in a turn": (shows(place, image=["coco/0.jpg"]), "has_image") for place in PLACES},
    **{f"{place} in a text": ({"text": f"{place} A cat.", "image": ["coco/0.jpg"]}, "has_image") for place in PLACES},
    "a place, and images": (shows("<image>", images="coco/0.jpg"), "has_image"),
    "a place, and a video": (shows("<video>", video="0.mp4"), "has_image"),
    "a place, and sounds": (shows("<|audio|>", audios=["0.wav"]), "has_image"),
    "a place, and an image's bytes": (shows("<image>", image={"bytes": "x"}), "has_image"),
    "a call that is a number": (calls(1), "malformed_tool_call"),
    "20,000 calls": (calls(*[{"name": "f"}] * 20_000), "malformed_tool_call"),
    "arguments 0": (calls({"name": "f", "arguments": 0}), "malformed_tool_call"),
    "arguments false": (calls({"name": "f", "arguments": False}), "malformed_tool_call"),
    "arguments in a list": (calls({"name": "f", "arguments": []}), "malformed_tool_call"),
    "arguments 0 in a string": (calls({"name": "f", "arguments": "0"}), "malformed_tool_call"),
    "arguments in a list in a string": (calls({"name": "f", "arguments": "[]"}), "malformed_tool_call"),
}


@pytest.mark.parametrize(("item", "reason"), RECORDS.values(), ids=RECORDS)
def test_a_record_is_rejected_for_the_first_reason_that_applies(item, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        clean(item)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([("critic", " "), ("human", " ")], "unknown_role"),
        ([("human", " "), Q, A], "blank_turn"),
        ([Q, Q, ("gpt", " ")], "blank_turn"),
        ([Q, Q], "repeated_role"),
    ],
)
def test_reasons_come_in_the_documented_order(pairs, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        clean(record(*pairs), "reject")


HOSTILE = {
    "no JSON": "search, maps",
    "deep, in a string": "[" * 100_000 + "]" * 100_000,
    "deeper than a record": "[" * 70 + "1" + "]" * 70,
    "deep": [json.loads('{"name": "f", "a": ' + "[" * 70 + "]" * 70 + "}")],
    "huge": [{"name": "f", "description": "x" * LONGEST}],
    "huge, in a string": json.dumps([{"name": "f", "description": "x" * LONGEST}]),
    "a number of thousands of digits": '[{"name": "f", "a": ' + "1" * 5000 + "}]",
    "numbers": [1, 2],
    "a number": 7,
    "nameless": [{"description": "x"}],
    "a name that is none": [{"name": {"a": 1}}],
    "half an emoji": [{"name": "f", "description": "\ud83d"}],
    "bytes": [{"name": "f", "description": b"x"}],
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tools_calls_and_arguments_cost_their_record(value):
    for item, reason in (
        (answered() | {"tools": value}, "malformed_tools"),
        (answered(tool_calls=value), "malformed_tool_call"),
        (calls({"function": {"name": "f", "arguments": value}}), "malformed_tool_call"),
    ):
        with pytest.raises(Unusable, match="^not_unicode$" if value is HOSTILE["half an emoji"] else f"^{reason}$"):
            clean(item)


# -- what the target's tokenizer and template refuse ------------------------------------------------------------------

LLAMA, HARMONY = tokenizer_with_settings(LLAMA_3_2), tokenizer_with_settings(GPT_OSS)
NO_TOOLS, WITH_TOOLS = tokenizer_with_settings(QWEN_3), tools_shown_by(GPT_OSS_TOOLS)
COUNTING = tokenizer_with_settings(SMOLLM_3)
COUNTING.chat_template = "{% if level is defined %}{{ level + 1 }}{% endif %}" + SMOLLM_3
apply_settings(COUNTING, TargetConfig(model="some/model"))
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
QUESTION_TURN, ANSWER_HEADER = HEADER.format("user") + "q<|eot_id|>", HEADER.format("assistant")
CALLED = f'{ANSWER_HEADER}{{"name": "w"}}<|eom_id|>'


TWO_CALLS = tool_record(QUESTION, CALL | {"tool_calls": [call("Oslo"), call("Rome")]}, RESULT, ANSWER)
BESIDE_A_CALL = tool_record(QUESTION, CALL | {"content": "Let me look."}, RESULT, ANSWER)
UNENDED = f"{ANSWER_HEADER}a{QUESTION_TURN}"
WITH_RESULT = f"{QUESTION_TURN}{CALLED}{HEADER.format('ipython')}21C<|eot_id|>"
TOO_LONG, LONG_QUESTIONS = messages("a" * 10, "b" * 20, "a", "b"), messages("a" * 200, "b", "a" * 200, "b")
TURNS, WINDOWS = {"max_length": 30, "long": "turns"}, {"max_length": 64, "long": "windows"}
BREAKING = answered() | {"chat_template_kwargs": {"level": "x"}}


def tokens(ids: list, mask: object) -> dict:
    return {"input_ids": ids, "assistant_masks": mask}


# What is dumped: the record, the tokenizer, the keys of `data`, the reason.
DUMPED = {
    "no answer with a loss": (answered(weight=0), TOKENIZER, {}, "no_turn_with_loss"),
    "a first exchange too long": ({"messages": TOO_LONG}, TOKENIZER, TURNS, "too_long"),
    "questions longer than a window": ({"messages": LONG_QUESTIONS}, TOKENIZER, WINDOWS, "no_assistant_token"),
    "16 tokens": ({"messages": messages("a" * 5, "b" * 5)}, TOKENIZER, {"min_length": 17}, "too_short"),
    "a text too long": ({"text": "once upon " * 4}, TOKENIZER, TURNS, "too_long"),
    "a text of one token": ({"text": "x"}, TOKENIZER, {}, "no_assistant_token"),
    "a mask too short": (tokens([1, 2, 3], [0, 1]), TOKENIZER, {}, "malformed_tokens"),
    "no token": (tokens([], []), TOKENIZER, {}, "malformed_tokens"),
    "a mask of 2": (tokens([1, 2], [0, 2]), TOKENIZER, {}, "malformed_tokens"),
    "a mask in words": (tokens([1, 2], "01"), TOKENIZER, {}, "malformed_tokens"),
    "a token in words": (tokens([1, "2"], [0, 1]), TOKENIZER, {}, "malformed_tokens"),
    "a token that is true": (tokens([1, True], [0, 1]), TOKENIZER, {}, "malformed_tokens"),
    "a token below 0": (tokens([1, -100], [0, 1]), TOKENIZER, {}, "malformed_tokens"),
    "a token above 31 bits": (tokens([1, 2**40], [0, 1]), TOKENIZER, {}, "malformed_tokens"),
    "tokens in a batch": (tokens([[1, 2]], [[0, 1]]), TOKENIZER, {}, "malformed_tokens"),
    "a token of another target": (tokens([1, len(TOKENIZER)], [0, 1]), TOKENIZER, {}, "tokens_outside_vocabulary"),
    "a mask of zeros": (
        tokens([1, 2], [0, 0]),
        TOKENIZER,
        {},
        "no_assistant_token",
    ),  # a template without generation tags
    "a mask of ones": (
        tokens([1, 2], [1, 1]),
        TOKENIZER,
        {},
        "only_assistant_tokens",
    ),  # transformers#47325: marked to the end
    "a rendered question": ({"text": QUESTION_TURN}, LLAMA, {}, "no_assistant_token"),
    "a rendered answer without its end": ({"text": UNENDED}, LLAMA, {}, "rendered_text_not_masked"),
    "a rendered result of a tool": ({"text": WITH_RESULT}, LLAMA, {}, "rendered_text_not_masked"),
    "rendered harmony": ({"text": chat.render(HARMONY, TWO_TURNS, False)}, HARMONY, {}, "rendered_text_not_masked"),
    "a keyword that breaks the template": (BREAKING, COUNTING, {}, "template_refuses"),
    "two calls, for a template of one": (TWO_CALLS, tools_shown_by(LLAMA_3_1), {}, "template_refuses"),
    "two calls, of which one is shown": (TWO_CALLS, WITH_TOOLS, {}, "template_hides_tools"),
    "words beside a call, dropped later": (BESIDE_A_CALL, WITH_TOOLS, {}, "template_not_prefix_stable"),
    "a call that is not shown": (tool_record(QUESTION, CALL, RESULT, ANSWER), NO_TOOLS, {}, "template_hides_tools"),
    "a result that is not shown": (tool_record(QUESTION, ANSWER, RESULT, ANSWER), NO_TOOLS, {}, "template_hides_tools"),
}


@pytest.mark.parametrize(("item", "tokenizer", "settings", "reason"), DUMPED.values(), ids=DUMPED)
def test_a_dialogue_that_the_target_is_not_trained_on_is_rejected(item, tokenizer, settings, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        encoded(item, tokenizer, **settings)
