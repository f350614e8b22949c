"""The tools of a record: their descriptions, an assistant's calls of them, and the call of each result.

All are returned in the form that chat templates expect (transformers' and OpenAI's): a tool is
{"type": "function", "function": {"name", ...}}; a call is the same with its `arguments` as an object. JSON in a string
is parsed. Nulls outside of strings are taken for the filling of a Parquet column, and left out.
"""

import json
from typing import Any

from pipeline.lm.chat import Messages, Unusable
from preprocess.sources.json_records import is_too_deep

LONGEST = 1 << 20  # characters, as JSON, of a record's tools, or of a turn's calls
MOST_CALLS = 64  # of a turn
BAD_TOOLS, BAD_CALL = "malformed_tools", "malformed_tool_call"


def tools_of(record: dict) -> list[dict] | None:
    """Return a record's tools; None for a record without. Raise Unusable("malformed_tools" | "not_unicode")."""
    tools, older = record.get("tools"), record.get("functions")  # other columns may have this name, too
    listed = isinstance(older, list) or (isinstance(older, str) and older.lstrip().startswith("["))
    tools = read_json(tools or (older if listed else None), BAD_TOOLS)
    tools = [tools] if isinstance(tools, dict) and tools else tools
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Unusable(BAD_TOOLS)
    return [_wrap(read_json(tool, BAD_TOOLS)) for tool in tools]


def calls_of(turn: dict) -> list[dict]:
    """Return a turn's calls. Raise Unusable("malformed_tool_call" | "not_unicode")."""
    calls = read_json(turn.get("tool_calls") or turn.get("function_call"), BAD_CALL)
    calls = [calls] if isinstance(calls, dict) and calls else calls or []
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise Unusable(BAD_CALL)
    return [_normalize_call(call) for call in calls]


def name_results(messages: Messages) -> None:
    """Set the name of tool turns, which some templates require: by the call's id; without an id, in their order."""
    waiting: list[dict] = []
    for message in messages:
        if message["role"] == "assistant":
            waiting = list(message.get("tool_calls", []))
        elif message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            call = next((call for call in waiting if call_id is None or call.get("id", call_id) == call_id), None)
            if call is not None:
                waiting.remove(call)
                message.setdefault("name", call["function"]["name"])


def read_json(value: Any, reason: str) -> Any:
    """Return the value with JSON strings parsed and without Parquet's nulls. Raise Unusable(reason) for a value that
    would break a template or a tokenizer.
    """
    quoted = isinstance(value, str)
    if quoted and not value.strip():
        return None
    try:
        value = json.loads(value[: LONGEST + 1]) if quoted else value
        if is_too_deep(value):
            raise Unusable(reason)
        value = value if quoted else _without_nulls(value)
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON, or a Parquet column's own types
        raise Unusable(reason) from None
    if len(written) > LONGEST:
        raise Unusable(reason)
    if written.encode(errors="replace").decode() != written:
        raise Unusable("not_unicode")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _function_of(value: Any, reason: str) -> dict:
    """Return the value's "function", or the value itself. Raise Unusable(reason) where it has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Unusable(reason)
    return function


def _wrap(tool: Any) -> dict:
    function = _function_of(tool, BAD_TOOLS)
    return {"type": "function", "function": function} if function is tool else tool


def _normalize_call(call: Any) -> dict:
    function = _function_of(call, BAD_CALL)
    arguments = read_json(function.get("arguments"), BAD_CALL)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise Unusable(BAD_CALL)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
