"""Conversations <-> token ids, through the target's own chat template.

Guarantees: the loss mask marks the assistant's tokens only (the turn's closing marker included), proven for every
dialogue by rendering its prefixes; a dialogue whose mask cannot be proven is refused with a reason.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from pipeline.errors import PipelineError

Messages = list[dict[str, str]]  # {"role": "system" | "user" | "assistant", "content": text}


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


def tokenizer_fingerprint(tokenizer: Any) -> str:
    state = tokenizer.backend_tokenizer.to_str() + repr(sorted(tokenizer.special_tokens_map.items()))
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def render(tokenizer: Any, messages: Messages, answer_next: bool) -> str:
    """The conversation as text; `answer_next` opens an assistant turn. Raises Unusable("template_refuses")."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
    except jinja2.TemplateError as error:
        raise Unusable("template_refuses") from error


def prompt_ids(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of a conversation that the assistant is to continue."""
    return tokenizer(render(tokenizer, messages, True), add_special_tokens=False)["input_ids"]


def encode(tokenizer: Any, messages: Messages, max_length: int | None) -> Encoded:
    """Ids and loss mask of a dialogue, cut at `max_length` tokens (None: whole).

    An assistant turn spans from the end of the rendering that asks for it to the end of the rendering that holds it,
    less trailing white space (which follows the closing marker and is never generated). Both renderings must be
    prefixes of the whole one; a token is the assistant's when it starts inside the span.

    Raises Unusable("template_refuses" | "template_not_prefix_stable" | "no_assistant_token" | "only_assistant_tokens").
    """
    whole = render(tokenizer, messages, False)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:turn], True)
        through = render(tokenizer, messages[: turn + 1], False).rstrip()
        if not (whole.startswith(before) and whole.startswith(through) and len(before) < len(through)):
            raise Unusable("template_not_prefix_stable")
        spans.append((len(before), len(through)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"][:max_length], dtype=np.int32)
    starts = np.asarray([start for start, _ in encoded["offset_mapping"][:max_length]])
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, last in spans:
        mask |= ((starts >= first) & (starts < last)).astype(np.uint8)
    if not mask.any():
        raise Unusable("no_assistant_token")
    if mask.all():
        raise Unusable("only_assistant_tokens")
    return Encoded(ids, mask)
