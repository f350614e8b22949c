"""Prompt lookup: a draft that proposes the continuations of earlier occurrences of the text's last tokens. It is not
trained. It reads the prompt, the answer so far and, if the user names one, a corpus.

It looks for the longest suffix of the text that occurs earlier in it, then for shorter ones, the latest occurrence
first. Occurrences with the same continuation share their nodes. Among equally long matches, those in the text come
before those in the corpus. (Saxena's prompt lookup, and transformers' `prompt_lookup_num_tokens`, take only the first
occurrence of the longest suffix.)
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draws, RoundInput
from pipeline.decoding.pools import (
    LONGEST,
    MAX_MATCHES,
    CandidatePool,
    SuffixIndex,
    copy_continuations,
    copy_probability,
)
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts.parts.base import DraftConfig
from pipeline.lm.states import Needs


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(DraftConfig):
    description: ClassVar = "Prompt lookup: it copies from the text so far,"
    trained: ClassVar = False
    may_be_secondary: ClassVar = True

    kind: Literal["prompt-lookup"] = "prompt-lookup"
    corpus: str | None = None  # a text file to copy from as well; it is not part of a release

    def __post_init__(self):
        if self.corpus is not None:
            # Absolute, so that any process can read it, from any folder.
            self._set("corpus", str(Path(self.corpus).expanduser().absolute()))

    def public(self) -> "PromptLookupConfig":
        return replace(self, corpus=None)

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        if tree.paths is not None:
            raise ValueError("tree.paths: prompt lookup has no ranks for a static tree: give depth, top_k and nodes")
        return super().resolve(tree)


class PromptLookup:
    """The draft. Its trees have at most `top_k` children per node and `nodes` nodes, the likelier ones first."""

    stepwise = False
    rounds = None
    token_ids_U: Tensor | None = None

    def __init__(self, config: PromptLookupConfig, shapes: dict[str, Any]):
        self.config, self.name = config, config.kind
        self.needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self._corpus: Corpus | None = None

    def read(self, tokenizer: Callable[[], Any]) -> None:
        """Read the corpus, if the settings name one. Raises PipelineError if it is not a text."""
        if self.config.corpus is not None:
            tokens = read_corpus(self.config.corpus, tokenizer())
            self._corpus = Corpus(tokens)

    def packable(self) -> list[Any]:
        """Return no modules: there are no linear layers to pack."""
        return []

    def compile_rounds(self, backend: Any = None) -> None:
        """Do nothing: it has no forward."""

    def open(self) -> SuffixIndex:
        return SuffixIndex()

    def propose(
        self, state: SuffixIndex, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Any = None
    ) -> Tree:
        pool = self.pool(state, inputs, tree, tree.nodes - 1)
        return build_tree(inputs.tokens[-1], pool.tokens, pool.parents, inputs.states_TSD.device)

    def pool(
        self, state: SuffixIndex, inputs: RoundInput, tree: TreeConfig, count: int, timer: Any = None
    ) -> CandidatePool:
        """Return candidates, whose score is the number of matching tokens before the continuation."""
        return copy_continuations(self._matches(state, inputs.tokens), tree.depth, tree.top_k, count)

    def _matches(self, state: SuffixIndex, tokens: list[int]) -> list[tuple[list[int], int, int]]:
        """Return texts, positions in them that end with the last `tokens`, and matching lengths, longest first."""
        state.extend(tokens)
        matches = [(tokens, *match) for match in state.matches(tokens)]
        if self._corpus is None:
            return matches
        matches += [(self._corpus.tokens, *match) for match in self._corpus.matches(tokens)]
        return sorted(matches, key=lambda match: -match[2])

    def accept_probability(self, depth: int, score: float) -> float:
        return copy_probability(depth, score)

    def start(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("prompt lookup has no forward pass: call `propose` instead")

    step = start


def corpus_sha256(path: str) -> str:
    """Return the SHA-256 of a file. Raises PipelineError for a file that cannot be read."""
    return hashlib.sha256(_read_bytes(path)).hexdigest()


def corpus_hashes(drafts: Iterable[DraftConfig]) -> tuple[str, ...]:
    """Return the SHA-256 of the drafts' corpora. Raises PipelineError for a corpus that cannot be read."""
    return tuple(corpus_sha256(draft.corpus) for draft in drafts if draft.corpus is not None)


def read_corpus(path: str, tokenizer: Any) -> list[int]:
    """Return a corpus's tokens, without special ones. Raises PipelineError unless it is a text of 2 or more tokens."""
    content, name = _read_bytes(path), Path(path).name
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corpus_error(name, f"it is not UTF-8 (byte {error.start})") from None
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise _corpus_error(name, f"it has {len(tokens)} tokens: nothing can be copied from it")
    return tokens


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _corpus_error(Path(path).name, error.strerror or type(error).__name__) from None


def _corpus_error(name: str, reason: str) -> PipelineError:
    """Report only the file name, never its path."""
    return PipelineError(f"corpus {name!r}: {reason}. draft.NAME.corpus has to name a text file in UTF-8")


class Corpus:
    """A suffix array of a corpus's reversed tokens."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = list(tokens)
        self._backwards = self.tokens[::-1]
        rank, run_length = np.unique(np.array(self._backwards), return_inverse=True)[1], 1
        while run_length < LONGEST:  # ranks by `run_length` tokens become ranks by twice as many
            following = np.concatenate([rank[run_length:] + 1, np.zeros(min(run_length, len(rank)), dtype=rank.dtype)])
            rank = np.unique(rank * (len(rank) + 1) + following, return_inverse=True)[1]
            run_length *= 2
        self._order: list[int] = np.argsort(rank, kind="stable").tolist()  # positions in the reversed text

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return at most `MAX_MATCHES` positions that end with the last of `tokens`, with the number of matching
        tokens, the longest match first.
        """
        ranges, low, high = [], 0, len(self._order)
        for depth, token in enumerate(reversed(tokens[-LONGEST:])):
            before = partial(self._preceding_token, depth)
            low, high = (bisect(self._order, token, low, high, key=before) for bisect in (bisect_left, bisect_right))
            if low == high:
                break
            ranges.append((low, high))
        matches: dict[int, int] = {}
        for length in range(len(ranges), 0, -1):
            low, high = ranges[length - 1]
            # Any of them if there are too many, the latest first.
            for backwards in sorted(self._order[low : min(high, low + MAX_MATCHES + 1)]):
                if len(matches) == MAX_MATCHES:
                    return list(matches.items())
                if backwards:  # nothing follows the last token
                    matches.setdefault(len(self.tokens) - 1 - backwards, length)
        return list(matches.items())

    def _preceding_token(self, depth: int, place: int) -> int:
        """Return the token `depth` after a position of the reversed text; -1 past its end."""
        return self._backwards[place + depth] if place + depth < len(self._backwards) else -1
