"""Growing the token trees of every draft: dynamic (EAGLE-2) or static (EAGLE-1), their candidates plain, merged or
mixed, and their last levels from one forward (Jakiro).

A tree of best candidates is a deterministic function of the context, a static tree may hold drawn ones: `accept.py`
says why each is lossless. Growing never asks the device for a number; one copy at the end brings the tree to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from pipeline.basics.accelerator import sent
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig, static_paths
from pipeline.decoding.contract import Draft, DraftOutput, DraftRequest, Draws, Forwards, Frontier, Pool, RoundInput
from pipeline.decoding.tree import Tree, build_tree


def grow(draft: Draft, state: Any, seen: RoundInput, tree: TreeConfig, draws: Draws | None, forwards: Forwards) -> Tree:
    """Grows the draft's tree below the last emitted token, from its `forwards`.

    `draws` are wanted by trees whose siblings are drawn; at temperature 0 those take the best. Raises PipelineError
    where the draft's logits are not finite.
    """
    if tree.paths is None:
        pool = best_pool(draft, state, seen, tree, tree.nodes - 1, forwards)
        return build_tree(seen.tokens[-1], pool.tokens, pool.parents, seen.states_TSD.device)
    grower = _Grower(draft, state, seen, tree, forwards)
    drawn = tree.siblings != "best" and draws is not None and draws.processing.temperature > 0
    return _grow_static(grower, seen.tokens[-1], _Siblings(tree, draws) if drawn and draws is not None else None)


class _Grower:
    """The forwards of one round, and what the last of them answered."""

    def __init__(self, draft: Draft, state: Any, seen: RoundInput, tree: TreeConfig, forwards: Forwards):
        self.draft, self.tree, self._state, self._forwards = draft, tree, state, forwards
        self.last = tree.forwards - 1  # depth of the last level that is forwarded
        self.answer = forwards.start(state, seen, self._wanted(0))
        self.broken, self.device = self.answer.broken(), self.answer.logits_LWU[0].device
        self._seen_WC = torch.zeros(1, 0, dtype=torch.bool, device=self.device)

    def _wanted(self, depth: int) -> DraftRequest:
        levels = self.tree.depth - self.last if depth == self.last else 1
        return DraftRequest(levels, self.tree.candidates != "plain")

    def step(self, tokens_W: Tensor, rows_W: Tensor, depth: int) -> None:
        """Forwards W nodes at `depth`, whose parents were rows of the forward before."""
        self._seen_WC = seen_by(self._seen_WC, rows_W)
        frontier = Frontier(tokens_W, self.answer.carry_WD[rows_W], self._seen_WC, depth)
        self.answer = self._forwards.step(self._state, frontier, self._wanted(depth))
        self.broken = self.broken | self.answer.broken()

    def scores(self, beyond: int) -> tuple[Tensor, Tensor]:
        """Of the tokens `beyond` levels below the last forward's own candidates (these: up to 0), what each of its rows
        ranks them by and what nodes are scored by.
        """
        return ranking(self.answer, self.tree) if beyond <= 0 else (ahead_scores(self.answer, beyond),) * 2


def seen_by(seen: Tensor, rows_W: Tensor) -> Tensor:
    """What W new nodes see below rows of the forward before, whose nodes saw `seen`: the same, and themselves."""
    itself = torch.eye(len(rows_W), dtype=torch.bool, device=seen.device)
    return torch.cat([seen[rows_W], itself], dim=1)


def ranking(answer: DraftOutput, spec: TreeConfig) -> tuple[Tensor, Tensor]:
    """Log-probabilities (W, U) of the next token: what candidates are ranked by, and what nodes are scored by. None is
    above 0, where rounding would let a mixture's be: a child must not outrank its parent.
    """
    if spec.candidates == "plain":
        scores = answer.logits_LWU[0].float().log_softmax(-1)
        return scores, scores
    assert answer.experts_WKU is not None and answer.log_weights_WK is not None
    each_WKU = answer.experts_WKU.float().log_softmax(-1) + answer.log_weights_WK.float()[:, :, None]
    mixed = each_WKU.logsumexp(1).clamp_max(0)
    return (mixed if spec.candidates == "mixture" else each_WKU.amax(1)), mixed


def candidates(draft: Draft, ranked_WU: Tensor, scored_WU: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row, best first (W, k), as target ids, and their scores. No token twice."""
    chosen = ranked_WU.topk(min(count, ranked_WU.shape[1]), dim=-1).indices
    tokens = chosen if draft.token_ids_U is None else draft.token_ids_U[chosen]
    return tokens, scored_WU.gather(1, chosen)


def ahead_scores(answer: DraftOutput, level: int) -> Tensor:
    """Log-probabilities of the token `level` levels below the last forward's own candidates."""
    return answer.logits_LWU[level].float().log_softmax(-1)


# -- dynamic ---------------------------------------------------------------------------------------------------------


