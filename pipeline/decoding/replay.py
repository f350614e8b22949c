"""How far trees would have been accepted along the target's own text, counted from stored features: no verification.

A tree of best candidates accepts exactly the target's own next tokens as far as it holds them (docs/lossless.md). So
`decoded` needs no target to count what decoding the text counts, for any tree. For many dynamic trees at once: a
smaller tree's candidates are among a larger one's: fewer of each node's children, fewer nodes of each level, fewer
levels. So below every token of a text one large tree is grown, many places at a time, and every smaller tree is
selected from its scores. One simplification: a node that the small tree forwards and the large one did not has no
children here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.decoding.accept import Acceptance, accept_best
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import (
    Draft,
    DraftOutput,
    DraftRequest,
    Draws,
    Frontier,
    Method,
    Pool,
    RoundInput,
    States,
)
from pipeline.decoding.grow import ahead_scores, candidates, not_finite, ranking, seen_by
from pipeline.decoding.sources import CHAIN, POOL, Sources

ABSENT = 1 << 30
FORWARDED = 256  # nodes of one level that are forwarded together, over places


@dataclass(frozen=True)
class _At:
    """A temperature at which nothing is drawn: the text is there already."""

    temperature: float

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        raise AssertionError("trees of best candidates draw nothing")

    def accept(self, probability: float) -> bool:
        raise AssertionError("trees of best candidates draw nothing")

    draw_rows = probabilities


@torch.inference_mode()
def decoded(method: Method, states: States, tokens: list[int], begin: int, temperature: float = 0.0) -> Acceptance:
    """What decoding counts with a tree of best candidates, from ``tokens[begin]``, the prompt's own token, to the last
    one. `states` are the target's there (at least of all but the last); `temperature` is that of the text, and chances
    are counted by it.
    """
    draft, out, fed, end = method.draft, Acceptance(), 0, begin
    state, states_TSD = draft.open(), states.of(draft.needs)
    draws = Draws(_At(temperature), _At(temperature)) if isinstance(draft, Sources) else None
    while end < len(tokens) - 1:  # `end`: the last emitted token
        seen = RoundInput(tokens[: end + 1], states_TSD[fed:end])
        tree, following = draft.propose(state, seen, method.tree, draws), [*tokens[end + 1 :], -1]
        path, _ = accept_best(tree, lambda node: following[min(tree.depths[node], len(following) - 1)])  # noqa: B023
        fed, emitted = end, min(len(path) + 1, len(tokens) - 1 - end)
        out.add_pass(min(len(path), emitted), emitted)
        end += emitted
    return out


def largest_tree(depth: int, top_k: int, candidates: Any, parallel: int) -> TreeConfig:
    """For `counter`, which selects trees of any number of nodes."""
    return TreeConfig(depth=depth, top_k=top_k, nodes=depth + 1, candidates=candidates, parallel=parallel)


Counter = Callable[[TreeConfig], Acceptance]  # what decoding one text counts with a tree


def counter(
    draft: Draft, states: States, tokens: list[int], begin: int, largest: TreeConfig, temperature: float = 0.0
) -> Counter:
    """Of a text of the target's own, from ``tokens[begin]``, for any of the draft's dynamic trees up to `largest`.
    `states` are the target's of all tokens, `temperature` is that of the text.
    """
    if begin == len(tokens) - 1:
        return lambda tree: Acceptance()  # a text of one token has no round
    if isinstance(draft, Sources):
        walk = collect(draft.draft, states, tokens, begin, largest)
        return Together(draft, walk, tokens, begin).counter(draft, temperature)
    if not draft.stepwise:
        return lambda tree: decoded(Method(draft, tree), states, tokens, begin)
    return collect(draft, states, tokens, begin, largest).counter()


def counted(method: Method, states: States, tokens: list[int], begin: int) -> Acceptance:
    """As `decoded` at temperature 0. A dynamic tree is grown at many places at a time, which is faster."""
    if method.tree.paths is not None:
        return decoded(method, states, tokens, begin)
    return counter(method.draft, states, tokens, begin, method.tree)(method.tree)


@dataclass
class _Level:
    """What the forwarded nodes of one depth propose, at A places with W of them each: k tokens a horizon, best
    first.
    """

    rows: np.ndarray  # (A, W_above * k): the forward that a candidate of the level above became, or -1
    tokens: list[np.ndarray]  # by horizon (A, W, k)
    scores: list[np.ndarray]  # log-probabilities, likewise


@dataclass
class _Grown:
    """One level of the candidates of a smaller tree, at A places, C of them each."""

    tokens_AC: np.ndarray
    parents_AC: np.ndarray  # number among all candidates of the place; -1: the root
    scores_AC: np.ndarray  # cumulative; -inf: no candidate
    true_AC: np.ndarray  # it lies on the target's path


@dataclass
class Walk:
    """One text: the draft's forwards below each of its A places, and the tokens that the target went on with."""

    levels: list[list[_Level]]  # by block of places, then by depth
    following_AS: np.ndarray  # -1 beyond the text's end

    def counter(self) -> "Counter":
        ranks = cache(self.ranks)
        return lambda tree: walk(ranks(tree.top_k, tree.depth, tree.parallel or 1), tree.nodes)

    def ranks(self, top_k: int, depth: int, parallel: int) -> np.ndarray:
        """(A, depth): the ranks, among all candidates of such a tree, of those that the target goes on with; ABSENT
        where the tree does not hold them. A tree of N nodes accepts those below N - 1.
        """
        return np.concatenate([_ranks(grown) for grown in self._grown(top_k, depth, parallel)])

    def pools(self, top_k: int, depth: int, parallel: int, count: int) -> Iterator[Pool]:
        """Place by place the best `count` candidates of such a tree."""
        for grown in self._grown(top_k, depth, parallel):
            yield from _pools(grown, count)

    def _grown(self, top_k: int, depth: int, parallel: int) -> Iterator[Iterator[_Grown]]:
        """By block of places."""
        first = 0
        for block in self.levels:
            count = len(block[0].tokens[0])
            yield _grown(block, self.following_AS[first : first + count, :depth], top_k, depth, parallel)
            first += count


