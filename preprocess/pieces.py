"""A clean dialogue -> the token sequences that are dumped of it, by the recipe's rule for long dialogues.

cut       the first `max_length` tokens
turns     as many whole exchanges as fit; "too_long" when the first one does not
windows   several documents ID#0, ID#1, ...: each holds the system turn and as many further exchanges as fit; an exchange
          that does not fit by itself is cut; one whose question does not fit is dropped and counted
"""

import py3langid

from pipeline import chat
from pipeline.chat import Encoded, Messages, Unusable
from pipeline.sections import DataConfig
from preprocess.dialogues import Dialogue

LOOKED_AT = 4000  # characters of a dialogue whose language is judged


def language(dialogue: Dialogue) -> str:
    """ISO 639-1 code."""
    return str(py3langid.classify(dialogue.text[:LOOKED_AT])[0])


def encode_pieces(tokenizer, dialogue: Dialogue, data: DataConfig) -> tuple[list[tuple[str, Encoded]], list[str]]:
    """``([(document id, ids and mask), ...], edits)``. Raises Unusable, also for fewer tokens than `min_length`."""
    messages, edits = accepted_messages(tokenizer, dialogue)
    if data.long == "cut":
        pieces = [chat.encode(tokenizer, messages, data.max_length)]
    else:
        whole = chat.encode(tokenizer, messages, None)
        if len(whole.input_ids) <= data.max_length:
            pieces = [whole]
        elif data.long == "turns":
            pieces, edits = [_first_exchanges(tokenizer, messages, data.max_length)], [*edits, "cut_at_a_turn"]
        else:
            pieces, dropped = _windows(tokenizer, messages, data.max_length)
            edits = [*edits, "cut_into_windows", *["exchange_dropped"] * dropped]
    kept = [piece for piece in pieces if len(piece.input_ids) >= data.min_length]
    if not kept:
        raise Unusable("too_short")
    edits, pieces = [*edits, *["window_too_short"] * (len(pieces) - len(kept))], kept
    if len(pieces) == 1:
        return [(dialogue.doc_id, pieces[0])], edits
    return [(f"{dialogue.doc_id}#{number}", piece) for number, piece in enumerate(pieces)], edits


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


def _fitting(tokenizer, system: Messages, exchanges: list[Messages], limit: int) -> tuple[int, Encoded | None]:
    """How many exchanges from the first on fit into `limit` tokens, and these, encoded."""
    count, best = 0, None
    for end in range(1, len(exchanges) + 1):
        encoded = chat.encode(tokenizer, system + [turn for pair in exchanges[:end] for turn in pair], None)
        if len(encoded.input_ids) > limit:
            break
        count, best = end, encoded
    return count, best


def _first_exchanges(tokenizer, messages: Messages, limit: int) -> Encoded:
    system, exchanges = _split(messages)
    _, encoded = _fitting(tokenizer, system, exchanges, limit)
    if encoded is None:
        raise Unusable("too_long")
    return encoded


def _windows(tokenizer, messages: Messages, limit: int) -> tuple[list[Encoded], int]:
    """The windows, and how many exchanges are in none: their question alone is longer than a window."""
    system, exchanges = _split(messages)
    windows, dropped = [], 0
    while exchanges:
        count, encoded = _fitting(tokenizer, system, exchanges, limit)
        if encoded is None:
            count = 1
            try:
                encoded = chat.encode(tokenizer, system + exchanges[0], limit)
            except Unusable as reason:
                if str(reason) != "no_assistant_token":
                    raise
                dropped += 1
        windows += [encoded] if encoded is not None else []
        exchanges = exchanges[count:]
    if not windows:
        raise Unusable("no_assistant_token")
    return windows, dropped
