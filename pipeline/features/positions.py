"""Which inputs of a dialogue are trained, and towards which label: from the text alone, before any state exists.

Input i is the pair (f_i, t_{i+1}). A position is an input, from which something is predicted, and the place p of its
label: f_p, and hence the distribution of t_{p+1}. Positions come in groups; all losses of a group share them. EAGLE's
and Medusa's groups are horizons: the label of input i is f_{i+h}.
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

    def __len__(self) -> int:
        return len(self.inputs)


class ChoosesPositions(Protocol):
    """What a batch is made for; a draft's objective is one."""

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        """By group, of a dialogue of T tokens: inputs below T - 1, labels below T. A function of the text and the seed,
        which differs by step and dialogue: what is drawn, is drawn from it, so that a resumed run and any number of
        ranks draw the same.
        """


@dataclass(frozen=True)
class Horizons:
    """Every trained input, for each horizon; nothing is drawn."""

    horizons: Sequence[int]

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        found: dict[Group, Positions] = {}
        for horizon in self.horizons:
            inputs = torch.from_numpy(trained(loss_mask, horizon).nonzero()[0])
            found[horizon] = Positions(inputs, inputs + horizon)
        return found


def trained(loss_mask: np.ndarray, horizon: int) -> np.ndarray:
    """Which inputs i = 0 .. T-2 have a loss at `horizon`, as bool [T-1]: those whose t_{i+1+h} exists and is the
    assistant's.
    """
    inputs = len(loss_mask) - 1
    out = np.zeros(inputs, dtype=bool)
    out[: max(inputs - horizon, 0)] = loss_mask[1 + horizon :]
    return out


def counts(found: Sequence[dict[Group, Positions]]) -> dict[Group, int]:
    """How many positions each group has in some dialogues: a global batch's totals."""
    out: dict[Group, int] = {}
    for one in found:
        for group, positions in one.items():
            out[group] = out.get(group, 0) + len(positions)
    return out