@dataclass
class _Level:
    """Candidates of one depth: n = W * k of them."""

    tokens: Tensor  # target ids [n]
    parents: Tensor  # number in the pool of all candidates [n]; -1 for the root
    scores: Tensor  # cumulative log-probability [n]
    rows: Tensor  # row of the forward that proposed them [n]
    first: int  # number of the first one in the pool


def best_pool(draft: Draft, state: Any, seen: RoundInput, tree: TreeConfig, count: int, forwards: Forwards) -> Pool:
    """The best `count` candidates of a dynamic tree. Per level the `top_k` best nodes by cumulative log-probability are
    forwarded and each proposes `top_k` children. A child never outranks its parent, so what stays is connected.

    Raises PipelineError where the draft's logits are not finite.
    """
    grower = _Grower(draft, state, seen, tree, forwards)
    levels = [_first(grower)]
    while len(levels) <= grower.last:
        levels.append(_forwarded(grower, levels[-1], len(levels)))
    for beyond in range(1, min(grower.tree.depth - grower.last, len(grower.answer.logits_LWU))):
        levels.append(_ahead(grower, levels[-1], beyond))
    scores = torch.cat([level.scores for level in levels])
    best = scores.sort(descending=True, stable=True).indices[:count]
    kept = best.sort().values  # parents come first in the pool
    tokens, parents = (torch.cat([getattr(level, name) for level in levels])[kept] for name in ("tokens", "parents"))
    found = torch.stack([x.double() for x in (kept, tokens, parents, grower.broken.expand(len(kept)), scores[kept])])
    *whole, gained = found.tolist()  # the only wait for the device
    numbers, names, above, failed = ([int(x) for x in row] for row in whole)
    if failed[0]:
        raise not_finite(draft)
    places = {number: place for place, number in enumerate(numbers, start=1)} | {-1: 0}
    return Pool(names, [places[parent] for parent in above], gained)


def not_finite(draft: Draft) -> PipelineError:
    return PipelineError(
        f"draft {draft.name!r}: its logits are not finite. Its weights are damaged or overflow in this dtype: use "
        "bfloat16 or float32 (eval.dtype; in training train.dtype), or train it again"
    )


def _first(grower: _Grower) -> _Level:
    """The root's children."""
    root = (
        torch.full((1,), -1, device=grower.device),
        torch.zeros(1, device=grower.device),
        torch.zeros(1, dtype=torch.long, device=grower.device),
    )
    return _propose(grower.draft, *grower.scores(0), grower.tree.top_k, *root, first=0)


def _forwarded(grower: _Grower, level: _Level, depth: int) -> _Level:
    """What the best nodes of a level propose, which is at `depth`, when they are forwarded."""
    order = level.scores.sort(descending=True, stable=True).indices[: grower.tree.top_k]
    grower.step(level.tokens[order], level.rows[order], depth)
    rows = torch.arange(len(order), device=grower.device)
    return _below(grower, level, order, *grower.scores(0), rows)


def _ahead(grower: _Grower, level: _Level, beyond: int) -> _Level:
    """The children of nodes that are not forwarded: what the forward above them expects that many tokens ahead,
    gathered by the row of that forward and NOT by the nodes' own ranks.
    """
    order = level.scores.sort(descending=True, stable=True).indices[: grower.tree.top_k]
    rows = level.rows[order]
    scores = grower.scores(beyond)[0][rows]
    return _below(grower, level, order, scores, scores, rows)


def _below(grower: _Grower, level: _Level, order: Tensor, ranked_WU: Tensor, scored_WU: Tensor, rows: Tensor) -> _Level:
    numbers, first = level.first + order, level.first + len(level.tokens)
    return _propose(grower.draft, ranked_WU, scored_WU, grower.tree.top_k, numbers, level.scores[order], rows, first)


def _propose(
    draft: Draft,
    ranked_WU: Tensor,
    scored_WU: Tensor,
    top_k: int,
    parents: Tensor,
    scores: Tensor,
    rows: Tensor,
    first: int,
) -> _Level:
    """The `top_k` best tokens of each row become children of `parents`; `rows` are the forwards' rows."""
    tokens, gained = candidates(draft, ranked_WU, scored_WU, top_k)
    children = tokens.shape[1]
    return _Level(
        tokens=tokens.reshape(-1),
        parents=parents.repeat_interleave(children),
        scores=(scores[:, None] + gained).reshape(-1),
        rows=rows.repeat_interleave(children),
        first=first,
    )


# -- static ----------------------------------------------------------------------------------------------------------


