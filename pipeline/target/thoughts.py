"""What a target thinks before it answers: whether it is asked to, and where its thoughts stand in an answer.

Targets like Qwen3 write thoughts between <think> and </think> in front of the answer; they stay part of the turn's
content, and the template shows or hides them. In gpt-oss's format (harmony) thoughts and answer are messages of their
own: a turn's `reasoning_content` and its content.
"""

import re
from functools import lru_cache
from typing import Any

import jinja2

OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")  # keywords by which templates turn it on and off
HARMONY = "<|channel|>"
_PART = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)


def thinking(tokenizer: Any) -> bool | None:
    """Whether the target is asked to think before it answers; None where its template has no say in it."""
    return _thinking(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=4)
def _thinking(tokenizer: Any, template: str) -> bool | None:
    if HARMONY in template:
        return True
    for switch in SWITCHES:
        on, off = (probe(tokenizer, **{switch: value}) for value in (True, False))
        if on != off:
            return probe(tokenizer) != off
    return _begins_thoughts(tokenizer) or None


def probe(tokenizer: Any, **keywords: Any) -> str:
    """A question's rendering, by which what a template does is told; empty where it refuses it."""
    question = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **keywords)
    except jinja2.TemplateError:
        return ""


def _begins_thoughts(tokenizer: Any) -> bool:
    """The prompt ends in the opening tag, and the answer begins inside of the thoughts."""
    return probe(tokenizer).rstrip().endswith(OPEN)


def as_message(tokenizer: Any, answer: list[int]) -> dict[str, str]:
    """The target's answer as a turn of the dialogue, thoughts included."""
    if HARMONY not in tokenizer.chat_template:
        return {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    parts = _PART.findall(tokenizer.decode(answer, skip_special_tokens=False))
    thoughts = "\n".join(text for channel, text in parts if channel == "analysis")
    message = {"role": "assistant", "content": "".join(text for channel, text in parts if channel == "final")}
    return message | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def thoughts_of(message: dict[str, str]) -> str:
    """Empty where a turn has none."""
    before, closed, _ = message["content"].partition(CLOSE)
    inside = before.rpartition(OPEN)[2] if closed else ""
    return message.get("reasoning_content", inside).strip()


def without_thoughts(message: dict[str, str]) -> dict[str, str]:
    return {"role": message["role"], "content": message["content"].rpartition(CLOSE)[2].lstrip("\n")}


def cut_in_thoughts(tokenizer: Any, message: dict[str, str]) -> bool:
    """Whether an answer that was cut ends before its thoughts do."""
    content = message["content"]
    if "reasoning_content" in message:
        return not content.strip()
    return CLOSE not in content and (OPEN in content or _begins_thoughts(tokenizer))
