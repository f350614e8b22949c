"""A clean dialogue -> the token sequences that are dumped of it, by the recipe's rule for long dialogues.

cut       the first `max_length` tokens
turns     as many whole exchanges as fit; "too_long" when the first one does not
windows   several documents ID#0, ID#1, ...: each holds the system turn and as many further exchanges as fit; one
          that does not fit by itself is cut; one whose question does not fit is dropped and counted

A dialogue, or a window of it, is one sequence. Where the target's template shows earlier answers otherwise than the
last one, it is a sequence for every answer, each a document of its own ("one_sequence_per_answer"); these are as long
as their longest.

A text without turns is what the target reads before it goes on: its tokenizer's tokens (with what that puts in front),
all trained but the first, which nothing comes before. Of one with the markers of the target's template, which is a
conversation already rendered, the answers are trained. A text has no turns to cut at ("too_long"), and its windows are
of `max_length` tokens each; so are those of tokens that come with their mask.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from pipeline.lm import chat
from pipeline.lm.chat import Encoded, Messages, Unusable, thinking, thoughts_of, without_thoughts
from pipeline.lm.template import Markers, markers_of, special_tokens, with_keywords
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue

Encode = Callable[[Messages], list[Encoded]]  # `chat.encode` of one dialogue's tools and the recipe's rules
Fit = Callable[[Messages, Iterable[int]], tuple[int, list[Encoded]]]  # `chat.encode_fitting` of the same


def encode_sequences(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[tuple[str, Encoded]], list[str]]:
    """``([(document id, ids and mask), ...], edits)``. Raises Unusable, also for fewer tokens than `min_length`, and as
    "too_long_to_render" for a dialogue that takes more than `chat.MOST_WORK`.
    """
    if dialogue.raw is not None:
        sequences, edits = _encode_raw(tokenizer, dialogue.raw, data)
    else:
        with chat.bounded_work():
            sequences, edits = _encode_turns(tokenizer, dialogue, data)
    kept = [sequence for sequence in sequences if len(sequence.input_ids) >= data.min_length]
    if not kept:
        raise Unusable("too_short")
    edits, sequences = [*edits, *["window_too_short"] * (len(sequences) - len(kept))], kept
    if len(sequences) == 1:
        return [(dialogue.doc_id, sequences[0])], edits
    return [(f"{dialogue.doc_id}#{number}", sequence) for number, sequence in enumerate(sequences)], edits


def _encode_turns(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[Encoded], list[str]]:
    tokenizer, keywords = with_keywords(tokenizer, dialogue.keywords)
    messages, edits = accepted_messages(tokenizer, dialogue)
    edits = [*edits, *_without_loss(messages), *keywords_not_shown(dialogue, keywords)]
    edits = [*edits, *_tools_shown(tokenizer, messages, dialogue.tools)]
    messages, thought = _thoughts_settled(tokenizer, messages, dialogue.tools)
    rules = {"max_length": data.max_length, "tools": dialogue.tools, "last_only": data.train_turns == "last"}
    encode, fit = partial(chat.encode, tokenizer, **rules), partial(chat.encode_fitting, tokenizer, **rules)
    groups, cut = _cut(encode, fit, messages, data.long)
    apart = ["one_sequence_per_answer"] if any(len(group) > 1 for group in groups) else []
    return [sequence for group in groups for sequence in group], [*edits, *thought, *cut, *apart]


def _without_loss(messages: Messages) -> list[str]:
    """Edits. Raises Unusable("no_turn_with_loss") where no answer has one."""
    losses = [message.get("loss", True) for message in messages if message["role"] == "assistant"]
    if not any(losses):
        raise Unusable("no_turn_with_loss")
    return ["turn_without_loss"] * losses.count(False)


def keywords_not_shown(dialogue: Dialogue, keywords: dict) -> list[str]:
    """Edits, where the template reads only these of the record's keywords, or the recipe sets others."""
    return ["keywords_not_shown"] if len(keywords) < len(dialogue.keywords or {}) else []


def _cut(encode: Encode, fit: Fit, messages: Messages, long: str) -> tuple[list[list[Encoded]], list[str]]:
    """The sequences of each window (one window, where nothing is cut into several), and edits."""
    if long == "cut":
        return [encode(messages)], []
    _, whole = fit(messages, [len(messages)])
    if whole:
        return [whole], []
    if long == "turns":
        return [_first_exchanges(fit, messages)], ["cut_at_a_turn"]
    windows, dropped = _windows(encode, fit, messages)
    return windows, ["cut_into_windows", *["exchange_dropped"] * dropped]


