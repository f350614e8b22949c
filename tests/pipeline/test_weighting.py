"""The loss as a mean over dialogues (`train.weighting = "dialogue"`): by hand, and however a global batch is cut."""

from dataclasses import replace

import pytest
import torch

from pipeline.drafts import make_objective
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parallel.anchors import BlockObjective
from pipeline.drafts.parts.objective import Objective
from pipeline.features.batch import collate_packed
from pipeline.features.positions import count_positions
from tests.pipeline.test_losses_batch import CONFIGS, OTHER_CONFIGS, direct, gradient_of, random_draft, row_of

SEED = (3, 1)
MASKS = {  # dialogues of 24, 11, 3 and 9 tokens; the third has no position at horizon 2, the last none at all
    24: [0] * 3 + [1] * 8 + [0] * 2 + [1] * 11,
    11: [0] * 4 + [1] * 7,
    3: [0, 0, 1],
    9: [0] * 9,
}
SPLITS = {
    "each alone": [[[0]], [[1]], [[2]], [[3]]],
    "two micro-batches": [[[3], [1]], [[0], [2]]],
    "packed": [[[1, 2]], [[3, 0]]],
    "in one row": [[[2, 0, 3, 1]]],
}


def rows_of() -> list:
    return [row_of(n, n, mask, width=32, vocabulary=260, layers=3) for n, mask in MASKS.items()]


def positions_of(objective: Objective, rows: list) -> list:
    return [objective.positions(row.input_ids, row.loss_mask, (*SEED, n)) for n, row in enumerate(rows)]


def batch_of(draft, rows, positions, packed, totals):
    """Return a batch of these rows of dialogues, given by number."""
    auxiliary = range(len(draft.needs.auxiliary))
    chosen = (positions[number] for row in packed for number in row)
    batch = collate_packed([[rows[number] for number in row] for row in packed], chosen, totals, auxiliary)
    return batch if any(len(row) > 1 for row in packed) else replace(batch, begins_BT=None)


def add_up(draft, rows, positions, split, totals):
    """Return the loss, the figures and the gradient of a global batch, the sums over its micro-batches."""
    parts = [gradient_of(draft, batch_of(draft, rows, positions, packed, totals)) for packed in split]
    figures = {
        (term, name): sum(part[1][term][name].item() for part in parts)
        for term, sums in parts[0][1].items()
        for name in sums
    }
    return sum(part[0] for part in parts), figures, sum(part[2] for part in parts)


def weighted_of(draft, rows):
    objective = make_objective(draft.config)
    plain = positions_of(objective, rows)
    return objective, plain, objective.weight_by_dialogue(plain), count_positions(plain)


@pytest.mark.parametrize("config", [EagleConfig(), JakiroConfig()])
def test_two_dialogues_count_the_same_whatever_their_lengths(loaded_target, embed_head, config):
    """By hand, position by position in fp64: a dialogue's mean over its positions, then the mean of both."""
    draft, rows = random_draft(config, loaded_target, embed_head), rows_of()[:2]
    objective, _, weighted, totals = weighted_of(draft, rows)
    batch = batch_of(draft, rows, weighted, [[0], [1]], totals)
    want = by_token = 0.0
    for term, prediction in zip(objective.terms(0), draft(batch)[0], strict=True):
        parts = []
        for number, row in enumerate(rows):
            regression, classification, _, count = direct(prediction[number, None], [row], term.group, embed_head.head)
            part = term.weights["regression"] * regression + term.weights["classification"] * classification
            parts.append((part.item(), count))
        assert parts[0][1] > 1.5 * parts[1][1] > 0
        want += sum(part / count for part, count in parts) / 2
        by_token += sum(part for part, _ in parts) / sum(count for _, count in parts)
    loss = objective.loss(draft, batch)[0].item()
    assert loss == pytest.approx(want, rel=1e-6) and abs(loss - by_token) > 1e-4 * loss


