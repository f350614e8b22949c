"""One dynamic token tree for every draft (EAGLE-2), with Jakiro's hybrid last level.

The tree is a deterministic function of the context: candidates are the draft's best, never sampled. That is what
makes the acceptance rule of `accept.py` exact without knowing the draft's probabilities.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.drafts.base import Answer, Draft, DraftState, Frontier
from pipeline.sections import TreeConfig


@dataclass
class Tree:
    """N nodes in an order in which parents precede children and siblings stand best first; node 0 is the root."""

    tokens_N: Tensor  # target ids, on the target's device
    tokens: list[int]
    parents: list[int]  # -1 for the root
    depths: list[int]
    ancestors_NN: Tensor  # bool: row n sees its ancestors and itself

    def children(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            out[parent].append(node)
        return out

    def longest_path(self) -> list[int]:
        """From the root to the first of the deepest nodes."""
        path = [self.depths.index(max(self.depths))]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path


@dataclass
class _Level:
    """Candidates of one depth: n = W * k of them."""

    tokens: Tensor  # target ids [n]
    parents: Tensor  # number in the pool of all candidates [n]; -1 for the root
    scores: Tensor  # cumulative log-probability [n]
    rows: Tensor  # row of the forward that proposed them [n]
    first: int  # number of the first one in the pool


def build_tree(root: int, tokens: list[int], parents: list[int], device: torch.device) -> Tree:
    """A tree from its nodes below the root (parents count the root as 0)."""
    tokens, parents = [root, *tokens], [-1, *parents]
    depths, rows = [0], [[0]]
    for node in range(1, len(tokens)):
        depths.append(depths[parents[node]] + 1)
        rows.append([*rows[parents[node]], node])
    ancestors = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for node, seen in enumerate(rows):
        ancestors[node, seen] = True
    return Tree(torch.tensor(tokens, device=device), tokens, parents, depths, ancestors.to(device))


def grow(draft: Draft, state: DraftState, root: int, answer: Answer, spec: TreeConfig) -> Tree:
    """Grows a tree below `root`, the last emitted token, from the draft's answer to it.

    Per level the `top_k` best nodes by cumulative log-probability are forwarded and each proposes `top_k` children; of
    all candidates the best ``nodes - 1`` stay. A child never outranks its parent, so what stays is connected.
    Draft forwards, the one that gave `answer` included: ``depth``, or ``depth - 1`` with a hybrid last level.
    """
    device = answer.next_WU.device
    level = _propose(
        draft,
        answer.next_WU,
        spec.top_k,
        parents=torch.tensor([-1], device=device),
        scores=torch.zeros(1, device=device),
        rows=torch.zeros(1, dtype=torch.long, device=device),
        first=0,
    )
    levels = [level]
    seen = torch.zeros(1, 0, dtype=torch.bool, device=device)
    for depth in range(1, spec.depth):
        order = level.scores.sort(descending=True, stable=True).indices[: spec.top_k]
        numbers, scores, rows = level.first + order, level.scores[order], level.rows[order]
        first = level.first + len(level.tokens)
        if spec.hybrid and depth == spec.depth - 1:
            # Nodes of the last-but-one level were not forwarded: their children are what the forward that proposed
            # them, their PARENT's, expects two tokens ahead.
            level = _propose(draft, answer.ahead_WU[rows], spec.top_k, numbers, scores, rows, first)
        else:
            itself = torch.eye(len(order), dtype=torch.bool, device=device)
            seen = torch.cat([seen[rows], itself], dim=1)
            answer = draft.step(state, Frontier(level.tokens[order], answer.hidden_WD[rows], seen, depth))
            forwarded = torch.arange(len(order), device=device)
            level = _propose(draft, answer.next_WU, spec.top_k, numbers, scores, forwarded, first)
        levels.append(level)
    return _prune(root, levels, spec.nodes, device)


def _propose(
    draft: Draft, logits_WU: Tensor, top_k: int, parents: Tensor, scores: Tensor, rows: Tensor, first: int
) -> _Level:
    """The `top_k` best tokens of each row become children of `parents`; `rows` are the forwards' rows."""
    best = logits_WU.float().log_softmax(-1).topk(min(top_k, logits_WU.shape[1]), dim=-1)
    children = best.indices.shape[1]
    tokens = best.indices if draft.draft_token_ids is None else draft.draft_token_ids[best.indices]
    return _Level(
        tokens=tokens.reshape(-1),
        parents=parents.repeat_interleave(children),
        scores=(scores[:, None] + best.values).reshape(-1),
        rows=rows.repeat_interleave(children),
        first=first,
    )


def _prune(root: int, levels: list[_Level], nodes: int, device: torch.device) -> Tree:
    """Keeps the best ``nodes - 1`` candidates. Parents come first in the pool, and the sort is stable: ties stay connected."""
    scores = torch.cat([level.scores for level in levels])
    kept = scores.sort(descending=True, stable=True).indices[: nodes - 1].sort().values
    tokens = torch.cat([level.tokens for level in levels])[kept].tolist()
    parents = torch.cat([level.parents for level in levels])[kept].tolist()
    numbers = {number: place for place, number in enumerate(kept.tolist(), start=1)}
    return build_tree(root, tokens, [0 if parent < 0 else numbers[parent] for parent in parents], device)
