"""The forms of a record: the columns of its turns, or, without turns, of its text or its tokens.

    conversations, messages         turns; the column with an exchange wins over an empty one or a stub
    prompt, completion              a question and its answer, or two lists of turns
    instruction, input, output      a question (followed by the input, if any) and its answer
    conversation                    turns
    QUESTIONS, ANSWERS              the same under other names; the question is followed by the record's further
                                    QUESTIONS and the CONTEXTS
    input_ids, loss_mask            tokens of the target and the mask of trained ones; the mask may be called
                                    assistant_masks; positions where attention_mask is 0 are left out
    text                            a text without turns, trained from its second token on

The first of these that a record holds is taken, but tokens and a text take precedence over the two rows before them;
`dialogues.py` checks its turns. Upper and lower case of a role's name are equal.
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
MAX_SHOWN_NAMES, LONGEST_NAME = 8, 40  # keys and roles that a message names; characters of each
LONGEST_DESCRIPTION = 2000  # characters; `schema.Accounting` has the same limit


class BrokenLine(str):
    """The first characters of a line that holds no record, and its number."""

    number: int

    def __new__(cls, text: str, number: int) -> "BrokenLine":
        line = super().__new__(cls, text)
        line.number = number
        return line


def first_present(columns: dict, first: str, second: str) -> Any:
    """Return the first of two columns that is not null: data sets fill missing columns with nulls."""
    return columns.get(second) if columns.get(first) is None else columns[first]


def form_of(record: dict) -> tuple[Any, str | Encoded | None]:
    """Return ``(turns, text or tokens)``, one of them None. Turns come from the first column with an exchange, else
    from the first that is filled. Raise Unusable("malformed_tokens").
    """
    columns = [record.get("conversations"), record.get("messages"), _prompt_turns(record), _instruction_turns(record)]
    if all(column is None or column == [] for column in columns) and (raw := _without_turns(record)) is not None:
        return None, raw
    columns += [record.get("conversation"), *_question_turns(record)]
    present = [column for column in columns if column is not None]
    filled = [column for column in present if column != []]
    return next((column for column in filled if _has_exchange(column)), next(iter([*filled, *present]), None)), None


def _without_turns(record: dict) -> str | Encoded | None:
    """Return a record's tokens, or else its text."""
    mask = next((record[name] for name in MASKS if record.get(name) is not None), None)
    if record.get("input_ids") is not None and mask is not None:
        return _parse_tokens(record["input_ids"], mask, record.get("attention_mask"))
    text = record.get("text")
    return text if isinstance(text, str) else None


def _prompt_turns(record: dict) -> list | None:
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        return None
    return [*_turns(_join_questions(record, "prompt", ()), "user"), *_turns(completion, "assistant")]


def _instruction_turns(record: dict) -> list | None:
    instruction, output = record.get("instruction"), record.get("output")
    if instruction is None or output is None:
        return None
    return [*_turns(_join_questions(record, "instruction", ("input",)), "user"), *_turns(output, "assistant")]


def _question_turns(record: dict) -> list[list]:
    """Return the turns of every question with an answer, under the column names of QUESTIONS and ANSWERS."""
    pairs = []
    for asking, answering in product(QUESTIONS, ANSWERS):
        answer = record.get(answering)
        if record.get(asking) is not None and answer is not None:
            pairs.append([*_turns(_join_questions(record, asking, CONTEXTS), "user"), *_turns(answer, "assistant")])
    return pairs


def _join_questions(record: dict, first: str, contexts: tuple[str, ...]) -> Any:
    """Return a question followed by the record's further questions, then its contexts. A further question is left out
    where one of the two texts contains the other (a prompt made of the instruction), and where there are several
    answers.
    """
    question, answers = record[first], [record.get(name) for name in ANSWERS]
    one_answer = sum(answer not in (None, "", []) for answer in answers) == 1
    for name in QUESTIONS:
        if one_answer and name not in (first, *contexts) and not _overlaps(question, record.get(name)):
            question = _append_context(question, record.get(name))
    for name in contexts:
        question = question if name == first else _append_context(question, record.get(name))
    return question


def _overlaps(question: Any, context: Any) -> bool:
    """Return whether one of two texts contains the other, whatever white space is between their words."""
    first, second = (" ".join(text.split()) if isinstance(text, str) else "" for text in (question, context))
    return bool(first and second) and (first in second or second in first)


def _append_context(question: Any, context: Any) -> Any:
    """Return the question followed by its context, where both are texts."""
    if not isinstance(question, str) or not isinstance(context, str) or not context.strip():
        return question
    return f"{question}\n\n{context}" if question.strip() else context


def role_of(name: Any) -> str | None:
    """Return the role of a turn's role name; None for an unknown name."""
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def describe_record(record: Any) -> str:
    """Describe a rejected record: its keys and its turns' roles, or its line number."""
    if isinstance(record, BrokenLine):
        return f"line {record.number} holds no object that can be read"
    if not isinstance(record, dict):
        return f"it is no object with keys but a {type(record).__name__}"
    columns = [record.get(name) for name in ("conversations", "messages", "conversation")]
    turns = [turn for column in columns if isinstance(column, list) for turn in column if isinstance(turn, dict)]
    roles = [name for turn in turns if isinstance(name := first_present(turn, "from", "role"), str)]
    described = f"its keys are {_names(record)}" + (f", its roles {_names(roles)}" if roles else "")
    return described[:LONGEST_DESCRIPTION]


def _names(names: Iterable[Any]) -> str:
    """Format the distinct names: a bounded list of bounded texts."""
    different = list(dict.fromkeys(str(name)[:LONGEST_NAME] for name in names))
    more = ", ..." if different[MAX_SHOWN_NAMES:] else ""
    return ", ".join(map(repr, different[:MAX_SHOWN_NAMES])) + more if different else "none"


def _turns(content: Any, role: str) -> list:
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def _has_exchange(column: Any) -> bool:
    if not isinstance(column, list):
        return False
    roles = [role_of(first_present(turn, "from", "role")) if isinstance(turn, dict) else None for turn in column]
    return "user" in roles and "assistant" in roles[roles.index("user") :]


def _parse_tokens(ids: Any, mask: Any, attended: Any) -> Encoded:
    """Return a record's tokens and mask. Raise Unusable("malformed_tokens"). `sequences.py` checks the vocabulary."""
    columns = [ids, mask] if attended is None else [ids, mask, attended]
    is_valid = all(isinstance(column, list) and len(column) == len(ids) > 0 for column in columns)
    if not is_valid or any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise Unusable("malformed_tokens")
    if any(type(flag) not in (int, bool) or flag not in (0, 1) for column in columns[1:] for flag in column):
        raise Unusable("malformed_tokens")
    attended_mask = np.ones(len(ids), bool) if attended is None else np.asarray(attended, bool)
    return Encoded(np.asarray(ids, np.int32)[attended_mask], np.asarray(mask, np.uint8)[attended_mask])
