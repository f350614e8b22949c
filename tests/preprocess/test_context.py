"""Columns next to a record's texts: flags of what has a loss, system prompts, earlier exchanges, the template's
keywords, images.
"""

import pytest

from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.template import apply_settings
from preprocess.sources.dialogues import Dialogue, clean
from tests.kit import byte_tokenizer
from tests.pipeline.test_chat import GEMMA, masked_runs, text_of, tokenizer_with
from tests.preprocess.records import TOKENIZER, ask, dumped, encoded, messages, runs
from tests.templates import QWEN_3, SMOLLM_3, tokenizer_with_settings

# -- flags of a turn -------------------------------------------------------------------------------------------------


def flagged(*flags: dict) -> dict:
    """Exchanges q0, a0, q1, a1, ..., with these keys of their answers."""
    turns = messages(*(f"{letter}{number}" for number in range(len(flags)) for letter in "qa"))
    for turn, keys in zip(turns[1::2], flags, strict=True):
        turn |= keys
    return {"messages": turns}


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, 1.0)])
def test_an_answer_that_is_not_to_be_trained_is_context_without_a_loss(key, no, yes):
    (sequence,), edits = encoded(flagged({key: no}, {key: yes}, {key: None}))
    (unflagged,), _ = encoded(flagged({}, {}, {}))
    assert masked_runs(TOKENIZER, sequence) == ["a1<|end|>", "a2<|end|>"] and edits == ["turn_without_loss"]
    assert sequence.input_ids.tolist() == unflagged.input_ids.tolist()


def test_other_keys_of_a_turn_and_flags_of_a_question_change_nothing():
    record = flagged({"id": 3, "label": "x", "train_detail": None, "lang": "en", "trained_by": "x"}, {"mask": ""})
    record["messages"][0] |= {"weight": 0, "train": False, "loss_scale": 3}
    assert clean(record).messages == flagged({}, {})["messages"]


def test_turns_that_are_joined_have_a_loss_if_both_have():
    for flags, trained in (({}, ["a0\n\na1<|end|>"]), ({"train": False}, [])):
        record = flagged({}, flags, {})
        del record["messages"][2]
        assert runs(record) == [*trained, "a2<|end|>"]


@pytest.mark.parametrize("long", ["cut", "turns", "windows"])
@pytest.mark.parametrize("rule", ["all", "last"])
def test_every_answer_with_a_loss_is_in_a_window_and_no_other(long, rule):
    """The test covers all flags of five exchanges of ten tokens each, of which two fit."""
    for bits in range(1, 32):
        losses = [bool(bits >> number & 1) for number in range(5)]
        record = flagged(*({} if loss else {"loss": False} for loss in losses))
        names = [f"a{number}<|end|>" for number, loss in enumerate(losses) if loss]
        expected_runs = runs(record, long=long, train_turns=rule)
        assert expected_runs == (names if rule == "all" else names[-1:])
        try:
            parts, edits = encoded(record, long=long, train_turns=rule, max_length=24)
        except Unusable as reason:
            assert long != "windows" and str(reason) in ("too_long", "no_assistant_token") and not any(losses[:2])
            continue
        got_runs = [run for part in parts for run in masked_runs(TOKENIZER, part)]
        assert all(len(part.input_ids) <= 24 for part in parts) and edits.count("turn_without_loss") == 5 - len(names)
        if long == "windows" and rule == "all":
            assert got_runs == names
        assert got_runs and set(got_runs) <= {*names, *(name[:-7] for name in names)}


@pytest.mark.parametrize("mask", ["User", ["system", "user"], None])
def test_a_records_mask_is_known_where_it_names_those_without_a_loss(mask):
    assert runs(flagged({}) | {"mask": mask}) == ["a0<|end|>"]


# -- system prompts and history --------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be a pirate."}


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message"])
def test_a_system_column_is_the_first_turn(name):
    column, exchange = {name: SYSTEM["content"]}, messages("q", "a")
    forms = [{"messages": exchange}, {"instruction": "q", "output": "a"}, {"prompt": "q", "completion": "a"}]
    for form in forms:
        assert clean(form | column).messages == [SYSTEM, *exchange]
        assert clean(form | {name: " "}).messages == clean(form | {name: None}).messages == exchange
    both = clean({"messages": [SYSTEM, *exchange], **column})
    assert both.messages == [SYSTEM, *exchange] and both.edits == ()
    assert clean({"messages": exchange, **column}, "reject").messages == [SYSTEM, *exchange]
    _, edits = encoded({"messages": exchange, **column}, tokenizer_with(GEMMA))
    assert edits == ["system_dropped"]


