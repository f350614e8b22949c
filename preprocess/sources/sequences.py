"""A clean dialogue -> the token sequences that are dumped of it, by the recipe's rule for long dialogues.

cut       the first `max_length` tokens
turns     as many whole exchanges as fit; "too_long" when the first one does not
windows   several documents ID#0, ID#1, ...: each holds the system turn and as many further exchanges as fit; an
          exchange that does not fit by itself is cut; one whose question does not fit is dropped and counted

A dialogue, or a window of it, is one sequence. Where the target's template renders earlier answers differently from the
last one, there is a sequence for every answer, each a document of its own ("one_sequence_per_answer"); the length of
these is that of their longest.

A text without turns is encoded by the target's tokenizer (with the tokens that it puts in front). All tokens are
trained except the first, which has no context. A text with the markers of the target's template is a rendered
conversation: only its answers are trained. A text has no turns to cut at ("too_long"), and its windows have
`max_length` tokens each; so have those of records that hold tokens and a mask.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from pipeline.lm import chat
from pipeline.lm.chat import Encoded, Messages, Unusable, extract_thoughts, is_thinking, remove_thoughts
from pipeline.lm.template import Markers, bind_keywords, find_markers, special_tokens
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue

Encode = Callable[[Messages], list[Encoded]]  # `chat.encode` of one dialogue's tools and the recipe's rules
Fit = Callable[[Messages, Iterable[int]], tuple[int, list[Encoded]]]  # `chat.encode_fitting` of the same


def encode_sequences(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[tuple[str, Encoded]], list[str]]:
    """Return ``([(document id, ids and mask), ...], edits)``. Raise Unusable, also for fewer tokens than `min_length`,
    and as "too_long_to_render" for a dialogue that takes more than `chat.MOST_WORK`.
    """
    if dialogue.raw is not None:
        sequences, edits = _encode_raw(tokenizer, dialogue.raw, data)
    else:
        with chat.bounded_work():
            sequences, edits = _encode_turns(tokenizer, dialogue, data)
    long_enough = [sequence for sequence in sequences if len(sequence.input_ids) >= data.min_length]
    if not long_enough:
        raise Unusable("too_short")
    edits, sequences = [*edits, *["window_too_short"] * (len(sequences) - len(long_enough))], long_enough
    if len(sequences) == 1:
        return [(dialogue.doc_id, sequences[0])], edits
    return [(f"{dialogue.doc_id}#{number}", sequence) for number, sequence in enumerate(sequences)], edits


def _encode_turns(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[Encoded], list[str]]:
    tokenizer, keywords = bind_keywords(tokenizer, dialogue.keywords)
    messages, edits = accepted_messages(tokenizer, dialogue)
    edits = [*edits, *_check_losses(messages), *keywords_not_shown(dialogue, keywords)]
    edits = [*edits, *_check_tools(tokenizer, messages, dialogue.tools)]
    messages, thought = _settle_thoughts(tokenizer, messages, dialogue.tools)
    rules = {"max_length": data.max_length, "tools": dialogue.tools, "last_only": data.train_turns == "last"}
    encode, fit = partial(chat.encode, tokenizer, **rules), partial(chat.encode_fitting, tokenizer, **rules)
    groups, cut = _fit_sequences(encode, fit, messages, data.long)
    split_edits = ["one_sequence_per_answer"] if any(len(group) > 1 for group in groups) else []
    return [sequence for group in groups for sequence in group], [*edits, *thought, *cut, *split_edits]


def _check_losses(messages: Messages) -> list[str]:
    """Return edits. Raise Unusable("no_turn_with_loss") where no answer has a loss."""
    losses = [message.get("loss", True) for message in messages if message["role"] == "assistant"]
    if not any(losses):
        raise Unusable("no_turn_with_loss")
    return ["turn_without_loss"] * losses.count(False)


def keywords_not_shown(dialogue: Dialogue, keywords: dict) -> list[str]:
    """Return edits. `keywords` are those of the record that the template reads and the recipe does not set."""
    return ["keywords_not_shown"] if len(keywords) < len(dialogue.keywords or {}) else []


def _fit_sequences(encode: Encode, fit: Fit, messages: Messages, long: str) -> tuple[list[list[Encoded]], list[str]]:
    """Return the sequences of each window (one window, unless the dialogue is cut into several), and edits."""
    if long == "cut":
        return [encode(messages)], []
    _, encoded = fit(messages, [len(messages)])
    if encoded:
        return [encoded], []
    if long == "turns":
        return [_first_exchanges(fit, messages)], ["cut_at_a_turn"]
    windows, dropped = _windows(encode, fit, messages)
    return windows, ["cut_into_windows", *["exchange_dropped"] * dropped]


def _check_tools(tokenizer, messages: Messages, tools: list[dict] | None) -> list[str]:
    """Return edits. Raise Unusable("template_hides_tools") where the template leaves out a call or a tool's result: the
    answer would be trained after another context. Only the first and the last of several calls, and of results in a
    row, are tested: a template that leaves out any leaves out one of these.
    """
    first = 0  # of tool results in a row
    for at, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        variants = [[*messages[:at], _without_call(message, place)] for place in {0, len(calls) - 1} if calls]
        if message["role"] != "tool":
            first = at + 1
        elif messages[at + 1 : at + 2] == [] or messages[at + 1]["role"] != "tool":
            variants = [_with_changed_text(messages[: at + 1], place) for place in {first, at}]
        shown = chat.render(tokenizer, messages[: at + 1], False, tools) if variants else None
        if any(_try_render(tokenizer, variant, tools) == shown for variant in variants):
            raise Unusable("template_hides_tools")
    hidden = tools and _try_render(tokenizer, messages, None) == chat.render(tokenizer, messages, False, tools)
    return ["tools_not_shown"] if hidden else []


def _without_call(message: dict, place: int) -> dict:
    """Return the message without one of its calls."""
    calls = [call for number, call in enumerate(message["tool_calls"]) if number != place]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | ({"tool_calls": calls} if calls else {})


def _with_changed_text(messages: Messages, place: int) -> Messages:
    """Return the messages with another text in one turn."""
    turn = messages[place] | {"content": messages[place]["content"] + "?"}
    return [*messages[:place], turn, *messages[place + 1 :]]


def _try_render(tokenizer, messages: Messages, tools: list[dict] | None) -> str | None:
    """Return the rendered messages; None where the template refuses them."""
    try:
        return chat.render(tokenizer, messages, False, tools)
    except Unusable as reason:
        if str(reason) != "template_refuses":
            raise
        return None


def _settle_thoughts(tokenizer, messages: Messages, tools: list[dict] | None) -> tuple[Messages, list[str]]:
    """Return the messages with the thoughts that the template shows, and edits. For a target set not to think, thoughts
    are dropped from the answers. For a target set to think, answers without thoughts are trained as its template
    renders them: with no thoughts, or empty ones. Thoughts that the template does not show even in the last answer are
    dropped and counted, too.
    """
    thinks, edits, accepted = is_thinking(tokenizer), [], []
    for message in messages:
        if message["role"] == "assistant":
            thoughts = extract_thoughts(message)
            shown = thoughts and thinks is not False and chat.render_written(tokenizer, [*accepted, message], tools)
            if thoughts and (not shown or thoughts not in shown):
                edits.append("thoughts_dropped")
                message = remove_thoughts(message)
            elif thinks and not thoughts and message.get("loss", True):
                edits.append("answer_without_thoughts")
        accepted.append(message)
    return accepted, edits


def accepted_messages(tokenizer, dialogue: Dialogue) -> tuple[Messages, list[str]]:
    """Return ``(messages, edits)``: without later system turns, or without any, where the template refuses them
    (Gemma's, some of Mistral's).
    """
    system = [message for message in dialogue.messages[:1] if message["role"] == "system"]
    rest = [message for message in dialogue.messages if message["role"] != "system"]
    if len(rest) == len(dialogue.messages):
        return rest, []
    for messages, edits in [(dialogue.messages, []), (system + rest, ["later_system_dropped"])]:
        if _try_render(tokenizer, messages, dialogue.tools) is not None:
            return messages, edits
    return rest, ["system_dropped"]


def _split(messages: Messages) -> tuple[Messages, list[int]]:
    """Return the system turn, if any, and the indices at which exchanges begin: a question and its answer, with the
    calls and results between.
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
    """Return the windows, and the number of dropped exchanges: their question alone is longer than a window."""
    system, begins = _split(messages)
    exchange_ends, at = [*begins[1:], len(messages)], 0  # ends of the exchanges; the window's first exchange
    windows, dropped = [], 0
    while at < len(begins):
        before = begins[at] - len(system)  # messages of earlier windows
        count, encoded = fit(system + messages[begins[at] :], (end - before for end in exchange_ends[at:]))
        if not encoded:
            count = 1
            try:
                encoded = encode(system + messages[begins[at] : exchange_ends[at]])
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
    """Return ``(sequences, edits)``. Raise Unusable("tokens_outside_vocabulary" | "no_assistant_token" |
    "only_assistant_tokens" | "too_long" | "rendered_text_not_masked").
    """
    encoded, edits = _encode_whole(tokenizer, raw)
    if len(encoded.input_ids) <= data.max_length or data.long == "cut":
        sequences = [_part(encoded, 0, data.max_length)]
    elif data.long == "turns":
        raise Unusable("too_long")
    else:
        sequences = [_part(encoded, at, data.max_length) for at in range(0, len(encoded.input_ids), data.max_length)]
        edits.append("cut_into_windows")
    if "rendered_text" in edits and data.train_turns == "last":
        sequences = [_last_answer(sequence) for sequence in sequences]
    trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
    if not trained:
        raise Unusable("no_assistant_token")
    return trained, [*edits, *["window_without_answer"] * (len(sequences) - len(trained))]


