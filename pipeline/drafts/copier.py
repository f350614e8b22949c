"""Prompt lookup: what followed the text's end before. Neither trained nor fed: it sees prompt and answer only.

The longest suffix of the text that occurs earlier in it, and after that shorter ones, the latest occurrence first, each
propose what followed them; occurrences that go on alike share their nodes. (Saxena's prompt lookup, and transformers'
`prompt_lookup_num_tokens`, take the first occurrence of the longest suffix alone.)
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draws, Forwards, Verified
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts.base import DraftConfig
from pipeline.target.states import Needs


@dataclass(frozen=True, kw_only=True)
class CopierConfig(DraftConfig):
    description: ClassVar = "Prompt lookup: it copies from the text so far,"
    trained: ClassVar = False

    kind: Literal["copier"] = "copier"
    longest: int = 8  # tokens of a suffix that are compared
    shortest: int = 1

    def __post_init__(self):
        self.at_least(1, "longest", "shortest")
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is more than longest={self.longest}")

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def settle(self, tree: TreeConfig) -> TreeConfig:
        if tree.paths is not None:
            raise ValueError("tree.paths: a copier has no ranks for a static tree: give depth, top_k and nodes")
        return super().settle(tree)


@dataclass
class Index:
    """The text so far, and where in it each token stands."""

    read: int = 0
    places: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def read_on(self, tokens: list[int]) -> None:
        for place in range(self.read, len(tokens)):
            self.places[tokens[place]].append(place)
        self.read = len(tokens)


class Copier:
    """Its trees take at most `top_k` children a node and `nodes` in all, the likelier ones first."""

    stepwise = False
    token_ids_U: Tensor | None = None

    def __init__(self, config: CopierConfig, shapes: dict[str, Any]):
        self.config, self.name = config, config.kind
        self.needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]

    def open(self) -> Index:
        return Index()

    def propose(
        self, state: Index, seen: Verified, tree: TreeConfig, draws: Draws | None, forwards: Forwards | None = None
    ) -> Tree:
        state.read_on(seen.tokens)
        root: dict = {}  # a node's children: token -> (its number, its own children)
        tokens: list[int] = []
        parents: list[int] = []
        for place in self._matches(state, seen.tokens):
            children, above = root, 0
            for token in seen.tokens[place + 1 : place + 1 + tree.depth]:
                if token not in children:
                    if len(children) == tree.top_k or len(tokens) == tree.nodes - 1:
                        break
                    tokens.append(token)
                    parents.append(above)
                    children[token] = (len(tokens), {})
                above, children = children[token]
            if len(tokens) == tree.nodes - 1:
                break
        return build_tree(seen.tokens[-1], tokens, parents, seen.states_TSD.device)

    def _matches(self, state: Index, tokens: list[int]) -> list[int]:
        """Places whose tokens before, and there, end the text: the longest match first, of equal ones the latest."""
        found = []
        for place in reversed(state.places[tokens[-1]][:-1]):
            length = 1
            while length < min(self.config.longest, place + 1) and tokens[place - length] == tokens[-1 - length]:
                length += 1
            if length >= self.config.shortest:
                found.append((-length, -place))
        return [-place for _, place in sorted(found)]

    def start(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a copier answers no level by itself: ask it to propose")

    step = start
