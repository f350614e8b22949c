"""Conversations <-> token ids, through the target's own chat template, and what a target thinks before it answers.

Guarantees: the loss mask marks the assistant's tokens only (the turn's closing marker included), each after exactly
what the target would have seen when it gave them, proven for every dialogue by rendering its prefixes; a dialogue whose
mask cannot be proven is refused with a reason.

Targets like Qwen3 write thoughts between <think> and </think> in front of the answer; they stay part of the turn's
content, and the template shows or hides them. In gpt-oss's format (harmony) thoughts and answer are messages of their
own: a turn's `reasoning_content` and its content.
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

# {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what templates read beside: an assistant's
# "reasoning_content" and "tool_calls", a tool's "name" and "tool_call_id"; an answer whose "loss" is False is context
Messages = list[dict[str, Any]]

OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")  # keywords by which templates turn it on and off
HARMONY = "<|channel|>"
_PART = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)

MARGIN = 256  # tokens at the end of a part of a text that may be others in the whole text
PER_TOKEN = 6  # characters: more than most have, or a part would be tokenized twice

# What the encoding of one record may cost, counted and not timed: a plan is the same on every machine. A unit is about
# a microsecond with the embedded target: a character that is tokenized; `TURN` are a turn that is rendered, and
# 1 / `CHARACTERS` a character of it.
MOST_WORK = 40_000_000
TURN, CHARACTERS = 5, 100
_work: ContextVar[list[int] | None] = ContextVar("work", default=None)  # of the record at hand: units so far

# What a template's own expressions raise for tools and calls that are built otherwise than it expects.
_UNEXPECTED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


class Unusable(Exception):
    """A dialogue that must not be trained on; ``args[0]`` is the reason it is counted under."""


@dataclass(frozen=True)
class Encoded:
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 where the token is the assistant's


@contextmanager
def bounded_work() -> Iterator[None]:
    """What encodes one record: more than `MOST_WORK` is Unusable("too_long_to_render")."""
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
    """The conversation as text; `answer_next` opens an assistant turn. Raises Unusable("template_refuses")."""
    if not messages:  # transformers renders none without a turn
        raise Unusable("template_refuses")
    _spend(TURN * len(messages))
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer_next)
    except (jinja2.TemplateError, *_UNEXPECTED) as error:
        raise Unusable("template_refuses") from error
    _spend(len(text) // CHARACTERS)
    return text


def prompt_ids(tokenizer: Any, messages: Messages, tools: list[dict] | None = None) -> list[int]:
    """Token ids of a conversation that the assistant is to continue."""
    return tokenizer(render(tokenizer, messages, True, tools), add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class _Rendering:
    """A sequence's text, and where its answers begin and end there, in characters."""

    text: str
    spans: list[tuple[int, int]]


def encode(
    tokenizer: Any,
    messages: Messages,
    max_length: int | None,
    tools: list[dict] | None = None,
    last_only: bool = False,
) -> list[Encoded]:
    """Ids and loss masks of a dialogue, each cut at `max_length` tokens (None: whole); what is cut before any answer is
    left out. `tools` go to the template, which shows them; with `last_only` only the last assistant turn is marked, of
    a dialogue that is cut the last one that begins before.

    An answer spans from the end of the rendering that asks for it to the end of the rendering that it ends, less
    trailing white space (which follows the closing marker and is never generated). The first has to be a prefix of the
    second, or else it is not what the target saw when it answered. Answers share a sequence as long as all their
    renderings are prefixes of the last one's. A template that shows earlier answers otherwise than the last one
    (without their thoughts, with another closing marker) so gives a sequence for every answer, its mask on that answer
    alone.

    Of a dialogue that is cut, answers are proven up to the first whose prompt begins with the same `max_length` tokens
    (and `MARGIN`) as the last answer's, and the last one. The prompts between begin so, too, and their answers are cut,
    with a template that shows a turn in one way as long as it is the last, and in another from then on. An answer
    between that is "template_not_prefix_stable" does not cost the dialogue.

    Raises Unusable("template_refuses" | "template_not_prefix_stable" | "no_assistant_token" | "only_assistant_tokens").
    """
    turns = _answers(messages, 0, len(messages))
    if last_only:
        turns = _begun(tokenizer, messages, turns, tools, max_length)[-1:]
    renderings = _renderings(tokenizer, messages, turns, tools, max_length)
    return _trained([_marked(tokenizer, rendering, max_length) for rendering in renderings])


