"""The rule for drawn candidates, enumerated on a real round.

Over a whole vocabulary the draws of several siblings are too many to enumerate. The rule does not know how large a
vocabulary is, so a real p and a real q are both restricted to their heaviest tokens, and every draw and decision of the real
`accept_drawn` is summed over there.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.decoding.accept import accept_drawn
from pipeline.decoding.tree import Tree, build_tree

TOKENS = 3  # heaviest of p, and as many of q


class _Decisions:
    """Replays accept/reject decisions, then rejects; keeps the distribution of the final draw instead of drawing."""

    def __init__(self, decisions: list[bool]):
        self._decisions, self._used, self.weight = decisions, 0, 1.0
        self.drawn_V: Tensor | None = None

    def accept(self, probability: float) -> bool:
        if self._used == len(self._decisions):
            self._decisions.append(False)
        decision = self._decisions[self._used]
        self._used += 1
        self.weight *= probability if decision else 1 - probability
        return decision

    def draw_rows(self, p_WV: Tensor) -> Tensor:
        self.drawn_V = p_WV[0]
        return torch.zeros(1, dtype=torch.long)


def drawn_error(tree: Tree, p_V: Tensor) -> float:
    """Largest difference between the first token's distribution, over every draw of the root's children, and p."""
    siblings = tree.children()[0]
    if not siblings:
        return 0.0
    proposals = [tree.proposals[child].double().cpu() for child in siblings]
    p_V = p_V.double().cpu()
    kept = torch.cat([p_V.topk(TOKENS).indices, proposals[0].topk(TOKENS).indices]).unique()
    p = p_V[kept] / p_V[kept].sum()
    bases = [q_V[kept] for q_V in proposals]
    emitted = torch.zeros_like(p)
    for drawn, proposals, weight in _draws(bases, torch.ones_like(p), [], []):
        stump = build_tree(-1, drawn, [0] * len(drawn), torch.device("cpu"))
        stump.proposals = [None, *proposals]
        p_NV = p.expand(1 + len(drawn), -1)
        decisions: list[bool] = []
        while True:
            chance = _Decisions(decisions)
            path, _ = accept_drawn(stump, p_NV, chance)
            if path:
                emitted[stump.tokens[path[0]]] += weight * chance.weight
            elif chance.weight > 0:
                emitted += weight * chance.weight * chance.drawn_V
            while decisions and decisions[-1]:
                decisions.pop()
            if not decisions:
                break
            decisions[-1] = True
    return (emitted - p).abs().max().item()


def _draws(
    bases: list[Tensor], free: Tensor, drawn: list[int], proposals: list[Tensor]
) -> Iterator[tuple[list[int], list[Tensor], float]]:
    """Every sequence of siblings without replacement: tokens, what each was drawn from, and its probability."""
    if not bases:
        yield drawn, proposals, 1.0
        return
    q = bases[0] * free
    if q.sum() <= 0:
        yield from _draws(bases[1:], free, drawn, proposals)
        return
    q = q / q.sum()
    for token in q.nonzero()[:, 0].tolist():
        rest = free.clone()
        rest[token] = 0
        for one in _draws(bases[1:], rest, [*drawn, token], [*proposals, q]):
            yield one[0], one[1], q[token].item() * one[2]
