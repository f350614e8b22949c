"""The training objective of a draft: the trained positions, their labels and the losses.

    positions(ids, mask, seed)   trained positions by group, from the text alone: counted before any state is loaded
    terms(step)                  the loss terms, the next token's first; each uses the positions of one group
    loss(draft, batch)           the weighted loss of the draft's predictions at these positions

A draft that samples its positions overrides `positions` (DFlash: parallel/anchors.py; P-EAGLE: parallel/p_eagle.py;
EAGLE-3's later steps: eagle3.py).
No other code depends on how they are chosen.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.drafts.parts.losses import (
    Labels,
    Sums,
    Teacher,
    Term,
    TermBatch,
    chunk_rows,
    compiled,
    compute_term_sums,
    full_vocabulary_labels,
    renormalised_labels,
)
from pipeline.features.positions import Group, Horizons, Positions, Seed, count_positions

if TYPE_CHECKING:
    from pipeline.drafts.parts.module import DraftModule
    from pipeline.features.batch import Batch


class Objective:
    """The default objective: every trained input learns the states at the horizons of the terms."""

    def __init__(self, config: Any):
        self.config = config  # the draft's settings, a `DraftConfig`

    @property
    def groups(self) -> list[Group]:
        """The groups that `positions` returns."""
        return list(dict.fromkeys(term.group for term in self.terms(0)))

    def terms(self, step: int) -> list[Term]:
        """Return the terms at this optimiser step: in the order of the draft's features, then penalties."""
        return self.config.terms(step)

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        """Return the trained positions of a text by group."""
        return Horizons(sorted(int(group) for group in self.groups)).positions(ids, loss_mask, seed)

    def penalties(self, penalty_inputs: Any, batch: "Batch") -> list[Tensor]:
        """Return one sum over positions for each penalty term, in their order.

        `penalty_inputs`: the second value that the draft's forward pass returned.
        """
        return []

    def warning(self, validation: dict[str, float]) -> str | None:
        """Return what went wrong in training and what to do, judged by validation averages; None if nothing did."""
        return None

    def total_weight(self, term: Term, totals: dict[Group, int]) -> float:
        """Return the sum of the weights that a term's mean divides by; `totals`: the positions of each group."""
        return totals[term.group]

    def divisor(self, term: Term, totals: dict[Group, int]) -> float:
        """Return the divisor of a term's sums in the loss; `totals`: positions of each group in the global batch."""
        return self.total_weight(term, totals) or 1

    def weight_by_dialogue(self, dialogues: Sequence[dict[Group, Positions]]) -> list[dict[Group, Positions]]:
        """Return the positions of a global batch's dialogues, with the weights under which its loss is the mean over
        dialogues of each one's own mean.

        A position of a dialogue has weight N / (D n): N and n are a term's total weights in the batch and in the
        dialogue, D is the number of dialogues where it is not 0. So weights have mean 1, and the divisor stays N.
        """
        counts = [count_positions([dialogue]) for dialogue in dialogues]
        totals, weighted = count_positions(dialogues), [dict(dialogue) for dialogue in dialogues]
        for group, term in {term.group: term for term in self.terms(0) if not term.is_penalty}.items():
            dialogue_weights = [self.total_weight(term, dialogue_counts) for dialogue_counts in counts]
            mean = self.total_weight(term, totals) / max(sum(map(bool, dialogue_weights)), 1)
            for positions, n in zip(weighted, dialogue_weights, strict=True):
                weights = torch.full((len(positions[group]),), mean / (n or 1), dtype=torch.float32)
                positions[group] = replace(positions[group], weights=weights)
        return weighted

    def row_weights(
        self, draft: "DraftModule", batch: "Batch", term_features: Sequence[tuple[Term, Tensor]]
    ) -> Sequence[Tensor | None]:
        """Return, for each term, weights (M) of the positions' classification under hard-ce; None: 1 each."""
        return [None] * len(term_features)

    def loss(self, draft: "DraftModule", batch: "Batch") -> tuple[Tensor, Sums]:
        """Return the loss, each term's sums over their divisor in the GLOBAL batch; and the figures, sums by term.

        Weights of positions are in the loss alone: figures, and penalties, weigh all positions the same.
        """
        features, penalty_inputs = draft(batch)
        terms = self.terms(batch.step)
        label_terms = [term for term in terms if not term.is_penalty]
        losses, figures = self._sum_label_terms(draft, batch, list(zip(label_terms, features, strict=True)))
        penalty_terms = [term for term in terms if term.is_penalty]
        for term, penalty in zip(penalty_terms, self.penalties(penalty_inputs, batch), strict=True):
            positions = torch.full((), len(batch.positions[term.group]), device=penalty.device)
            losses[term.name] = {"penalty": penalty}
            figures[term.name] = {"penalty": penalty, "positions": positions}
        total = torch.zeros((), device=batch.tokens_BT.device)
        for term in terms:
            weighted = sum(weight * losses[term.name][part] for part, weight in term.weights.items())
            total = total + weighted / self.divisor(term, batch.totals)
        return total, {name: {part: x.detach() for part, x in parts.items()} for name, parts in figures.items()}

    def _sum_label_terms(
        self, draft: "DraftModule", batch: "Batch", term_features: Sequence[tuple[Term, Tensor]]
    ) -> tuple[Sums, Sums]:
        losses, figures = Sums(), Sums()
        device = batch.tokens_BT.device
        chunk = chunk_rows(max(draft.vocabulary_size * len(term_features), draft.teacher_vocabulary), device)
        for number in sorted({term.head for term, _ in term_features}):
            head_terms = [(term, feature) for term, feature in term_features if term.head == number]
            rows = batch.rows(sorted({term.group for term, _ in head_terms}, key=str), chunk)
            shares = self._shares([term for term, _ in head_terms], batch.totals)
            weights = self.row_weights(draft, batch, head_terms)
            batches = [
                TermBatch(
                    term,
                    select_inputs(x, rows.inputs[term.group]),
                    rows.label_indices[term.group],
                    rows.chunk_ends[term.group],
                    share,
                    w,
                    rows.weights.get(term.group),
                )
                for (term, x), share, w in zip(head_terms, shares, weights, strict=True)
            ]
            text_M = vocabulary_indices(batch.following_BT.flatten()[rows.labels], draft.token_ids_U)
            labels_MD = batch.labels_at(rows.labels)
            labels = Labels(labels_MD, text_M, self.teacher(draft), draft.vocabulary_size, chunk, draft.compiled)
            head_losses, head_figures = compute_term_sums(
                batches, labels, draft.head(number), draft.head_input if draft.own_heads else None
            )
            losses |= head_losses
            figures |= head_figures
        return losses, figures

    def _shares(self, terms: list[Term], totals: dict[Group, int]) -> list[float]:
        """Return each term's classification weight, times the first term's divisor, divided by its own divisor."""
        first = self.divisor(terms[0], totals)
        return [t.weights.get("classification", 0.0) * first / self.divisor(t, totals) for t in terms]

    def teacher(self, draft: "DraftModule") -> Teacher:
        """Return the teacher: the target's distribution over the draft's vocabulary."""
        head = draft.embed_head.head
        restricted = (draft.token_ids_U, self.config.masks_teacher) if self.config.needs_full_head else ()
        labels: Any = full_vocabulary_labels if restricted else renormalised_labels
        labels = compiled(labels) if draft.compiled else labels
        return lambda labels_MD: labels(head(labels_MD), *restricted)


def select_inputs(feature: Tensor, inputs_M: Tensor) -> Tensor:
    """Return features (M, D) at these inputs, from features at every input (B, T, D) or already only there (M, D)."""
    return feature.flatten(0, 1).index_select(0, inputs_M) if feature.ndim == 3 else feature


def vocabulary_indices(tokens_M: Tensor, ids_U: Tensor | None) -> Tensor:
    """Return the tokens' indices in a vocabulary of ascending target ids; -1 for a token that it does not have."""
    if ids_U is None:
        return tokens_M
    indices = torch.searchsorted(ids_U, tokens_M).clamp_max(len(ids_U) - 1)
    return indices.where(ids_U[indices] == tokens_M, -1)