class Together:
    """One text, and what several sources propose below each of its places (the draft's is its `walk`)."""

    def __init__(self, sources: Sources, walk: Walk, tokens: list[int], begin: int):
        self.walk, ends, state = walk, range(begin, len(tokens) - 1), sources.open()
        seen = (RoundInput(tokens[: end + 1], torch.zeros(0, 0, 1)) for end in ends)
        self.copied = [sources.copied(state, one) for one in seen]  # by place, as all that follows
        deepest = max(CHAIN, walk.following_AS.shape[1])
        self.following = [tokens[end + 1 : end + 1 + deepest] for end in ends]

    def pools(self, tree: TreeConfig) -> Iterator[Pool]:
        """What the draft proposes."""
        return self.walk.pools(tree.top_k, tree.depth, tree.parallel or 1, POOL)

    def counter(self, sources: Sources, temperature: float) -> Counter:
        """For these sources with any calibration."""

        @cache
        def ranks(tree: TreeConfig) -> np.ndarray:
            deepest, out = max(CHAIN, tree.depth), []
            for drafted, copied, following in zip(self.pools(tree), self.copied, self.following, strict=True):
                found = sources.merged(drafted, copied, tree, temperature).ranks(following)
                out.append([*found, *[ABSENT] * (deepest - len(found))])
            return np.array(out)

        return lambda tree: walk(ranks(replace(tree, nodes=tree.depth + 1)), tree.nodes)


