"""Grow the token trees of every draft: dynamic (EAGLE-2) or static (EAGLE-1), with plain or decoupled candidates, and
their last levels from one forward (Jakiro).

A tree of best candidates is a deterministic function of the context, a static tree may hold drawn ones: `accept.py`
explains why each is lossless. Growing never reads a number from the device; the tree is copied to the host once, at the
end, without the distributions of drawn siblings. The same code grows dynamic trees at many places of a text (replay.py)
and at one (decoding).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.basics.accelerator import to_device
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig, static_paths
from pipeline.decoding.contract import (
    CandidatePool,
    Draft,
    DraftOutput,
    DraftRequest,
    Draws,
    Frontier,
    RoundInput,
    Timer,
    call_untimed,
)
from pipeline.decoding.tree import Tree, build_tree


def grow(
    draft: Draft, state: Any, inputs: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = call_untimed
) -> Tree:
    """Grow the draft's tree below the last emitted token.

    `draws` are required by trees whose siblings are drawn; at temperature 0 those take the best. `timer` calls the
    draft's forwards. Raise PipelineError where the draft's logits are not finite.
    """
    if tree.paths is None:
        pool = best_pool(draft, state, inputs, tree, tree.nodes - 1, timer)
        return build_tree(inputs.tokens[-1], pool.tokens, pool.parents, inputs.states_TSD.device)
    grower = Grower(draft, state, inputs, tree, timer)
    drawn = tree.siblings == "drawn" and draws is not None and draws.processing.temperature > 0
    return _grow_static(grower, inputs.tokens[-1], _Siblings(tree, draws) if drawn and draws is not None else None)


class Grower:
    """The draft forwards of one round, or of the rounds at A places of a text at once, and the output of the last of
    them, whose rows are W nodes of the first place, W of the second, ...
    """

    def __init__(
        self,
        draft: Draft,
        state: Any,
        inputs: RoundInput,
        tree: TreeConfig,
        timer: Timer = call_untimed,
        prefix_A: Tensor | None = None,
    ):
        """Run the round's first forward. `prefix_A`: the verified inputs before each of the last A places of `inputs`;
        every forward then predicts all levels ahead, since smaller trees are selected from this one. Without it the
        only place is the end of the text.
        """
        self.draft, self.tree, self._state, self._timer, self._prefix_A = draft, tree, state, timer, prefix_A
        self.places, self.last = 1 if prefix_A is None else len(prefix_A), tree.forwards - 1
        self._receive(timer("draft", draft.start, state, inputs, self._request(0), self.places))
        self.nonfinite, self.device = self.output.is_nonfinite(), self.output.logits_LWU[0].device
        self._visible_WC = torch.zeros(self.places, 0, dtype=torch.bool, device=self.device)

    def _request(self, depth: int) -> DraftRequest:
        any_last = self._prefix_A is not None
        levels = self.tree.depth - self.last if any_last or depth == self.last else 1
        return DraftRequest(levels, self.tree.candidates != "plain")

    def _receive(self, output: DraftOutput) -> None:
        self.output, self.width = output, len(output.carry_WD) // self.places
        self._children: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, tokens_W: Tensor, rows_W: Tensor, depth: int) -> None:
        """Forward nodes at `depth`, equally many for each place, whose parents were these rows of the last forward."""
        itself = torch.eye(len(rows_W), dtype=torch.bool, device=self.device)
        self._visible_WC = torch.cat([self._visible_WC[rows_W], itself], dim=1)
        prefix_W = None if self._prefix_A is None else self._prefix_A.repeat_interleave(len(rows_W) // self.places)
        frontier = Frontier(tokens_W, self.output.carry_WD[rows_W], self._visible_WC, depth, prefix_W)
        self._receive(self._timer("draft", self.draft.step, self._state, frontier, self._request(depth)))
        self.nonfinite = self.nonfinite | self.output.is_nonfinite()

    def scores(self, offset: int) -> tuple[Tensor, Tensor]:
        """Return (ranking scores, node scores) by the last forward's rows. `offset` up to 0: of its next token; n: n
        tokens further.
        """
        return rank_and_score(self.output, self.tree) if offset <= 0 else (score_ahead(self.output, offset),) * 2

    # -- the protocol `Expander` ----------------------------------------------------------------------------------

    def children(self, rows_AW: Tensor | None, offset: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the children as `Expander` defines; without `rows_AW` for all rows."""
        if (offset, count) not in self._children:
            self._children[offset, count] = best_candidates(self.draft, *self.scores(offset), count)
        tokens_and_scores = self._children[offset, count]
        if offset == 0 or rows_AW is None:  # of the last forward's own nodes: all its rows
            return tokens_and_scores[0].view(self.places, self.width, -1), tokens_and_scores[1].view(
                self.places, self.width, -1
            )
        rows_AW = self._whole_rows(rows_AW)
        return tokens_and_scores[0][rows_AW], tokens_and_scores[1][rows_AW]

    def forward(self, tokens_AW: Tensor, rows_AW: Tensor, ranks_AW: Tensor, depth: int) -> Tensor:
        self.step(tokens_AW.flatten(), self._whole_rows(rows_AW).flatten(), depth)
        return torch.arange(self.width, device=self.device).expand(self.places, -1)

    def _whole_rows(self, rows_AW: Tensor) -> Tensor:
        """Convert each place's row numbers to rows of the complete forward."""
        if self.places == 1:
            return rows_AW
        return rows_AW + self.width * torch.arange(self.places, device=self.device)[:, None]


