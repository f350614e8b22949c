"""The layout of a training-time test along chains: the further steps only after drawn inputs, the anchors.

In step s the chain of anchor a has the input a + s - 1. Its feature is the one that step s - 1 predicted, and it sees
the first step's keys up to a, then its chain's keys of steps 2 to s. So a further step has one row for each anchor, and
what it computes there equals what the same step over all inputs computes at this input.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import pad_width
from pipeline.drafts.parts.attention.ranges import RangeMask, range_mask, text_begins
from pipeline.features.positions import Group, Positions

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

ANCHORS = "anchors"  # the group of the anchors; a batch that lacks it is trained at all inputs


def step_group(number: int) -> Group:
    """Return the group of the inputs that step `number`, from 2, is trained at."""
    return f"ttt_{number}"


@dataclass(frozen=True)
class Chains:
    """The chains of K anchors among the N = B T inputs of a batch, on the host. Padding has the anchor 0."""

    anchors_K: np.ndarray  # ascending, then padding
    begins_K: np.ndarray  # the first input of each anchor's text
    inputs: int  # N
    count: int  # of anchors without padding

    def inputs_K(self, number: int) -> np.ndarray:
        """Return the input of each chain in a step. After the end of a text it is another's, and nothing reads it."""
        return (self.anchors_K + (number - 1)).clip(max=self.inputs - 1)

    def positions_K(self, number: int) -> np.ndarray:
        """Return the position of each chain's input in its text."""
        return self.anchors_K + (number - 1) - self.begins_K

    def rows(self, number: int, positions: Positions) -> np.ndarray:
        """Return the chains' rows, below K, at the inputs that the step is trained at."""
        return np.searchsorted(self.anchors_K[: self.count], np.asarray(positions.inputs) - (number - 1))

    def mask(self, number: int, window: int | None, device: torch.device) -> RangeMask:
        """Return the mask of a step's K queries over N keys of the first step, then each chain's keys of the others."""
        first_K, rows_K = self.begins_K, np.arange(len(self.anchors_K))
        if window:  # it holds all of a chain
            first_K = np.maximum(first_K, self.anchors_K + (number - window))
        further_K = self.inputs + rows_K * (number - 1)
        ranges_K4 = np.stack([first_K, self.anchors_K, further_K, further_K + (number - 2)], axis=1)
        return range_mask(ranges_K4, self.inputs, self.inputs + len(rows_K) * (number - 1), device)


def lay_out_chains(batch: "Batch", device: torch.device) -> Chains:
    """Return the chains of a batch's anchors: at least one, so that every weight takes part in every batch."""
    anchors, begins_N = np.asarray(batch.positions[ANCHORS].inputs), text_begins(batch)
    anchors_K = np.pad(anchors, (0, pad_width(max(len(anchors), 1), device) - len(anchors)))
    return Chains(anchors_K, begins_N[anchors_K], len(begins_N), len(anchors))


def join_chains(parts: list[Tensor]) -> Tensor:
    """Return the first step's keys or values (1, G, N, d), then each chain's of the others, which are (1, G, K, d)."""
    return torch.cat([parts[0], torch.stack(parts[1:], 3).flatten(2, 3)], 2)
