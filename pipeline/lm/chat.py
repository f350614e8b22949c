"""Convert conversations to token ids and back, by the target's own chat template, and find the target's reasoning.

Guarantees: the loss mask marks the assistant's tokens only (the turn's closing marker included), each after exactly the
text that the target would have seen when it generated them, proven for every dialogue by rendering its prefixes; a
dialogue whose mask cannot be proven is refused with a reason.

Targets like Qwen3 write their reasoning ("thoughts") between <think> and </think> before the answer; it stays part of
the turn's content, and the template shows or hides it. In gpt-oss's format (harmony) thoughts and answer are separate
messages: a turn's `reasoning_content` and its content.
"""

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np

from pipeline.basics.errors import PipelineError

# {"role": "system" | "user" | "assistant" | "tool", "content": text}, and further keys of templates: an assistant's
# "reasoning_content" and "tool_calls", a tool's "name" and "tool_call_id"; an answer whose "loss" is False is context
Messages = list[dict[str, Any]]

OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")  # keywords by which templates turn thoughts on and off
HARMONY = "<|channel|>"
_PART = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)

MARGIN = 256  # tokens at the end of a part of a text that may differ in the complete text
PER_TOKEN = 6  # characters: more than most tokens have, so that a part is rarely tokenized twice

# The bound on the cost of encoding one record; it is counted and not timed, so a plan is the same on every machine. A
# unit is about a microsecond with the embedded target: one character tokenized. Rendering a turn costs `TURN` units,
# and 1 / `CHARACTERS` for each of its characters.
MOST_WORK = 40_000_000
TURN, CHARACTERS = 5, 100
_work: ContextVar[list[int] | None] = ContextVar("work", default=None)  # units spent on the current record

# Errors that a template's own expressions raise for tools and calls of an unexpected structure.
_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


class Unusable(Exception):
    """An error for a dialogue that must not be trained on; ``args[0]`` is the reason it is counted under."""


@dataclass(frozen=True)
class Encoded:
    """The token ids and loss mask of one training sequence."""

    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 where the token is the assistant's


@contextmanager
def bounded_work() -> Iterator[None]:
    """Bound the work of encoding one record: more than `MOST_WORK` units raise Unusable("too_long_to_render")."""
    token = _work.set([0])
    try:
        yield
    finally:
        _work.reset(token)


