"""P-EAGLE: every guess equals that of a separate causal forward; sampling of depths; decoding in pieces."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pipeline.decoding.contract import DraftRequest, RoundInput
from pipeline.drafts import make_objective
from pipeline.drafts.parallel import p_eagle
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.attention import additive_mask, causal_mask
from tests.pipeline.taught import make_draft, prompt_of

SOURCES = 2  # layers of the small target that it fuses
CONFIGS = {
    "plain": PEagleConfig(layers=2, depths=3),
    "a window": PEagleConfig(layers=3, depths=4, window=5, qk_norm=True, mask_token=9),
    "drawn": PEagleConfig(layers=2, depths=4, vocabulary=100),
}


@pytest.fixture(params=CONFIGS)
def draft(request, loaded_target, embed_head, monkeypatch):
    """Return a draft that drops no guess in training, except in the variant "drawn"."""
    if request.param != "drawn":
        monkeypatch.setattr(p_eagle, "MIN_KEEP_RATE", 1.0)
    return make_draft(loaded_target, embed_head, CONFIGS[request.param])


def row_of(seed: int, length: int, answers_from: int = 4) -> TextRow:
    states = torch.randn(length, 1 + SOURCES, 32, generator=torch.Generator().manual_seed(seed))
    mask = (np.arange(length) >= answers_from).astype(np.uint8)
    return TextRow(f"row{seed}", np.array(prompt_of(seed, length), np.int32), mask, states[:, 0], states[:, 1:])


def batch_of(draft, rows):
    objective = make_objective(draft.config)
    return collate(rows, objective, dict.fromkeys(objective.groups, 10), auxiliary=range(SOURCES))


def alone(draft, row: TextRow, place: int, depth: int) -> torch.Tensor:
    """Return the guess of a depth after an input, by a causal forward over the inputs up to it and earlier guesses."""
    assert row.auxiliary_TKD is not None
    states = draft.features(row.auxiliary_TKD[: place + 1])
    masked = draft.features(draft.mask_hidden.view(SOURCES, -1))
    features = torch.cat([states, masked.expand(depth, -1)])[None]
    tokens = [*row.input_ids[1 : place + 2].tolist(), *[int(draft.mask_token_id)] * depth]
    mask = additive_mask(causal_mask(0, len(tokens), states.device, draft.config.window), features.dtype)[None, None]
    positions = torch.arange(len(tokens))[None]
    return draft._layers(features, torch.tensor([tokens]), positions, mask, DynamicCache())[0, -1]


@torch.inference_mode()
def test_each_guess_is_that_of_a_causal_forward_of_its_own(draft):
    """No guess attends to text after its input or to another input's guesses, in a batch of several lengths."""
    rows = [row_of(1, 13), row_of(2, 7)]
    batch = batch_of(draft, rows)
    group_features, width = draft(batch)[0], batch.tokens_BT.shape[1]
    checked = 0
    for depth, (group, features) in enumerate(zip(sorted(batch.positions), group_features, strict=True)):
        for number, feature in zip(batch.positions[group].inputs.tolist(), features, strict=True):
            row, place = divmod(number, width)
            assert torch.allclose(feature, alone(draft, rows[row], place, depth), atol=1e-5)
            checked += 1
    assert checked > 20


@torch.inference_mode()
def test_decoding_in_pieces_guesses_what_training_does(draft):
    """Inputs that no later one attends to, with a window, are dropped on the way."""
    row, state, begin = row_of(3, 30), draft.open(), 0
    tokens, levels, window = row.input_ids.tolist(), draft.config.depths, draft.config.window
    for end, places in ((5, 2), (6, 1), (11, 4), (12, 1), (26, 3), (28, 1)):
        inputs = RoundInput(tokens[: end + 1], row.auxiliary_TKD[begin:end])
        for requested in (levels, 1):
            state.verified = begin
            answer = draft.start(state, inputs, DraftRequest(requested), places)
            assert len(answer.logits_LWU) == requested and state.verified == end
            for depth, logits_WU in enumerate(answer.logits_LWU):
                for w, logits_U in enumerate(logits_WU):
                    want = draft.logits(alone(draft, row, end - places + w, depth))
                    assert torch.allclose(logits_U, want, atol=1e-4)
        begin = end
    assert state.dropped == (26 - window + 1 if window else 0)


def test_what_is_drawn_for_a_depth_is_drawn_for_those_before_it():
    objective = make_objective(PEagleConfig(depths=8))
    ids, mask = np.zeros(4001, np.int32), np.ones(4001, np.uint8)
    positions = objective.positions(ids, mask, (0, 7, 3))
    inputs = [set(positions[group].inputs.tolist()) for group in sorted(positions)]
    assert all(later < earlier for earlier, later in pairwise(inputs))
    shares = [len(depth_inputs) / 4000 for depth_inputs in inputs]
    assert shares == pytest.approx([1, 0.8, 0.64, 0.512, 0.41, 0.328, 0.262, 0.21], abs=0.03)
    assert all(
        torch.equal(group_positions.labels, group_positions.inputs + group)
        for group, group_positions in positions.items()
    )
    again, other_step = (objective.positions(ids, mask, seed) for seed in ((0, 7, 3), (0, 8, 3)))
    assert all(torch.equal(again[group].inputs, positions[group].inputs) for group in positions)
    assert not torch.equal(other_step[2].inputs, positions[2].inputs)
