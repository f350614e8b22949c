"""A token tree: its nodes, and which nodes each of them sees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.basics.accelerator import to_device


@dataclass
class Tree:
    """A tree of N nodes, in an order in which parents precede children and siblings stand best (or first drawn) first;
    node 0 is the root.
    """

    tokens_N: Tensor  # target ids, on the target's device
    depths_N: Tensor
    tokens: list[int]
    parents: list[int]  # -1 for the root
    depths: list[int]
    ancestors_NN: Tensor  # bool: row n sees its ancestors and itself
    # Of drawn trees: the distribution [V] over target ids that node n was drawn from, on the draft's device; empty for
    # the root.
    proposals: list[Tensor] | None = None

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def children(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            out[parent].append(node)
        return out

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root's child to `node`; empty for the root."""
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = self.parents[node]
        return path

    def longest_path(self) -> list[int]:
        """Return the nodes from the root to the first of the deepest nodes."""
        return [0, *self.path_to(self.depths.index(max(self.depths)))]


def build_tree(root: int, tokens: list[int], parents: list[int], device: torch.device) -> Tree:
    """Build a tree from its nodes below the root (parents count the root as 0)."""
    tokens, parents = [root, *tokens], [-1, *parents]
    depths, rows = [0], [[True] + [False] * (len(tokens) - 1)]
    for node in range(1, len(tokens)):
        depths.append(depths[parents[node]] + 1)
        row = rows[parents[node]].copy()
        row[node] = True
        rows.append(row)
    all_of = to_device([*rows, depths, tokens], device, torch.long)  # one copy to the device
    return Tree(all_of[-1], all_of[-2], tokens, parents, depths, all_of[:-2].bool())
