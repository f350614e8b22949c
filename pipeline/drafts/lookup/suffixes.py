"""Where the end of a text stood before: an index of its runs of tokens, read on token by token.

Every run of `shortest` to `longest` tokens leads to the places where it ends. A token costs as many entries as there
are lengths, and a look-up a bounded number of places, however long the text is.
"""

from collections import defaultdict

LOOKED_AT = 32  # places of one look-up, the best ones


class SuffixIndex:
    def __init__(self, shortest: int, longest: int):
        self._lengths = range(shortest, longest + 1)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._read = 0

    def read_on(self, tokens: list[int]) -> None:
        """The text so far: what was read before, and more."""
        ends, lengths = self._ends, self._lengths
        for end in range(self._read, len(tokens)):
            for length in lengths:
                if length > end + 1:
                    break
                ends[tuple(tokens[end + 1 - length : end + 1])].append(end)
        self._read = len(tokens)

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Earlier places of the text whose last tokens are those that end it, with how many agree (at most the index's
        longest run): the longest agreement first, of equal ones the latest place.
        """
        found: dict[int, int] = {}
        for length in reversed(self._lengths):
            places = self._ends.get(tuple(tokens[-length:]), []) if length <= len(tokens) else []
            for place in reversed(places):
                if len(found) == LOOKED_AT:
                    return list(found.items())
                if place < len(tokens) - 1:
                    found.setdefault(place, length)
        return list(found.items())