def _spend(units: int) -> None:
    if (work := _work.get()) is not None:
        work[0] += units
        if work[0] > MOST_WORK:
            raise Unusable("too_long_to_render")


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
    state += "split_special_tokens" if tokenizer.split_special_tokens else ""  # outside of the backend
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def render(tokenizer: Any, messages: Messages, answer_next: bool, tools: list[dict] | None = None) -> str:
    """Render the conversation as text; `answer_next` opens an assistant turn. Raise Unusable("template_refuses")."""
    if not messages:  # transformers cannot render a conversation without a turn
        raise Unusable("template_refuses")
    _spend(TURN * len(messages))
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer_next)
    except (jinja2.TemplateError, *_UNEXPECTED) as error:
        raise Unusable("template_refuses") from error
    _spend(len(text) // CHARACTERS)
    return text


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[dict] | None = None) -> list[int]:
    """Return the token ids of a conversation that the assistant is to continue."""
    return tokenizer(render(tokenizer, messages, True, tools), add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class _Rendering:
    """A sequence's text, and where its answers begin and end in it, in characters."""

    text: str
    spans: list[tuple[int, int]]


def encode(
    tokenizer: Any,
    messages: Messages,
    max_length: int | None,
    tools: list[dict] | None = None,
    last_only: bool = False,
) -> list[Encoded]:
    """Encode a dialogue as ids and loss masks, each cut at `max_length` tokens (None: not cut); sequences that are cut
    before any answer are left out. `tools` go to the template, which shows them; with `last_only` only the last
    assistant turn is marked, in a dialogue that is cut the last one that begins before the cut.

    An answer spans from the end of the rendering that asks for it to the end of the rendering that it ends, less
    trailing white space (which follows the closing marker and is never generated). The first has to be a prefix of the
    second; otherwise it is not the text that the target saw when it answered. Answers share a sequence as long as all
    their renderings are prefixes of the last one's. So a template that shows earlier answers differently from the last
    one (without their thoughts, with another closing marker) gives a sequence for every answer, its mask on that answer
    alone.

    In a dialogue that is cut, answers are proven up to the first whose prompt begins with the same `max_length` tokens
    (and `MARGIN`) as the last answer's, and the last one. The prompts in between begin with them, too, and their
    answers are cut, if the template shows a turn in one way while it is the last, and in another afterwards. An answer
    in between that is "template_not_prefix_stable" does not make the dialogue unusable.

    Raise Unusable("template_refuses" | "template_not_prefix_stable" | "no_assistant_token" | "only_assistant_tokens").
    """
    turns = _answers(messages, 0, len(messages))
    if last_only:
        turns = _begins_before_cut(tokenizer, messages, turns, tools, max_length)[-1:]
    renderings = _renderings(tokenizer, messages, turns, tools, max_length)
    return _require_trained([_mark(tokenizer, rendering, max_length) for rendering in renderings])


def encode_fitting(
    tokenizer: Any,
    messages: Messages,
    lengths: Iterable[int],
    max_length: int,
    tools: list[dict] | None = None,
    last_only: bool = False,
) -> tuple[int, list[Encoded]]:
    """Return the number of a dialogue's beginnings, of `ends` messages each, that fit into `max_length` tokens, up to
    the first that does not; and what `encode` returns for the longest of these (nothing where no answer has a loss).
    Nothing after the first that does not fit is rendered.
    """
    count, start, check_length = 0, 0, _characters(max_length)
    renderings: list[_Rendering] = []
    sequences: list[Encoded] = []  # of `renderings`
    fitting: list[Encoded] = []
    for length in lengths:
        turns, start = _answers(messages, start, length), length
        if last_only and turns:
            turns, renderings = turns[-1:], []
        sequences = sequences[: max(len(renderings) - 1, 0)]  # the last rendering may go on
        for turn in turns:
            renderings = _extend(renderings, *_prove(tokenizer, messages, turn, tools))
            if turn != turns[-1] and len(renderings[-1].text) >= check_length:  # there are many answers to one question
                check_length = check_length * 3 // 2
                if len(_tokenize(tokenizer, renderings[-1].text, max_length + 1)[0]) > max_length:
                    return count, fitting
        sequences += [_mark(tokenizer, rendering, max_length + 1) for rendering in renderings[len(sequences) :]]
        if any(len(sequence.input_ids) > max_length for sequence in sequences):
            break
        count, fitting = count + 1, _require_trained(sequences) if sequences else []
    return count, fitting


def _answers(messages: Messages, start: int, end: int) -> list[int]:
    """Return the assistant's turns in that range, except for turns without a loss."""
    answers = [turn for turn in range(start, end) if messages[turn]["role"] == "assistant"]
    return [turn for turn in answers if messages[turn].get("loss", True)]


def _require_trained(sequences: list[Encoded]) -> list[Encoded]:
    """Return the sequences with an assistant's token. Raise Unusable("no_assistant_token" |
    "only_assistant_tokens").
    """
    answered = [encoded for encoded in sequences if encoded.loss_mask.any()]
    if not answered:
        raise Unusable("no_assistant_token")
    if any(encoded.loss_mask.all() for encoded in answered):
        raise Unusable("only_assistant_tokens")
    return answered


def _begins_before_cut(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None, max_length: int | None
) -> list[int]:
    """Return those of the answers `turns` whose prompts are shorter than `max_length`."""

    def is_after_cut(turn: int) -> bool:
        prompt = render(tokenizer, messages[:turn], True, tools)
        return len(_tokenize(tokenizer, prompt, max_length)[0]) == max_length

    return turns if max_length is None else turns[: bisect_left(turns, True, key=is_after_cut)]


def _renderings(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None, max_length: int | None
) -> list[_Rendering]:
    """Render the sequences that hold the answers `turns`, except for those that are cut at `max_length` before them."""
    renderings: list[_Rendering] = []
    due, last = _characters(max_length), None
    for turn in turns:
        before, through = _prove(tokenizer, messages, turn, tools)
        renderings = _extend(renderings, before, through)
        if max_length is None or len(before) < due or turn == turns[-1]:
            continue
        due = len(before) * 3 // 2  # counting costs more than rendering
        _, starts = _tokenize(tokenizer, before, max_length + MARGIN)
        if len(starts) == max_length + MARGIN:
            last = last or _prove(tokenizer, messages, turns[-1], tools)
            if last[0].startswith(before[: starts[-1]]):
                break
    return renderings


def _prove(tokenizer: Any, messages: Messages, turn: int, tools: list[dict] | None) -> tuple[str, _Rendering]:
    """Return an answer's prompt, and the text up to its end. Raise Unusable where the text does not begin with the
    prompt.
    """
    before = render(tokenizer, messages[:turn], True, tools)
    through = _as_written(before, render(tokenizer, messages[: turn + 1], False, tools), messages[turn])
    span = (len(before), len(through.rstrip()))
    if not (through.startswith(before) and span[0] < span[1]):
        raise Unusable("template_not_prefix_stable")
    return before, _Rendering(through, [span])


def _as_written(before: str, through: str, message: dict[str, Any]) -> str:
    """Return the text up to the end of an answer. Where its prompt opens thoughts that the template never shows
    (DeepSeek-R1's), they are inserted as the target writes them.
    """
    earlier, opened, gap = before.rpartition(OPEN)
    if through.startswith(before) or not opened or gap.strip() or not through.startswith(earlier):
        return through
    answer = through[len(earlier) :].removeprefix(CLOSE)
    if OPEN in answer or CLOSE in answer:
        return through
    blank = "" if not gap or answer[:1].isspace() else "\n\n"
    return before + extract_thoughts(message) + gap + CLOSE + blank + answer


def _extend(renderings: list[_Rendering], before: str, through: _Rendering) -> list[_Rendering]:
    """Add another answer: to the last sequence, where its prompt continues that, or else in a new one."""
    if renderings and before.startswith(renderings[-1].text[: renderings[-1].spans[-1][1]]):
        return [*renderings[:-1], _Rendering(through.text, [*renderings[-1].spans, *through.spans])]
    return [*renderings, through]


def encode_spans(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Encoded:
    """Return ids and loss mask of a text whose answers are `spans`, in characters."""
    return _mark(tokenizer, _Rendering(text, spans), None)


def _mark(tokenizer: Any, rendering: _Rendering, max_length: int | None) -> Encoded:
    """Return the sequence with its loss mask: a token is the assistant's when it starts inside a span."""
    ids, starts = _tokenize(tokenizer, rendering.text, max_length)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, last in rendering.spans:
        mask |= ((starts >= first) & (starts < last)).astype(np.uint8)
    return Encoded(ids, mask)


def _tokenize(tokenizer: Any, text: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a text's first `most` tokens (None: all), and the characters where they begin. For a long text
    a part is tokenized that has `MARGIN` tokens more: the rest of the text changes none before these.
    """
    size, required = len(text) if limit is None else _characters(limit), (limit or 0) + MARGIN
    while True:
        _spend(len(text[:size]))
        encoded = tokenizer(text[:size], add_special_tokens=False, return_offsets_mapping=True)
        if size >= len(text) or len(encoded["input_ids"]) >= required:
            break
        size *= 2
    starts = [start for start, _ in encoded["offset_mapping"][:limit]]
    return np.asarray(encoded["input_ids"][:limit], dtype=np.int32), np.asarray(starts)


def _characters(tokens: int | None) -> int:
    """Return the approximate length of a text of this number of tokens and `MARGIN`."""
    return PER_TOKEN * ((tokens or 0) + MARGIN)


def render_written(tokenizer: Any, messages: Messages, tools: list[dict] | None) -> str:
    """Return the text up to the end of the last turn, an answer, with the thoughts that the target is shown to begin
    with.
    """
    through = render(tokenizer, messages, False, tools)
    if extract_thoughts(messages[-1]) in through or not is_thinking(tokenizer):
        return through
    return _as_written(render(tokenizer, messages[:-1], True, tools), through, messages[-1])


# -- thoughts -----------------------------------------------------------------------------------------------------


def is_thinking(tokenizer: Any) -> bool | None:
    """Return whether the target is asked to think before it answers; None where its template does not control that."""
    return _thinking(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=4)
def _thinking(tokenizer: Any, template: str) -> bool | None:
    if HARMONY in template:
        return True
    for switch in SWITCHES:
        on, off = (render_probe(tokenizer, **{switch: value}) for value in (True, False))
        if on != off:
            return render_probe(tokenizer) != off
    return _begins_thoughts(tokenizer) or None


def render_probe(tokenizer: Any, **keywords: Any) -> str:
    """Render one question, to find out what a template does; empty where the template refuses it."""
    question = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **keywords)
    except (jinja2.TemplateError, *_UNEXPECTED):  # a record's keyword may be of another type than it expects
        return ""


def _begins_thoughts(tokenizer: Any) -> bool:
    """Return whether the prompt ends in the opening tag, so that the answer begins inside the thoughts."""
    return render_probe(tokenizer).rstrip().endswith(OPEN)


def token_texts(tokenizer: Any, tokens: list[int]) -> list[str]:
    """Return the text that each token adds; part of a letter adds nothing until the letter is complete."""
    texts, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        complete = text.rstrip("\ufffd") if count < len(tokens) else text
        texts.append(complete[len(before) :])
        before = complete if len(complete) > len(before) else before
    return texts


def parse_answer(tokenizer: Any, answer: list[int]) -> dict[str, str]:
    """Return the target's answer as a turn of the dialogue, thoughts included."""
    if HARMONY not in tokenizer.chat_template:
        return {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    parts = _PART.findall(tokenizer.decode(answer, skip_special_tokens=False))
    thoughts = "\n".join(text for channel, text in parts if channel == "analysis")
    message = {"role": "assistant", "content": "".join(text for channel, text in parts if channel == "final")}
    return message | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def extract_thoughts(message: dict[str, Any]) -> str:
    """Return the thoughts in a turn; empty where it has none."""
    before, closed, _ = message["content"].partition(CLOSE)
    inside = before.rpartition(OPEN)[2] if closed else ""
    return message.get("reasoning_content", inside).strip()


def remove_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the turn without its thoughts."""
    kept_keys = {key: value for key, value in message.items() if key != "reasoning_content"}
    return kept_keys | {"content": message["content"].rpartition(CLOSE)[2].lstrip("\n")}


def is_cut_in_thoughts(tokenizer: Any, message: dict[str, str]) -> bool:
    """Return whether a truncated answer ends before its thoughts do."""
    content = message["content"]
    if "reasoning_content" in message:
        return not content.strip()
    return CLOSE not in content and (OPEN in content or _begins_thoughts(tokenizer))
