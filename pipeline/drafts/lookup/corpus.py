"""A text beside the one that is decoded, which prompt lookup copies from, too: a code base, a manual.

Its places are sorted by the tokens before them, read backwards (a suffix array of the reversed text). So a longer match
lies among the shorter ones, and a look-up narrows a range token by token, however long the text is.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.basics.errors import PipelineError
from pipeline.drafts.lookup.suffixes import LONGEST, LOOKED_AT

if TYPE_CHECKING:
    from pipeline.drafts.parts.base import DraftConfig


def corpus_sha256(path: str) -> str:
    """Raises PipelineError for a file that cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def corpora_of(drafts: Iterable["DraftConfig"]) -> tuple[str, ...]:
    """The SHA-256 of the texts that these copy from, but for the one that is decoded. Raises PipelineError for one that
    cannot be read.
    """
    return tuple(corpus_sha256(draft.corpus) for draft in drafts if draft.corpus is not None)


def read_corpus(path: str, tokenizer: Any) -> list[int]:
    """Its tokens, without special ones. Raises PipelineError for what is no text of two tokens and more."""
    content, name = _content(path), Path(path).name
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(name, f"it is not UTF-8 (byte {error.start})") from None
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise _refused(name, f"it has {len(tokens)} tokens: nothing can be copied from it")
    return tokens


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _refused(Path(path).name, error.strerror or type(error).__name__) from None


def _refused(name: str, why: str) -> PipelineError:
    """Its folder is nobody's business."""
    return PipelineError(f"corpus {name!r}: {why}. draft.NAME.corpus is to name a text file, in UTF-8")


class Corpus:
    def __init__(self, tokens: Sequence[int]):
        self.tokens = list(tokens)
        self._backwards = self.tokens[::-1]
        rank, known = np.unique(np.array(self._backwards), return_inverse=True)[1], 1
        while known < LONGEST:  # ranks of runs of `known` tokens become those of runs twice as long
            beyond = np.concatenate([rank[known:] + 1, np.zeros(min(known, len(rank)), dtype=rank.dtype)])
            rank = np.unique(rank * (len(rank) + 1) + beyond, return_inverse=True)[1]
            known *= 2
        self._order: list[int] = np.argsort(rank, kind="stable").tolist()  # places of the reversed text

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Places whose last tokens are those that end `tokens`, with how many agree: at most `LOOKED_AT`, the longest
        agreement first.
        """
        ranges, low, high = [], 0, len(self._order)
        for depth, token in enumerate(reversed(tokens[-LONGEST:])):
            before = partial(self._before, depth)
            low, high = (bisect(self._order, token, low, high, key=before) for bisect in (bisect_left, bisect_right))
            if low == high:
                break
            ranges.append((low, high))
        found: dict[int, int] = {}
        for length in range(len(ranges), 0, -1):
            low, high = ranges[length - 1]
            for backwards in sorted(self._order[low : min(high, low + LOOKED_AT + 1)]):  # of too many any; latest first
                if len(found) == LOOKED_AT:
                    return list(found.items())
                if backwards:  # the last token has nothing behind it
                    found.setdefault(len(self.tokens) - 1 - backwards, length)
        return list(found.items())

    def _before(self, depth: int, place: int) -> int:
        """The token so far before a place of the reversed text; -1 where it has ended."""
        return self._backwards[place + depth] if place + depth < len(self._backwards) else -1
