"""Count how far trees would be accepted along the target's own text, from stored features, without verification.

A tree of best candidates accepts exactly the target's own next tokens as far as it holds them (docs/lossless.md). So
`replay_decoding` counts for any tree what decoding the text would count, without the target. Many dynamic trees are
counted at once, as a smaller tree's candidates are among a larger one's: fewer of each node's children, fewer nodes of
each level, fewer levels. So below every token of a text one large tree is grown, many places at a time, and every
smaller tree is selected from its scores. One simplification: a node that the small tree forwards and the large one did
not has no children here.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.decoding.accept import Acceptance, accept_best
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.contract import CandidatePool, Draft, RoundInput, States
from pipeline.decoding.grow import Grower, Level, best_pools, dynamic_levels, not_finite_error
from pipeline.decoding.pools import CHAIN, Merged
from pipeline.decoding.sources import POOL, Sources

ABSENT = 1 << 30
FORWARDED = 256  # nodes of one level that are forwarded together, over places


@torch.inference_mode()
def replay_decoding(method: LoadedMethod, states: States, tokens: list[int], begin: int) -> Acceptance:
    """Count what decoding would count with a tree of best candidates, from ``tokens[begin]``, the prompt's own token,
    to the last one. `states` are the target's along the text (at least of all tokens but the last).
    """
    draft, acceptance, consumed, end = method.draft, Acceptance(), 0, begin
    state, states_TSD = draft.open(), states.select(draft.needs)
    while end < len(tokens) - 1:  # `end`: the last emitted token
        inputs = RoundInput(tokens[: end + 1], states_TSD[consumed:end])
        tree, following = draft.propose(state, inputs, method.tree, None), [*tokens[end + 1 :], -1]
        path, _ = accept_best(tree, lambda node: following[min(tree.depths[node], len(following) - 1)])  # noqa: B023
        consumed, emitted = end, min(len(path) + 1, len(tokens) - 1 - end)
        acceptance.add_pass(min(len(path), emitted), emitted)
        end += emitted
    return acceptance


def largest_tree(depth: int, top_k: int, candidates: Any, parallel: int) -> TreeConfig:
    """Return the settings of the tree for `make_counter`, which selects trees of any number of nodes."""
    return TreeConfig(depth=depth, top_k=top_k, nodes=depth + 1, candidates=candidates, parallel=parallel)


Counter = Callable[[TreeConfig], Acceptance]  # counts what decoding one text with a tree would count


def make_counter(draft: Draft, states: States, tokens: list[int], begin: int, largest: TreeConfig) -> Counter:
    """Return the counter of one text of the target's own, from ``tokens[begin]``, for any of the draft's dynamic trees
    up to `largest`. `states` are the target's of all tokens.
    """
    if begin == len(tokens) - 1:
        return lambda tree: Acceptance()  # a text of one token has no round
    if isinstance(draft, Sources):
        return _count_sources(draft, record_replay(draft.draft, states, tokens, begin, largest), tokens, begin)
    if not draft.stepwise:
        return lambda tree: replay_decoding(LoadedMethod(draft, tree), states, tokens, begin)
    return record_replay(draft, states, tokens, begin, largest).counter()


def count_acceptance(method: LoadedMethod, states: States, tokens: list[int], begin: int) -> Acceptance:
    """Count as `replay_decoding` does. A dynamic tree is grown at many places at a time, which is faster."""
    if method.tree.paths is not None:
        return replay_decoding(method, states, tokens, begin)
    return make_counter(method.draft, states, tokens, begin, method.tree)(method.tree)


@dataclass
class _Forward:
    """The proposals of the forwarded nodes of one depth, at A places with W of them each: k tokens per horizon, best
    first.
    """

    rows_AC: Tensor  # (A, W_above * k): the row of this forward for each candidate of the level above, or -1
    tokens: list[Tensor]  # by horizon (A, W, k)
    scores: list[Tensor]  # log-probabilities, likewise


class _Recorded:
    """An `Expander` over recorded forwards, for growing smaller trees."""

    def __init__(self, forwards: list[_Forward]):
        self._forwards, self._now = forwards, forwards[0]

    def children(self, rows_AW: Tensor, offset: int, count: int) -> tuple[Tensor, Tensor]:
        tokens_AWK, scores_AWK = self._now.tokens[offset], self._now.scores[offset]
        index_AWK = rows_AW.clamp_min(0)[:, :, None].expand(-1, -1, min(count, tokens_AWK.shape[2]))
        scores = scores_AWK.gather(1, index_AWK).masked_fill((rows_AW < 0)[:, :, None], -math.inf)
        return tokens_AWK.gather(1, index_AWK), scores

    def forward(self, tokens_AW: Tensor, rows_AW: Tensor, ranks_AW: Tensor, depth: int) -> Tensor:
        columns_AW = rows_AW.clamp_min(0) * self._now.tokens[0].shape[2] + ranks_AW
        self._now = self._forwards[depth]
        return self._now.rows_AC.gather(1, columns_AW).masked_fill(rows_AW < 0, -1)


@dataclass
class Replay:
    """A replay of one text: the draft's forwards below each of its A places, and the tokens that the target continued
    with.
    """

    forwards: list[_Forward]  # by depth
    following_AS: Tensor  # -1 beyond the text's end

    def counter(self) -> "Counter":
        ranks = cache(self.ranks)
        return lambda tree: count_rounds(ranks(replace(tree, nodes=tree.depth + 1)), tree.nodes)

    def ranks(self, tree: TreeConfig) -> Tensor:
        """Return (A, depth): the ranks, among all candidates of such a tree, of those that the target continues with;
        ABSENT where the tree does not hold them. A tree of N nodes accepts those below N - 1.
        """
        return _ranks(list(self._levels(tree)), self.following_AS)

    def pools(self, tree: TreeConfig, count: int) -> list[CandidatePool]:
        """Return for each place the best `count` candidates of such a tree."""
        return best_pools(list(self._levels(tree)), count)[0]

    def _levels(self, tree: TreeConfig) -> Iterator[Level]:
        return dynamic_levels(_Recorded(self.forwards), tree, len(self.following_AS), self.following_AS.device)


def _ranks(levels: list[Level], following_AS: Tensor) -> Tensor:
    """Compute `Walk.ranks`."""
    all_scores_AC, out = torch.cat([level.scores_AC for level in levels], dim=1), []
    numbers_C = torch.arange(all_scores_AC.shape[1])
    true_AC, above, first = torch.ones(len(following_AS), 1, dtype=torch.bool), -1, 0  # the root is on the way
    for depth, level in enumerate(levels):
        parent_true_AC = true_AC.gather(1, level.parents_AC - above)
        true_AC = (level.tokens_AC == following_AS[:, depth, None]) & parent_true_AC
        score_A1, place_A1 = level.scores_AC.masked_fill(~true_AC, -math.inf).max(dim=1, keepdim=True)
        equal_AC = (all_scores_AC == score_A1) & (numbers_C < first + place_A1)  # ties are ordered by number
        rank_A = ((all_scores_AC > score_A1) | equal_AC).sum(1)
        out.append(rank_A.masked_fill(score_A1[:, 0].isinf(), ABSENT))
        above, first = first, first + level.scores_AC.shape[1]
    return torch.stack(out, dim=1).cummax(dim=1).values


def _count_sources(sources: Sources, drafted: Replay, tokens: list[int], begin: int) -> Counter:
    """Return the counter of several sources; `drafted` is the replay of the draft's proposals."""
    positions, state, deepest = range(begin, len(tokens) - 1), sources.open(), max(CHAIN, drafted.following_AS.shape[1])
    copied = [
        sources.propose_copies(state, RoundInput(tokens[: position + 1], torch.zeros(0, 0, 1)))
        for position in positions
    ]

    def merged_pools(tree: TreeConfig) -> Iterator[tuple[list[int], Merged]]:
        """Yield the text that follows each place, and the merged pools there."""
        for position, pool, copies in zip(positions, drafted.pools(tree, POOL), copied, strict=True):
            yield tokens[position + 1 : position + 1 + deepest], sources.merge_pools(pool, copies)

    @cache
    def ranks(tree: TreeConfig) -> Tensor:
        ranks = [merged.ranks(following) for following, merged in merged_pools(tree)]
        return torch.tensor([[*row, *[ABSENT] * (deepest - len(row))] for row in ranks])

    @cache
    def chains(tree: TreeConfig) -> list[list[int]]:
        """Return the number of tokens that chains of at most 1, 2, ... tokens accept below each place."""
        return [
            [_common_prefix(following, merged.chain_tokens(length)) for length in range(1, deepest + 1)]
            for following, merged in merged_pools(tree)
        ]

    def count(tree: TreeConfig) -> Acceptance:
        smallest = replace(tree, nodes=tree.depth + 1)
        if tree.siblings != "none":
            return count_rounds(ranks(smallest), tree.nodes)
        return _count_passes([lengths[min(tree.nodes - 1, deepest) - 1] for lengths in chains(smallest)])

    return count


