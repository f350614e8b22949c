"""Thoughts: each answer is trained as the target gives it when it is the last one, and history is what the target is
shown.
"""

import pytest

from pipeline.lm import chat
from pipeline.lm.chat import Unusable, extract_thoughts, is_cut_in_thoughts, parse_answer, remove_thoughts
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.sequences import encode_sequences
from tests.pipeline.test_chat import masked_runs, text_of
from tests.templates import (
    DEEPSEEK_R1,
    DEEPSEEK_V3_1,
    GPT_OSS,
    LLAMA_3_2,
    QWEN_3,
    QWEN_3_THINKING,
    SMOLLM_3,
    SPECIAL,
    tokenizer_with_settings,
)


def dialogue(*answers: str, **last) -> list[dict]:
    """Questions q1, q2, ... and these answers; `last` are further keys of the last one."""
    messages = []
    for number, answer in enumerate(answers, start=1):
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": answer}]
    messages[-1] |= last
    return messages


def sequences(tokenizer, messages) -> list[tuple[str, list[str]]]:
    """Text of each, and of its marked runs."""
    sequences = chat.encode(tokenizer, messages, None)
    return [(text_of(tokenizer, encoded.input_ids), masked_runs(tokenizer, encoded)) for encoded in sequences]


def qwen(*turns: str) -> str:
    """Questions and answers as they stand in Qwen's text, an answer in what precedes it."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[n % 2]}\n{turn}<|im_end|>\n" for n, turn in enumerate(turns))


EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "keywords", "first", "second", "marked"),
    [
        (QWEN_3, {"enable_thinking": False}, EMPTY + "a1", EMPTY + "a2", ["a1<|im_end|>", "a2<|im_end|>"]),
        (QWEN_3, {}, EMPTY + "a1", EMPTY + "a2", [EMPTY + "a1<|im_end|>", EMPTY + "a2<|im_end|>"]),
        (QWEN_3_THINKING, {}, EMPTY + "a1", EMPTY + "a2", [EMPTY[8:] + "a1<|im_end|>", EMPTY[8:] + "a2<|im_end|>"]),
    ],
    ids=["thinking off", "thinking on", "always thinking"],
)
def test_every_answer_of_qwen_is_encoded_as_it_was_asked_for(template, keywords, first, second, marked):
    tokenizer, messages = tokenizer_with_settings(template, **keywords), dialogue("a1", "a2")
    texts = [qwen("q1", first), qwen("q1", "a1", "q2", second)]
    assert sequences(tokenizer, messages) == [(text, [run]) for text, run in zip(texts, marked, strict=True)]
    for turn, encoded in zip((1, 3), chat.encode(tokenizer, messages, None), strict=True):
        prompt = chat.prompt_ids(tokenizer, messages[:turn])
        assert encoded.input_ids[: len(prompt)].tolist() == prompt
        assert int(encoded.loss_mask.argmax()) == len(prompt)


@pytest.mark.parametrize("separate_key", [False, True])
def test_thoughts_are_trained_with_their_own_answer_and_gone_from_the_history(separate_key):
    """Thoughts are in the content, as the target writes them, or next to it, as in data sets."""
    messages = dialogue(THOUGHT + "a1", THOUGHT + "a2")
    if separate_key:
        for message in messages[1::2]:
            message |= {"content": message["content"][-2:], "reasoning_content": "hm"}
    assert sequences(tokenizer_with_settings(QWEN_3), messages) == [
        (qwen("q1", THOUGHT + "a1"), [THOUGHT + "a1<|im_end|>"]),
        (qwen("q1", "a1", "q2", THOUGHT + "a2"), [THOUGHT + "a2<|im_end|>"]),
    ]


def test_gpt_oss_ends_the_last_answer_otherwise_than_the_others():
    messages = dialogue("a1", "a2", reasoning_content="hm")
    first_sequence, second_sequence = sequences(tokenizer_with_settings(GPT_OSS), messages)
    assert first_sequence[1] == ["<|channel|>final<|message|>a1<|return|>"]
    assert second_sequence[1] == [
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a2<|return|>"
    ]
    assert (
        "<|start|>assistant<|channel|>final<|message|>a1<|end|><|start|>user<|message|>q2<|end|>" in second_sequence[0]
    )


@pytest.mark.parametrize(
    ("template", "keywords"),
    [(LLAMA_3_2, {}), (SMOLLM_3, {}), (SMOLLM_3, {"enable_thinking": False})],
    ids=["llama-3.2", "smollm3 thinking", "smollm3 not thinking"],
)
def test_where_renderings_agree_a_dialogue_is_one_sequence(template, keywords):
    ((_, marked),) = sequences(tokenizer_with_settings(template, **keywords), dialogue("a1", "a2", "a3"))
    assert marked == [f"a{number}{SPECIAL[template][0]}" for number in (1, 2, 3)]


@pytest.mark.parametrize("template", SPECIAL, ids=["llama-3.2", "qwen3", "qwen3-thinking", "smollm3", "gpt-oss"])
def test_an_answer_ends_with_the_token_that_stops_the_target(template):
    """The closing marker is one token, the tokenizer's end token; what follows it in the text is not trained."""
    tokenizer = tokenizer_with_settings(template)
    for encoded in chat.encode(tokenizer, dialogue("a1", "a2"), None):
        last = len(encoded.loss_mask) - 1 - int(encoded.loss_mask[::-1].argmax())
        assert encoded.input_ids[last] == tokenizer.eos_token_id
        assert text_of(tokenizer, encoded.input_ids[last + 1 :]).strip() == ""
        assert list(encoded.input_ids[encoded.loss_mask == 1]).count(tokenizer.eos_token_id) in (1, 2)


