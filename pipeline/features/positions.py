"""The inputs of a dialogue that are trained, and their labels: from the text alone, before any state exists.

Input i is the pair (f_i, t_{i+1}). A position is an input, from which something is predicted, and the place p of its
label: f_p, and hence the distribution of t_{p+1}. Positions come in groups, which the losses of a group share. The
groups of EAGLE and Medusa are horizons: the label of input i is f_{i+h}.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Group = int | str  # a horizon, or a name


Seed = tuple[int, ...]


@dataclass(frozen=True)
class Positions:
    """M positions of one group; inputs and labels ascend. In a `Batch` both index its flattened (B, T) inputs: label
    f_p has the number of input p - 1, since labels_BTD[i] = f_{i+1}.
    """

    inputs: Tensor  # [M], int64
    labels: Tensor  # [M]
    weights: Tensor | None = None  # [M], float32, of the loss at each position; default: 1

    def __len__(self) -> int:
        return len(self.inputs)


class PositionChooser(Protocol):
    """The interface that a batch is built for; a draft's objective implements it."""

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        """Return, by group, the positions of a dialogue of T tokens: inputs below T - 1, labels below T. They depend on
        the text and the seed only. The seed differs by step and dialogue, and everything random is drawn from it, so
        a resumed run and any number of ranks draw the same. Validation gives no seed.
        """


@dataclass(frozen=True)
class Horizons:
    """Every trained input, for each horizon; nothing is random."""

    horizons: Sequence[int]

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        positions: dict[Group, Positions] = {}
        for horizon in self.horizons:
            inputs = torch.from_numpy(trained_mask(loss_mask, horizon).nonzero()[0])
            positions[horizon] = Positions(inputs, inputs + horizon)
        return positions


def trained_mask(loss_mask: np.ndarray, horizon: int) -> np.ndarray:
    """Return a mask, bool [T-1], of the inputs i = 0 .. T-2 that have a loss at `horizon`: those whose t_{i+1+h} exists
    and was written by the assistant.
    """
    inputs = len(loss_mask) - 1
    out = np.zeros(inputs, dtype=bool)
    out[: max(inputs - horizon, 0)] = loss_mask[1 + horizon :]
    return out


def draw_inputs(inputs_M: np.ndarray, count: int, seed: Seed) -> np.ndarray:
    """Return `count` of these inputs in their order, drawn without repetition; all of them if they are not more."""
    if len(inputs_M) <= count:
        return inputs_M
    return np.sort(np.random.default_rng(seed).choice(inputs_M, count, replace=False))


def count_positions(dialogues: Sequence[dict[Group, Positions]]) -> dict[Group, int]:
    """Return the number of positions of each group in these dialogues: the totals of a global batch."""
    out: dict[Group, int] = {}
    for groups in dialogues:
        for group, positions in groups.items():
            out[group] = out.get(group, 0) + len(positions)
    return out