def _tools_shown(tokenizer, messages: Messages, tools: list[dict] | None) -> list[str]:
    """Edits. Raises Unusable("template_hides_tools") where the template leaves out a call or a tool's result: the
    answer would be trained as one to something else. Of several calls, and of results in a row, one that leaves out any
    leaves out the first or the last.
    """
    first = 0  # of results in a row
    for at, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        others = [[*messages[:at], _less(message, place)] for place in {0, len(calls) - 1} if calls]
        if message["role"] != "tool":
            first = at + 1
        elif messages[at + 1 : at + 2] == [] or messages[at + 1]["role"] != "tool":
            others = [_otherwise(messages[: at + 1], place) for place in {first, at}]
        shown = chat.render(tokenizer, messages[: at + 1], False, tools) if others else None
        if any(_rendered(tokenizer, other, tools) == shown for other in others):
            raise Unusable("template_hides_tools")
    hidden = tools and _rendered(tokenizer, messages, None) == chat.render(tokenizer, messages, False, tools)
    return ["tools_not_shown"] if hidden else []


def _less(message: dict, place: int) -> dict:
    """Without one of its calls."""
    calls = [call for number, call in enumerate(message["tool_calls"]) if number != place]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | ({"tool_calls": calls} if calls else {})


def _otherwise(messages: Messages, place: int) -> Messages:
    """With another text of one turn."""
    turn = messages[place] | {"content": messages[place]["content"] + "?"}
    return [*messages[:place], turn, *messages[place + 1 :]]


def _rendered(tokenizer, messages: Messages, tools: list[dict] | None) -> str | None:
    """None where the template refuses it."""
    try:
        return chat.render(tokenizer, messages, False, tools)
    except Unusable as reason:
        if str(reason) != "template_refuses":
            raise
        return None


def _thoughts_settled(tokenizer, messages: Messages, tools: list[dict] | None) -> tuple[Messages, list[str]]:
    """Of a target that is told not to think, answers lose the thoughts that they come with. One that is to think, but
    whose answers come without, is trained on these as its template renders them: with no thoughts, or empty ones.
    Thoughts that the template does not show even of the last answer are dropped and counted, too.
    """
    thinks, edits, settled = thinking(tokenizer), [], []
    for message in messages:
        if message["role"] == "assistant":
            thoughts = thoughts_of(message)
            shown = thoughts and thinks is not False and chat.written(tokenizer, [*settled, message], tools)
            if thoughts and (not shown or thoughts not in shown):
                edits.append("thoughts_dropped")
                message = without_thoughts(message)
            elif thinks and not thoughts and message.get("loss", True):
                edits.append("answer_without_thoughts")
        settled.append(message)
    return settled, edits


def accepted_messages(tokenizer, dialogue: Dialogue) -> tuple[Messages, list[str]]:
    """``(messages, edits)``: without later system turns, or without any, where the template refuses them (Gemma's, some
    of Mistral's).
    """
    system = [message for message in dialogue.messages[:1] if message["role"] == "system"]
    rest = [message for message in dialogue.messages if message["role"] != "system"]
    if len(rest) == len(dialogue.messages):
        return rest, []
    for messages, edits in [(dialogue.messages, []), (system + rest, ["later_system_dropped"])]:
        if _rendered(tokenizer, messages, dialogue.tools) is not None:
            return messages, edits
    return rest, ["system_dropped"]


def _split(messages: Messages) -> tuple[Messages, list[int]]:
    """The system turn, if any, and where the exchanges begin: a question and its answer, with the calls and results
    between.
    """
    system, asking = messages[:1] if messages[0]["role"] == "system" else [], ("user", "system")
    roles = ["", *(message["role"] for message in messages[len(system) :])]
    begins = [at for at in range(1, len(roles)) if roles[at] in asking and roles[at - 1] not in asking]
    return system, [len(system) + at - 1 for at in begins]


def _first_exchanges(fit: Fit, messages: Messages) -> list[Encoded]:
    _, begins = _split(messages)
    _, encoded = fit(messages, [*begins[1:], len(messages)])
    if not encoded:
        raise Unusable("too_long")
    return encoded


