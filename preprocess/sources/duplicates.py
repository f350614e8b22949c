"""Dialogues that were there before: by id, by content, and nearly, by MinHash."""

import hashlib
import re

from rensa import RMinHash, RMinHashLSH

from pipeline.lm.chat import Unusable
from preprocess.sources.dialogues import Dialogue

PERMUTATIONS, BANDS, SHINGLE = 128, 32, 5  # words a shingle


class Duplicates:
    """Remembers what was seen: 16 bytes a dialogue, and with `near` about 2 KB more."""

    def __init__(self, near: float | None):
        """`near`: the estimated Jaccard similarity of word 5-grams from which two dialogues count as one; None: off."""
        self._near, self._ids, self._texts = near, set(), set()
        self._signatures: list[RMinHash] = []
        self._index = RMinHashLSH(threshold=near, num_perm=PERMUTATIONS, num_bands=BANDS) if near else None

    def refuse_repeated(self, dialogue: Dialogue) -> None:
        """Remembers the dialogue, or raises Unusable("duplicate" | "duplicate_text" | "near_duplicate")."""
        self._refuse(self._ids, dialogue.doc_id, "duplicate")
        self._refuse(self._texts, dialogue.text, "duplicate_text")
        if self._index is not None:
            signature = RMinHash(num_perm=PERMUTATIONS, seed=0)
            signature.update(shingles(dialogue.text))
            for number in self._index.query(signature):
                if signature.jaccard(self._signatures[number]) >= self._near:
                    raise Unusable("near_duplicate")
            self._index.insert(len(self._signatures), signature)
            self._signatures.append(signature)

    @staticmethod
    def _refuse(seen: set[bytes], text: str, reason: str) -> None:
        mark = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        if mark in seen:
            raise Unusable(reason)
        seen.add(mark)


def shingles(text: str) -> list[str]:
    """Runs of five words, in lower case; the whole text where it is shorter."""
    words = re.findall(r"\w+", text.lower())
    return [" ".join(words[at : at + SHINGLE]) for at in range(max(len(words) - SHINGLE + 1, 1))]
