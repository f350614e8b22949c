"""The forms of a record, and those without turns all the way to their masks."""

import pytest

from pipeline.features.schema import Accounting
from preprocess.sources.dialogues import clean
from preprocess.sources.forms import BrokenLine, describe_record
from tests.preprocess.records import TOKENIZER, A, Q, dumped, intake_of, turns

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
    ("columns", "question"),
    [
        ({"instruction": "Add.", "input": "2+2?", "output": "4"}, "Add.\n\n2+2?"),
        ({"instruction": "Add.", "context": "2+2?", "response": "4"}, "Add.\n\n2+2?"),
        ({"question": "Add.", "context": "2+2?", "answer": "4"}, "Add.\n\n2+2?"),
        ({"instruction": "Add.", "input": "2+2?", "response": "4"}, "Add.\n\n2+2?"),
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
def test_a_further_question_and_an_input_stand_behind_the_first(columns, question):
    """It was left out, and the answer was one to half of what was asked."""
    assert clean(columns).messages == [{"role": "user", "content": question}, {"role": "assistant", "content": "4"}]


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
    assert describe_record(record).startswith(words) and len(describe_record(record)) < 300


def test_a_description_fits_the_accounting():
    """Control characters are written as four each, and a manifest was refused."""
    names = ["\x01" * 39 + letter for letter in "abcdefgh"]
    turns_of = [{"role": name, "content": "x"} for name in names]
    record = {"conversation": turns_of, **dict.fromkeys(names)}
    Accounting.model_validate(EMPTY | {"examples": {"malformed": describe_record(record)}})
    assert describe_record(record).startswith("its keys are 'conversation', '\\x01")


def test_a_text_is_a_continuation_from_its_second_token_on():
    ids = TOKENIZER("once upon")["input_ids"]
    assert dumped({"text": "once upon"}) == ([(ids, [0] + [1] * (len(ids) - 1))], ["text"])
    assert dumped({"text": "once upon"}, max_length=4) == ([(ids[:4], [0, 1, 1, 1])], ["text"])
    windows, edits = dumped({"text": "once upon"}, max_length=4, long="windows")
    assert windows == [(ids[:4], [0, 1, 1, 1]), (ids[4:8], [0, 1, 1, 1])] and len(ids) == 9  # one token answers nothing
    assert edits == ["text", "cut_into_windows", "window_without_answer"]


@pytest.mark.parametrize("name", ["loss_mask", "assistant_masks"])
def test_tokens_are_dumped_as_they_are(name):
    record = {"input_ids": [5, 6, 7, 8, 9], name: [0, 0, 1, 0, 1]}
    assert dumped(record) == ([([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])], ["tokens"])
    assert dumped(record | {name: [False, False, True, False, True]})[0] == dumped(record)[0]
    padded = record | {"attention_mask": [1, 1, 1, 1, 0]}
    assert dumped(padded) == ([([5, 6, 7, 8], [0, 0, 1, 0])], ["tokens"])
    assert dumped(record, max_length=3) == ([([5, 6, 7], [0, 0, 1])], ["tokens"])
    windows, edits = dumped(record | {name: [1, 1, 1, 0, 1]}, max_length=2, long="windows")
    assert windows == [([5, 6], [0, 1])]  # nothing comes before a window's first token
    assert edits == ["tokens", "cut_into_windows", "window_without_answer", "window_without_answer"]


def test_the_language_of_mere_tokens_is_not_known(tmp_path):
    intake = intake_of(tmp_path, [{"id": "t", "input_ids": [1, 2], "loss_mask": [0, 1]}], languages=["en"])
    assert not list(intake) and intake.rejected == [("t", "language")]