def rank_and_score(output: DraftOutput, spec: TreeConfig) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (W, U) of the next token: the ranking of candidates, and the scores of nodes. They are
    at most 0, though rounding could lift a mixture's above: a child must not outrank its parent.
    """
    if spec.candidates == "plain":
        scores = output.logits_LWU[0].float().log_softmax(-1)
        return scores, scores
    assert output.experts_WKU is not None and output.log_weights_WK is not None
    each_WKU = output.experts_WKU.float().log_softmax(-1) + output.log_weights_WK.float()[:, :, None]
    mixed = each_WKU.logsumexp(1).clamp_max(0)
    return each_WKU.amax(1), mixed


def best_candidates(draft: Draft, ranked_WU: Tensor, scored_WU: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of each row, best first (W, k), as target ids, and their scores; no token
    twice.
    """
    chosen = ranked_WU.topk(min(count, ranked_WU.shape[1]), dim=-1).indices
    tokens = chosen if draft.token_ids_U is None else draft.token_ids_U[chosen]
    return tokens, scored_WU.gather(1, chosen)


def score_ahead(output: DraftOutput, level: int) -> Tensor:
    """Return log-probabilities of the token `level` levels below the last forward's own candidates."""
    return output.logits_LWU[level].float().log_softmax(-1)


# -- dynamic ---------------------------------------------------------------------------------------------------------


