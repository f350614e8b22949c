"""The training-time test after drawn inputs: loss and gradient are those of steps over all inputs, at the same inputs;
which inputs are drawn; what a step costs; and a draft that learns.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.drafts import build, load_settings, make_objective
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.jakiro import JakiroOnEagle3Config
from pipeline.drafts.parts.attention import chains, ranges
from pipeline.drafts.parts.attention.chains import ANCHORS
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate, collate_packed
from pipeline.features.positions import count_positions, trained_mask
from pipeline.features.schema import TextRow
from tests.pipeline.taught import make_draft, prompt_of

SOURCES, STEPS, ALL = 2, 4, 1000
CONFIGS = {
    "eagle3": Eagle3Config(ttt_steps=STEPS, anchors=ALL),
    "reduced": Eagle3Config(ttt_steps=STEPS, anchors=ALL, vocabulary=100, norm_output=True, qk_norm=True),
    "window": Eagle3Config(ttt_steps=STEPS, anchors=ALL, window=6),
    "jakiro": JakiroOnEagle3Config(frame="eagle-3", ttt_steps=STEPS, anchors=ALL, balance_loss=0.01),
    "sparse": JakiroOnEagle3Config(
        frame="eagle-3", experts=6, expert_width=16, ttt_steps=STEPS, anchors=ALL, vocabulary=100, window=5
    ),
}
TEXTS = {"whole rows": [[40], [23]], "packed": [[17, 2, 21], [30]]}  # tokens of each row's dialogues


def row_of(seed: int, length: int) -> TextRow:
    """A dialogue whose answers are tokens 5 to 11, and those from 15 on."""
    states = torch.randn(length, 1 + SOURCES, 32, generator=torch.Generator().manual_seed(seed))
    place = np.arange(length)
    mask = ((place >= 5) & (place < 12) | (place >= 15)).astype(np.uint8)
    return TextRow(f"row{seed}", np.array(prompt_of(seed, length), np.int32), mask, states[:, 0], states[:, 1:])


def batch_of(config, texts, step=1, packed=False):
    """Return the batch of a training's step."""
    rows = [[row_of(10 * r + n, length) for n, length in enumerate(counts)] for r, counts in enumerate(texts)]
    objective = make_objective(config)
    drawn = [
        objective.positions(x.input_ids, x.loss_mask, (0, step, 10 * r + n))
        for r, row in enumerate(rows)
        for n, x in enumerate(row)
    ]
    batch = collate_packed(rows, iter(drawn), count_positions(drawn), range(SOURCES))
    if not packed:
        batch.begins_BT = None
    return batch


def loss_and_gradients(draft, batch):
    draft.requires_grad_(True).zero_grad()
    loss, sums = make_objective(draft.config).loss(draft, batch)
    loss.backward()
    gradients = {name: weight.grad for name, weight in draft.named_parameters()}
    assert all(x is not None for x in gradients.values())
    return loss.item(), gradients, sums


def over_all_inputs(batch):
    """Return the batch whose steps run over all inputs, and are trained at the same ones."""
    batch.positions = {group: x for group, x in batch.positions.items() if group != ANCHORS}
    return batch


