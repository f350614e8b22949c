"""The training objective of a block draft: blocks that start at anchors, which are sampled again at every step.

An anchor is a token t_a of the assistant whose next token is the assistant's, too. The label of place k of its block is
t_{a+k}, if that is the assistant's: the group of place k has the inputs i = a - 1 and the labels i + k, like horizon k.
The inputs of place 1 are all the anchors. After a gap (a place that is not the assistant's), the places of DFlash are
trained again and those of DSpark are not, as in their authors' code (SpecForge; DeepSpec).

Place k has weight exp(-(k - 1) / gamma), and the loss is divided by the sum of all weights. With D-PACE its weight is

    w_k = sum over j >= k of f_1 f_2 ... f_j,    f_j = (1 - alpha) q_j + alpha

where q_j is the draft's probability of the text's token at place j, without a gradient: the likelier all earlier places
are accepted, the more a place counts. A place in a gap has f = 1 and is left out of the sum. The loss is then divided
by the number of blocks.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import to_device
from pipeline.drafts.parts.losses import Term, chunk_rows
from pipeline.drafts.parts.objective import Objective, vocabulary_indices
from pipeline.features.positions import Group, Positions, Seed, draw_inputs, trained_mask

if TYPE_CHECKING:
    from pipeline.drafts.parts.module import DraftModule
    from pipeline.features.batch import Batch

STREAM = 0x616E6368  # random stream, separate from the noise's, which has the same seeds


class BlockObjective(Objective):
    """The objective of a draft whose settings have `anchors`, `gamma`, `dpace` and `trains_behind_gaps`."""

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        anchors = (trained_mask(loss_mask, 1) & loss_mask[1:].astype(bool)).nonzero()[0]
        anchors = draw_inputs(anchors, self.config.anchors, (STREAM, *seed))
        positions: dict[Group, Positions] = {}
        unbroken = np.ones(len(anchors), dtype=bool)
        for place in self.groups:
            is_trained = trained_mask(loss_mask, int(place))[anchors]
            if not self.config.trains_behind_gaps:
                unbroken = is_trained = is_trained & unbroken
            inputs = torch.from_numpy(anchors[is_trained])
            positions[place] = Positions(inputs, inputs + int(place))
        return positions

    def total_weight(self, term: Term, totals: dict[Group, int]) -> float:
        if self.config.dpace is not None:
            return totals[1]
        terms = self.terms(0)
        return sum(place_term.weights["classification"] * totals[place_term.group] for place_term in terms)

    @torch.no_grad()
    def row_weights(
        self, draft: "DraftModule", batch: "Batch", term_features: Sequence[tuple[Term, Tensor]]
    ) -> list[Tensor | None]:
        """Return D-PACE's weights for each term."""
        if self.config.dpace is None:
            return [None] * len(term_features)
        anchors, device = batch.positions[1].inputs, batch.tokens_BT.device
        factors_AK = torch.ones(len(anchors), len(term_features), device=device)
        trained_AK = torch.zeros_like(factors_AK)
        rows = []
        for column, (term, feature_MD) in enumerate(term_features):
            positions = batch.positions[term.group]
            rows.append(to_device(torch.searchsorted(anchors, positions.inputs), device))
            text_M = batch.following_BT.flatten()[to_device(positions.labels, device)]
            q_M = _text_probabilities(draft, feature_MD, vocabulary_indices(text_M, draft.token_ids_U))
            factors_AK[rows[-1], column] = torch.lerp(q_M, torch.ones_like(q_M), self.config.dpace)
            trained_AK[rows[-1], column] = 1
        weights_AK = (factors_AK.cumprod(1) * trained_AK).flip(1).cumsum(1).flip(1)
        return [weights_AK[row_M, column] for column, row_M in enumerate(rows)]


def _text_probabilities(draft: "DraftModule", feature_MD: Tensor, text_M: Tensor) -> Tensor:
    """Return the draft's probabilities of these tokens, float32; 0 for -1, a token outside its vocabulary."""
    chunk = chunk_rows(draft.vocabulary_size, feature_MD.device)
    parts = [
        draft.head(0)(feature).float().softmax(-1).gather(1, text.clamp_min(0)[:, None])[:, 0]
        for feature, text in zip(feature_MD.split(chunk), text_M.split(chunk), strict=True)
    ]
    return torch.cat(parts) * (text_M >= 0)


def decay_weights(gamma: float, places: int) -> list[float]:
    """Return the weights of places 1 to `places`."""
    return [math.exp(-(place - 1) / gamma) for place in range(1, places + 1)]