def _encode_whole(tokenizer, raw: str | Encoded) -> tuple[Encoded, list[str]]:
    """Return ``(ids and mask, edits)`` of a record without turns, before it is cut."""
    if isinstance(raw, str):
        if (markers := find_markers(tokenizer)) and markers.occur_in(raw):
            return _encode_rendered(tokenizer, raw, markers), ["text", "rendered_text"]
        ids, begin = tokenizer(raw)["input_ids"], tokenizer.bos_token_id
        ids = np.asarray(ids[1:] if ids[:2] == [begin, begin] else ids, np.int32)  # the text had a BOS of its own
        return Encoded(ids, np.ones(len(ids), np.uint8)), ["text"]
    if len(raw.input_ids) and raw.input_ids.max() >= len(tokenizer):
        raise Unusable("tokens_outside_vocabulary")
    if len(raw.loss_mask) and raw.loss_mask.all():
        raise Unusable("only_assistant_tokens")
    return raw, ["tokens"]


def _encode_rendered(tokenizer, text: str, markers: Markers) -> Encoded:
    """Encode a conversation that the target's template has rendered: its answers are trained. Raise
    Unusable("rendered_text_not_masked") where the markers do not delimit them, or where an answer holds another special
    token before its end: a call with another end, followed by the tool's result (Llama's <|eom_id|>).
    """
    text = text if text.lstrip().startswith(markers.begin) else markers.begin + text
    spans = markers.answers(text) if markers.end else None
    answers = [text[first:last].removesuffix(markers.end) for first, last in spans or ()]
    other_tokens = special_tokens(tokenizer, markers)
    if spans is None or any(
        markers.occur_in(answer) or any(token in answer for token in other_tokens) for answer in answers
    ):
        raise Unusable("rendered_text_not_masked")
    return chat.encode_spans(tokenizer, text, spans)


def _last_answer(sequence: Encoded) -> Encoded:
    """Return the sequence with only the last run of its mask."""
    mask = sequence.loss_mask.copy()
    begins = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    mask[: begins[-1] if len(begins) else 0] = 0
    return Encoded(sequence.input_ids, mask)


def _part(encoded: Encoded, at: int, length: int) -> Encoded:
    """Return a part of a sequence. Its first token has no context, so it is not trained."""
    ids, mask = encoded.input_ids[at : at + length], encoded.loss_mask[at : at + length].copy()
    mask[:1] = 0
    return Encoded(ids, mask)
