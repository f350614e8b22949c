"""Long, foreign and repeated dialogues: what is dumped of them."""

import random
from contextlib import suppress

import pytest

from pipeline.lm import chat
from pipeline.lm.chat import Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.intake import Duplicates, detect_language, shingles
from preprocess.sources.sequences import _settle_thoughts, accepted_messages, encode_sequences
from tests.kit import TEMPLATE, byte_tokenizer
from tests.pipeline.test_chat import (
    CHATML,
    GEMMA,
    HISTORIES,
    LLAMA_2,
    MISTRAL,
    QWEN_2_5,
    Counted,
    exchanges,
    random_talk,
    tokenizer_with,
)
from tests.templates import GPT_OSS, QWEN_3, SMOLLM_3, tokenizer_with_settings

TOKENIZER = byte_tokenizer()
SYSTEM = {"role": "system", "content": "Be brief."}


def dialogue(lengths: list[tuple[int, int]], system: bool = False, doc_id: str = "doc") -> Dialogue:
    """Exchanges of so many characters each; exchange k consists of the letter k."""
    messages = [SYSTEM] if system else []
    for number, (question, answer) in enumerate(lengths):
        letter = chr(ord("a") + number)
        messages.append({"role": "user", "content": letter * question})
        messages.append({"role": "assistant", "content": letter.upper() * answer})
    return Dialogue(doc_id, messages, ())


def sequences_of(item: Dialogue, tokenizer=TOKENIZER, **settings) -> tuple[list[tuple[str, str]], list[str]]:
    """[(document id, text)], edits"""
    sequences, edits = encode_sequences(tokenizer, item, DataConfig(source="", **settings))
    for _, sequence in sequences:
        assert sequence.loss_mask.any() and not sequence.loss_mask.all()
        assert len(sequence.input_ids) <= settings["max_length"]
    return [(name, tokenizer.decode(sequence.input_ids)) for name, sequence in sequences], edits


@pytest.mark.parametrize(
    ("template", "edits", "roles"),
    [
        (QWEN_2_5, [], ["system", "user", "assistant", "system", "user", "assistant"]),
        (LLAMA_2, ["later_system_dropped"], ["system", "user", "assistant", "user", "assistant"]),
        (GEMMA, ["system_dropped"], ["user", "assistant", "user", "assistant"]),
    ],
    ids=["qwen-2.5", "llama-2", "gemma"],
)
def test_a_later_system_turn_stays_where_the_template_takes_it(template, edits, roles):
    two = dialogue([(3, 4), (5, 6)], system=True)
    item = Dialogue("doc", [*two.messages[:3], {"role": "system", "content": "Now!"}, *two.messages[3:]], ())
    messages, got_edits = accepted_messages(tokenizer_with(template), item)
    assert (got_edits, [message["role"] for message in messages]) == (edits, roles)
    sequences, _ = sequences_of(item, tokenizer_with(QWEN_2_5), max_length=140, long="windows")
    assert len(sequences) == 2 and "Now!" not in sequences[0][1] and "Now!" in sequences[1][1]


def exchange(number: int, question: int, answer: int) -> str:
    letter = chr(ord("a") + number)
    return f"<|user|>{letter * question}<|end|>\n<|assistant|>{letter.upper() * answer}<|end|>\n"


LONG = [(10, 20), (5, 5), (10, 30), (3, 80), (4, 4)]  # with markers 36, 16, 46, 89 and 14 tokens
TEXTS = [exchange(number, *lengths) for number, lengths in enumerate(LONG)]


@pytest.mark.parametrize("rule", ["cut", "turns", "windows"])
def test_a_dialogue_that_fits_is_one_document_under_every_rule(rule):
    assert sequences_of(dialogue(LONG), max_length=1000, long=rule) == ([("doc", "".join(TEXTS))], [])


def test_cut_takes_the_first_tokens_and_turns_whole_exchanges():
    ids = TOKENIZER("".join(TEXTS), add_special_tokens=False)["input_ids"]
    assert sequences_of(dialogue(LONG), max_length=60) == ([("doc", TOKENIZER.decode(ids[:60]))], [])
    last = DataConfig(source="", max_length=60, train_turns="last")  # that begins before the cut
    (((_, sequence),), _) = encode_sequences(TOKENIZER, dialogue(LONG), last)
    assert TOKENIZER.decode(sequence.input_ids[sequence.loss_mask == 1]) == "B" * 5 + "<|end|>"
    assert sequences_of(dialogue(LONG), max_length=60, long="turns") == (
        [("doc", TEXTS[0] + TEXTS[1])],
        ["cut_at_a_turn"],
    )


