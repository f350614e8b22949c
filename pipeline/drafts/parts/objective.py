"""What a draft is trained on: at which positions, towards which labels, with which losses.

    positions(ids, mask, seed)   from the text alone, by group: known, and counted, before any state is loaded
    terms(step)                  its losses, the next token's first; each is of one group's positions
    loss(draft, batch)           the weighted loss of what the draft's forward says at these positions

A draft that draws its positions overrides `positions` (DFlash: parallel/anchors.py; P-EAGLE: parallel/p_eagle.py).
Nothing else asks where they come from.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.drafts.parts.losses import (
    Asked,
    Labels,
    Teacher,
    Term,
    chunk_rows,
    of_whole_vocabulary,
    renormalised,
    term_sums,
)
from pipeline.features.batch import Group, Horizons, Positions, Seed

if TYPE_CHECKING:
    from pipeline.drafts.parts.module import DraftModule
    from pipeline.features.batch import Batch

Sums = dict[str, dict[str, Tensor]]  # by term, then by name


class Objective:
    """The default: every trained input is trained towards the states at its terms' horizons."""

    def __init__(self, config: Any):
        self.config = config  # the draft's settings, a `DraftConfig`

    @property
    def groups(self) -> list[Group]:
        """Those that `positions` returns."""
        return list(dict.fromkeys(term.group for term in self.terms(0)))

    def terms(self, step: int) -> list[Term]:
        """At this optimiser step: those with labels in the order of the draft's features, then penalties."""
        return self.config.terms(step)

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        return Horizons(sorted(int(group) for group in self.groups)).positions(ids, loss_mask, seed)

    def penalties(self, aside: Any, batch: "Batch") -> list[Tensor]:
        """One sum over positions for each penalty term, in their order. `aside`: what the draft's forward
        gave beside its features.
        """
        return []

    def warning(self, validation: dict[str, float]) -> str | None:
        """What went wrong in training, by a validation's averages, and what to do; None where nothing did."""
        return None

    def divisor(self, term: Term, totals: dict[Group, int]) -> float:
        """What a term's sums are divided by in the loss; `totals`: the positions of each group, of a global batch."""
        return max(totals[term.group], 1)

    def row_weights(
        self, draft: "DraftModule", batch: "Batch", both: Sequence[tuple[Term, Tensor]]
    ) -> Sequence[Tensor | None]:
        """By term a weight (M) of each position's classification under hard-ce; None: 1 each."""
        return [None] * len(both)

    def loss(self, draft: "DraftModule", batch: "Batch") -> tuple[Tensor, Sums]:
        """The weighted loss, each sum over its divisor in the GLOBAL batch; and the raw sums by term."""
        features, aside = draft(batch)
        terms = self.terms(batch.step)
        told = [term for term in terms if not term.is_penalty]
        sums = self._told(draft, batch, list(zip(told, features, strict=True)))
        rest = [term for term in terms if term.is_penalty]
        for term, penalty in zip(rest, self.penalties(aside, batch), strict=True):
            positions = torch.full((), len(batch.positions[term.group]), device=penalty.device)
            sums[term.name] = {"penalty": penalty, "positions": positions}
        total = torch.zeros((), device=batch.labels_BTD.device)
        for term in terms:
            weighted = sum(weight * sums[term.name][part] for part, weight in term.weights.items())
            total = total + weighted / self.divisor(term, batch.totals)
        return total, {name: {part: x.detach() for part, x in parts.items()} for name, parts in sums.items()}

    def _told(self, draft: "DraftModule", batch: "Batch", both: Sequence[tuple[Term, Tensor]]) -> Sums:
        sums: Sums = {}
        device = batch.labels_BTD.device
        chunk = chunk_rows(max(draft.vocabulary_size * len(both), draft.teacher_vocabulary), device)
        for number in sorted({term.head for term, _ in both}):
            mine = [(term, feature) for term, feature in both if term.head == number]
            rows = batch.rows(sorted({term.group for term, _ in mine}, key=str), chunk)
            shares = self._shares([term for term, _ in mine], batch.totals)
            weights = self.row_weights(draft, batch, mine)
            asked = [
                Asked(term, chosen(x, rows.inputs[term.group]), rows.among[term.group], rows.ends[term.group], share, w)
                for (term, x), share, w in zip(mine, shares, weights, strict=True)
            ]
            text_M = numbers_of(batch.following_BT.flatten()[rows.labels], draft.token_ids_U)
            labels_MD = batch.labels_BTD.flatten(0, 1)[rows.labels]
            labels = Labels(labels_MD, text_M, self.teacher(draft), draft.vocabulary_size, chunk)
            sums |= term_sums(asked, labels, draft.head(number), draft.normed if draft.own_heads else None)
        return sums

    def _shares(self, terms: list[Term], totals: dict[Group, int]) -> list[float]:
        """Each term's weight of the classification, times the first term's divisor, divided by its own."""
        first = self.divisor(terms[0], totals)
        return [t.weights.get("classification", 0.0) * first / self.divisor(t, totals) for t in terms]

    def teacher(self, draft: "DraftModule") -> Teacher:
        """The target's distribution over the draft's vocabulary."""
        if not self.config.asks_whole_head:
            return renormalised(draft.embed_head.head)
        assert draft.token_ids_U is not None
        return of_whole_vocabulary(draft.embed_head.head, draft.token_ids_U, self.config.masks_teacher)


def chosen(feature: Tensor, inputs_M: Tensor) -> Tensor:
    """What a draft says at some inputs: it answered at every input (B, T, D), or at these alone (M, D)."""
    return feature.flatten(0, 1).index_select(0, inputs_M) if feature.ndim == 3 else feature


def numbers_of(tokens_M: Tensor, ids_U: Tensor | None) -> Tensor:
    """The tokens' numbers in a vocabulary, ascending ids among the target's; -1 for one that it does not have."""
    if ids_U is None:
        return tokens_M
    found = torch.searchsorted(ids_U, tokens_M).clamp_max(len(ids_U) - 1)
    return found.where(ids_U[found] == tokens_M, -1)
