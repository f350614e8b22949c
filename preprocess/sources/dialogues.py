"""Records -> clean dialogues; every record that is not used is counted under a reason.

A record is ShareGPT's {"id", "conversations": [{"from", "value"}]} or {"id", "messages": [{"role", "content"}]}, or a
mixture of the two. Rules, in this order:

    malformed          no list of turns, or a turn without a role and a text
    not_unicode        a turn with half an emoji (a lone surrogate), which no tokenizer takes
    not_text           a turn that holds an image, a tool call or anything else but text
    unknown_role       a role other than human/user, gpt/chatgpt/bing/bard/assistant/model, system
    (edit)             leading assistant turns are dropped; a system turn stays first
    blank_turn         a turn of white space only
    repeated_role      two turns of one role in a row, or a system turn that is not first
    (edit)             user turns after the last answer are dropped
    no_exchange        nothing with a question and an answer is left
"""

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from pipeline.target.chat import Messages, Unusable

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # where data sets keep an answer's, if apart from its content


@dataclass(frozen=True)
class Dialogue:
    doc_id: str
    messages: Messages
    edits: tuple[str, ...]  # "leading_assistant_dropped", "trailing_user_dropped"

    def content(self) -> bytes:
        return json.dumps(self.messages).encode()

    @property
    def text(self) -> str:
        """All turns, for comparing dialogues."""
        return "\n".join(message["content"] for message in self.messages)


def record_id(record: Any) -> str:
    """The record's own id, else a hash of its content: stable under reordering."""
    if isinstance(record, dict):
        for key in ("id", "conversation_id", "prompt_id"):
            if isinstance(record.get(key), str | int) and str(record[key]):
                return str(record[key]).encode(errors="replace").decode()
    return "sha-" + hashlib.sha256(repr(record).encode()).hexdigest()[:16]


def clean(record: Any) -> Dialogue:
    """Raises Unusable(reason) by the rules above."""
    turns = _either(record, "conversations", "messages") if isinstance(record, dict) else None
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


def _either(columns: dict, one: str, other: str) -> Any:
    """Data sets fill the columns that a record lacks with nulls."""
    return columns.get(other) if columns.get(one) is None else columns[one]


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise Unusable("malformed")
    role, content = _either(turn, "from", "role"), _either(turn, "value", "content")
    if isinstance(content, list):  # OpenAI's parts
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable("not_text")
        content = "".join(parts)
    if turn.get("tool_calls"):
        raise Unusable("not_text")
    if not isinstance(role, str) or not isinstance(content, str):
        raise Unusable("malformed")
    if content.encode(errors="replace").decode() != content:
        raise Unusable("not_unicode")
    if role not in ROLES:
        raise Unusable("unknown_role")
    message = {"role": ROLES[role], "content": content}
    thoughts = next((turn[key] for key in THOUGHTS if isinstance(turn.get(key), str) and turn[key].strip()), None)
    if thoughts is None or message["role"] != "assistant":
        return message
    if thoughts.encode(errors="replace").decode() != thoughts:
        raise Unusable("not_unicode")
    return message | {"reasoning_content": thoughts}


def held_out(doc_id: str, fraction: float) -> bool:
    """Split by hash, never by order. ShareGPT cuts long conversations into ID_0, ID_1, ...: all parts fall on one
    side.
    """
    conversation = re.sub(r"_\d+$", "", doc_id)
    return int(hashlib.sha256(conversation.encode()).hexdigest()[:8], 16) < fraction * 2**32
