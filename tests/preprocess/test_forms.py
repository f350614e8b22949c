"""The forms of a record, and those without turns all the way to their masks."""

import json

import pytest

from pipeline.features.schema import Accounting
from pipeline.lm.chat import Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import clean
from preprocess.sources.forms import BrokenLine, description
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences
from tests.kit import byte_tokenizer
from tests.preprocess.test_dialogues import A, Q, turns

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because."}]
EMPTY = dict.fromkeys(("records", "further_sequences", "accepted"), 0) | {"torn_tail_after": None}
EMPTY |= {name: {} for name in ("rejected", "skipped", "edits", "grouped")}
STUB = turns(("human", "another"))


@pytest.mark.parametrize(
    "columns",
    [
        {"conversations": turns(Q, A)},
        {"conversations": [], "messages": MESSAGES},
        {"conversations": STUB, "messages": MESSAGES},
        {"conversations": turns(Q, A), "messages": STUB},
        {"conversations": [None, {"from": ["human"]}], "messages": MESSAGES},
        {"messages": [], "prompt": "why?", "completion": "because."},
        {"messages": STUB, "instruction": "why?", "input": "", "output": "because."},
        {"prompt": "why?", "completion": "because."},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"instruction": " ", "output": "because.", "input": "why?"},
        {"messages": MESSAGES, "input_ids": [1, 2], "loss_mask": [0, 1], "text": "why? because."},
        {"conversation": MESSAGES, "language": "English", "turn": 1},
        {"conversations": [], "conversation": MESSAGES},
        {"messages": STUB, "prompt": "why?", "response": "because."},
        {"input": MESSAGES[:1], "output": "because.", "category": "chat", "reasoning": "off"},
        {"instruction": "why?", "response": "because."},
        {"instruction": "why?", "context": "", "response": "because.", "category": "open_qa"},
        {"question": "why?", "answer": "because."},
        {"question": "why?", "response": "because."},
        {"input": "why?", "output": "because."},
        {"prompt": "why?", "answer": "because.", "completion": None},
    ],
)
def test_the_column_with_an_exchange_wins(columns):
    dialogue = clean({"id": "doc", **columns})
    assert dialogue.messages == MESSAGES and dialogue.raw is None and not dialogue.edits


@pytest.mark.parametrize(
    "columns",
    [
        {"instruction": "Translate.", "input": "Bonjour", "output": "Hello"},
        {"instruction": "Translate.", "context": "Bonjour", "response": "Hello"},
        {"question": "Translate.", "context": "Bonjour", "answer": "Hello"},
        {"instruction": "Translate.", "input": "Bonjour", "response": "Hello"},
    ],
)
def test_an_instructions_input_stands_behind_it(columns):
    assert clean(columns).messages[0]["content"] == "Translate.\n\nBonjour"
    assert len(clean(columns).messages) == 2


@pytest.mark.parametrize(
    ("columns", "asked"),
    [
        ({"instruction": "Answer.", "question": "2+2?", "answer": "4"}, "Answer.\n\n2+2?"),
        ({"instruction": "Answer.", "question": "2+2?", "context": "Sums.", "answer": "4"}, "Answer.\n\n2+2?\n\nSums."),
        ({"instruction": "Answer.", "question": "2+2?", "input": "Sums.", "output": "4"}, "Answer.\n\n2+2?\n\nSums."),
        ({"prompt": "Answer.", "question": "2+2?", "input": "Sums.", "completion": "4"}, "Answer.\n\n2+2?\n\nSums."),
        ({"prompt": " ", "question": "2+2?", "answer": "4"}, "2+2?"),
        ({"prompt": "Solve this:\n2+2?", "question": "2+2?", "completion": "4"}, "Solve this:\n2+2?"),
        ({"instruction": "2+2?", "prompt": "### Instruction:\n2+2?\n### Output:\n4", "output": "4"}, "2+2?"),
        ({"prompt": "2+2?", "completion": "4", "question": "3+3?", "answer": "6"}, "2+2?"),  # another's
        ({"prompt": "2+2?", "completion": "4", "question": ["x"]}, "2+2?"),
    ],
)
def test_a_further_question_stands_behind_the_first(columns, asked):
    """It was left out, and the answer was one to half of what was asked."""
    assert clean(columns).messages == [{"role": "user", "content": asked}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize("raw", [{"text": "once upon"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}])
def test_a_text_and_tokens_win_over_the_names_that_are_read_since_later(raw):
    assert clean({"question": "why?", "answer": "because.", "conversation": MESSAGES, **raw}).raw is not None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"id": 1, "convs": []}, "its keys are 'id', 'convs'"),
        ({"messages": turns(Q, ("critic", "x"), Q)}, "its keys are 'messages', its roles 'human', 'critic'"),
        ({"x" * 99: 1} | {f"k{n}": 1 for n in range(99)}, f"its keys are '{'x' * 40}', 'k0'"),
        ({"a\x1b[2J": 1}, "its keys are 'a\\x1b[2J'"),
        ({}, "its keys are none"),
        ([1], "it is no object with keys but a list"),
        (BrokenLine("oops", 17), "line 17 holds no object"),
    ],
)
def test_a_rejected_record_is_described_in_bounded_words(record, words):
    assert description(record).startswith(words) and len(description(record)) < 300


