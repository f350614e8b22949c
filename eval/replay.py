"""How far any dynamic tree would have been accepted along the target's own answers, from one large tree at every place.

A tree of best candidates accepts exactly the target's own next tokens as far as it holds them (docs/lossless.md). And a smaller
tree's candidates are among a larger one's: fewer of each node's children, fewer nodes of each level, fewer levels. So every
smaller tree is selected from the scores of the large one, without another forward. One simplification: a node that the small
tree forwards and the large one did not has no children here.
"""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.decoding.tree import ahead_scores, candidates, forward_level, ranking
from pipeline.drafts import Draft
from pipeline.drafts.base import Answer, DraftState
from pipeline.sections import TreeConfig
from pipeline.target import Target

ABSENT = 1 << 30


@dataclass
class Forwards:
    """The nodes of one level that were forwarded, and what each proposes."""

    row_of: dict[tuple[int, int], int]  # (row of the forward before, which of its candidates) -> row
    proposals: list[
        tuple[np.ndarray, np.ndarray]
    ]  # (tokens, log-probabilities) [W, k]: of the next token, the one after it, ...


@dataclass
class Place:
    """The draft's forwards below one token of an answer, and the tokens that the target went on with."""

    forwards: list[Forwards]
    following: list[int]


@dataclass
class Walk:
    """One answer."""

    places: list[Place]

    def ranks(self, top_k: int, depth: int, parallel: int) -> list[list[int]]:
        """At each place, the ranks among all candidates of those that the target goes on with, by depth; ABSENT where the tree
        does not hold it. A tree of N nodes accepts those below N - 1.
        """
        return [ranks_at(place, top_k, depth, parallel) for place in self.places]


@torch.inference_mode()
def collect(target: Target, draft: Draft, prompt: list[int], answer: list[int], depth: int, top_k: int) -> Walk:
    """Grows the largest tree below every token of an answer but the last, from true features."""
    tokens = [*prompt, *answer]
    hidden_TD = target.capture(torch.tensor([tokens]))[0]
    state, places, fed = DraftState(), [], 0
    horizons = min(draft.config.horizons, depth)
    tree = TreeConfig(
        depth=depth, top_k=top_k, nodes=depth + 1, candidates=draft.config.tree.candidates, parallel=horizons
    )
    own, draft.config = draft.config, draft.config.with_tree(tree)
    try:
        for place in range(len(answer) - 1):
            upto = len(prompt) + place
            fresh = torch.tensor(tokens[fed + 1 : upto + 1], device=target.device)
            first = draft.start(state, hidden_TD[fed:upto], fresh, True)
            fed = upto
            places.append(Place(_forwards(draft, state, first, tree), answer[place + 1 : place + 1 + depth]))
    finally:
        draft.config = own
    return Walk(places)


def _forwards(draft: Draft, state: DraftState, answer: Answer, tree: TreeConfig) -> list[Forwards]:
    """As `tree.candidate_pool` grows its levels, each with all its branches ahead."""
    device, out, row_of = answer.next_WU.device, [], {}
    totals, seen = torch.zeros(1, device=device), torch.zeros(1, 0, dtype=torch.bool, device=device)
    for depth in range(1, tree.depth + 1):
        tokens, gained = candidates(draft, *ranking(answer, tree), tree.top_k)
        ahead = [ahead_scores(answer, level) for level in range(1, tree.parallel)]
        further = [candidates(draft, scores, scores, tree.top_k) for scores in ahead]
        out.append(Forwards(row_of, [(t.cpu().numpy(), s.cpu().numpy()) for t, s in [(tokens, gained), *further]]))
        if depth == tree.depth:
            return out
        scores = (totals[:, None] + gained).flatten()
        order = scores.sort(descending=True, stable=True).indices[: tree.top_k]
        rows, picks = order // tokens.shape[1], order % tokens.shape[1]
        row_of = {pair: row for row, pair in enumerate(zip(rows.tolist(), picks.tolist(), strict=True))}
        totals = scores[order]
        answer, seen = forward_level(draft, state, answer, tokens.flatten()[order], rows, seen, depth, last=True)


def ranks_at(place: Place, top_k: int, depth: int, parallel: int) -> list[int]:
    """See `Walk.ranks`."""
    # Nodes of a level: their forward's row (-1: not forwarded), cumulative score, and whether they lie on the target's path.
    rows, scores, true = np.array([0]), np.array([0.0]), np.array([True])
    pool, on_path = [], []
    last = depth - parallel
    for level in range(depth):
        forwarded = place.forwards[min(level, last)]
        tokens, gained = forwarded.proposals[max(level - last, 0)]
        tokens, gained = tokens[rows, :top_k], gained[rows, :top_k]
        wanted = place.following[level] if level < len(place.following) else -1
        children_true = (tokens == wanted) & true[:, None]
        total = (scores[:, None] + gained).ravel()
        total[np.repeat(rows < 0, tokens.shape[1])] = -np.inf
        pool.append(total)
        on_path.append(total[children_true.ravel()])
        order = np.argsort(-total, kind="stable")[:top_k]
        order = order[np.isfinite(total[order])]
        if level < last:
            below = place.forwards[level + 1].row_of
            parent_rows, picks = rows[order // tokens.shape[1]], order % tokens.shape[1]
            rows = np.array(
                [below.get((r, p), -1) for r, p in zip(parent_rows.tolist(), picks.tolist(), strict=True)], dtype=int
            )
        else:
            rows = rows[order // tokens.shape[1]]
        scores, true = total[order], children_true.ravel()[order]
        if not len(order):
            break
    whole = np.sort(np.concatenate(pool))[::-1]
    ranks = [
        int(np.searchsorted(-whole, -found[0])) if len(found) and np.isfinite(found[0]) else ABSENT for found in on_path
    ]
    return np.maximum.accumulate(ranks).tolist()


def walk(ranks: list[list[int]], nodes: int) -> tuple[int, int]:
    """(tokens, rounds) of decoding the answer with a tree of so many nodes: each round starts where the one before it ended."""
    place = tokens = rounds = 0
    while place < len(ranks):
        accepted = sum(rank < nodes - 1 for rank in ranks[place])
        emitted = min(accepted + 1, len(ranks) - place)  # what is beyond the answer's end is not counted
        place, tokens, rounds = place + emitted, tokens + emitted, rounds + 1
    return tokens, rounds
