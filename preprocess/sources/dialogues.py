"""Records -> clean dialogues; every record that is not used is counted under a reason.

`forms.py` finds a record's turns, its text or its tokens, `tools.py` reads its tools, `context.py` the columns next to
the turns. A turn is ShareGPT's {"from", "value"} or {"role", "content"}, or a mixture of the two. Rules, in this order:

    malformed          no turns, text or tokens, or a turn without a role and a text
    malformed_...      invalid tokens, tools, tool calls or keywords of the template
    not_unicode        a turn with half an emoji (a lone surrogate), which no tokenizer takes
    not_text           a turn that holds an image or anything else but text
    unknown_role       a role other than those of `forms.ROLES`
    unknown_...        a key of an answer, or a mask of the record, that flags the trained parts in another way
    has_image          a text with a marker for the image, video or sound that its record holds
    (edit)             turns before the first question are dropped, except system turns; so are blank system turns
    blank_turn         a turn of white space only, except a tool's result and a turn that calls a tool
    stray_tool_result  a tool's turn that follows neither an assistant's turn nor another tool's
    repeated_role      two turns of one role in a row, except tools' results
    (edit)             turns after the last answer are dropped
    no_exchange        no question with an answer is left

By `data.repeated`, such a turn removes the turns after it ("cut": the dialogue ends before it) or the whole record
("reject", under which a system turn that is not first counts as repeated); "join" cuts, too, but appends a repeated
turn's text to the turn before, after a blank line, unless that one calls a tool. A record that has no exchange left is
rejected under the reason of its cut.
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.lm.chat import Encoded, Messages, Unusable
from pipeline.recipe.sections import DataConfig
from preprocess.sources.context import has_loss, keywords_of, require_known_mask, unseen_media, with_context
from preprocess.sources.forms import BrokenLine, first_present, form_of, role_of
from preprocess.sources.tools import calls_of, name_results, tools_of

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of an answer's thoughts, where its content lacks them
TEXTS = ("text", "input_text", "output_text")  # types of a turn's parts that hold its text


@dataclass(frozen=True)
class Dialogue:
    doc_id: str
    messages: Messages  # empty where the record has no turns
    edits: tuple[str, ...]  # changes made to it: "turns_joined", "trailing_user_dropped", ...
    tools: list[dict] | None = None  # tools that the assistant may call
    raw: str | Encoded | None = None  # text or tokens of a record without turns
    group: str = ""  # its conversation's name (`groups.py`)
    keywords: dict[str, Any] | None = None  # for the template, by the record's chat_template_kwargs

    def content(self) -> bytes:
        extra = [self.tools, self.keywords] if self.keywords else [self.tools] if self.tools else []
        return json.dumps([self.messages, *extra] if extra else self.messages).encode()

    def identity(self) -> bytes:
        """Return bytes that identify a dialogue: its text, where its turns hold nothing else, or else its content."""
        plain = all(message.keys() == {"role", "content"} for message in self.messages)
        if self.raw is None and (self.tools or self.keywords or not plain):
            return self.content()
        return self.text.encode(errors="surrogatepass")

    @property
    def question(self) -> str | None:
        """The first question; None for a record without turns."""
        return next((message["content"] for message in self.messages if message["role"] == "user"), None)

    @property
    def text(self) -> str:
        """All turns, for comparing dialogues."""
        if self.raw is not None:
            return self.raw if isinstance(self.raw, str) else " ".join(map(str, self.raw.input_ids.tolist()))
        calls = [json.dumps(message["tool_calls"]) for message in self.messages if "tool_calls" in message]
        return "\n".join([*(message["content"] for message in self.messages), *calls])


def record_id(record: Any) -> str:
    """Return a record's id, else a hash of its content, stable under reordering; for a broken line, its number."""
    if isinstance(record, BrokenLine):
        return f"line {record.number}"
    if isinstance(record, dict):
        for key in ("id", "conversation_id", "prompt_id"):
            if isinstance(record.get(key), str | int) and str(record[key]):
                return str(record[key]).encode(errors="replace").decode()
    return "sha-" + hashlib.sha256(repr(record).encode()).hexdigest()[:16]


def clean(record: Any, repeated: str = DataConfig.model_fields["repeated"].default) -> Dialogue:
    """Return the record's dialogue. Raise Unusable(reason) by the rules above."""
    turns, raw = form_of(record) if isinstance(record, dict) else (None, None)
    if raw is not None:
        edits = unseen_media(record, [raw]) if isinstance(raw, str) else []
        return _text_dialogue(record_id(record), raw, tuple(edits))
    if not isinstance(turns, list):
        raise Unusable("malformed")
    turns, edits = with_context(record, turns)
    messages, tools, keywords = [_parse_message(turn) for turn in turns], tools_of(record), keywords_of(record)
    require_known_mask(record)
    edits += unseen_media(record, [message["content"] for message in messages])
    accepted, fault = _keep_alternating(_drop_before_question(messages, edits), repeated, edits)
    while accepted and accepted[-1]["role"] != "assistant":
        edits.append(f"trailing_{accepted.pop()['role']}_dropped")
    if not accepted:
        raise Unusable(fault or "no_exchange")
    if any(message["role"] == "system" for message in accepted[1:]):
        edits.append("later_system_turn")
    name_results(accepted)
    return Dialogue(record_id(record), accepted, tuple(edits), tools, keywords=keywords)


