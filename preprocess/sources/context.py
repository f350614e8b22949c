"""A record's columns next to the texts of its turns: system prompts, earlier exchanges, the template's keywords,
images, and flags of answers without a loss.

An answer is trained after the prompt that it was written for. Parts of that prompt that cannot be used are counted:

    system_not_shown    a system column next to another system prompt, or one that is no text
    history_not_shown   a history that is no list of exchanges, or next to several questions
    image_not_shown     an image, video or sound for which no text has a marker
"""

import re
from typing import Any

from pipeline.lm.chat import Messages, Unusable
from preprocess.sources.forms import first_present, role_of
from preprocess.sources.tools import read_json

SYSTEM = ("system", "system_prompt", "system_message")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
FLAGS = ("weight", "train", "training", "trainable", "loss")  # of a turn: 0 or false leaves its text without a loss
# Markers of images, videos and sounds in a text.
_MEDIA_MARKER = re.compile(r"<\|?(?:image|img|video|audio|vision)[ _]?\w*\|?>|\[img\]", re.IGNORECASE)
# Keys by which data sets flag the trained parts of a turn. They are few, and so are the reasons that name one.
_LOSS_KEY = re.compile(
    r"(?:(?:token|assistant|response)_)?(?:train|training|trained|trainable|loss|weights?|mask|masked)"
    r"(?:_(?:details?|scale|weights?|masks?|only))?"
)


def with_context(record: dict, turns: list) -> tuple[list, list[str]]:
    """Return ``(turns after the record's system prompt and history, edits)``."""
    roles = [_role(turn) for turn in turns]
    first = roles.index("user") if "user" in roles else len(roles)
    stated = [first_present(turns[at], "value", "content") for at in range(first) if roles[at] == "system"]
    system = _text_of(next(filter(_is_filled, stated), None))
    columns = [record[name] for name in SYSTEM if _is_filled(record.get(name))]
    shown = columns[0] if system is None and columns and isinstance(columns[0], str) else None
    history = None if record.get("history") == "[]" else record.get("history")
    earlier = _exchanges(history) if roles.count("user") == 1 else []
    edits = ["system_not_shown"] if any(column != (shown or system) for column in columns) else []
    edits += [] if earlier or not _is_filled(history) else ["history_not_shown"]
    front = [] if shown is None else [{"role": "system", "content": shown}]
    return [*front, *turns[:first], *earlier, *turns[first:]], edits


def keywords_of(record: dict) -> dict[str, Any] | None:
    """Return the record's keywords for the chat template, under which its answers were written;
    `template.with_keywords` checks them. Raise Unusable("malformed_keywords" | "not_unicode").
    """
    column = record.get("chat_template_kwargs")
    keywords = None if _is_nan(column) else read_json(column, "malformed_keywords")
    if not isinstance(keywords, dict | None):
        raise Unusable("malformed_keywords")
    return {name: value for name, value in (keywords or {}).items() if _is_filled(value)} or None


def require_known_mask(record: dict) -> None:
    """Raise Unusable("unknown_mask") for a record's `mask`, unless it names roles that have no loss anyway (NeMo)."""
    mask = record.get("mask")
    names = mask if isinstance(mask, list) else [mask]
    roles = [role_of(name) for name in names]
    if _is_filled(mask) and not all(role in ("system", "user", "tool") for role in roles):
        raise Unusable("unknown_mask")


def has_loss(turn: dict) -> bool:
    """Return whether a turn's flags leave its text to be trained. Raise Unusable("unknown_KEY") for a flag that is
    neither 0 nor 1, or has another key.
    """
    names = [key for key in turn if isinstance(key, str) and _LOSS_KEY.fullmatch(key)]
    flags = {name: turn[name] for name in names if _is_filled(turn[name])}
    for key, value in flags.items():
        if key not in FLAGS or not isinstance(value, bool | int | float) or value not in (0, 1):
            raise Unusable(f"unknown_{key}")
    return all(flags.values())


def unseen_media(record: dict, texts: list[str]) -> list[str]:
    """Return edits. Raise Unusable("has_image") where a text has a marker for media of its record."""
    if not any(_is_filled(record.get(name)) for name in MEDIA):
        return []
    if any(_MEDIA_MARKER.search(text) for text in texts):
        raise Unusable("has_image")
    return ["image_not_shown"]


def _role(turn: Any) -> str | None:
    return role_of(first_present(turn, "from", "role")) if isinstance(turn, dict) else None


def _is_filled(value: Any) -> bool:
    """Return whether a column has content: data sets fill missing ones with nulls, NaN (pandas), blanks and empty
    lists.
    """
    if isinstance(value, list):  # or lists of these
        return any(_has_content(inner) for item in value for inner in (item if isinstance(item, list) else [item]))
    return _has_content(value) and value != {}


def _has_content(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and not _is_nan(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _exchanges(history: Any) -> Messages:
    """Return the turns of Alpaca's ``[[question, answer], ...]`` without blank pairs, or a list of turns as it is; an
    empty list for any other value.
    """
    pairs = history if isinstance(history, list) else []
    if all(isinstance(turn, dict) for turn in pairs):
        return pairs if all(map(_is_turn, pairs)) else []
    pairs = [pair for pair in pairs if _is_filled(pair)]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        return []
    if not all(text.strip() for pair in pairs for text in pair):
        return []
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _is_turn(turn: dict) -> bool:
    """Return whether an object has a known role, and a text or a call."""
    texts = first_present(turn, "value", "content"), turn.get("tool_calls"), turn.get("function_call")
    return _role(turn) is not None and (isinstance(texts[0], str | list) or any(texts[1:]))


def _text_of(system: Any) -> Any:
    """Return the text of a system prompt in parts."""
    if not isinstance(system, list):
        return system
    return "".join(str(part.get("text") or "") for part in system if isinstance(part, dict))
