"""ShareGPT JSON -> clean dialogues, as a stream; every record that is not used is counted under a reason.

Rules, in this order:

    malformed          no list of turns, or a turn that is no {"from", "value"} of texts
    unknown_role       a role other than human/user, gpt/chatgpt/bing/bard/assistant, system
    (edit)             leading assistant turns are dropped; a system turn stays first
    blank_turn         a turn of white space only
    repeated_role      two turns of one role in a row, or a system turn that is not first
    (edit)             user turns after the last answer are dropped
    no_exchange        nothing with a question and an answer is left
    duplicate          the id was there before
"""

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
import httpx2
import ijson

from pipeline import embedded
from pipeline.chat import Messages, Unusable
from pipeline.errors import PipelineError

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
}


@dataclass(frozen=True)
class Dialogue:
    doc_id: str
    messages: Messages
    edits: tuple[str, ...]  # "leading_assistant_dropped", "trailing_user_dropped"


@dataclass
class Tail:
    """Filled when the file ends in the middle of a record."""

    torn_after: int | None = None  # whole records before the tear


def read_records(source: str, tail: Tail) -> Iterator[Any]:
    """Yields the file's records one by one, never holding the whole file.

    Raises PipelineError when the file is missing, is not a JSON list, or is damaged before its end.
    """
    if source.startswith(embedded.PREFIX):
        if source != "embedded:sharegpt":
            raise PipelineError(f"data.source={source!r} is not known; there is 'embedded:sharegpt'")
        source = str(embedded.dialogues())
    count = 0
    with _open(source) as raw:
        file = _Watched(raw)
        try:
            for record in ijson.items(file, "item", use_float=True):
                count += 1
                yield record
        except (ijson.JSONError, UnicodeDecodeError) as error:
            if count == 0:
                why = "it ends in its first record" if file.ended else "its first record cannot be parsed"
            elif file.ended:
                tail.torn_after = count
                return
            else:
                why = f"it is damaged after {count} records"
            raise PipelineError(_not_sharegpt(source, f"{why} ({str(error).splitlines()[0]})")) from None
    if count == 0:
        raise PipelineError(_not_sharegpt(source, "it is JSON, but no list of records"))


class _Watched:
    """A file that remembers having been read to its end: only there is a parse error a torn tail."""

    def __init__(self, raw: BinaryIO):
        self._raw, self.ended = raw, False

    def read(self, size: int = -1) -> bytes:
        content = self._raw.read(size)
        self.ended |= size != 0 and not content
        return content


def _open(source: str) -> BinaryIO:
    try:
        return fsspec.open(source, "rb").open()
    except FileNotFoundError:
        raise PipelineError(f"data.source {source} does not exist") from None
    except (OSError, ValueError, ImportError, httpx2.HTTPError) as error:
        raise PipelineError(f"data.source {source} cannot be opened: {error}") from None


def _not_sharegpt(source: str, why: str) -> str:
    return (
        f"data.source {source}: {why}. Expected ShareGPT JSON: "
        '[{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, ...]'
    )


def record_id(record: Any) -> str:
    """The record's own id, else a hash of its content: stable under reordering."""
    if isinstance(record, dict) and isinstance(record.get("id"), str | int) and str(record["id"]):
        return str(record["id"])
    return "sha-" + hashlib.sha256(repr(record).encode()).hexdigest()[:16]


def clean(record: Any) -> Dialogue:
    """Raises Unusable(reason) by the rules above ("duplicate" is the caller's: it takes memory of all ids)."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise Unusable("malformed")
    messages = [_message(turn) for turn in turns]
    edits = []
    system = messages[:1] if messages and messages[0]["role"] == "system" else []
    rest = list(itertools.dropwhile(lambda message: message["role"] == "assistant", messages[len(system) :]))
    if len(system) + len(rest) < len(messages):
        edits.append("leading_assistant_dropped")
    messages = system + rest
    if any(not message["content"].strip() for message in messages):
        raise Unusable("blank_turn")
    roles = [message["role"] for message in messages[len(system) :]]
    if any(role != ("user", "assistant")[place % 2] for place, role in enumerate(roles)):
        raise Unusable("repeated_role")
    if roles and roles[-1] == "user":
        messages.pop()
        edits.append("trailing_user_dropped")
    if len(messages) - len(system) < 2:
        raise Unusable("no_exchange")
    return Dialogue(record_id(record), messages, tuple(edits))


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
        raise Unusable("malformed")
    if turn["from"] not in ROLES:
        raise Unusable("unknown_role")
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def held_out(doc_id: str, fraction: float) -> bool:
    """Split by hash, never by order. ShareGPT cuts long conversations into ID_0, ID_1, ...: all parts fall on one side."""
    conversation = re.sub(r"_\d+$", "", doc_id)
    return int(hashlib.sha256(conversation.encode()).hexdigest()[:8], 16) < fraction * 2**32