def test_an_answer_that_its_own_prompt_does_not_begin_is_refused():
    """The prompt opens another turn than the answer's, or thoughts of which the answer shows a part."""
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}"
    tokenizer = tokenizer_with_settings(LLAMA_3_2)
    for opening in ("<|bot|>", "<|bot|><think>\n", "<|assistant|><think>\n"):
        tokenizer.chat_template = turns + opening + "{% endif %}"
        with pytest.raises(Unusable, match=r"^template_not_prefix_stable$"):
            chat.encode(tokenizer, dialogue("a1 </think> a2"), None)


R1_END = "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("template", "keywords", "opening", "thoughts"),
    [
        (DEEPSEEK_R1, {}, "<think>\n", "hm\n</think>\n\n"),
        (DEEPSEEK_V3_1, {"thinking": True}, "<think>", "hm</think>"),
    ],
    ids=["r1", "v3.1"],
)
def test_thoughts_that_the_template_never_shows_are_trained_as_the_target_writes_them(
    template, keywords, opening, thoughts
):
    """Each dialogue was template_not_prefix_stable."""
    tokenizer, messages = tokenizer_with_settings(template, **keywords), dialogue("a1", "a2")
    for message in messages[1::2]:
        message["reasoning_content"] = "hm"
    first = "<s><｜User｜>q1<｜Assistant｜>"
    shown = "" if template == DEEPSEEK_R1 else "</think>"  # of an earlier answer's thoughts
    second = f"{first}{shown}a1{R1_END}<｜User｜>q2<｜Assistant｜>"
    expected = [
        (f"{prompt}{opening}{thoughts}{answer}{R1_END}", [f"{thoughts}{answer}{R1_END}"])
        for prompt, answer in ((first, "a1"), (second, "a2"))
    ]
    assert sequences(tokenizer, messages) == expected
    for turn, encoded in zip((1, 3), chat.encode(tokenizer, messages, None), strict=True):
        prompt = chat.prompt_ids(tokenizer, messages[:turn])
        assert encoded.input_ids[: len(prompt)].tolist() == prompt
    encoded_sequences, edits = encode_sequences(tokenizer, Dialogue("doc", messages, ()), DataConfig(source=""))
    assert [text_of(tokenizer, encoded.input_ids) for _, encoded in encoded_sequences] == [text for text, _ in expected]
    assert edits == ["one_sequence_per_answer"]