@pytest.mark.parametrize("on_cpu", [True, False], ids=["the CPU's kernel", "an accelerator's pieces"])
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("anchors", [ALL, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_those_of_steps_over_all_inputs(
    loaded_target, embed_head, monkeypatch, name, anchors, texts, on_cpu
):
    config = replace(CONFIGS[name], anchors=anchors)
    draft, packed = make_draft(loaded_target, embed_head, config), texts == "packed"
    with monkeypatch.context() as patch:
        patch.setattr(ranges, "is_cpu", lambda _: on_cpu)
        loss, gradients, sums = loss_and_gradients(draft, batch_of(config, TEXTS[texts], packed=packed))
    whole = loss_and_gradients(draft, over_all_inputs(batch_of(config, TEXTS[texts], packed=packed)))
    largest = max(x.abs().max().item() for x in whole[1].values())
    errors = {name: (x - whole[1][name]).abs().max().item() for name, x in gradients.items()}
    of_largest = max(errors.values()) / largest
    of_each = max(error / whole[1][name].abs().max().item() for name, error in errors.items())
    print(f"loss: {abs(loss / whole[0] - 1):.1e}; gradient: {of_largest:.1e}, of each tensor's largest {of_each:.1e}")
    assert abs(loss / whole[0] - 1) < 1e-6 and of_largest < 1e-6 and of_each < 4e-6
    for term, parts in sums.items():
        assert parts.get("agree") == whole[2][term].get("agree")
        assert parts["positions"] == whole[2][term]["positions"] > 0


def test_recomputed_activations_give_the_same_gradient(loaded_target, embed_head):
    """To the last bit."""
    draft, results = make_draft(loaded_target, embed_head, CONFIGS["jakiro"]), []
    for draft.recompute in (False, True):
        results.append(loss_and_gradients(draft, batch_of(draft.config, TEXTS["packed"], packed=True)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(x, results[1][1][name]) for name, x in results[0][1].items())


FLAWS = {  # what a chain sees, one thing changed
    "no text": lambda a, b, c, d: (b, b, c, d),
    "one input of the text less": lambda a, b, c, d: (a, b - 1, c, d),
    "its own key alone": lambda a, b, c, d: (a, b, d, d),
    "the first key of another chain": lambda a, b, c, d: (a, b, c, np.append(d[:-1] + 1, d[-1])),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_faulty_mask_changes_the_loss(loaded_target, embed_head, monkeypatch, flaw):
    draft = make_draft(loaded_target, embed_head, CONFIGS["eagle3"])
    loss = loss_and_gradients(draft, batch_of(draft.config, TEXTS["packed"], packed=True))[0]

    def faulty(ranges_K4, context, keys, device):
        return ranges.range_mask(np.stack(FLAWS[flaw](*ranges_K4.T), axis=1), context, keys, device)

    monkeypatch.setattr(chains, "range_mask", faulty)
    wrong = loss_and_gradients(draft, batch_of(draft.config, TEXTS["packed"], packed=True))[0]
    print(f"{flaw}: {abs(wrong - loss):.1e}")
    assert abs(wrong - loss) > 1e-4  # rounding changes it by less than 1e-6


# -- which inputs are trained ------------------------------------------------------------------------------------------


def pairs_of(positions):
    """The trained (input, step) pairs."""
    return {(i, n) for n in range(2, STEPS + 1) for i in positions[f"ttt_{n}"].inputs.tolist()}


def test_a_step_is_trained_where_the_first_is_and_after_an_anchor():
    row = row_of(3, 40)
    trained = set(trained_mask(row.loss_mask, 1).nonzero()[0].tolist())
    objective = make_objective(CONFIGS["eagle3"])
    positions = objective.positions(row.input_ids, row.loss_mask, (0, 1, 2))
    assert set(positions[ANCHORS].inputs.tolist()) == trained == set(positions[1].inputs.tolist())
    assert pairs_of(positions) == {(i, n) for i in trained for n in range(2, STEPS + 1) if i - n + 1 in trained}
    few, drawn = make_objective(replace(CONFIGS["eagle3"], anchors=6)), {}
    for seed in [(0, 1, 2), (0, 2, 2), (0, 1, 3), (1, 1, 2)]:
        positions = few.positions(row.input_ids, row.loss_mask, seed)
        again = few.positions(row.input_ids, row.loss_mask, seed)
        drawn[seed] = anchors = tuple(positions[ANCHORS].inputs.tolist())
        assert anchors == tuple(sorted(set(anchors) & trained)) and len(anchors) == 6
        assert pairs_of(positions) == pairs_of(again)
        assert pairs_of(positions) == {
            (a + n - 1, n) for a in anchors for n in range(2, STEPS + 1) if a + n - 1 in trained
        }
        assert torch.equal(positions[1].inputs, torch.tensor(sorted(trained)))  # the first step has them all
        for group in positions.values():
            assert torch.equal(group.labels, group.inputs + 1) and group.labels.max() < 40
    assert len(set(drawn.values())) == 4


@pytest.mark.parametrize("name", ["reduced", "jakiro"])
def test_validation_is_that_without_anchors(loaded_target, embed_head, name):
    """To the last bit."""
    losses = []
    for anchors in (3, None):
        config = replace(CONFIGS[name], anchors=anchors)
        draft, objective = make_draft(loaded_target, embed_head, config), make_objective(config)
        batch = collate([row_of(1, 30), row_of(2, 19)], objective, {}, range(SOURCES))
        batch.totals = dict.fromkeys(batch.positions, 1)
        losses.append(objective.loss(draft, batch))
    assert losses[0] == losses[1]


def test_texts_without_an_anchor_train_every_weight(loaded_target, embed_head):
    """One has no trained input, the other one whose chain ends with the text."""
    draft = make_draft(loaded_target, embed_head, CONFIGS["sparse"])
    for length in (5, 6):
        batch = batch_of(draft.config, [[length]])
        assert len(batch.positions[ANCHORS]) == length // 6 and not len(batch.positions["ttt_2"])
        _, gradients, _ = loss_and_gradients(draft, batch)
        assert all(x.isfinite().all() for x in gradients.values())


def test_the_targets_head_has_no_anchors():
    with pytest.raises(ValueError, match="anchors"):
        load_settings({"kind": "mtp", "anchors": 8})


# -- cost, and learning ------------------------------------------------------------------------------------------------


def repeated(query, shape):
    return (shape[0], query[1], *shape[2:])


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q, repeated(q, k), repeated(q, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
        sdpa_backward_flop_count(g, q, repeated(q, k), repeated(q, v))
    ),
}


def test_a_further_step_costs_the_rows_of_its_anchors(loaded_target, embed_head):
    inputs, anchors = 1024, 128

    def flops(steps, anchors):
        """Operations of the layer's products, of attention's, and of a training step, all with their gradients."""
        config = Eagle3Config(ttt_steps=steps, anchors=anchors)
        draft, batch = make_draft(loaded_target, embed_head, config), batch_of(config, [[inputs + 1]])
        draft.requires_grad_(True)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            sum(x.sum() for x in draft(batch)[0]).backward()
        counts = counter.get_flop_counts()["Global"]
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            loss_and_gradients(draft, batch)
        return np.array([counts[torch.ops.aten.mm], sum(map(counts.get, ATTENTION)), counter.get_total_flops()])

    first, whole, chained = flops(1, None), flops(7, None), flops(7, anchors)
    products, attention, _ = (chained - first) / (whole - first)
    total = chained[2] / whole[2]
    print(f"of a further step's operations: products {products:.4f}, attention {attention:.3f}; of a step {total:.3f}")
    assert products == anchors / inputs and attention < 0.2 and total < 0.35


def test_a_draft_learns_after_anchors(loaded_target, embed_head, text):
    """At all inputs, though a step of the training draws 6 of 47; in as many steps less than without anchors."""
    prompt, answer = text
    ids = torch.tensor([*prompt, *answer])
    states_TSD = loaded_target.capture_all(ids[None], [1, 2])[0].clone()
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    row = TextRow("text", ids.int().numpy(), mask, states_TSD[:, 0], states_TSD[:, 1:])

    def losses(anchors):
        """The loss over all inputs before and after a training of 150 steps, and the agreements after it."""
        config = Eagle3Config(ttt_steps=3, anchors=anchors, auxiliary_layers=[1, 2])
        draft, objective = build(config, draft_shapes(loaded_target.config)), make_objective(config)
        draft.initialise(0)
        draft.bind(embed_head)
        validation = collate([row], objective, dict.fromkeys(objective.groups, len(answer) - 1), range(SOURCES))
        optimizer, validated = torch.optim.AdamW(draft.parameters(), lr=5e-3), []
        for step in range(151):
            if step in (0, 150):
                with torch.no_grad():
                    validated.append(objective.loss(draft, validation))
            drawn = objective.positions(row.input_ids, row.loss_mask, (0, step, 0))
            batch = collate_packed([[row]], iter([drawn]), count_positions([drawn]), range(SOURCES))
            optimizer.zero_grad()
            objective.loss(draft, batch)[0].backward()
            optimizer.step()
        agreements = [(x["agree"] / x["positions"]).item() for x in validated[1][1].values()]
        return validated[0][0].item(), validated[1][0].item(), agreements

    before, after, agreements = losses(6)
    whole_before, whole_after, whole_agreements = losses(None)
    share = (before - after) / (before - whole_after)
    print(f"loss {before:.2f} -> {after:.2f}, without anchors {whole_after:.2f}: {share:.2f} of that fall")
    print(f"agreement {agreements}, without anchors {whole_agreements}")
    assert before == whole_before and before - after > 2 and share > 0.7 and min(agreements) > 0.4