def test_windows_hold_every_exchange_once():
    got, edits = sequences_of(dialogue(LONG), max_length=64, long="windows")
    assert edits == ["cut_into_windows"]
    assert [name for name, _ in got] == ["doc#0", "doc#1", "doc#2", "doc#3"]
    assert [text for _, text in got[:2]] == [TEXTS[0] + TEXTS[1], TEXTS[2]]
    assert TEXTS[3].startswith(got[2][1]) and len(got[2][1]) < len(TEXTS[3])  # cut: longer than a window by itself
    assert got[3][1] == TEXTS[4]


def test_a_window_has_the_system_turn_and_a_question_that_fits():
    got, _ = sequences_of(dialogue(LONG, system=True), max_length=90, long="windows")
    assert len(got) > 1 and all(text.startswith("<|system|>Be brief.<|end|>\n<|user|>") for _, text in got)
    got, _ = sequences_of(dialogue([(5, 5), (200, 5), (6, 6)]), max_length=64, long="windows")
    assert [text[:9] for _, text in got] == ["<|user|>a", "<|user|>c"]


def test_a_document_of_the_minimum_is_kept():
    assert len(sequences_of(dialogue([(5, 5)]), max_length=64, min_length=16)[0]) == 1


@pytest.mark.parametrize("template", [MISTRAL, GEMMA], ids=["mistral", "gemma"])
def test_a_system_turn_that_the_template_refuses_is_dropped_and_counted(template):
    tokenizer = tokenizer_with(template)
    with_system, edits = sequences_of(dialogue(LONG, system=True), tokenizer, max_length=1000)
    assert edits == ["system_dropped"]
    assert with_system == sequences_of(dialogue(LONG), tokenizer, max_length=1000)[0]


# -- answers apart ---------------------------------------------------------------------------------------------------

TALK = [(5, 10), (5, 10), (5, 30)]  # of 46, 41 and 61 bytes as exchanges of Qwen's


def of_qwen(number: int, last: bool) -> str:
    letter, thoughts = chr(ord("a") + number), "<think>\n\n</think>\n\n" if last else ""
    question, answer = TALK[number]
    return (
        f"<|im_start|>user\n{letter * question}<|im_end|>\n"
        f"<|im_start|>assistant\n{thoughts}{letter.upper() * answer}<|im_end|>\n"
    )


def upto(number: int, first: int = 0) -> str:
    """The sequence of an answer: the exchanges before it as history."""
    return "".join(of_qwen(n, last=n == number) for n in range(first, number + 1))


OFF, ON = tokenizer_with_settings(QWEN_3, enable_thinking=False), tokenizer_with_settings(QWEN_3)


