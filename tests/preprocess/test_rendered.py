"""Conversations that the target's template has rendered already: their answers are trained, behind one BOS."""

import pytest
from tokenizers import processors

from pipeline.lm import chat
from tests.pipeline.test_chat import (
    CHATML,
    GEMMA,
    LLAMA_2,
    LLAMA_3,
    MISTRAL,
    QWEN_2_5,
    TWO_TURNS,
    masked_runs,
    tokenizer_with,
)
from tests.preprocess.records import dumped, encoded, runs
from tests.templates import DEEPSEEK_R1, LLAMA_3_2, QWEN_3, SMOLLM_3, tokenizer_with_settings

TOKENIZERS = {
    "smollm-2": tokenizer_with(CHATML),
    "llama-2": tokenizer_with(LLAMA_2),
    "llama-3": tokenizer_with(LLAMA_3),
    "llama-3.2": tokenizer_with_settings(LLAMA_3_2),
    "qwen-2.5": tokenizer_with(QWEN_2_5),
    "mistral": tokenizer_with(MISTRAL),
    "gemma": tokenizer_with(GEMMA),
    "smollm-3": tokenizer_with_settings(SMOLLM_3),
}
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% else %}{{ ' ASSISTANT: ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
CALL = (
    "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "w"}<|eom_id|>'
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("begins", [True, False], ids=["as rendered", "without BOS"])
def test_a_rendered_conversation_is_what_its_turns_are(tokenizer, begins):
    """Every token of it had a loss, the questions' as well."""
    text = chat.render(tokenizer, TWO_TURNS, False)
    (expected,) = chat.encode(tokenizer, TWO_TURNS, None)
    full_sequence = [(expected.input_ids.tolist(), expected.loss_mask.tolist())], ["text", "rendered_text"]
    assert dumped({"text": text if begins else text.removeprefix("<s>")}, tokenizer) == full_sequence


def with_bos(tokenizer):
    """The template is like Llama's, whose tokenizer puts a BOS in front of every text."""
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer


def test_no_text_gets_a_second_bos():
    tokenizer = with_bos(tokenizer_with_settings(LLAMA_3_2))
    begin, ids = tokenizer.bos_token_id, tokenizer("once upon")["input_ids"]
    assert ids[0] == begin
    for text in ("once upon", "<s>once upon"):
        assert dumped({"text": text}, tokenizer) == ([(ids, [0] + [1] * (len(ids) - 1))], ["text"])
    rendered = chat.render(tokenizer, TWO_TURNS, False)
    for text in (rendered, rendered.removeprefix("<s>")):
        (sequence,), _ = encoded({"text": text}, tokenizer)
        assert sequence.input_ids.tolist().count(begin) == 1 and sequence.input_ids[0] == begin


@pytest.mark.parametrize(
    ("tokenizer", "text", "trained"),
    [
        (
            tokenizer_with_settings(QWEN_3, enable_thinking=False),
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n",
            ["a<|im_end|>", "b<|im_end|>"],
        ),
        (
            tokenizer_with_settings(DEEPSEEK_R1),
            "<｜User｜>q<｜Assistant｜><think>\nhm\n</think>\n\na<｜end▁of▁sentence｜>",
            ["hm\n</think>\n\na<｜end▁of▁sentence｜>"],
        ),
        (
            tokenizer_with_settings(LLAMA_3_2),  # which ends in an answer that is cut
            "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\na b",
            ["a b"],
        ),
        (tokenizer_with_settings(LLAMA_3_2), CALL, ['{"name": "w"}<|eom_id|>']),
        (tokenizer_with(VICUNA), "USER: q ASSISTANT: a</s>USER: q ASSISTANT: b</s>", [" a</s>", " b</s>"]),
    ],
    ids=["what a prompt adds", "thoughts that a prompt opens", "cut", "a last call", "markers of words"],
)
def test_an_answer_spans_from_the_prompts_end_to_its_marker(tokenizer, text, trained):
    assert runs({"text": text}, tokenizer) == trained


def test_words_that_a_template_uses_as_markers_make_no_conversation_of_a_text():
    tokenizer, text = tokenizer_with(VICUNA), "The ASSISTANT: a play in one act."
    (sequence,), edits = encoded({"text": text}, tokenizer)
    assert edits == ["text"] and sequence.loss_mask[1:].all()


def test_rendered_conversations_are_cut_and_trained_by_the_recipes_rules():
    tokenizer = TOKENIZERS["smollm-2"]
    text = chat.render(tokenizer, TWO_TURNS, False)
    (full_sequence,), _ = encoded({"text": text}, tokenizer)
    (last,), _ = encoded({"text": text}, tokenizer, train_turns="last")
    assert masked_runs(tokenizer, last) == masked_runs(tokenizer, full_sequence)[1:]
    length = len(full_sequence.input_ids) - 3
    (cut,), _ = encoded({"text": text}, tokenizer, max_length=length)
    assert cut.loss_mask.tolist() == full_sequence.loss_mask[:length].tolist()
    windows, edits = encoded(
        {"text": text}, tokenizer, max_length=length + 2, long="windows"
    )  # the last holds a line break
    assert len(windows) == 1 and "cut_into_windows" in edits and "window_without_answer" in edits