IN_PARTS = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "a pirate."}]}


@pytest.mark.parametrize(
    ("turns", "columns", "edits"),
    [
        ([], {"system": {"a": 1}}, ("system_not_shown",)),
        ([], {"system": "Be a pirate.", "system_prompt": "Be brief."}, ("system_not_shown",)),
        ([SYSTEM], {"system": "Be brief."}, ("system_not_shown",)),
        ([IN_PARTS], {"system": "Be brief."}, ("system_not_shown",)),
        ([IN_PARTS], {"system": "Be a pirate."}, ()),
    ],
)
def test_a_system_prompt_that_is_not_shown_is_counted(turns, columns, edits):
    dialogue = clean({"messages": [*turns, *messages("q", "a")], **columns})
    assert dialogue.edits == edits and (not turns or dialogue.messages[0] == SYSTEM)


def test_pandas_fills_what_is_missing_with_nan():
    nothing = float("nan")
    record = flagged({"weight": nothing}, {"weight": 0.0}) | {"system": nothing, "images": nothing, "mask": nothing}
    dialogue = clean(record | {"chat_template_kwargs": nothing})
    assert dialogue.messages == clean(flagged({}, {"weight": 0})).messages and dialogue.edits == ()


def test_alpacas_history_stands_before_the_question_and_is_trained():
    record = {"instruction": "q2", "input": "", "output": "a2", "system": "Be a pirate.", "history": [["q1", "a1"]]}
    dialogue = clean(record)
    assert dialogue.messages == [SYSTEM, *messages("q1", "a1", "q2", "a2")] and dialogue.edits == ()
    assert runs(record) == ["a1<|end|>", "a2<|end|>"]
    turns = record | {"history": messages("q1", "a1")}
    assert clean(turns).messages == dialogue.messages
    assert clean(record | {"history": [["", " "], ["q1", "a1"]]}).messages == dialogue.messages
    for nothing in (None, [], "", "[]", [[]], [["", ""]], [None, [None, ""]], float("nan")):
        alone = clean(record | {"history": nothing})
        assert alone.messages == [SYSTEM, *messages("q2", "a2")] and alone.edits == ()


def test_turns_of_a_history_may_be_of_parts_or_call_tools():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "q1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"from": "gpt", "value": "a1"},
    ]
    dialogue = clean({"messages": messages("q2", "a2"), "history": history})
    assert [turn["content"] for turn in dialogue.messages] == ["q1", "", "r", "a1", "q2", "a2"]


NO_HISTORY = ["q1", [["q1"]], [["q1", None]], ["q1", "a1"], {"q1": "a1"}, 3, [["q1", ""]], [{"a": 1}]]


@pytest.mark.parametrize("history", [*NO_HISTORY, [{"role": "user"}], [{"role": "critic", "content": "x"}]])
def test_a_history_that_is_none_is_counted(history):
    dialogue = clean({"messages": messages("q", "a"), "history": history})
    assert dialogue.messages == messages("q", "a") and dialogue.edits == ("history_not_shown",)


def test_a_history_beside_several_questions_is_counted():
    turns = messages("q1", "a1", "q2", "a2")
    dialogue = clean({"messages": turns, "history": [["q1", "a1"]]})
    assert dialogue.messages == turns and dialogue.edits == ("history_not_shown",)


# -- the template's keywords -----------------------------------------------------------------------------------------


def with_keywords(keywords, *texts: str) -> dict:
    return {"messages": messages(*texts or ("q", "a")), "chat_template_kwargs": keywords}


@pytest.mark.parametrize("template", [QWEN_3, SMOLLM_3], ids=["qwen3", "smollm3"])
@pytest.mark.parametrize("written", [False, True], ids=["object", "JSON in a string"])
@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_is_trained_under_the_keywords_that_it_was_given_under(template, written, thinks):
    keywords = {"enable_thinking": thinks, "python_tools": [], "custom_instructions": ""}
    record = with_keywords(f'{{"enable_thinking": {str(thinks).lower()}}}' if written else keywords)
    expected = dumped({"messages": record["messages"]}, tokenizer_with_settings(template, enable_thinking=thinks))
    assert dumped(record, tokenizer_with_settings(template)) == expected