def _text_dialogue(doc_id: str, raw: str | Encoded, edits: tuple[str, ...]) -> Dialogue:
    if isinstance(raw, str) and not raw.strip():
        raise Unusable("blank_turn")
    if isinstance(raw, str) and raw.encode(errors="replace").decode() != raw:
        raise Unusable("not_unicode")
    return Dialogue(doc_id, [], edits, raw=raw)


def _drop_before_question(messages: Messages, edits: list[str]) -> Messages:
    """Drop the turns before the first question, except system turns."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    for role in sorted({*roles[:first]} - {"system"}):
        edits.append(f"leading_{role}_dropped")
    return [message for message in messages[:first] if message["role"] == "system"] + messages[first:]


def _keep_alternating(messages: Messages, repeated: str, edits: list[str]) -> tuple[Messages, str | None]:
    """Return ``(messages, the reason of a cut)``: the messages as long as roles alternate. Raise Unusable."""
    if repeated == "reject":
        faults = [_fault(before, message) for before, message in pairwise([None, *messages])]
        faults += ["repeated_role" for message in messages[1:] if message["role"] == "system"]
        for reason in ("blank_turn", "stray_tool_result", "repeated_role"):
            if reason in faults:
                raise Unusable(reason)
        return messages, None
    accepted: Messages = []
    for message in messages:
        before = accepted[-1] if accepted else None
        fault = _fault(before, message)
        if fault is None:
            accepted.append(message)
        elif fault == "blank_turn" and message["role"] == "system":
            edits.append("blank_system_dropped")
        elif before and fault == "repeated_role" and repeated == "join" and "tool_calls" not in before:
            accepted[-1] = _join(before, message)
            edits.append("turns_joined")
        else:
            edits.append(f"cut_before_{fault}")
            return accepted, fault
    return accepted, None


def _fault(before: dict | None, message: dict) -> str | None:
    role, last = message["role"], before["role"] if before else None
    if not message["content"].strip() and role != "tool" and "tool_calls" not in message:
        return "blank_turn"
    if role == "tool":
        return None if last in ("assistant", "tool") else "stray_tool_result"
    return "repeated_role" if role == last else None


def _join(first: dict, second: dict) -> dict:
    texts = {
        key: "\n\n".join(message[key] for message in (first, second) if message.get(key, "").strip())
        for key in ("content", "reasoning_content")
    }
    return {**first, **second, **{key: text for key, text in texts.items() if key == "content" or text}}


def _parse_message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Unusable("malformed")
    role, content = first_present(turn, "from", "role"), first_present(turn, "value", "content")
    if isinstance(content, list):  # OpenAI's parts
        content, turn = _join_parts(content, turn)
    calls = calls_of(turn)
    content = "" if calls and content is None else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise Unusable("malformed")
    if (canonical := role_of(role)) is None:
        raise Unusable("unknown_role")
    message: dict[str, Any] = {"role": canonical, "content": content}
    if message["role"] == "assistant":
        thoughts = next((turn[key] for key in THOUGHTS if isinstance(turn.get(key), str) and turn[key].strip()), None)
        message |= {} if thoughts is None else {"reasoning_content": thoughts}
    if message["role"] == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str) and turn[key]}
    if any(text.encode(errors="replace").decode() != text for text in message.values()):
        raise Unusable("not_unicode")
    if message["role"] != "assistant":
        return message
    return message | ({"tool_calls": calls} if calls else {}) | ({} if has_loss(turn) else {"loss": False})


def _join_parts(parts: list, turn: dict) -> tuple[str, dict]:
    """Return the text of a turn's parts, and the turn with the thoughts among them. Raise Unusable("not_text")."""
    texts: dict[bool, list[str]] = {False: [], True: []}  # answers, thoughts
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("thinking" if kind == "thinking" else "text") if kind in (*TEXTS, "thinking") else None
        if kind == "thinking" and isinstance(text, list):  # Mistral's: parts again
            text, _ = _join_parts(text, {})
        if not isinstance(text, str):
            raise Unusable("not_text")
        texts[kind == "thinking"].append(text)
    thoughts = "\n".join(texts[True])
    return "".join(texts[False]), turn | {"reasoning_content": thoughts} if thoughts.strip() else turn
