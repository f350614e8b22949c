"""What a block draft is trained on: blocks behind anchors, which are drawn anew at every step.

An anchor is a token t_a of the assistant whose next token is the assistant's, too. Place k of its block is told
t_{a+k}, where that is the assistant's: the group of place k has the inputs i = a - 1 and the labels i + k, as horizon k
has. The inputs of place 1 are all the anchors. Behind a gap, a place that is not the assistant's, the places of DFlash
are trained again, and those of DSpark are not: as their authors' code has it (SpecForge; DeepSpec).

Place k weighs exp(-(k - 1) / gamma), and the loss is divided by the sum of all weights. With D-PACE it weighs

    w_k = sum over j >= k of f_1 f_2 ... f_j,    f_j = (1 - alpha) q_j + alpha

where q_j is the draft's probability of the text's token at place j, and through which no gradient goes: a later place
counts the more, the likelier all before it are accepted. A place in a gap has f = 1 and no part in the sum. Then the
loss is divided by the number of blocks.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import sent
from pipeline.drafts.parts.losses import Term, chunk_rows
from pipeline.drafts.parts.objective import Objective, numbers_of
from pipeline.features.batch import Group, Positions, Seed, trained

if TYPE_CHECKING:
    from pipeline.drafts.parts.module import DraftModule
    from pipeline.features.batch import Batch

STREAM = 0x616E6368  # of random numbers: apart from the noise's, which has the same seeds


class BlockObjective(Objective):
    """Of a draft whose settings have `anchors`, `gamma`, `dpace` and `trains_behind_gaps`."""

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        anchors = (trained(loss_mask, 1) & loss_mask[1:].astype(bool)).nonzero()[0]
        if len(anchors) > self.config.anchors:
            random = np.random.default_rng((STREAM, *seed))
            anchors = np.sort(random.choice(anchors, self.config.anchors, replace=False))
        found: dict[Group, Positions] = {}
        unbroken = np.ones(len(anchors), dtype=bool)
        for place in self.groups:
            kept = trained(loss_mask, int(place))[anchors]
            if not self.config.trains_behind_gaps:
                unbroken = kept = kept & unbroken
            inputs = torch.from_numpy(anchors[kept])
            found[place] = Positions(inputs, inputs + int(place))
        return found

    def divisor(self, term: Term, totals: dict[Group, int]) -> float:
        if self.config.dpace is not None:
            return max(totals[1], 1)
        terms = self.terms(0)
        return sum(one.weights["classification"] * totals[one.group] for one in terms) or 1

    @torch.no_grad()
    def row_weights(
        self, draft: "DraftModule", batch: "Batch", both: Sequence[tuple[Term, Tensor]]
    ) -> list[Tensor | None]:
        """Return D-PACE's weights, by term."""
        if self.config.dpace is None:
            return [None] * len(both)
        anchors, device = batch.positions[1].inputs, batch.labels_BTD.device
        factors_AK = torch.ones(len(anchors), len(both), device=device)
        trained_AK = torch.zeros_like(factors_AK)
        rows = []
        for column, (term, feature_MD) in enumerate(both):
            here = batch.positions[term.group]
            rows.append(sent(torch.searchsorted(anchors, here.inputs), device))
            text_M = batch.following_BT.flatten()[sent(here.labels, device)]
            q_M = _probabilities(draft, feature_MD, numbers_of(text_M, draft.token_ids_U))
            factors_AK[rows[-1], column] = torch.lerp(q_M, torch.ones_like(q_M), self.config.dpace)
            trained_AK[rows[-1], column] = 1
        weights_AK = (factors_AK.cumprod(1) * trained_AK).flip(1).cumsum(1).flip(1)
        return [weights_AK[row_M, column] for column, row_M in enumerate(rows)]


def _probabilities(draft: "DraftModule", feature_MD: Tensor, text_M: Tensor) -> Tensor:
    """Float32, of these tokens of the draft's vocabulary; 0 of -1, a token that it lacks."""
    chunk = chunk_rows(draft.vocabulary_size, feature_MD.device)
    parts = [
        draft.head(0)(feature).float().softmax(-1).gather(1, text.clamp_min(0)[:, None])[:, 0]
        for feature, text in zip(feature_MD.split(chunk), text_M.split(chunk), strict=True)
    ]
    return torch.cat(parts) * (text_M >= 0)


def decayed(gamma: float, places: int) -> list[float]:
    """The weights of places 1 to `places`."""
    return [math.exp(-(place - 1) / gamma) for place in range(1, places + 1)]
