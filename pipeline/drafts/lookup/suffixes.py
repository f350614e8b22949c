"""Where the end of a text stood before: an index of its runs of tokens, read on token by token.

Every run of up to LONGEST tokens leads to the places where it ends. A token costs as many entries as there
are lengths, and a look-up a bounded number of places, however long the text is.
"""

from collections import defaultdict

LONGEST = 8  # tokens of a run
LOOKED_AT = 32  # places of one look-up, the best ones


class SuffixIndex:
    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._read = 0

    def read_on(self, tokens: list[int]) -> None:
        """The text so far: what was read before, and more."""
        for end in range(self._read, len(tokens)):
            for length in range(1, min(LONGEST, end + 1) + 1):
                self._ends[tuple(tokens[end + 1 - length : end + 1])].append(end)
        self._read = len(tokens)

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Earlier places of the text whose last tokens are those that end it, with how many agree (at most LONGEST):
        the longest agreement first, of equal ones the latest place.
        """
        found: dict[int, int] = {}
        for length in range(min(LONGEST, len(tokens)), 0, -1):
            places = self._ends.get(tuple(tokens[-length:]), [])
            for place in reversed(places):
                if len(found) == LOOKED_AT:
                    return list(found.items())
                if place < len(tokens) - 1:
                    found.setdefault(place, length)
        return list(found.items())
