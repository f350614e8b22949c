"""Conversations <-> token ids, through the target's own chat template, and what a target thinks before it answers.

Guarantees: the loss mask marks the assistant's tokens only (the turn's closing marker included), each after exactly
what the target would have seen when it gave them, proven for every dialogue by rendering its prefixes; a dialogue whose
mask cannot be proven is refused with a reason.

Targets like Qwen3 write thoughts between <think> and </think> in front of the answer; they stay part of the turn's
content, and the template shows or hides them. In gpt-oss's format (harmony) thoughts and answer are messages of their
own: a turn's `reasoning_content` and its content.
"""

import hashlib
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np

from pipeline.basics.errors import PipelineError

# {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what templates read beside: an assistant's
# "reasoning_content" and "tool_calls", a tool's "name" and "tool_call_id"
Messages = list[dict[str, Any]]

OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")  # keywords by which templates turn it on and off
HARMONY = "<|channel|>"
_PART = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)


# What a template's own expressions raise for tools and calls that are built otherwise than it expects.
_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


class Unusable(Exception):
    """A dialogue that must not be trained on; ``args[0]`` is the reason it is counted under."""


@dataclass(frozen=True)
class Encoded:
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 where the token is the assistant's


def require_template(tokenizer: Any, name: str) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise PipelineError(
            f"the tokenizer of {name} has no chat template: a chat model is expected. "
            "Put a chat_template.jinja into a local copy of the model and point target.model at it"
        )
    if not tokenizer.is_fast:
        raise PipelineError(f"the tokenizer of {name} has no fast (tokenizers) version: character offsets are needed")


def template_fingerprint(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


# What a tokenizer does outside of its backend, and does not do by default.
_SWITCHES = ("split_special_tokens", "clean_up_tokenization_spaces")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    state = tokenizer.backend_tokenizer.to_str() + repr(sorted(tokenizer.special_tokens_map.items()))
    state += "".join(name for name in _SWITCHES if getattr(tokenizer, name, False))
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def render(tokenizer: Any, messages: Messages, answer_next: bool, tools: list[dict] | None = None) -> str:
    """The conversation as text; `answer_next` opens an assistant turn. Raises Unusable("template_refuses")."""
    if not messages:  # transformers renders none without a turn
        raise Unusable("template_refuses")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer_next)
    except (jinja2.TemplateError, *_UNEXPECTED) as error:
        raise Unusable("template_refuses") from error


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[dict] | None = None) -> list[int]:
    """Token ids of a conversation that the assistant is to continue."""
    return tokenizer(render(tokenizer, messages, True, tools), add_special_tokens=False)["input_ids"]


def encode(
    tokenizer: Any,
    messages: Messages,
    max_length: int | None,
    tools: list[dict] | None = None,
    last_only: bool = False,
) -> list[Encoded]:
    """Ids and loss masks of a dialogue, each cut at `max_length` tokens (None: whole); what is cut before any answer is
    left out. `tools` go to the template, which shows them; with `last_only` only the last assistant turn is marked, of
    a dialogue that is cut the last one that begins before.

    An answer spans from the end of the rendering that asks for it to the end of the rendering that it ends, less
    trailing white space (which follows the closing marker and is never generated). The first has to be a prefix of the
    second, or else it is not what the target saw when it answered. Answers share a sequence as long as all their
    renderings are prefixes of the last one's. A template that shows earlier answers otherwise than the last one
    (without their thoughts, with another closing marker) so gives a sequence for every answer, its mask on that answer
    alone.

    Raises Unusable("template_refuses" | "template_not_prefix_stable" | "no_assistant_token" | "only_assistant_tokens").
    """
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if last_only:
        turns = _begun(tokenizer, messages, turns, tools, max_length)[-1:]
    renderings = _renderings(tokenizer, messages, turns, tools)
    sequences = [_marked(tokenizer, text, spans, max_length) for text, spans in renderings]
    answered = [encoded for encoded in sequences if encoded.loss_mask.any()]
    if not answered:
        raise Unusable("no_assistant_token")
    if any(encoded.loss_mask.all() for encoded in answered):
        raise Unusable("only_assistant_tokens")
    return answered


def _begun(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None, max_length: int | None
) -> list[int]:
    """Those of the answers `turns` whose prompts are shorter than `max_length`."""

    def tokens(turn: int) -> int:
        prompt = render(tokenizer, messages[:turn], True, tools)
        return len(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    return turns if max_length is None else turns[: bisect_left(turns, max_length, key=tokens)]


def _renderings(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Each sequence's text and where the answers among `turns` begin and end there, in characters."""
    found: list[tuple[str, list[tuple[int, int]]]] = []
    for turn in turns:
        before = render(tokenizer, messages[:turn], True, tools)
        through = render(tokenizer, messages[: turn + 1], False, tools)
        span = (len(before), len(through.rstrip()))
        if not (through.startswith(before) and span[0] < span[1]):
            raise Unusable("template_not_prefix_stable")
        if found and before.startswith(found[-1][0][: found[-1][1][-1][1]]):
            found[-1] = (through, [*found[-1][1], span])
        else:
            found.append((through, [span]))
    return found


def _marked(tokenizer: Any, text: str, spans: list[tuple[int, int]], max_length: int | None) -> Encoded:
    """A token is the assistant's when it starts inside of a span."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"][:max_length], dtype=np.int32)
    starts = np.asarray([start for start, _ in encoded["offset_mapping"][:max_length]])
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, last in spans:
        mask |= ((starts >= first) & (starts < last)).astype(np.uint8)
    return Encoded(ids, mask)


# -- thoughts -----------------------------------------------------------------------------------------------------


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


def pieces_of(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text; part of a letter adds nothing until the letter is whole."""
    texts, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        whole = text.rstrip("\ufffd") if count < len(tokens) else text
        texts.append(whole[len(before) :])
        before = whole if len(whole) > len(before) else before
    return texts


def as_message(tokenizer: Any, answer: list[int]) -> dict[str, str]:
    """The target's answer as a turn of the dialogue, thoughts included."""
    if HARMONY not in tokenizer.chat_template:
        return {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    parts = _PART.findall(tokenizer.decode(answer, skip_special_tokens=False))
    thoughts = "\n".join(text for channel, text in parts if channel == "analysis")
    message = {"role": "assistant", "content": "".join(text for channel, text in parts if channel == "final")}
    return message | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def thoughts_of(message: dict[str, Any]) -> str:
    """The thoughts in a turn; empty where it has none."""
    before, closed, _ = message["content"].partition(CLOSE)
    inside = before.rpartition(OPEN)[2] if closed else ""
    return message.get("reasoning_content", inside).strip()


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest | {"content": message["content"].rpartition(CLOSE)[2].lstrip("\n")}


def cut_in_thoughts(tokenizer: Any, message: dict[str, str]) -> bool:
    """Whether an answer that was cut ends before its thoughts do."""
    content = message["content"]
    if "reasoning_content" in message:
        return not content.strip()
    return CLOSE not in content and (OPEN in content or _begins_thoughts(tokenizer))