def width(text: str) -> int:
    return len(OFF(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("rule", ["cut", "turns", "windows"])
def test_answers_that_are_shown_otherwise_later_are_documents_of_their_own(rule):
    got, edits = sequences_of(dialogue(TALK), OFF, max_length=1000, long=rule)
    assert got == [(f"doc#{n}", upto(n)) for n in range(3)] and edits == ["one_sequence_per_answer"]
    alone = dialogue(TALK[:1])
    assert sequences_of(alone, OFF, max_length=1000, long=rule) == ([("doc", upto(0))], [])


@pytest.mark.parametrize(
    ("long", "third", "edits"),
    [
        ("cut", [], []),
        ("turns", [], ["cut_at_a_turn"]),
        ("windows", [("doc#2", upto(2, first=2))], ["cut_into_windows"]),
    ],
)
def test_answers_apart_are_cut_by_every_rule(long, third, edits):
    limit = width(upto(1)) + 20  # the third answer's prompt is longer
    sequences = [("doc#0", upto(0)), ("doc#1", upto(1)), *third]
    expected = sequences, [*edits, "one_sequence_per_answer"]
    assert sequences_of(dialogue(TALK), OFF, max_length=limit, long=long) == expected


def test_a_cut_answer_apart_keeps_what_fits_of_it():
    limit = width(upto(2)) - 12
    got, _ = sequences_of(dialogue(TALK), OFF, max_length=limit, long="cut")
    assert [name for name, _ in got] == ["doc#0", "doc#1", "doc#2"]
    assert upto(2).startswith(got[2][1]) and width(got[2][1]) == limit


def test_thoughts_are_counted_that_a_thinking_target_lacks_or_another_has_to_drop():
    thoughtful = dialogue(TALK)
    thoughtful.messages[3]["content"] = "<think>\nwell\n</think>\n\n" + thoughtful.messages[3]["content"]
    for tokenizer in (ON, tokenizer_with_settings(SMOLLM_3), tokenizer_with_settings(GPT_OSS)):
        for item, count in ((dialogue(TALK), 3), (thoughtful, 2)):
            assert sequences_of(item, tokenizer, max_length=1000)[1].count("answer_without_thoughts") == count
    (_, (_, second), _), _ = sequences_of(thoughtful, ON, max_length=1000)
    assert "<think>\nwell\n</think>\n\nB" in second
    thoughtful.messages[5]["reasoning_content"] = "well"
    got, edits = sequences_of(thoughtful, OFF, max_length=1000)
    assert got == [(f"doc#{n}", upto(n)) for n in range(3)]
    assert edits == ["thoughts_dropped", "thoughts_dropped", "one_sequence_per_answer"]


# -- long dialogues --------------------------------------------------------------------------------------------------


def windows_throughout(tokenizer, messages: list[dict], limit: int, long: str, last_only: bool) -> list[str]:
    """Return the expected result of "turns" or "windows": every beginning is encoded whole. They are
    ids and masks as text, or a reason.
    """

    def encode(turns: list[dict], most: int | None) -> list[chat.Encoded]:
        return chat.encode(tokenizer, turns, most, last_only=last_only)

    def fits(sequences: list[chat.Encoded]) -> bool:
        return all(len(sequence.input_ids) <= limit for sequence in sequences)

    begins = [at for at, message in enumerate(messages) if message["role"] == "user"]
    system, exchange_ends, windows = messages[: begins[0]], [*begins[1:], len(messages)], []
    try:
        if fits(full_sequence := encode(messages, None)):
            exchange_ends, windows = [], full_sequence
        while exchange_ends:
            rest = messages[begins[-len(exchange_ends)] :]
            beginnings = [system + rest[: end - begins[-len(exchange_ends)]] for end in exchange_ends]
            count = 0
            while count < len(exchange_ends) and fits(encode(beginnings[count], None)):
                count += 1
            if count:
                windows += encode(beginnings[count - 1], None)
            elif long == "windows":
                with suppress(Unusable):  # the question alone is longer
                    windows += encode(beginnings[0], limit)
            exchange_ends = exchange_ends[max(count, 1) :] if long == "windows" else []
    except Unusable as reason:
        return [str(reason)]
    reason = "too_long" if long == "turns" else "no_assistant_token"
    return [str((window.input_ids.tolist(), window.loss_mask.tolist())) for window in windows] or [reason]


@pytest.mark.parametrize("long", ["turns", "windows"])
def test_windows_are_what_encoding_every_beginning_gives(long):
    outcomes = set()
    for number, template in enumerate(HISTORIES):
        tokenizer = tokenizer_with(template)
        for seed in range(4):
            talk, limit = random_talk(31 * number + seed), [300, 900, 2500, 6000][(number + seed) % 4]
            messages, _ = accepted_messages(tokenizer, Dialogue("doc", talk[: 20 + len(talk) % 2], ()))
            messages, _ = _settle_thoughts(tokenizer, messages, None)
            for rule in ("all", "last"):
                data = DataConfig(source="", max_length=limit, long=long, train_turns=rule)
                try:
                    sequences, _ = encode_sequences(tokenizer, Dialogue("doc", messages, ()), data)
                    got = [str((sequence.input_ids.tolist(), sequence.loss_mask.tolist())) for _, sequence in sequences]
                except Unusable as reason:
                    got = [str(reason)]
                expected = windows_throughout(tokenizer, messages, limit, long, rule == "last")
                assert got == expected, (template, seed, rule)
                outcomes.add(min(len(got), 2))
    assert outcomes == {1, 2}


@pytest.mark.parametrize(("long", "most"), [("cut", 4), ("turns", 2), ("windows", 100)])
def test_a_long_dialogue_renders_each_turn_as_often_as_its_window_has_turns(long, most):
    """It was rendered from the first turn on, for each answer of each beginning of each window."""
    tokenizer, data = Counted(tokenizer_with(CHATML)), DataConfig(source="", max_length=1000, long=long)
    encode_sequences(tokenizer, Dialogue("doc", exchanges(1600), ()), data)
    assert tokenizer.turns < most * 3200 + 10_000 and tokenizer.characters < 1000 * most * 3200 + 20_000


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
SHOWS = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")


def with_calls(count: int) -> list[dict]:
    turns = [{"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "so"}]
    return [{"role": "user", "content": "why?"}, *turns * count, {"role": "assistant", "content": "so"}]


def with_thoughts(count: int) -> list[dict]:
    answer = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    return [{"role": "user", "content": "why?"}, answer] * count


@pytest.mark.parametrize("long", ["cut", "turns", "windows"])
@pytest.mark.parametrize(
    ("template", "make"), [(SHOWS, with_calls), (QWEN_3, with_thoughts)], ids=["calls", "thoughts"]
)
def test_a_record_that_takes_too_much_rendering_is_a_reason(monkeypatch, template, make, long):
    """Calls, results and thoughts are each looked for in a rendering from the first turn on."""
    monkeypatch.setattr(chat, "MOST_WORK", 50_000)
    data = DataConfig(source="", max_length=600, long=long)
    tokenizer, turns = Counted(tokenizer_with_settings(QWEN_3)), []
    tokenizer._tokenizer.chat_template = template
    assert encode_sequences(tokenizer, Dialogue("doc", make(3), ()), data)
    for _ in range(2):
        tokenizer.turns = 0
        with pytest.raises(Unusable, match=r"^too_long_to_render$"):
            encode_sequences(tokenizer, Dialogue("doc", make(400), ()), data)
        turns.append(tokenizer.turns)
    assert turns[0] == turns[1] < 50_000 / 5 + 801  # the same whenever and wherever


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("How do I write a function that adds two numbers in Python?", "en"),
        ("Wie schreibe ich eine Funktion, die zwei Zahlen addiert?", "de"),
        ("Comment écrire une fonction qui additionne deux nombres ?", "fr"),
        ("如何编写一个将两个数字相加的函数？", "zh"),
    ],
)
def test_languages_are_told_apart(text, code):
    assert detect_language(Dialogue("doc", [{"role": "user", "content": text}], ())) == code


# -- duplicates ------------------------------------------------------------------------------------------------------

WORDS = [f"word{number}" for number in range(500)]


def saying(text: str, doc_id: str) -> Dialogue:
    return Dialogue(doc_id, [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}], ())


def fate(duplicates: Duplicates, text: str, doc_id: str) -> str:
    try:
        return duplicates.deduplicate(saying(text, doc_id)).doc_id
    except Unusable as reason:
        return str(reason)


def test_texts_are_taken_once_and_an_id_of_another_text_becomes_another_id():
    duplicates, sources = (
        Duplicates(None),
        [("a", "1"), ("a", "1"), ("a", "2"), ("a ", "3"), ("b", "1"), ("b", "1"), ("c", "1")],
    )
    first, *fates, second, again, third = [fate(duplicates, *item) for item in sources]
    assert (first, fates, again) == ("1", ["duplicate", "duplicate_text", "3"], "duplicate")
    assert len({"1", second, third}) == 3 and all(doc_id.startswith("1@") for doc_id in (second, third))
    assert fate(Duplicates(None), "b", "1") == "1"
    renamed = Duplicates(None)
    assert fate(renamed, "x", "1") == "1" and fate(renamed, "b", "1") == second  # whatever came before


def random_text(seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=400)


def test_near_duplicates_are_found_as_well_as_the_exact_similarity_finds_them():
    """Pairs are judged whose exact Jaccard similarity is clearly above or below the threshold."""
    wrong, judged = 0, {True: 0, False: 0}
    for seed in range(200):
        original = random_text(seed)
        changed = [
            word if random.Random(seed * 1000 + place).random() > seed / 1000 else "x"
            for place, word in enumerate(original)
        ]
        first, second = set(shingles(" ".join(original))), set(shingles(" ".join(changed)))
        similarity = len(first & second) / len(first | second)
        if abs(similarity - 0.7) > 0.15 and original != changed:
            duplicates = Duplicates(0.7)
            assert fate(duplicates, " ".join(original), "1") == "1"
            judged[similarity > 0.7] += 1
            wrong += (fate(duplicates, " ".join(changed), "2") == "near_duplicate") != (similarity > 0.7)
    assert sum(judged.values()) > 100 and min(judged.values()) > 10 and wrong == 0
