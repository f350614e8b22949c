"""The forms of a record: where its turns are, or, of one without turns, its text or its tokens.

    conversations, messages         turns; the column with an exchange wins over an empty one or a stub
    prompt, completion              a question and its answer, or two lists of turns
    instruction, input, output      a question (behind it the input, if any) and its answer
    conversation                    turns
    QUESTIONS, ANSWERS              of other names: the same, behind the question the record's other QUESTIONS and the
                                    CONTEXTS
    input_ids, loss_mask            tokens of the target and which of them are trained; the mask's name may be
                                    assistant_masks; where attention_mask is 0, both are left out
    text                            a text without turns, trained from its second token on

The first of these that a record holds is taken, but tokens and a text win over the two rows before them;
`dialogues.py` judges its turns. A role is known in any case of its letters.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np

from pipeline.lm.chat import Encoded, Unusable

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
}
MASKS = ("loss_mask", "assistant_masks")
QUESTIONS = ("prompt", "instruction", "question", "input")
ANSWERS = ("completion", "output", "response", "answer")
CONTEXTS = ("input", "context")
SHOWN, LONGEST_NAME = 8, 40  # of a record's keys and roles that a message names, and of their characters
LONGEST_DESCRIPTION = 2000  # characters, as `schema.Accounting` has them


class BrokenLine(str):
    """The first characters of a line that is no record, and its number."""

    number: int

    def __new__(cls, text: str, number: int) -> "BrokenLine":
        line = super().__new__(cls, text)
        line.number = number
        return line


def either(columns: dict, one: str, other: str) -> Any:
    """Data sets fill the columns that a record lacks with nulls."""
    return columns.get(other) if columns.get(one) is None else columns[one]


def form_of(record: dict) -> tuple[Any, str | Encoded | None]:
    """``(turns, text or tokens)``, one of them None. Turns are of the first column with an exchange, else of the first
    that is filled. Raises Unusable("malformed_tokens").
    """
    columns = [record.get("conversations"), record.get("messages"), _prompted(record), _instructed(record)]
    if all(column is None or column == [] for column in columns) and (raw := _without_turns(record)) is not None:
        return None, raw
    columns += [record.get("conversation"), *_answered(record)]
    given = [column for column in columns if column is not None]
    filled = [column for column in given if column != []]
    return next((column for column in filled if _has_exchange(column)), next(iter([*filled, *given]), None)), None


def _without_turns(record: dict) -> str | Encoded | None:
    """Its tokens, else its text."""
    mask = next((record[name] for name in MASKS if record.get(name) is not None), None)
    if record.get("input_ids") is not None and mask is not None:
        return _tokens(record["input_ids"], mask, record.get("attention_mask"))
    text = record.get("text")
    return text if isinstance(text, str) else None


def _prompted(record: dict) -> list | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        return None
    return [*_turns(_asked(record, "prompt", ()), "user"), *_turns(completion, "assistant")]


def _instructed(record: dict) -> list | None:
    instruction, output = record.get("instruction"), record.get("output")
    if instruction is None or output is None:
        return None
    return [*_turns(_asked(record, "instruction", ("input",)), "user"), *_turns(output, "assistant")]


def _answered(record: dict) -> list[list]:
    """Return the turns of every question with an answer, under the names that data sets give the two."""
    pairs = []
    for asking, answering in product(QUESTIONS, ANSWERS):
        answer = record.get(answering)
        if record.get(asking) is not None and answer is not None:
            pairs.append([*_turns(_asked(record, asking, CONTEXTS), "user"), *_turns(answer, "assistant")])
    return pairs


def _asked(record: dict, first: str, contexts: tuple[str, ...]) -> Any:
    """Return a question with the record's further questions behind it, then its contexts. A further one is left out
    where one of the two texts holds the other (a prompt made of the instruction), and beside several answers.
    """
    question, answers = record[first], [record.get(name) for name in ANSWERS]
    one_answer = sum(answer not in (None, "", []) for answer in answers) == 1
    for name in QUESTIONS:
        if one_answer and name not in (first, *contexts) and not _repeats(question, record.get(name)):
            question = _with(question, record.get(name))
    for name in contexts:
        question = question if name == first else _with(question, record.get(name))
    return question


def _repeats(question: Any, other: Any) -> bool:
    """Return whether one of two texts holds the other, whatever white space is between their words."""
    one, two = (" ".join(text.split()) if isinstance(text, str) else "" for text in (question, other))
    return bool(one and two) and (one in two or two in one)


def _with(question: Any, context: Any) -> Any:
    """Return the question with its context behind it, where both are texts."""
    if not isinstance(question, str) or not isinstance(context, str) or not context.strip():
        return question
    return f"{question}\n\n{context}" if question.strip() else context


def role_of(name: Any) -> str | None:
    """Return the role that a turn's name stands for; None for a name that is not known."""
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def description(record: Any) -> str:
    """Return what a rejected record looks like: its keys and its turns' roles, or its line number."""
    if isinstance(record, BrokenLine):
        return f"line {record.number} holds no object that can be read"
    if not isinstance(record, dict):
        return f"it is no object with keys but a {type(record).__name__}"
    columns = [record.get(name) for name in ("conversations", "messages", "conversation")]
    turns = [turn for column in columns if isinstance(column, list) for turn in column if isinstance(turn, dict)]
    roles = [name for turn in turns if isinstance(name := either(turn, "from", "role"), str)]
    described = f"its keys are {_names(record)}" + (f", its roles {_names(roles)}" if roles else "")
    return described[:LONGEST_DESCRIPTION]


def _names(names: Iterable[Any]) -> str:
    """Return different names, a bounded list of bounded texts."""
    different = list(dict.fromkeys(str(name)[:LONGEST_NAME] for name in names))
    return ", ".join(map(repr, different[:SHOWN])) + (", ..." if different[SHOWN:] else "") if different else "none"


def _turns(said: Any, role: str) -> list:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _has_exchange(column: Any) -> bool:
    if not isinstance(column, list):
        return False
    roles = [role_of(either(turn, "from", "role")) if isinstance(turn, dict) else None for turn in column]
    return "user" in roles and "assistant" in roles[roles.index("user") :]


def _tokens(ids: Any, mask: Any, attended: Any) -> Encoded:
    """Whether the ids are the target's, `sequences.py` sees."""
    columns = [ids, mask] if attended is None else [ids, mask, attended]
    whole = all(isinstance(column, list) and len(column) == len(ids) > 0 for column in columns)
    if not whole or any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise Unusable("malformed_tokens")
    if any(type(flag) not in (int, bool) or flag not in (0, 1) for column in columns[1:] for flag in column):
        raise Unusable("malformed_tokens")
    kept = np.ones(len(ids), bool) if attended is None else np.asarray(attended, bool)
    return Encoded(np.asarray(ids, np.int32)[kept], np.asarray(mask, np.uint8)[kept])