def _windows(encode: Encode, fit: Fit, messages: Messages) -> tuple[list[list[Encoded]], int]:
    """The windows, and how many exchanges are in none: their question alone is longer than a window."""
    system, begins = _split(messages)
    ends, at = [*begins[1:], len(messages)], 0  # of the exchanges; the first of the window
    windows, dropped = [], 0
    while at < len(begins):
        before = begins[at] - len(system)  # messages of earlier windows
        count, encoded = fit(system + messages[begins[at] :], (end - before for end in ends[at:]))
        if not encoded:
            count = 1
            try:
                encoded = encode(system + messages[begins[at] : ends[at]])
            except Unusable as reason:
                if str(reason) != "no_assistant_token":
                    raise
                dropped += 1
        windows += [encoded] if encoded else []
        at += count
    if not windows:
        raise Unusable("no_assistant_token")
    return windows, dropped


# -- records without turns -------------------------------------------------------------------------------------------


def _encode_raw(tokenizer, raw: str | Encoded, data: DataConfig) -> tuple[list[Encoded], list[str]]:
    """``(sequences, edits)``. Raises Unusable("tokens_outside_vocabulary" | "no_assistant_token" |
    "only_assistant_tokens" | "too_long" | "rendered_text_not_masked").
    """
    whole, edits = _whole_of(tokenizer, raw)
    if len(whole.input_ids) <= data.max_length or data.long == "cut":
        sequences = [_part(whole, 0, data.max_length)]
    elif data.long == "turns":
        raise Unusable("too_long")
    else:
        sequences = [_part(whole, at, data.max_length) for at in range(0, len(whole.input_ids), data.max_length)]
        edits.append("cut_into_windows")
    if "rendered_text" in edits and data.train_turns == "last":
        sequences = [_last_answer(sequence) for sequence in sequences]
    trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
    if not trained:
        raise Unusable("no_assistant_token")
    return trained, [*edits, *["window_without_answer"] * (len(sequences) - len(trained))]


def _whole_of(tokenizer, raw: str | Encoded) -> tuple[Encoded, list[str]]:
    """``(ids and mask, edits)``."""
    if isinstance(raw, str):
        if (markers := markers_of(tokenizer)) and markers.are_in(raw):
            return _of_rendered(tokenizer, raw, markers), ["text", "rendered_text"]
        ids, begin = tokenizer(raw)["input_ids"], tokenizer.bos_token_id
        ids = np.asarray(ids[1:] if ids[:2] == [begin, begin] else ids, np.int32)  # the text had brought its own
        return Encoded(ids, np.ones(len(ids), np.uint8)), ["text"]
    if len(raw.input_ids) and raw.input_ids.max() >= len(tokenizer):
        raise Unusable("tokens_outside_vocabulary")
    if len(raw.loss_mask) and raw.loss_mask.all():
        raise Unusable("only_assistant_tokens")
    return raw, ["tokens"]


def _of_rendered(tokenizer, text: str, markers: Markers) -> Encoded:
    """A conversation that the target's template has rendered: its answers are trained. Raises
    Unusable("rendered_text_not_masked") where the markers do not show them, or where one holds a token of theirs in
    front of its end: a call that ends otherwise, with the tool's result behind it (Llama's <|eom_id|>).
    """
    text = text if text.lstrip().startswith(markers.begin) else markers.begin + text
    spans = markers.answers(text) if markers.end else None
    answers = [text[first:last].removesuffix(markers.end) for first, last in spans or ()]
    others = special_tokens(tokenizer, markers)
    if spans is None or any(markers.are_in(said) or any(token in said for token in others) for said in answers):
        raise Unusable("rendered_text_not_masked")
    return chat.encode_spans(tokenizer, text, spans)


def _last_answer(sequence: Encoded) -> Encoded:
    """The last run of the mask alone."""
    mask = sequence.loss_mask.copy()
    begins = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    mask[: begins[-1] if len(begins) else 0] = 0
    return Encoded(sequence.input_ids, mask)


def _part(whole: Encoded, at: int, length: int) -> Encoded:
    """Nothing comes before a part's first token, so nothing is trained on it."""
    ids, mask = whole.input_ids[at : at + length], whole.loss_mask[at : at + length].copy()
    mask[:1] = 0
    return Encoded(ids, mask)
