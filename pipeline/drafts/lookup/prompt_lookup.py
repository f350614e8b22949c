"""Prompt lookup: what followed the text's end before. Neither trained nor fed: it sees prompt and answer only.

The longest suffix of the text that occurs earlier in it, and after that shorter ones, the latest occurrence first, each
propose what followed them; occurrences that go on alike share their nodes. A corpus that the user names is looked into,
too: its occurrences come after the text's own that agree as long. (Saxena's prompt lookup, and transformers'
`prompt_lookup_num_tokens`, take the first occurrence of the longest suffix alone.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draws, Pool, RoundInput
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts.lookup.corpus import Corpus, read_corpus
from pipeline.drafts.lookup.suffixes import LONGEST, SuffixIndex
from pipeline.drafts.parts.base import DraftConfig
from pipeline.lm.states import Needs


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(DraftConfig):
    description: ClassVar = "Prompt lookup: it copies from the text so far,"
    trained: ClassVar = False
    may_be_secondary: ClassVar = True

    kind: Literal["prompt-lookup"] = "prompt-lookup"
    corpus: str | None = None  # a text file that is copied from, too (corpus.py); a release does not hold it

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