def encode_fitting(
    tokenizer: Any,
    messages: Messages,
    ends: Iterable[int],
    max_length: int,
    tools: list[dict] | None = None,
    last_only: bool = False,
) -> tuple[int, list[Encoded]]:
    """Of a dialogue's beginnings, of `ends` messages each, how many fit into `max_length` tokens, up to the first that
    does not; and what `encode` gives of the longest of these (nothing where no answer has a loss). Nothing behind the
    first that does not fit is rendered.
    """
    count, start, due = 0, 0, _characters(max_length)
    renderings: list[_Rendering] = []
    sequences: list[Encoded] = []  # of these
    fitting: list[Encoded] = []
    for end in ends:
        turns, start = _answers(messages, start, end), end
        if last_only and turns:
            turns, renderings = turns[-1:], []
        sequences = sequences[: max(len(renderings) - 1, 0)]  # the last rendering may go on
        for turn in turns:
            renderings = _extended(renderings, *_proof(tokenizer, messages, turn, tools))
            if turn != turns[-1] and len(renderings[-1].text) >= due:  # many answers to one question
                due = due * 3 // 2
                if len(_tokens(tokenizer, renderings[-1].text, max_length + 1)[0]) > max_length:
                    return count, fitting
        sequences += [_marked(tokenizer, one, max_length + 1) for one in renderings[len(sequences) :]]
        if any(len(sequence.input_ids) > max_length for sequence in sequences):
            break
        count, fitting = count + 1, _trained(sequences) if sequences else []
    return count, fitting


def _answers(messages: Messages, start: int, end: int) -> list[int]:
    """The assistant's turns among those, but for turns without a loss."""
    answers = [turn for turn in range(start, end) if messages[turn]["role"] == "assistant"]
    return [turn for turn in answers if messages[turn].get("loss", True)]


def _trained(sequences: list[Encoded]) -> list[Encoded]:
    """Those with an assistant's token. Raises Unusable("no_assistant_token" | "only_assistant_tokens")."""
    answered = [encoded for encoded in sequences if encoded.loss_mask.any()]
    if not answered:
        raise Unusable("no_assistant_token")
    if any(encoded.loss_mask.all() for encoded in answered):
        raise Unusable("only_assistant_tokens")
    return answered


def _begun(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None, max_length: int | None
) -> list[int]:
    """Those of the answers `turns` whose prompts are shorter than `max_length`."""

    def is_behind(turn: int) -> bool:
        prompt = render(tokenizer, messages[:turn], True, tools)
        return len(_tokens(tokenizer, prompt, max_length)[0]) == max_length

    return turns if max_length is None else turns[: bisect_left(turns, True, key=is_behind)]


def _renderings(
    tokenizer: Any, messages: Messages, turns: list[int], tools: list[dict] | None, max_length: int | None
) -> list[_Rendering]:
    """Of the sequences in which the answers `turns` are, but for those that are cut at `max_length` before them."""
    renderings: list[_Rendering] = []
    due, last = _characters(max_length), None
    for turn in turns:
        before, through = _proof(tokenizer, messages, turn, tools)
        renderings = _extended(renderings, before, through)
        if max_length is None or len(before) < due or turn == turns[-1]:
            continue
        due = len(before) * 3 // 2  # counting costs more than rendering
        _, starts = _tokens(tokenizer, before, max_length + MARGIN)
        if len(starts) == max_length + MARGIN:
            last = last or _proof(tokenizer, messages, turns[-1], tools)
            if last[0].startswith(before[: starts[-1]]):
                break
    return renderings


def _proof(tokenizer: Any, messages: Messages, turn: int, tools: list[dict] | None) -> tuple[str, _Rendering]:
    """An answer's prompt, and the text through it. Raises Unusable where the one does not begin the other."""
    before = render(tokenizer, messages[:turn], True, tools)
    through = _as_written(before, render(tokenizer, messages[: turn + 1], False, tools), messages[turn])
    span = (len(before), len(through.rstrip()))
    if not (through.startswith(before) and span[0] < span[1]):
        raise Unusable("template_not_prefix_stable")
    return before, _Rendering(through, [span])


def _as_written(before: str, through: str, message: dict[str, Any]) -> str:
    """The text through an answer. Where its prompt opens thoughts that the template never shows (DeepSeek-R1's), they
    stand there as the target writes them.
    """
    earlier, opened, gap = before.rpartition(OPEN)
    if through.startswith(before) or not opened or gap.strip() or not through.startswith(earlier):
        return through
    answer = through[len(earlier) :].removeprefix(CLOSE)
    if OPEN in answer or CLOSE in answer:
        return through
    blank = "" if not gap or answer[:1].isspace() else "\n\n"
    return before + thoughts_of(message) + gap + CLOSE + blank + answer