class _Siblings:
    """Siblings drawn one after the other without replacement: from one distribution, or from each expert's in turn."""

    def __init__(self, tree: TreeConfig, draws: Draws):
        self._processing, self._randomness = draws.processing, draws.randomness
        self._by_expert, self._mixed = tree.siblings == "drawn-by-expert", tree.candidates == "mixture"

    def of(self, draft: Draft, answer: DraftOutput, rows: Tensor, beyond: int, count: int) -> tuple[Tensor, Tensor]:
        """For parents whose children come from these `rows` of the last forward, `beyond` levels below its own:
        ``tokens (W, count)``, -1 where nothing is left to draw, and what each was drawn from ``(W, count, V)``. Each
        parent draws for itself.
        """
        if beyond > 0:
            q_WKU = self._processing.probabilities(answer.logits_LWU[beyond][rows])[:, None]
        elif self._by_expert or self._mixed:
            assert answer.experts_WKU is not None and answer.log_weights_WK is not None
            logits_WKU = answer.experts_WKU[rows]
            q_WKU = self._processing.probabilities(logits_WKU.flatten(0, 1)).view_as(logits_WKU).float()
            if self._mixed:
                q_WKU = (answer.log_weights_WK[rows].float().exp()[:, :, None] * q_WKU).sum(1, keepdim=True)
        else:
            q_WKU = self._processing.probabilities(answer.logits_LWU[0][rows])[:, None]
        return self._draw(draft, q_WKU, count, draft.target_vocabulary)

    def _draw(self, draft: Draft, q_WKU: Tensor, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        q_WKV = _over_target_ids(draft, q_WKU.double(), vocabulary)
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


def _over_target_ids(draft: Draft, q: Tensor, vocabulary: int) -> Tensor:
    if draft.token_ids_U is None:
        return q
    whole = q.new_zeros(*q.shape[:-1], vocabulary)
    whole[..., draft.token_ids_U] = q
    return whole


@dataclass(frozen=True)
class _Layer:
    """The nodes of one depth of a static tree."""

    paths: tuple[tuple[int, ...], ...]
    inner: tuple[int, ...]  # places in it of those that have children
    siblings: int  # most that one parent has


@cache
def _layers(paths: tuple[tuple[int, ...], ...]) -> tuple[_Layer, ...]:
    """By depth, from 1. Worked out once for a tree, not once a round."""
    parents, out = {path[:-1] for path in paths}, []
    for depth in range(1, 1 + max(map(len, paths))):
        level = tuple(path for path in paths if len(path) == depth)
        inner = tuple(place for place, path in enumerate(level) if path in parents)
        out.append(_Layer(level, inner, 1 + max(path[-1] for path in level)))
    return tuple(out)


def _grow_static(grower: _Grower, root: int, siblings: _Siblings | None) -> Tree:
    """Level by level along `static_paths`; only nodes that have children are forwarded."""
    device, paths = grower.device, tuple(tuple(path) for path in static_paths(grower.tree.paths))
    rows: dict[tuple[int, ...], int] = {(): 0}  # path -> row of the forward whose answer its children come from
    tokens_of, proposals_of = [], []
    for depth, layer in enumerate(_layers(paths)):  # the children of the nodes at `depth`
        parents, beyond = list(dict.fromkeys(path[:-1] for path in layer.paths)), depth - grower.last
        parent_rows = _index(tuple(rows[parent] for parent in parents), device)
        if siblings:
            found, proposals = siblings.of(grower.draft, grower.answer, parent_rows, beyond, layer.siblings)
        else:
            found = _best(grower, beyond, layer.siblings)[parent_rows]
        place_of = {parent: place for place, parent in enumerate(parents)}
        source, rank = (_index(x, device) for x in zip(*((place_of[p[:-1]], p[-1]) for p in layer.paths), strict=True))
        tokens = found[source, rank]
        tokens_of.append(tokens)
        if siblings:
            proposals_of.append(proposals[source, rank])
        above = [rows[layer.paths[place][:-1]] for place in layer.inner]
        if depth < grower.last:
            grower.step(tokens[_index(layer.inner, device)].clamp_min(0), _index(tuple(above), device), depth + 1)
            above = list(range(len(above)))
        rows = {layer.paths[place]: row for place, row in zip(layer.inner, above, strict=True)}
    drawn_from = torch.cat(proposals_of).to("cpu", non_blocking=True) if siblings else None  # there after the next line
    *numbers, failed = torch.cat([*tokens_of, grower.broken[None].long()]).tolist()  # the only wait for the device
    if failed:
        raise not_finite(grower.draft)
    return _collect(root, paths, numbers, drawn_from, device)


def _best(grower: _Grower, beyond: int, count: int) -> Tensor:
    """The `count` best tokens of each row of the last forward (W, count), `beyond` levels below its own candidates; -1
    where the vocabulary has no more.
    """
    found = candidates(grower.draft, *grower.scores(beyond), count)[0]
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-1)


def _collect(
    root: int, paths: Sequence[tuple[int, ...]], tokens: list[int], proposals: Tensor | None, device: torch.device
) -> Tree:
    """Leaves out the nodes that nothing was left for (-1, or a rank that the vocabulary does not have), and what is
    below them.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    kept = []
    for number, (path, token) in enumerate(zip(paths, tokens, strict=True)):
        if token >= 0 and path[:-1] in places:
            places[path] = len(places)
            kept.append(number)
    tree = build_tree(root, [tokens[n] for n in kept], [places[paths[n][:-1]] for n in kept], device)
    if proposals is not None:
        tree.proposals = [proposals[:0], *proposals[kept]]  # the root was not drawn
    return tree


@lru_cache(1024)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A static tree's are the same in every round: they are sent once."""
    return sent(numbers, device, torch.long)