def test_thoughts_in_the_content_stand_as_they_were_written_or_are_empty():
    tokenizer = tokenizer_with_settings(DEEPSEEK_R1)
    ((_, marked),) = sequences(tokenizer, dialogue(THOUGHT + "a1"))
    assert marked == [f"hm\n</think>\n\na1{R1_END}"]
    ((text, marked),) = sequences(tokenizer, dialogue("a1"))
    assert marked == [f"\n</think>\n\na1{R1_END}"] and EMPTY in text
    _, edits = encode_sequences(tokenizer, Dialogue("doc", dialogue("a1"), ()), DataConfig(source=""))
    assert edits == ["answer_without_thoughts"]
    not_thinking = tokenizer_with_settings(DEEPSEEK_V3_1)
    messages = dialogue("a1", reasoning_content="hm")
    ((_, encoded),), edits = encode_sequences(not_thinking, Dialogue("doc", messages, ()), DataConfig(source=""))
    assert masked_runs(not_thinking, encoded) == [f"a1{R1_END}"] and edits == ["thoughts_dropped"]


# -- what the target says -> a turn of the dialogue ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "keywords", "text", "message"),
    [
        (QWEN_3, {}, THOUGHT + "a1", {"content": THOUGHT + "a1"}),
        (QWEN_3, {"enable_thinking": False}, "a1", {"content": "a1"}),
        (QWEN_3_THINKING, {}, "hm\n</think>\n\na1", {"content": "hm\n</think>\n\na1"}),
        (DEEPSEEK_R1, {}, "hm\n</think>\n\na1", {"content": "hm\n</think>\n\na1"}),
        (
            GPT_OSS,
            {},
            "<|channel|>analysis<|message|>h\nm<|end|><|start|>assistant<|channel|>final<|message|>a1",
            {"content": "a1", "reasoning_content": "h\nm"},
        ),
        (GPT_OSS, {}, "<|channel|>final<|message|>a1", {"content": "a1"}),
    ],
)
def test_what_the_target_says_is_rendered_again_as_it_said_it(template, keywords, text, message):
    tokenizer = tokenizer_with_settings(template, **keywords)
    question = [{"role": "user", "content": "q1"}]
    prompt = chat.prompt_ids(tokenizer, question)
    answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    turn = parse_answer(tokenizer, answer)
    assert turn == {"role": "assistant", **message}
    (encoded,) = chat.encode(tokenizer, [*question, turn], None)
    assert encoded.input_ids[: len(prompt + answer)].tolist() == prompt + answer
    assert encoded.input_ids[encoded.loss_mask == 1].tolist() == answer


def test_thoughts_are_told_from_answers():
    assert extract_thoughts({"content": THOUGHT + "a"}) == extract_thoughts({"content": "hm</think>a"}) == "hm"
    assert extract_thoughts({"content": "a", "reasoning_content": "hm"}) == "hm"
    assert extract_thoughts({"content": "a"}) == extract_thoughts({"content": EMPTY + "a"}) == ""
    assert remove_thoughts({"role": "assistant", "content": THOUGHT + "a", "reasoning_content": "b"}) == {
        "role": "assistant",
        "content": "a",
    }


@pytest.mark.parametrize(
    ("template", "text", "cut"),
    [
        (QWEN_3, "<think>\nhm", True),
        (QWEN_3, THOUGHT + "a", False),
        (QWEN_3_THINKING, "hm", True),
        (QWEN_3_THINKING, "hm\n</think>\n\na", False),
        (LLAMA_3_2, "a", False),
        (GPT_OSS, "<|channel|>analysis<|message|>hm", True),
        (GPT_OSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a", False),
    ],
)
def test_an_answer_may_be_cut_in_its_thoughts(template, text, cut):
    tokenizer = tokenizer_with_settings(template)
    message = parse_answer(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert is_cut_in_thoughts(tokenizer, message) is cut
