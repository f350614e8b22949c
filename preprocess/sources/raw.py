"""A record without turns -> the token sequences that are dumped of it: its tokens as they are, or a text's own.

A text is what the target reads before it goes on: its tokenizer's tokens (with what that puts in front), all trained
but the first, which nothing comes before. Of the recipe's rules for long dialogues, "turns" has none to cut at
("too_long"), and "windows" are of `max_length` tokens each.
"""

import numpy as np

from pipeline.lm.chat import Encoded, Unusable
from pipeline.recipe.sections import DataConfig


def encode_raw(tokenizer, raw: str | Encoded, data: DataConfig) -> tuple[list[Encoded], list[str]]:
    """``(sequences, edits)``. Raises Unusable("tokens_outside_vocabulary" | "no_assistant_token" |
    "only_assistant_tokens" | "too_long").
    """
    whole, edits = _whole(tokenizer, raw), ["text" if isinstance(raw, str) else "tokens"]
    if len(whole.input_ids) <= data.max_length or data.long == "cut":
        sequences = [_part(whole, 0, data.max_length)]
    elif data.long == "turns":
        raise Unusable("too_long")
    else:
        sequences = [_part(whole, at, data.max_length) for at in range(0, len(whole.input_ids), data.max_length)]
        edits.append("cut_into_windows")
    trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
    if not trained:
        raise Unusable("no_assistant_token")
    return trained, [*edits, *["window_without_answer"] * (len(sequences) - len(trained))]


def _whole(tokenizer, raw: str | Encoded) -> Encoded:
    if isinstance(raw, str):
        ids = np.asarray(tokenizer(raw)["input_ids"], np.int32)
        return Encoded(ids, np.ones(len(ids), np.uint8))
    if len(raw.input_ids) and raw.input_ids.max() >= len(tokenizer):
        raise Unusable("tokens_outside_vocabulary")
    if len(raw.loss_mask) and raw.loss_mask.all():
        raise Unusable("only_assistant_tokens")
    return raw


def _part(whole: Encoded, at: int, length: int) -> Encoded:
    """Nothing comes before a part's first token, so nothing is trained on it."""
    ids, mask = whole.input_ids[at : at + length], whole.loss_mask[at : at + length].copy()
    mask[:1] = 0
    return Encoded(ids, mask)
