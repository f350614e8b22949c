"""Prompt lookup: a draft that proposes what followed earlier occurrences of the text's last tokens. It is not trained,
and it reads the prompt, the answer so far and, where the user names one, a corpus.

It looks for the longest suffix of the text that occurs earlier in it, then for shorter ones, the latest occurrence
first. Occurrences with the same continuation share their nodes. Of equally long matches the text's own precede the
corpus's. (Saxena's prompt lookup, and transformers' `prompt_lookup_num_tokens`, take the first occurrence of the
longest suffix alone.)
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draws, Pool, RoundInput
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts.parts.base import DraftConfig
from pipeline.lm.states import Needs

LONGEST = 8  # tokens of a run
LOOKED_AT = 32  # places of one look-up, the best ones


class SuffixIndex:
    """An index of a text's runs of tokens.

    Every run of up to LONGEST tokens leads to the places where it ends. A token costs as many entries as there are
    lengths, and a look-up a bounded number of places, however long the text is.
    """

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


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(DraftConfig):
    description: ClassVar = "Prompt lookup: it copies from the text so far,"
    trained: ClassVar = False
    may_be_secondary: ClassVar = True

    kind: Literal["prompt-lookup"] = "prompt-lookup"
    corpus: str | None = None  # a text file that is copied from, too; a release does not hold it

    def __post_init__(self):
        if self.corpus is not None:
            self._set("corpus", str(Path(self.corpus).expanduser().absolute()))  # whoever reads it, wherever

    def public(self) -> "PromptLookupConfig":
        return replace(self, corpus=None)

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        if tree.paths is not None:
            raise ValueError("tree.paths: prompt lookup has no ranks for a static tree: give depth, top_k and nodes")
        return super().resolve(tree)


# Chance that the first copied token is right, by how many tokens agreed, and of every further one given those before:
# about what greedy and sampled answers of the embedded default showed, mixed.
FIRST = (0.18, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
FURTHER = 0.85
OTHER = 0.05  # of a continuation that is not the first choice


class PromptLookup:
    """Its trees take at most `top_k` children a node and `nodes` in all, the likelier ones first."""

    stepwise = False
    token_ids_U: Tensor | None = None

    def __init__(self, config: PromptLookupConfig, shapes: dict[str, Any]):
        self.config, self.name = config, config.kind
        self.needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self._corpus: Corpus | None = None

    def read(self, tokenizer: Callable[[], Any]) -> None:
        """Takes in its corpus, where its settings name one. Raises PipelineError for what is no text."""
        if self.config.corpus is not None:
            tokens = read_corpus(self.config.corpus, tokenizer())
            self._corpus = Corpus(tokens)

    def packable(self) -> list[Any]:
        """What decodes: nothing."""
        return []

    def open(self) -> SuffixIndex:
        return SuffixIndex()

    def propose(
        self, state: SuffixIndex, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Any = None
    ) -> Tree:
        pool = self.pool(state, inputs, tree, tree.nodes - 1)
        return build_tree(inputs.tokens[-1], pool.tokens, pool.parents, inputs.states_TSD.device)

    def pool(self, state: SuffixIndex, inputs: RoundInput, tree: TreeConfig, count: int, timer: Any = None) -> Pool:
        """A score is how many tokens agreed before the continuation; those that are not the first choice at some node
        have LONGEST less, so that any first choice has more.
        """
        found = Pool([], [], [])
        children: list[dict[int, int]] = [{}]  # of each node: token -> its child
        for text, place, length in self._matches(state, inputs.tokens):
            above, first = 0, True
            for token in text[place + 1 : place + 1 + tree.depth]:
                if token not in children[above]:
                    if len(children[above]) == tree.top_k or len(found.tokens) == count:
                        break
                    first = first and not children[above]
                    children[above][token] = len(children)
                    children.append({})
                    found.tokens.append(token)
                    found.parents.append(above)
                    found.scores.append(float(length if first else length - LONGEST))
                above = children[above][token]
                first = first and found.scores[above - 1] > 0
            if len(found.tokens) == count:
                break
        return found

    def _matches(self, state: SuffixIndex, tokens: list[int]) -> list[tuple[list[int], int, int]]:
        """Texts and places in them whose last tokens are those that end `tokens`, with how many agree, most first."""
        state.read_on(tokens)
        found = [(tokens, *match) for match in state.matches(tokens)]
        if self._corpus is None:
            return found
        found += [(self._corpus.tokens, *match) for match in self._corpus.matches(tokens)]
        return sorted(found, key=lambda match: -match[2])

    def accept_probability(self, depth: int, score: float) -> float:
        first = FIRST[min(int(score), len(FIRST)) - 1] if score > 0 else OTHER
        return first * FURTHER ** (depth - 1)

    def start(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("prompt lookup answers no level by itself: ask it to propose")

    step = start


def corpus_sha256(path: str) -> str:
    """Raises PipelineError for a file that cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def corpora_of(drafts: Iterable[DraftConfig]) -> tuple[str, ...]:
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