def _extended(renderings: list[_Rendering], before: str, through: _Rendering) -> list[_Rendering]:
    """With another answer: in the last sequence, where its prompt goes on from there, or else in one of its own."""
    if renderings and before.startswith(renderings[-1].text[: renderings[-1].spans[-1][1]]):
        return [*renderings[:-1], _Rendering(through.text, [*renderings[-1].spans, *through.spans])]
    return [*renderings, through]


def encode_spans(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> Encoded:
    """Ids and loss mask of a text whose answers are `spans`, in characters."""
    return _marked(tokenizer, _Rendering(text, spans), None)


def _marked(tokenizer: Any, rendering: _Rendering, max_length: int | None) -> Encoded:
    """A token is the assistant's when it starts inside of a span."""
    ids, starts = _tokens(tokenizer, rendering.text, max_length)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for first, last in rendering.spans:
        mask |= ((starts >= first) & (starts < last)).astype(np.uint8)
    return Encoded(ids, mask)


def _tokens(tokenizer: Any, text: str, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a text's first `most` tokens (None: of all), and the characters where they begin. Of a long text a part is
    tokenized that has `MARGIN` tokens more: what follows changes none before these.
    """
    size, enough = len(text) if most is None else _characters(most), (most or 0) + MARGIN
    while True:
        _spend(len(text[:size]))
        encoded = tokenizer(text[:size], add_special_tokens=False, return_offsets_mapping=True)
        if size >= len(text) or len(encoded["input_ids"]) >= enough:
            break
        size *= 2
    starts = [start for start, _ in encoded["offset_mapping"][:most]]
    return np.asarray(encoded["input_ids"][:most], dtype=np.int32), np.asarray(starts)


def _characters(tokens: int | None) -> int:
    """Of a text of so many tokens and `MARGIN`, about."""
    return PER_TOKEN * ((tokens or 0) + MARGIN)


def written(tokenizer: Any, messages: Messages, tools: list[dict] | None) -> str:
    """The text through the last turn, an answer, with the thoughts that the target is shown to begin with."""
    through = render(tokenizer, messages, False, tools)
    if thoughts_of(messages[-1]) in through or not thinking(tokenizer):
        return through
    return _as_written(render(tokenizer, messages[:-1], True, tools), through, messages[-1])


# -- thoughts -----------------------------------------------------------------------------------------------------


def thinking(tokenizer: Any) -> bool | None:
    """Whether the target is asked to think before it answers; None where its template has no say in it."""
    return _thinking(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=4)
def _thinking(tokenizer: Any, template: str) -> bool | None:
    if HARMONY in template:
        return True
    for switch in SWITCHES:
        on, off = (probe(tokenizer, **{switch: value}) for value in (True, False))
        if on != off:
            return probe(tokenizer) != off
    return _begins_thoughts(tokenizer) or None


def probe(tokenizer: Any, **keywords: Any) -> str:
    """A question's rendering, by which what a template does is told; empty where it refuses it."""
    question = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **keywords)
    except (jinja2.TemplateError, *_UNEXPECTED):  # a record's keyword may be of another type than it expects
        return ""


def _begins_thoughts(tokenizer: Any) -> bool:
    """The prompt ends in the opening tag, and the answer begins inside of the thoughts."""
    return probe(tokenizer).rstrip().endswith(OPEN)


def pieces_of(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text; part of a letter adds nothing until the letter is whole."""
    texts, before = [], ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        whole = text.rstrip("\ufffd") if count < len(tokens) else text
        texts.append(whole[len(before) :])
        before = whole if len(whole) > len(before) else before
    return texts


def as_message(tokenizer: Any, answer: list[int]) -> dict[str, str]:
    """The target's answer as a turn of the dialogue, thoughts included."""
    if HARMONY not in tokenizer.chat_template:
        return {"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)}
    parts = _PART.findall(tokenizer.decode(answer, skip_special_tokens=False))
    thoughts = "\n".join(text for channel, text in parts if channel == "analysis")
    message = {"role": "assistant", "content": "".join(text for channel, text in parts if channel == "final")}
    return message | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def thoughts_of(message: dict[str, Any]) -> str:
    """The thoughts in a turn; empty where it has none."""
    before, closed, _ = message["content"].partition(CLOSE)
    inside = before.rpartition(OPEN)[2] if closed else ""
    return message.get("reasoning_content", inside).strip()


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return rest | {"content": message["content"].rpartition(CLOSE)[2].lstrip("\n")}


def cut_in_thoughts(tokenizer: Any, message: dict[str, str]) -> bool:
    """Whether an answer that was cut ends before its thoughts do."""
    content = message["content"]
    if "reasoning_content" in message:
        return not content.strip()
    return CLOSE not in content and (OPEN in content or _begins_thoughts(tokenizer))