def test_a_description_fits_the_accounting():
    """Control characters are written as four each, and a manifest was refused."""
    names = ["\x01" * 39 + letter for letter in "abcdefgh"]
    turns_of = [{"role": name, "content": "x"} for name in names]
    record = {"conversation": turns_of, **dict.fromkeys(names)}
    Accounting.model_validate(EMPTY | {"examples": {"malformed": description(record)}})
    assert description(record).startswith("its keys are 'conversation', '\\x01")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": 3, "completion": "x"}, "malformed"),
        ({"prompt": "why?", "completion": " "}, "blank_turn"),
        ({"instruction": "why?", "output": {"a": 1}}, "malformed"),
        ({"conversations": STUB, "messages": []}, "no_exchange"),
        ({"conversations": STUB, "text": "x"}, "no_exchange"),
        ({"text": " \n"}, "blank_turn"),
        ({"text": "\ud83d"}, "not_unicode"),
        ({"text": ["x"]}, "malformed"),
        ({"input_ids": [1, 2]}, "malformed"),  # nobody says what is the assistant's
    ],
)
def test_a_form_that_is_none_is_a_reason(record, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        clean(record)


def encoded(record: dict, **settings) -> tuple[list[tuple[list[int], list[int]]], list[str]]:
    data = DataConfig(source="", **{"max_length": 100, **settings})
    sequences, edits = encode_sequences(TOKENIZER, clean(record), data)
    return [(sequence.input_ids.tolist(), sequence.loss_mask.tolist()) for _, sequence in sequences], edits


def test_a_text_is_a_continuation_from_its_second_token_on():
    ids = TOKENIZER("once upon")["input_ids"]
    assert encoded({"text": "once upon"}) == ([(ids, [0] + [1] * (len(ids) - 1))], ["text"])
    assert encoded({"text": "once upon"}, max_length=4) == ([(ids[:4], [0, 1, 1, 1])], ["text"])
    windows, edits = encoded({"text": "once upon"}, max_length=4, long="windows")
    assert windows == [(ids[:4], [0, 1, 1, 1]), (ids[4:8], [0, 1, 1, 1])] and len(ids) == 9  # one token answers nothing
    assert edits == ["text", "cut_into_windows", "window_without_answer"]
    for text, settings in (("once upon", {"max_length": 4, "long": "turns"}), ("x", {})):
        with pytest.raises(Unusable, match=r"^(too_long|no_assistant_token)$"):
            encoded({"text": text}, **settings)


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks"])
def test_tokens_are_dumped_as_they_are(name):
    record = {"input_ids": [5, 6, 7, 8, 9], name: [0, 0, 1, 0, 1]}
    assert encoded(record) == ([([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])], ["tokens"])
    assert encoded(record | {name: [False, False, True, False, True]})[0] == encoded(record)[0]
    padded = record | {"attention_mask": [1, 1, 1, 1, 0]}
    assert encoded(padded) == ([([5, 6, 7, 8], [0, 0, 1, 0])], ["tokens"])
    assert encoded(record, max_length=3) == ([([5, 6, 7], [0, 0, 1])], ["tokens"])
    windows, edits = encoded(record | {name: [1, 1, 1, 0, 1]}, max_length=2, long="windows")
    assert windows == [([5, 6], [0, 1])]  # nothing comes before a window's first token
    assert edits == ["tokens", "cut_into_windows", "window_without_answer", "window_without_answer"]


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([1, 2, 3], [0, 1], "malformed_tokens"),
        ([], [], "malformed_tokens"),
        ([1, 2], [0, 2], "malformed_tokens"),
        ([1, 2], "01", "malformed_tokens"),
        ([1, "2"], [0, 1], "malformed_tokens"),
        ([1, True], [0, 1], "malformed_tokens"),
        ([1, -100], [0, 1], "malformed_tokens"),
        ([1, 2**40], [0, 1], "malformed_tokens"),
        ([[1, 2]], [[0, 1]], "malformed_tokens"),
        ([1, len(TOKENIZER)], [0, 1], "tokens_outside_vocabulary"),
        ([1, 2], [0, 0], "no_assistant_token"),  # a template without generation tags: transformers' mask of zeros
        ([1, 2], [1, 1], "only_assistant_tokens"),  # transformers#47325: marked to the end
    ],
)
def test_a_mask_without_sense_costs_its_record(ids, mask, reason):
    with pytest.raises(Unusable, match=f"^{reason}$"):
        encoded({"input_ids": ids, "assistant_masks": mask})


def test_the_language_of_mere_tokens_is_not_known(tmp_path):
    source = tmp_path / "data.json"
    source.write_text(json.dumps([{"id": "t", "input_ids": [1, 2], "loss_mask": [0, 1]}]))
    intake = Intake(DataConfig(source=str(source), languages=["en"]))
    assert not list(intake) and intake.rejected == [("t", "language")]