class Expander(Protocol):
    """The proposals for the nodes of a tree, at A places at once: from live forwards, or from recorded ones."""

    def children(self, rows_AW: Tensor, offset: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best tokens of these rows of the last forward (A, W, k), as target ids, and their
        log-probabilities, `offset` levels below the forward's own candidates.
        """

    def forward(self, tokens_AW: Tensor, rows_AW: Tensor, ranks_AW: Tensor, depth: int) -> Tensor:
        """Forward nodes at `depth`: the children of these rows that have these ranks. Return the new rows (A, W)."""


@dataclass
class Level:
    """The candidates of one depth at A places, C of them each."""

    tokens_AC: Tensor  # target ids
    parents_AC: Tensor  # number among all candidates of the place, from 0; -1 for the root
    scores_AC: Tensor  # cumulative log-probability; -inf: the candidate does not exist


def dynamic_levels(expander: Expander, tree: TreeConfig, places: int, device: torch.device) -> Iterator[Level]:
    """Yield the candidates of a dynamic tree, level by level. The `top_k` best nodes of a level by cumulative
    log-probability are forwarded and each proposes `top_k` children. Below the last forward a node's children are the
    tokens that the forward above it predicts that far ahead: they are found by the row of that forward and NOT by the
    node's own rank.
    """
    rows_AW = torch.zeros(places, 1, dtype=torch.long, device=device)
    numbers_AW, totals_AW = rows_AW - 1, torch.zeros(places, 1, device=device)
    first, last = 0, tree.forwards - 1
    for depth in range(1, tree.depth + 1):
        tokens_AWK, gained_AWK = expander.children(rows_AW, max(depth - 1 - last, 0), tree.top_k)
        children, tokens_AC = tokens_AWK.shape[2], tokens_AWK.flatten(1)
        scores_AC = (totals_AW[:, :, None] + gained_AWK).flatten(1)
        yield Level(tokens_AC, numbers_AW.repeat_interleave(children, dim=1), scores_AC)
        if depth == tree.depth:
            return
        order_AW = scores_AC.sort(dim=1, descending=True, stable=True).indices[:, : tree.top_k]
        totals_AW, numbers_AW = scores_AC.gather(1, order_AW), first + order_AW
        first += scores_AC.shape[1]
        rows_AW = rows_AW.gather(1, order_AW // children)
        if depth <= last:
            rows_AW = expander.forward(tokens_AC.gather(1, order_AW), rows_AW, order_AW % children, depth)


def best_pools(levels: Sequence[Level], count: int, broken: Tensor | None = None) -> tuple[list[CandidatePool], bool]:
    """Return the best `count` of all candidates at each place, and whether `broken`."""
    return pools_of(select_best(levels, count, broken))


def select_best(levels: Sequence[Level], count: int, broken: Tensor | None = None) -> Tensor:
    """Return the best `count` of all candidates at each place, float64 (5, A, N): number, token, parent, score, and
    whether `broken`. A child never outranks its parent, so the selected nodes are connected.
    """
    tokens_AC, parents_AC, scores_AC = (
        torch.cat([getattr(level, name) for level in levels], dim=1)
        for name in ("tokens_AC", "parents_AC", "scores_AC")
    )
    best_AC = scores_AC.sort(dim=1, descending=True, stable=True).indices[:, :count]
    selected_AC = best_AC.sort(dim=1).values  # parents come first in a pool
    failed = torch.zeros((), device=scores_AC.device) if broken is None else broken
    parts = [
        selected_AC,
        *(x.gather(1, selected_AC) for x in (tokens_AC, parents_AC, scores_AC)),
        failed.expand_as(selected_AC),
    ]
    return torch.stack([x.double() for x in parts])


def pools_of(selected: Tensor) -> tuple[list[CandidatePool], bool]:
    """Return the pools that `select_best` has selected, and whether they are broken."""
    *columns, failures = selected.tolist()  # the only wait for the device
    return [_pool(*place) for place in zip(*columns, strict=True)], bool(failures[0][0])


def _pool(numbers: list[float], tokens: list[float], parents: list[float], scores: list[float]) -> CandidatePool:
    present = [place for place, score in enumerate(scores) if score > -math.inf]
    places = {numbers[n]: place for place, n in enumerate(present, start=1)} | {-1: 0}
    return CandidatePool(
        [int(tokens[n]) for n in present], [places[parents[n]] for n in present], [scores[n] for n in present]
    )


def best_pool(
    draft: Draft, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer = call_untimed
) -> CandidatePool:
    """Return the best `count` candidates of a dynamic tree. Raise PipelineError where the draft's logits are not
    finite.
    """
    if draft.rounds is not None:
        return draft.rounds.pool(state, inputs, tree, count, timer)
    grower = Grower(draft, state, inputs, tree, timer)
    levels = list(dynamic_levels(grower, tree, 1, grower.device))
    (pool,), failed = best_pools(levels, count, grower.nonfinite)
    if failed:
        raise not_finite_error(draft)
    return pool


def not_finite_error(draft: Draft) -> PipelineError:
    return PipelineError(
        f"draft {draft.name!r}: its logits are not finite. Its weights are damaged or overflow in this dtype: use "
        "bfloat16 or float32 (eval.dtype; in training train.dtype), or train it again"
    )


# -- static ----------------------------------------------------------------------------------------------------------


class _Siblings:
    """A sampler of siblings, one after the other without replacement: from one distribution, or from each expert's in
    turn.
    """

    def __init__(self, tree: TreeConfig, draws: Draws):
        self._processing, self._randomness = draws.processing, draws.randomness
        self._by_expert = tree.candidates == "decoupled"

    def draw(self, draft: Draft, output: DraftOutput, rows: Tensor, offset: int, count: int) -> tuple[Tensor, Tensor]:
        """Draw the children of parents that have these `rows` of the last forward, `offset` levels below its own:
        return ``tokens (W, count)``, -1 where nothing is left to draw, and the distribution of each draw ``(W, count,
        V)``. Parents draw independently.
        """
        if self._by_expert and offset <= 0:
            assert output.experts_WKU is not None
            logits_WKU = output.experts_WKU[rows]
            q_WKU = self._processing.probabilities(logits_WKU.flatten(0, 1)).view_as(logits_WKU)
        else:
            q_WKU = self._processing.probabilities(output.logits_LWU[max(offset, 0)][rows])[:, None]
        return self._draw(draft, q_WKU, count, draft.target_vocabulary)

    def _draw(self, draft: Draft, q_WKU: Tensor, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        q_WKV = _expand_to_target_ids(draft, q_WKU.double(), vocabulary)
        free = torch.ones_like(q_WKV[:, 0])
        tokens, proposals = [], []
        for rank in range(count):
            q_WV = q_WKV[:, rank % q_WKV.shape[1]] * free
            mass = q_WV.sum(-1, keepdim=True)
            q_WV = q_WV / mass.clamp_min(torch.finfo(q_WV.dtype).tiny)
            drawn = self._randomness.draw_rows(q_WV)
            free = free.scatter(1, drawn[:, None], 0.0)
            tokens.append(torch.where(mass[:, 0] > 0, drawn, -1))
            proposals.append(q_WV)
        return torch.stack(tokens, 1), torch.stack(proposals, 1)


def _expand_to_target_ids(draft: Draft, q: Tensor, vocabulary: int) -> Tensor:
    if draft.token_ids_U is None:
        return q
    full = q.new_zeros(*q.shape[:-1], vocabulary)
    full[..., draft.token_ids_U] = q
    return full


@dataclass(frozen=True)
class _Layer:
    """The nodes of one depth of a static tree."""

    paths: tuple[tuple[int, ...], ...]
    inner: tuple[int, ...]  # places in `paths` of those that have children
    siblings: int  # maximum number of children of one parent


@cache
def _layers(paths: tuple[tuple[int, ...], ...]) -> tuple[_Layer, ...]:
    """Return the layers of each depth, from 1; computed once for a tree, not once a round."""
    parents, out = {path[:-1] for path in paths}, []
    for depth in range(1, 1 + max(map(len, paths))):
        level = tuple(path for path in paths if len(path) == depth)
        inner = tuple(place for place, path in enumerate(level) if path in parents)
        out.append(_Layer(level, inner, 1 + max(path[-1] for path in level)))
    return tuple(out)


def _grow_static(grower: Grower, root: int, siblings: _Siblings | None) -> Tree:
    """Grow level by level along `static_paths`; only nodes that have children are forwarded."""
    device, paths = grower.device, tuple(tuple(path) for path in static_paths(grower.tree.paths))
    rows: dict[tuple[int, ...], int] = {(): 0}  # path -> row of the forward that predicts its children
    tokens_of: list[Tensor] = []
    proposals_of: list[Tensor] = []
    for depth, layer in enumerate(_layers(paths)):  # the children of the nodes at `depth`
        parents, offset = list(dict.fromkeys(path[:-1] for path in layer.paths)), depth - grower.last
        parent_rows = _index(tuple(rows[parent] for parent in parents), device)
        if siblings:
            tokens_WC, proposals = siblings.draw(grower.draft, grower.output, parent_rows, offset, layer.siblings)
        else:
            tokens_WC = _best(grower, offset, layer.siblings)[parent_rows]
        place_of = {parent: place for place, parent in enumerate(parents)}
        source, rank = (_index(x, device) for x in zip(*((place_of[p[:-1]], p[-1]) for p in layer.paths), strict=True))
        tokens = tokens_WC[source, rank]
        tokens_of.append(tokens)
        if siblings:
            proposals_of += proposals[source, rank].unbind()
        above = [rows[layer.paths[place][:-1]] for place in layer.inner]
        if depth < grower.last:
            grower.step(tokens[_index(layer.inner, device)].clamp_min(0), _index(tuple(above), device), depth + 1)
            above = list(range(len(above)))
        rows = {layer.paths[place]: row for place, row in zip(layer.inner, above, strict=True)}
    *numbers, failed = torch.cat([*tokens_of, grower.nonfinite[None].long()]).tolist()  # the only wait for the device
    if failed:
        raise not_finite_error(grower.draft)
    return _collect(root, paths, numbers, proposals_of if siblings else None, device)


def _best(grower: Grower, offset: int, count: int) -> Tensor:
    """Return the `count` best tokens of each row of the last forward (W, count), `offset` levels below its own
    candidates; -1 where the vocabulary has no more.
    """
    tokens_WC = best_candidates(grower.draft, *grower.scores(offset), count)[0]
    return torch.nn.functional.pad(tokens_WC, (0, count - tokens_WC.shape[1]), value=-1)


def _collect(
    root: int, paths: Sequence[tuple[int, ...]], tokens: list[int], proposals: list[Tensor] | None, device: torch.device
) -> Tree:
    """Build the tree without the nodes that have no token (-1, or a rank that the vocabulary does not have), and those
    below them.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    kept_nodes = []
    for number, (path, token) in enumerate(zip(paths, tokens, strict=True)):
        if token >= 0 and path[:-1] in places:
            places[path] = len(places)
            kept_nodes.append(number)
    tree = build_tree(root, [tokens[n] for n in kept_nodes], [places[paths[n][:-1]] for n in kept_nodes], device)
    if proposals is not None:
        tree.proposals = [torch.empty(0), *(proposals[n] for n in kept_nodes)]  # the root was not drawn
    return tree


@lru_cache(1024)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the numbers on the device. A static tree's are the same in every round, so they are copied once."""
    return to_device(numbers, device, torch.long)