KINDS = {
    **CONFIGS,
    **OTHER_CONFIGS,
    "eagle3, drawn anchors": Eagle3Config(ttt_steps=3, anchors=4),
    "dflash, drawn anchors": replace(OTHER_CONFIGS["dflash"], anchors=5),
    "dspark, drawn anchors": replace(OTHER_CONFIGS["dspark"], anchors=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mean_of_dialogues_however_the_global_batch_is_cut(
    loaded_target, embed_head, monkeypatch, kind
):
    """A dialogue's own mean over D is its loss by token, divided by D times its own positions. A dialogue without a
    position in a group does not count there.
    """
    draft, rows = random_draft(KINDS[kind], loaded_target, embed_head), rows_of()
    objective, plain, weighted, totals = weighted_of(draft, rows)
    without = [torch.zeros(()) for term in objective.terms(0) if term.is_penalty]
    monkeypatch.setattr(type(objective), "penalties", lambda *_: without)
    means = []
    for number, own in enumerate(plain):
        counts = {}
        for group in own:
            shared = 1 if isinstance(objective, BlockObjective) else group  # one mean over the places of all blocks
            counts[group] = len(own[group]) * sum(bool(len(dialogue[shared])) for dialogue in plain)
        means.append(gradient_of(draft, batch_of(draft, rows, plain, [[number]], counts)))
    want, gradient = sum(mean[0] for mean in means), sum(mean[2] for mean in means)
    by_token, figures, token_gradient = add_up(draft, rows, plain, SPLITS["each alone"], totals)
    assert abs(want - by_token) > 2e-6 * want and (gradient - token_gradient).norm() > 1e-3 * gradient.norm()
    worst = 0.0
    for split in SPLITS.values():
        loss, split_figures, split_gradient = add_up(draft, rows, weighted, split, totals)
        assert loss == pytest.approx(want, rel=1e-6)
        worst = max(worst, ((split_gradient - gradient).norm() / gradient.norm()).item())
        assert split_figures == pytest.approx(figures, rel=1e-5)  # sums over tokens
    print(f"{kind}: largest relative difference of the gradient {worst:.1e}")
    assert worst < 2e-6


@pytest.mark.parametrize("kind", ["on eagle-3", "skipper"])
def test_penalties_stay_means_over_tokens(loaded_target, embed_head, monkeypatch, kind):
    draft, rows = random_draft(KINDS[kind], loaded_target, embed_head), rows_of()
    objective, _, weighted, totals = weighted_of(draft, rows)
    batch = batch_of(draft, rows, weighted, [[0], [1], [2], [3]], totals)
    loss, figures = objective.loss(draft, batch)
    (term,) = (term for term in objective.terms(0) if term.is_penalty)
    penalty = figures[term.name]["penalty"] / totals[term.group]
    monkeypatch.setattr(type(objective), "penalties", lambda *_: [torch.zeros(())])
    share = (loss - objective.loss(draft, batch)[0]).item()
    by_token = replace(batch, positions={g: replace(x, weights=None) for g, x in batch.positions.items()})
    assert abs(objective.loss(draft, by_token)[0] - objective.loss(draft, batch)[0]) > 0.01 * share
    assert 0 < share == pytest.approx((term.weights["penalty"] * penalty).item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["jakiro", "eagle3, acceptance", "dspark", "medusa"])
def test_compiled_losses_have_the_same_weights(loaded_target, embed_head, kind):
    draft, rows = random_draft(KINDS[kind], loaded_target, embed_head), rows_of()
    _, plain, weighted, totals = weighted_of(draft, rows)
    _, _, token_gradient = add_up(draft, rows, plain, SPLITS["packed"], totals)
    loss, _, gradient = add_up(draft, rows, weighted, SPLITS["packed"], totals)
    draft.compiled = True
    compiled_loss, _, compiled_gradient = add_up(draft, rows, weighted, SPLITS["packed"], totals)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert (compiled_gradient - gradient).norm() < 1e-6 * gradient.norm() < 1e-4 * (gradient - token_gradient).norm()