def _common_prefix(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@torch.inference_mode()
def record_replay(draft: Draft, states: States, tokens: list[int], begin: int, tree: TreeConfig) -> Replay:
    """Grow the largest tree, with `tree`'s kind of candidates, below every token from ``tokens[begin]`` to the last but
    one, as decoding does there: from the target's `states` (at least of all but the last two). `begin` is at least 1;
    the tree's depth, top_k and parallel are the maxima of later requests. Raise PipelineError where a logit is not
    finite.
    """
    state, states_TSD, consumed, blocks = draft.open(), states.select(draft.needs), 0, []
    positions = range(begin, len(tokens) - 1)  # a place is named by its last emitted token
    for first in range(0, len(positions), block := max(1, FORWARDED // tree.top_k)):
        block_ends = positions[first : first + block]
        last = block_ends[-1]
        inputs, consumed = RoundInput(tokens[: last + 1], states_TSD[consumed:last]), last
        prefix_A = torch.tensor(list(block_ends), device=states_TSD.device)
        blocks.append(_record(Grower(draft, state, inputs, tree, prefix_A=prefix_A)))
    forwards = [
        _Forward(
            torch.cat([part.rows_AC for part in parts]),
            [torch.cat(outputs) for outputs in zip(*(part.tokens for part in parts), strict=True)],
            [torch.cat(outputs) for outputs in zip(*(part.scores for part in parts), strict=True)],
        )
        for parts in zip(*blocks, strict=True)
    ]
    padded = torch.tensor([*tokens, *[-1] * tree.depth])
    return Replay(forwards, padded.unfold(0, tree.depth, 1)[begin + 1 : len(tokens)])


def _record(grower: Grower) -> list[_Forward]:
    """Record the forwards of a tree that takes no level from the forward above, each with all its outputs."""
    draft, tree, above, first = grower.draft, grower.tree, -1, 0
    out: list[_Forward] = []
    for depth, level in enumerate(dynamic_levels(grower, replace(tree, parallel=1), grower.places, grower.device), 1):
        horizons = min(tree.parallel or 1, tree.depth - depth + 1, len(grower.output.logits_LWU))
        children = [grower.children(None, offset, tree.top_k) for offset in range(horizons)]
        rows_AC = torch.full((grower.places, first - max(above, 0)), -1)
        if out:  # the children tell which candidates above were forwarded
            order_AW = level.parents_AC[:, :: children[0][0].shape[2]].cpu() - above
            rows_AC.scatter_(1, order_AW, torch.arange(grower.width).expand(grower.places, -1))
        out.append(_Forward(rows_AC, *([x.cpu() for x in kind] for kind in zip(*children, strict=True))))
        above, first = first, first + level.scores_AC.shape[1]
        if not draft.config.levels_of(depth):
            break
    if grower.nonfinite:
        raise not_finite_error(draft)
    return out


def count_rounds(ranks_AS: Tensor, nodes: int) -> Acceptance:
    """Count what decoding the text with a tree of this number of nodes would count."""
    return _count_passes((ranks_AS < nodes - 1).sum(1).tolist())


def _count_passes(accepted_A: list[int]) -> Acceptance:
    """Count passes by the number of tokens that are accepted below each place: each round starts where the one before
    it ended.
    """
    acceptance, place = Acceptance(), 0
    while place < len(accepted_A):
        emitted = min(accepted_A[place] + 1, len(accepted_A) - place)  # tokens after the text's end are not counted
        acceptance.add_pass(min(accepted_A[place], emitted), emitted)
        place += emitted
    return acceptance
