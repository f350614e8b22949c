"""The reasons for which dialogues are not trained on: their names in accounts and `rejected.jsonl`, and in words."""

DESCRIPTIONS = {
    # of a record
    "malformed": "a record or a turn in no known form",
    "no_exchange": "no question with an answer",
    "blank_turn": "a turn without text",
    "repeated_role": "two turns of one role in a row",
    "stray_tool_result": "a tool's result that follows no call",
    "unknown_role": "a role that no chat template has",
    "not_text": "a turn with an image or another part that is no text",
    "has_image": "a text with a placeholder for an image, a video or sound, which is not supported",
    "not_unicode": "text with broken characters",
    "malformed_tools": "tools that are no JSON of a tool's form",
    "malformed_tool_call": "a call of a tool that is no JSON of a call's form",
    "malformed_keywords": "chat_template_kwargs that are no object",
    "unknown_mask": "a mask next to the turns in an unknown format",
    "no_turn_with_loss": "turns whose flags exclude every answer from the loss",
    "on_both_sides": "a later part whose first question is on the other side of the split",
    "malformed_tokens": "token ids and mask that do not fit each other",
    "language": "not in data.languages",
    "duplicate": "an id and a text that were there before",
    "duplicate_text": "a text that was there before",
    "near_duplicate": "a text that is nearly equal to an earlier one",
    # of its rendering
    "template_refuses": "the chat template raises an error",
    "template_not_prefix_stable": "the chat template changes earlier turns, so no mask is proven",
    "template_hides_tools": "the chat template leaves out a call or a tool's result",
    "rendered_text_not_masked": "a rendered conversation whose answers the markers do not delimit",
    "too_long_to_render": "rendering it would take too much work",
    "too_short": "fewer tokens than data.min_length",
    "too_long": "more tokens than data.max_length",
    "no_assistant_token": "no token of the assistant within data.max_length",
    "only_assistant_tokens": "no token that is not the assistant's",
    "tokens_outside_vocabulary": "token ids that the tokenizer lacks",
    # of the target's answers and states
    "rendered_otherwise": "the answer has different tokens when it is rendered",
    "not_answered": "the target gave no answer",
    "empty_answer": "the target's answer is empty",
    "cut_answer": "the target's answer did not end in time",
    "cut_in_thoughts": "the target's answer stopped inside its reasoning",
    "repetitive_answer": "the target's answer repeats itself",
    "features_not_finite": "hidden states that are not finite",
    "kills_workers": "every worker that took it died",
}


UNKNOWN_KEY = "unknown_"  # prefix of the reason for an unknown key of a turn; the key follows
_KEY_WORDS = "a turn's key of this name may select what is trained, in a way that is not known"


def _description(reason: str) -> str | None:
    return DESCRIPTIONS.get(reason) or (
        _KEY_WORDS if reason.startswith(UNKNOWN_KEY) and reason.isidentifier() else None
    )


def describe_reasons(counts: dict[str, int]) -> str:
    """Return the count of each reason, with its words, the most frequent first. Names that this version does not know
    are counted together.
    """
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    described = [f"{count} {reason} ({words})" for reason, count in ordered if (words := _description(reason))]
    unknown_count = sum(count for reason, count in ordered if not _description(reason))
    return ", ".join([*described, *([f"{unknown_count} for other reasons"] if unknown_count else [])])
