"""A clean dialogue -> the token sequences that are dumped of it, by the recipe's rule for long dialogues.

cut       the first `max_length` tokens
turns     as many whole exchanges as fit; "too_long" when the first one does not
windows   several documents ID#0, ID#1, ...: each holds the system turn and as many further exchanges as fit; an
exchange
          that does not fit by itself is cut; one whose question does not fit is dropped and counted

A dialogue, or a window of it, is one sequence. Where the target's template shows earlier answers otherwise than the
last one, it is a sequence for every answer, each a document of its own ("one_sequence_per_answer"); these are as long
as their longest.
"""

import py3langid

from pipeline.recipe.sections import DataConfig
from pipeline.target import chat
from pipeline.target.chat import Encoded, Messages, Unusable, thinking, thoughts_of, without_thoughts
from preprocess.sources.dialogues import Dialogue

LOOKED_AT = 4000  # characters of a dialogue whose language is judged


def language(dialogue: Dialogue) -> str:
    """ISO 639-1 code."""
    return str(py3langid.classify(dialogue.text[:LOOKED_AT])[0])


def encode_pieces(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[tuple[str, Encoded]], list[str]]:
    """``([(document id, ids and mask), ...], edits)``. Raises Unusable, also for fewer tokens than `min_length`."""
    messages, edits = accepted_messages(tokenizer, dialogue)
    messages, thought = _thoughts_settled(tokenizer, messages)
    groups, cut = _cut(tokenizer, messages, data)
    apart = ["one_sequence_per_answer"] if any(len(group) > 1 for group in groups) else []
    edits, pieces = [*edits, *thought, *cut, *apart], [piece for group in groups for piece in group]
    kept = [piece for piece in pieces if len(piece.input_ids) >= data.min_length]
    if not kept:
        raise Unusable("too_short")
    edits, pieces = [*edits, *["window_too_short"] * (len(pieces) - len(kept))], kept
    if len(pieces) == 1:
        return [(dialogue.doc_id, pieces[0])], edits
    return [(f"{dialogue.doc_id}#{number}", piece) for number, piece in enumerate(pieces)], edits


def _cut(tokenizer, messages: Messages, data: DataConfig) -> tuple[list[list[Encoded]], list[str]]:
    """The sequences of each window (one window, where nothing is cut into several), and edits."""
    if data.long == "cut":
        return [chat.encode(tokenizer, messages, data.max_length)], []
    whole = chat.encode(tokenizer, messages, None)
    if _longest(whole) <= data.max_length:
        return [whole], []
    if data.long == "turns":
        return [_first_exchanges(tokenizer, messages, data.max_length)], ["cut_at_a_turn"]
    windows, dropped = _windows(tokenizer, messages, data.max_length)
    return windows, ["cut_into_windows", *["exchange_dropped"] * dropped]


def _longest(sequences: list[Encoded]) -> int:
    return max(len(encoded.input_ids) for encoded in sequences)


def _thoughts_settled(tokenizer, messages: Messages) -> tuple[Messages, list[str]]:
    """Of a target that is told not to think, answers lose the thoughts that they come with. One that is to think, but
    whose answers come without, is trained on these as its template renders them: with no thoughts, or empty ones.
    Thoughts that the template does not show even of the last answer are dropped and counted, too.
    """
    thinks, edits, settled = thinking(tokenizer), [], []
    for message in messages:
        if message["role"] == "assistant":
            thoughts = thoughts_of(message)
            if thoughts and (thinks is False or thoughts not in chat.render(tokenizer, [*settled, message], False)):
                edits.append("thoughts_dropped")
                message = without_thoughts(message)
            elif thinks and not thoughts:
                edits.append("answer_without_thoughts")
        settled.append(message)
    return settled, edits


def accepted_messages(tokenizer, dialogue: Dialogue) -> tuple[Messages, list[str]]:
    """``(messages, edits)``: without its system turn where the template refuses that (Gemma's, some of Mistral's)."""
    if dialogue.messages[0]["role"] == "system":
        try:
            chat.render(tokenizer, dialogue.messages, False)
        except Unusable:
            return dialogue.messages[1:], ["system_dropped"]
    return dialogue.messages, []


def _split(messages: Messages) -> tuple[Messages, list[Messages]]:
    """The system turn, if any, and the exchanges: a question and its answer."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    rest = messages[len(system) :]
    return system, [rest[at : at + 2] for at in range(0, len(rest), 2)]


def _fitting(tokenizer, system: Messages, exchanges: list[Messages], limit: int) -> tuple[int, list[Encoded]]:
    """How many exchanges from the first on fit into `limit` tokens, and these, encoded."""
    count, best = 0, []
    for end in range(1, len(exchanges) + 1):
        encoded = chat.encode(tokenizer, system + [turn for pair in exchanges[:end] for turn in pair], None)
        if _longest(encoded) > limit:
            break
        count, best = end, encoded
    return count, best


def _first_exchanges(tokenizer, messages: Messages, limit: int) -> list[Encoded]:
    system, exchanges = _split(messages)
    _, encoded = _fitting(tokenizer, system, exchanges, limit)
    if not encoded:
        raise Unusable("too_long")
    return encoded


def _windows(tokenizer, messages: Messages, limit: int) -> tuple[list[list[Encoded]], int]:
    """The windows, and how many exchanges are in none: their question alone is longer than a window."""
    system, exchanges = _split(messages)
    windows, dropped = [], 0
    while exchanges:
        count, encoded = _fitting(tokenizer, system, exchanges, limit)
        if not encoded:
            count = 1
            try:
                encoded = chat.encode(tokenizer, system + exchanges[0], limit)
            except Unusable as reason:
                if str(reason) != "no_assistant_token":
                    raise
                dropped += 1
        windows += [encoded] if encoded else []
        exchanges = exchanges[count:]
    if not windows:
        raise Unusable("no_assistant_token")
    return windows, dropped