CUSTOM = "{{ custom_instructions | default('none') }}|" + byte_tokenizer().chat_template


def custom(**keywords):
    tokenizer = tokenizer_with_settings(SMOLLM_3)
    tokenizer.chat_template = CUSTOM
    apply_settings(tokenizer, TargetConfig(model="some/model", template_keywords=keywords))
    return tokenizer


def test_a_recipes_keyword_wins_over_a_records():
    record = with_keywords({"custom_instructions": "Be a pirate."})
    for tokenizer, begins, edits in (
        (custom(), "Be a pirate.|", []),
        (custom(custom_instructions="Be brief."), "Be brief.|", ["keywords_not_shown"]),
    ):
        (sequence,), got = encoded(record, tokenizer)
        assert text_of(tokenizer, sequence.input_ids).startswith(begins) and got == edits


@pytest.mark.parametrize(
    "keywords",
    [
        {"chat_template": "{{ 'x' }}"},
        {"tokenize": True, "return_dict": True},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"messages": [], "tools": [{"name": "f"}], "documents": [1]},
        {"pinned_date": {"%d": "x"}, "strftime_now": "x", "raise_exception": "x"},
        {"bos_token": "x", "eos_token": "x"},
        {"custom_instructions": ["x"]},
        {"custom_instructions": {"x": 1}},
        {"of_another_template": "x"},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_a_keyword_that_the_template_does_not_read_changes_nothing_and_is_counted(keywords):
    sequences, edits = dumped(with_keywords(keywords), custom())
    assert sequences == dumped({"messages": messages("q", "a")}, custom())[0] and edits == ["keywords_not_shown"]


def test_a_switch_is_true_or_false():
    _, edits = encoded(with_keywords({"enable_thinking": "false"}), tokenizer_with_settings(SMOLLM_3))
    assert edits == ["keywords_not_shown", "answer_without_thoughts"]


def test_the_target_is_asked_under_the_keywords_and_they_stay_with_its_answers(tiny_recipe, monkeypatch):
    dialogue = clean(with_keywords({"custom_instructions": "Be a pirate.", "another": 1}))
    tokenizer = custom()
    reply = [*tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    part, (prompt,) = ask(monkeypatch, tiny_recipe, tokenizer, reply, dialogue)
    assert prompt.startswith("Be a pirate.|") and part.edits == {"keywords_not_shown": 1}
    assert clean(part.dialogues[0]).keywords == {"custom_instructions": "Be a pirate."}


def test_dialogues_that_differ_in_their_keywords_are_asked_as_two():
    """A dump of the first is not taken for one of the second."""
    first, second = (clean({"id": "doc", **with_keywords({"custom_instructions": text})}) for text in "xy")
    assert first.content() != second.content() != Dialogue("doc", first.messages, ()).content()


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image", "images", "video", "audios"])
def test_the_place_of_an_image_is_mere_words_without_one_and_one_without_its_place_is_counted(name):
    for item in ({"messages": messages("<image>\nWhat is this?", "A cat.")}, {"text": "<image> A cat."}):
        for nothing in (None, [], "", [None]):
            assert clean(item | {name: nothing}).edits == ()
    assert clean({"messages": messages("q", "a"), name: "0.jpg"}).edits == ("image_not_shown",)


def parts(*content: dict) -> dict:
    return {"messages": [*messages("q"), {"role": "assistant", "content": list(content)}]}


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_are_text_whatever_their_api_calls_them(kind):
    record = parts({"type": kind, "text": "a", "thinking": None}, {"type": "text", "text": "b"})
    assert clean(record).messages == messages("q", "ab")


def test_a_part_of_thoughts_is_the_answers_thoughts():
    answer = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    for thoughts in ("hm", [{"type": "text", "text": "hm"}]):
        record = parts({"type": "thinking", "thinking": thoughts, "signature": "x"}, {"type": "text", "text": "a"})
        assert clean(record).messages == [*messages("q"), answer]
    question = {"role": "user", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "q"}]}
    assert clean({"messages": [question, *messages("q", "a")[1:]]}).messages == messages("q", "a")