@torch.inference_mode()
def collect(draft: Draft, states: States, tokens: list[int], begin: int, tree: TreeConfig) -> Walk:
    """Grows the largest tree, with `tree`'s kind of candidates, below every token from ``tokens[begin]`` to the last
    but one, as decoding does there: from the target's `states` (at least of all but the last two). `begin` is at least
    1; the tree's depth, top_k and parallel are the most that will be asked for.
    """
    state, states_TSD, fed, levels = draft.open(), states.of(draft.needs), 0, []
    ends = range(begin, len(tokens) - 1)  # a place is named by its last emitted token
    for first in range(0, len(ends), block := max(1, FORWARDED // tree.top_k)):
        block_ends = ends[first : first + block]
        upto = block_ends[-1]
        seen = RoundInput(tokens[: upto + 1], states_TSD[fed:upto])
        answer = draft.start(state, seen, _wanted(tree), len(block_ends))
        fed = upto
        prefix_A = torch.tensor(list(block_ends), device=answer.carry_WD.device)
        levels.append(_levels(draft, state, answer, prefix_A, tree))
    padded = np.array([*tokens, *[-1] * tree.depth])
    return Walk(levels, np.stack([padded[end + 1 : end + 1 + tree.depth] for end in ends]))


def _wanted(tree: TreeConfig) -> DraftRequest:
    """Of every forward, since any may be a smaller tree's last."""
    return DraftRequest(tree.parallel or 1, tree.candidates != "plain")


def _levels(draft: Draft, state: Any, answer: DraftOutput, prefix_A: Tensor, tree: TreeConfig) -> list[_Level]:
    """As `grow.best_pool` grows its levels, at A places at a time and each level with all its branches ahead.
    Raises PipelineError where a logit is not finite.
    """
    broken = answer.broken()
    device, places, width, out = prefix_A.device, len(prefix_A), 1, []
    totals_AW, seen = torch.zeros(places, 1, device=device), torch.zeros(places, 0, dtype=torch.bool, device=device)
    rows = np.zeros((places, 0), dtype=np.int64)
    for depth in range(1, tree.depth + 1):
        own = candidates(draft, *ranking(answer, tree), tree.top_k)
        deep = min(tree.parallel or 1, tree.depth - depth + 1, len(answer.logits_LWU))
        ahead = [ahead_scores(answer, level) for level in range(1, deep)]
        both = zip(own, *(candidates(draft, scores, scores, tree.top_k) for scores in ahead), strict=True)
        tokens, scores = ([x.view(places, width, -1).cpu().numpy() for x in kind] for kind in both)
        out.append(_Level(rows, tokens, scores))
        if depth == tree.depth or not draft.config.levels_of(depth):
            break
        wide, gained = own[0].shape[1], own[1].view(places, width, -1)
        scores_AC = (totals_AW[:, :, None] + gained).flatten(1)
        order_AW = scores_AC.sort(descending=True, stable=True).indices[:, : tree.top_k]
        above = order_AW // wide + torch.arange(places, device=device)[:, None] * width
        chosen = own[0].view(places, -1).gather(1, order_AW).flatten()
        totals_AW, width = scores_AC.gather(1, order_AW), order_AW.shape[1]
        rows = np.full(scores_AC.shape, -1)
        np.put_along_axis(rows, order_AW.cpu().numpy(), np.arange(width)[None], axis=1)
        rows_W, prefix_W = above.flatten(), prefix_A.repeat_interleave(width)
        seen = seen_by(seen, rows_W)
        answer = draft.step(state, Frontier(chosen, answer.carry_WD[rows_W], seen, depth, prefix_W), _wanted(tree))
        broken = broken | answer.broken()
    if broken:
        raise not_finite(draft)
    return out


def _grown(block: list[_Level], following_AS: np.ndarray, top_k: int, depth: int, parallel: int) -> Iterator[_Grown]:
    """The levels of all candidates of such a tree, in the order of `grow.best_pool`."""
    places = len(following_AS)
    each = np.arange(places)[:, None]
    # A level's nodes: their forward's row (-1: none), their number among all candidates, their cumulative score, and
    # whether they lie on the target's path.
    rows, numbers, scores, true = (np.full((places, 1), start) for start in (0, -1, np.float32(0), True))
    first, last = 0, depth - parallel
    for level in range(depth):
        forwarded, horizon = block[min(level, last)], max(level - last, 0)
        tokens, gained = (x[horizon][each, rows][:, :, :top_k] for x in (forwarded.tokens, forwarded.scores))
        children = tokens.shape[2]
        total = np.where(rows[:, :, None] < 0, -np.inf, scores[:, :, None] + gained).reshape(places, -1)
        children_true = ((tokens == following_AS[:, level, None, None]) & true[:, :, None]).reshape(places, -1)
        yield _Grown(tokens.reshape(places, -1), numbers.repeat(children, axis=1), total, children_true)
        order = np.argsort(-total, axis=1, kind="stable")[:, :top_k]
        scores, true = (np.take_along_axis(x, order, 1) for x in (total, children_true))
        rows, numbers = np.take_along_axis(rows, order // children, 1), first + order
        if level < last:
            below = block[level + 1].rows
            collected = forwarded.tokens[0].shape[2]
            rows = np.take_along_axis(below, rows * collected + order % children, 1)
        rows = np.where(np.isfinite(scores), rows, -1)
        first += total.shape[1]


def _ranks(levels: Iterable[_Grown]) -> np.ndarray:
    """See `Walk.ranks`."""
    grown = list(levels)
    whole_AC, ranks = np.concatenate([one.scores_AC for one in grown], axis=1), []
    order_C, first = np.arange(whole_AC.shape[1]), 0
    for one in grown:
        column_A = first + one.true_AC.argmax(1)[:, None]
        score_A = np.where(one.true_AC, one.scores_AC, -np.inf).max(1)[:, None]
        before_AC = (whole_AC > score_A) | ((whole_AC == score_A) & (order_C < column_A))  # equals go by their number
        ranks.append(np.where(np.isfinite(score_A[:, 0]), before_AC.sum(1), ABSENT))
        first += one.scores_AC.shape[1]
    return np.maximum.accumulate(np.stack(ranks, axis=1), axis=1)


def _pools(levels: Iterable[_Grown], count: int) -> Iterator[Pool]:
    """At each place the best `count` candidates, as `grow.best_pool` finds them."""
    grown = list(levels)
    tokens_AC, parents_AC, scores_AC = (
        np.concatenate([getattr(one, name) for one in grown], axis=1)
        for name in ("tokens_AC", "parents_AC", "scores_AC")
    )
    order_AC = np.argsort(-scores_AC, axis=1, kind="stable")[:, :count]
    for tokens, parents, scores, order in zip(tokens_AC, parents_AC, scores_AC, order_AC, strict=True):
        kept = np.sort(order[np.isfinite(scores[order])])
        above = np.where(parents[kept] < 0, 0, np.searchsorted(kept, parents[kept]) + 1)
        yield Pool(tokens[kept].tolist(), above.tolist(), scores[kept].tolist())


def walk(ranks_AS: np.ndarray, nodes: int) -> Acceptance:
    """What decoding the text with a tree of so many nodes would count: each round starts where the one before it
    ended.
    """
    accepted_A, out, place = (ranks_AS < nodes - 1).sum(1).tolist(), Acceptance(), 0
    while place < len(accepted_A):
        emitted = min(accepted_A[place] + 1, len(accepted_A) - place)  # what is beyond the text's end is not counted
        out.add_pass(min(accepted_A[place], emitted), emitted)
        place += emitted
    return out
