"""Grow one tree from several sources: a draft and secondary sources, which read only the text (prompt lookup).

Each source proposes a pool of candidates, and converts their scores to probabilities (`Source.accept_probability`). The
pools are merged by path: the same token below the same node is one node. The likeliest nodes stay. All of it is a
function of the text, so the tree is one of best candidates and the answer is plain decoding's (docs/lossless.md,
section 1).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import (
    CandidatePool,
    DraftOutput,
    DraftRequest,
    Draws,
    Frontier,
    RoundInput,
    Source,
    Timer,
    TreeSupport,
    call_untimed,
)
from pipeline.decoding.tree import Tree, build_tree
from pipeline.lm.states import Needs

POOL = 127  # candidates of the draft that are considered: its best ones
CHAIN = 10  # maximum number of tokens copied at once
BRANCHES = 3  # maximum number of copied children of one node

COPIED = TreeConfig(depth=CHAIN, top_k=BRANCHES, nodes=1 + BRANCHES * CHAIN, parallel=1)


@dataclass
class Merged:
    """The nodes of all pools, parents before children, with the probability that the target's text goes through
    each.
    """

    tokens: list[int]
    parents: list[int]  # 0: the root; n: the n-th node, from 1
    probabilities: list[float]
    order: list[int]  # the nodes from 1 on, likeliest first: every prefix of it is connected

    def tree(self, root: int, nodes: int, device: torch.device, chain: bool = False) -> Tree:
        """Build the tree, or the chain, of the likeliest ones; `nodes` counts the root."""
        likeliest = self.best_chain(nodes - 1) if chain else self.order[: nodes - 1]
        places = {number: place for place, number in enumerate(likeliest, start=1)} | {0: 0}
        tokens, parents = [self.tokens[n - 1] for n in likeliest], [places[self.parents[n - 1]] for n in likeliest]
        return build_tree(root, tokens, parents, device)

    def best_chain(self, length: int) -> list[int]:
        """Return the path below the root, of at most `length` nodes, that is expected to have the most accepted tokens:
        the sum of its nodes' probabilities.
        """
        depths, expected = [0], [0.0]
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            depths.append(depths[parent] + 1)
            expected.append(expected[parent] + probability)
        end = max((node for node, depth in enumerate(depths) if depth <= length), key=expected.__getitem__)
        path: list[int] = []
        while end:
            path.insert(0, end)
            end = self.parents[end - 1]
        return path

    def chain_tokens(self, length: int) -> list[int]:
        return [self.tokens[node - 1] for node in self.best_chain(length)]

    def ranks(self, following: list[int]) -> list[int]:
        """Return the places in `order` of the nodes that a text goes through, from the root on, as far as they
        exist.
        """
        above = zip(self.parents, self.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(above, start=1)}
        place_of = {number: place for place, number in enumerate(self.order)}
        ranks, node = [], 0
        for token in following:
            node = children.get((node, token), -1)
            if node < 0:
                break
            ranks.append(place_of[node])
        return ranks


def merge(pools: list[tuple[CandidatePool, list[float]]]) -> Merged:
    """Merge pools, given with their candidates' probabilities, by path.

    A node that several sources propose has probability 1 - (1 - a)(1 - b), as if they erred independently. No node is
    likelier than its parent.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    node_by_edge: dict[tuple[int, int], int] = {}
    for pool, pool_probabilities in pools:
        node_of = [0]
        for token, parent, probability in zip(pool.tokens, pool.parents, pool_probabilities, strict=True):
            key = (node_of[parent], token)
            node = node_by_edge.get(key)
            if node is None:
                tokens.append(token)
                parents.append(key[0])
                probabilities.append(probability)
                node = node_by_edge[key] = len(tokens)
            else:
                probabilities[node - 1] = 1 - (1 - probabilities[node - 1]) * (1 - probability)
            node_of.append(node)
    for place, parent in enumerate(parents):
        if parent:
            probabilities[place] = min(probabilities[place], probabilities[parent - 1])
    order = sorted(range(1, len(tokens) + 1), key=lambda node: -probabilities[node - 1])
    return Merged(tokens, parents, probabilities, order)


@dataclass
class _State:
    """The states of all sources for one sequence."""

    draft: Any
    secondary: dict[str, Any]


class SharedTrees:
    """The tree support of a draft with secondary sources: larger trees, of best candidates."""

    def __init__(self, draft: TreeSupport):
        self._draft = draft

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        if tree.paths is not None:
            raise ValueError(
                "tree.paths: nodes of secondary sources have no ranks for a static tree: give depth, top_k and nodes"
            )
        if tree.nodes > self.max_nodes(tree):
            raise ValueError(
                f"nodes={tree.nodes}, but the sources propose at most {self.max_nodes(tree)} with the root"
            )
        resolved = self._draft.resolve(replace(tree, nodes=min(tree.nodes, self._draft.max_nodes(tree))))
        return replace(resolved, nodes=tree.nodes)

    def max_nodes(self, tree: TreeConfig) -> int:
        return min(self._draft.max_nodes(tree), 1 + POOL) + COPIED.nodes - 1

    def max_level(self, tree: TreeConfig) -> int:
        return max(self._draft.max_level(tree), min(CHAIN, tree.nodes - 1))

    def levels_of(self, number: int) -> int:
        return self._draft.levels_of(number)

    def parallel_choices(self, depth: int) -> list[int]:
        return self._draft.parallel_choices(depth)


class Sources:
    """A draft and secondary sources that act as one draft. `tree` configures the draft's part; its `nodes` counts those
    of all.
    """

    rounds = None  # its draft has its own

    def __init__(self, draft: Source, secondary: dict[str, Source]):
        self.draft, self.secondary = draft, secondary
        self.name = " + ".join([draft.name, *secondary])
        self.config, self.stepwise = SharedTrees(draft.config), draft.stepwise
        self.target_vocabulary = draft.target_vocabulary

    @property
    def token_ids_U(self) -> Tensor | None:
        return self.draft.token_ids_U

    @property
    def needs(self) -> Needs:
        return self.draft.needs

    def open(self) -> _State:
        return _State(self.draft.open(), {name: source.open() for name, source in self.secondary.items()})

    def start(self, state: _State, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        return self.draft.start(state.draft, inputs, request, places)

    def step(self, state: _State, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        return self.draft.step(state.draft, frontier, request)

    def propose(
        self, state: _State, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = call_untimed
    ) -> Tree:
        drafted = self.draft.pool(state.draft, inputs, tree, POOL, timer)
        merged = self.merge_pools(drafted, self.propose_copies(state, inputs))
        return merged.tree(inputs.tokens[-1], tree.nodes, inputs.states_TSD.device, tree.siblings == "none")

    def propose_copies(self, state: _State, inputs: RoundInput) -> dict[str, CandidatePool]:
        """Return the proposals of the secondary sources."""
        count = COPIED.nodes - 1
        return {
            name: source.pool(state.secondary[name], inputs, COPIED, count) for name, source in self.secondary.items()
        }

    def merge_pools(self, drafted: CandidatePool, copied: dict[str, CandidatePool]) -> Merged:
        pools = [(self.draft, drafted), *((self.secondary[name], pool) for name, pool in copied.items())]
        return merge([(pool, _probabilities(source, pool)) for source, pool in pools])


def _probabilities(source: Source, pool: CandidatePool) -> list[float]:
    return [source.accept_probability(*candidate) for candidate in zip(pool.depths(), pool.scores, strict=True)]
