"""Grow one tree from several sources: a draft and secondary sources, which read only the text (prompt lookup).

Each source proposes a pool of candidates, and converts their scores to probabilities (`Source.accept_probability`). The
pools are merged by path: the same token below the same node is one node. The likeliest nodes stay. All of it is a
function of the text, so the tree is one of best candidates and the answer is plain decoding's (docs/lossless.md,
section 1).
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import (
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
from pipeline.decoding.pools import BRANCHES, CHAIN, COPIES, CandidatePool, Merged, merge
from pipeline.decoding.tree import Tree, build_tree
from pipeline.lm.states import Needs

POOL = 127  # candidates of the draft that are considered: its best ones
COPIED = TreeConfig(depth=CHAIN, top_k=BRANCHES, nodes=1 + COPIES, parallel=1)


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
        tokens, parents = merged.likeliest(tree.nodes, tree.siblings == "none")
        return build_tree(inputs.tokens[-1], tokens, parents, inputs.states_TSD.device)

    def propose_copies(self, state: _State, inputs: RoundInput) -> dict[str, CandidatePool]:
        """Return the proposals of the secondary sources."""
        return {
            name: source.pool(state.secondary[name], inputs, COPIED, COPIES) for name, source in self.secondary.items()
        }

    def merge_pools(self, drafted: CandidatePool, copied: dict[str, CandidatePool]) -> Merged:
        pools = [(self.draft, drafted), *((self.secondary[name], pool) for name, pool in copied.items())]
        return merge([(pool, _probabilities(source, pool)) for source, pool in pools])


def _probabilities(source: Source, pool: CandidatePool) -> list[float]:
    return [source.accept_probability(*candidate) for candidate in zip(pool.depths(), pool.scores, strict=True)]
