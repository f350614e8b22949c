"""The shift by one, the masks and the losses, compared with slow, independent implementations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.drafts import build, make_objective
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3, Eagle3Config
from pipeline.drafts.gumiho import GumihoConfig
from pipeline.drafts.hydra import HydraConfig
from pipeline.drafts.jakiro import JakiroConfig, JakiroOnEagle3Config, balance_penalty
from pipeline.drafts.native.skipper import SkipperConfig
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.medusa import Medusa, MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.drafts.parts import losses
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.parts.losses import Labels, Term, TermBatch, chunk_rows, compute_term_sums, renormalised_labels
from pipeline.drafts.parts.objective import select_inputs, vocabulary_indices
from pipeline.drafts.small_model import SmallLlamaConfig
from pipeline.features.batch import Noise, collate, collate_packed
from pipeline.features.positions import Horizons, trained_mask
from pipeline.features.schema import TextRow
from pipeline.lm.states import LMHead
from tests.kit import labels_of, mask_of, positions_in

D, V, CPU = 6, 11, torch.device("cpu")


def row_of(length: int, seed: int = 0, mask=None, width: int = D, vocabulary: int = V, layers: int = 0) -> TextRow:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (length,), generator=generator).int().numpy()
    mask = torch.randint(0, 2, (length,), generator=generator).numpy() if mask is None else np.array(mask)
    hidden = 2 * torch.randn(length, width, generator=generator)
    states = torch.randn(length, layers, width, generator=generator) if layers else None
    return TextRow(f"row{seed}", tokens, mask.astype(np.uint8), hidden, states)


# -- which positions are trained ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "horizon", "want"),
    [
        # t:   u u a a u a a u   inputs 0..6; horizon h predicts t_{i+1+h}
        ([0, 0, 1, 1, 0, 1, 1, 0], 1, [1, 1, 0, 1, 1, 0, 0]),
        ([0, 0, 1, 1, 0, 1, 1, 0], 2, [1, 0, 1, 1, 0, 0, 0]),
        ([1, 0, 0, 0], 1, [0, 0, 0]),
        ([1], 1, []),
        ([1, 1], 1, [0]),  # input 0 would predict t_2
        ([0, 0, 1], 1, [1, 0]),
        ([1, 1, 1], 2, [0, 0]),
    ],
)
def test_trained_positions_by_hand(mask, horizon, want):
    got = trained_mask(np.array(mask, dtype=np.uint8), horizon)
    assert (got.dtype, got.astype(int).tolist()) == (bool, want)


# -- the shift ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[7], [4, 9, 2], [1, 3], [2, 2], [1]])
def test_collate_shifts_by_one(lengths):
    rows = [row_of(length, seed) for seed, length in enumerate(lengths)]
    totals, inputs, zero = {1: 5, 2: 3}, max(lengths) - 1, torch.zeros(D)
    batch = collate(rows, Horizons([1, 2]), totals)
    assert batch.tokens_BT.shape == (len(rows), inputs)
    assert batch.hidden_BTD.shape == labels_of(batch).shape == (len(rows), inputs, D)
    assert batch.totals == totals
    for b, row in enumerate(rows):
        for i in range(inputs):
            real = i + 1 < lengths[b]
            assert torch.equal(batch.hidden_BTD[b, i], row.hidden_TD[i] if i < lengths[b] else zero)
            assert torch.equal(labels_of(batch)[b, i], row.hidden_TD[i + 1] if real else zero)
            assert batch.tokens_BT[b, i] == (row.input_ids[i + 1] if real else 0)
            for h in (1, 2):
                assert mask_of(batch, h)[b, i] == bool(real and trained_mask(row.loss_mask, h)[i])


# -- noise ----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_a_function_of_its_seed_alone():
    values = Noise(0, 0, 2000, 0.1, (3, 0, 5)).draw(D, CPU)
    assert values.shape == (2000, D) and abs(values.mean()) < 0.003
    assert -0.1 <= values.min() < -0.0999 and 0.0999 < values.max() <= 0.1
    assert torch.equal(values, Noise(3, 7, 2000, 0.1, (3, 0, 5)).draw(D, CPU))
    seeds = [(3, 0, 5), (4, 0, 5), (3, 1, 5), (3, 0, 6), (0, 3, 5)]
    assert len({tuple(Noise(0, 0, 9, 0.1, seed).draw(D, CPU).flatten().tolist()) for seed in seeds}) == len(seeds)


def test_noise_is_added_before_the_rounding_and_never_to_labels():
    rows, noise = [row_of(6, 1), row_of(4, 2)], [Noise(b, 0, n, 0.3, (b,)) for b, n in ((0, 5), (1, 3))]
    clean = collate(rows, Horizons([1, 2]), {1: 1, 2: 1})
    noisy = replace(clean, noise=noise).to(CPU, torch.bfloat16)
    for b, n in ((0, 5), (1, 3)):
        expected = rows[b].hidden_TD[:n] + noise[b].draw(D, CPU)
        assert torch.equal(noisy.hidden_BTD[b, :n], expected.bfloat16())
        assert torch.equal(noisy.hidden_BTD[b, n:], clean.hidden_BTD[b, n:].bfloat16())  # what pads gets none
    assert torch.equal(labels_of(noisy), labels_of(clean).bfloat16())
    assert torch.equal(noisy.tokens_BT, clean.tokens_BT) and noisy.tokens_BT.dtype == torch.long
    assert torch.equal(clean.hidden_BTD[0], row_of(6, 1).hidden_TD[:-1])  # the batch stays as it was


# -- term_sums ----------------------------------------------------------------------------------------------------


def make_head(seed: int = 0) -> LMHead:
    return LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(seed)) / 2)


def direct(prediction_BTD, rows, horizon, head):
    """Return (regression, classification, agree, positions), position by position in fp64, from the rows themselves."""
    weight = head.linear.weight.double()
    regression = classification = torch.zeros((), dtype=torch.float64)
    agree = positions = 0
    for b, row in enumerate(rows):
        for i in trained_mask(row.loss_mask, horizon).nonzero()[0].tolist():
            predicted, label = prediction_BTD[b, i].double(), row.hidden_TD[i + horizon].double()
            distance = (predicted - label).abs()
            regression = regression + torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean()
            p = (weight @ label).softmax(-1)
            q = weight @ predicted
            classification = classification - (p * (q - q.logsumexp(-1))).sum()
            agree += int(p.argmax() == q.argmax())
            positions += 1
    return regression, classification, agree, positions


ROWS = [row_of(9, 1, [0, 0, 1, 1, 1, 0, 1, 1, 1]), row_of(4, 2, [0, 1, 1, 1]), row_of(2, 3, [0, 1]), row_of(6, 4)]


WEIGHTS = {"regression": 1.0, "classification": 1.0}


def sums_of(predictions, batch, head):
    """Return the sums. `predictions`: the horizon and the predicted features, by name."""
    chunk = chunk_rows(V * len(predictions), torch.device("cpu"))
    rows = batch.rows(sorted({horizon for horizon, _ in predictions.values()}), chunk)
    labels = Labels(batch.labels_at(rows.labels), rows.labels, lambda x: renormalised_labels(head(x)), V, chunk)
    batches = [
        TermBatch(
            Term(name, h, WEIGHTS), select_inputs(x, rows.inputs[h]), rows.label_indices[h], rows.chunk_ends[h], 1.0
        )
        for name, (h, x) in predictions.items()
    ]
    term_losses, figures = compute_term_sums(batches, labels, head)
    assert all(figures[name][part] == loss for name, parts in term_losses.items() for part, loss in parts.items())
    return {name: figures[name] | term_losses[name] for name in figures}


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 5, 1000])
def test_term_sums_are_the_direct_ones_in_value_and_gradient(monkeypatch, rows_per_chunk):
    """Two terms at once share their teacher's rows, although each trains different ones."""
    monkeypatch.setattr(losses, "CHUNK_LOGITS", rows_per_chunk * V * 2)
    batch, head = collate(ROWS, Horizons([1, 2]), {1: 1, 2: 1}), make_head()
    generator = torch.Generator().manual_seed(5)
    predictions = {h: torch.randn(batch.hidden_BTD.shape, generator=generator).requires_grad_() for h in (1, 2)}
    sums, losses_of = sums_of({h: (h, x) for h, x in predictions.items()}, batch, head), []
    for horizon, prediction in predictions.items():
        reference, got = prediction.detach().clone().requires_grad_(), sums[horizon]
        regression, classification, agree, positions = direct(reference, ROWS, horizon, head)
        assert positions == got["positions"] > 6
        assert got["agree"] == agree
        assert got["regression"].item() == pytest.approx(regression.item(), rel=1e-6)
        assert got["classification"].item() == pytest.approx(classification.item(), rel=1e-6)
        (1.5 * regression + 0.7 * horizon * classification).backward()
        losses_of.append((1.5 * got["regression"] + 0.7 * horizon * got["classification"], prediction, reference))
    sum(loss for loss, *_ in losses_of).backward()
    for _, prediction, reference in losses_of:
        assert reference.grad.abs().max() > 0.01
        assert torch.allclose(prediction.grad, reference.grad, rtol=1e-5, atol=1e-6)


def test_a_gpus_chunk_goes_by_the_memory_it_has_and_a_cpus_by_its_cache(monkeypatch):
    """Llama-3's 128,256 tokens and two branches allow thousands of rows, within 2 GiB for the largest tensor."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    rows = losses.chunk_rows(128_256 * 2, gpu, 80 * 10**9)
    assert rows == 2092 and rows * 2 * 128_256 * 4 <= 2 << 30
    assert losses.chunk_rows(128_256 * 2, gpu, 24 * 10**9) == 730
    assert losses.chunk_rows(128_256, gpu, 1000 * 10**9) == 4185
    assert losses.chunk_rows(5 * 10**12, gpu, 24 * 10**9) == 1
    of_both = (1, 24 * 10**9)  # free and total memory: only the total counts
    monkeypatch.setattr("torch.accelerator.get_memory_info", lambda device: of_both)
    assert losses.chunk_rows(128_256 * 2, gpu) == 730
    assert losses.chunk_rows(128_256 * 2, cpu) == losses.chunk_rows(260 * 2, cpu) == 128
    assert losses.chunk_rows(1_000_000 * 2, cpu) == 16


def test_gradients_are_formed_only_where_they_are_asked_for():
    batch = collate(ROWS, Horizons([1]), {1: 1})
    got = sums_of({"one": (1, torch.zeros_like(batch.hidden_BTD))}, batch, make_head())
    assert not got["one"]["classification"].requires_grad


# -- a draft's whole loss -------------------------------------------------------------------------------------------

TOTALS = {1: 30, 2: 25, 3: 20, 4: 15, 5: 12, 6: 10, 7: 8}  # by horizon
CONFIGS = {
    "eagle": EagleConfig(kind="eagle"),
    "jakiro": JakiroConfig(kind="jakiro", window=4),
    "reduced": JakiroConfig(kind="jakiro", vocabulary=100),
    "eagle3": Eagle3Config(ttt_steps=3, fc_norm=True, norm_output=True),
    "eagle3, masked": Eagle3Config(ttt_steps=2, vocabulary=100),
    "eagle3, a window": Eagle3Config(ttt_steps=2, norm_before_fc=True, qk_norm=True, window=4),
    "eagle3, acceptance": Eagle3Config(ttt_steps=2, vocabulary=100, objective="acceptance", teacher="whole"),
    "on eagle-3": JakiroOnEagle3Config(
        frame="eagle-3",
        ttt_steps=2,
        experts=4,
        expert_width=16,
        vocabulary=100,
        teacher="renormalised",
        balance_loss=0.01,
    ),
}


OTHER_CONFIGS = {
    "gumiho": GumihoConfig(window=3),
    "p-eagle": PEagleConfig(layers=2, depths=4, vocabulary=100),
    "medusa": MedusaConfig(heads=3, vocabulary=100),
    "medusa, the target's head": MedusaConfig(own_head=False, objective="soft-ce"),
    "hydra++": HydraConfig(heads=3, blocks=2),
    "dflash": DFlashConfig(layers=2, block=6),
    "dflash, D-PACE": DFlashConfig(layers=1, block=8, dpace=0.5),
    "dspark": DSparkConfig(layers=1, block=5, rank=8, vocabulary=100),
    "skipper": SkipperConfig(sparsity=[0.0, 0.5]),
    "small-llama": SmallLlamaConfig(width=32, mlp_width=48),
}


def random_draft(config, loaded_target, embed_head):
    draft = build(config, draft_shapes(loaded_target.config))
    draft.initialise(0)
    if draft.needs.auxiliary:  # their norms remove the scale of their inputs
        for weight in draft.parameters():
            weight.data.mul_(5 if weight.ndim == 2 else 1)
    if config.vocabulary:
        draft.set_vocabulary(torch.arange(0, 200, 2))
    draft.bind(embed_head)
    return draft


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def draft(request, loaded_target, embed_head):
    return random_draft(request.param, loaded_target, embed_head)


@pytest.fixture(params=[*CONFIGS.values(), *OTHER_CONFIGS.values()], ids=[*CONFIGS, *OTHER_CONFIGS])
def any_draft(request, loaded_target, embed_head):
    return random_draft(request.param, loaded_target, embed_head)


def wide_rows():
    lengths = [12, 5, 20, 3]
    return [row_of(n, n, [0, 0] + [1] * (n - 2), width=32, vocabulary=260, layers=3) for n in lengths]


def batch_of(draft, rows, totals):
    return collate(rows, make_objective(draft.config), totals, auxiliary=range(len(draft.needs.auxiliary)))


def packed_of(draft, packed, totals, width=0):
    auxiliary = range(len(draft.needs.auxiliary))
    positions = positions_in(make_objective(draft.config), packed)
    return collate_packed(packed, positions, totals, width=width, auxiliary=auxiliary)


def gradient_of(draft, batch):
    draft.zero_grad()
    loss, sums = make_objective(draft.config).loss(draft, batch)
    loss.backward()
    return loss.item(), sums, torch.cat([p.grad.flatten() for p in draft.parameters()]).clone()


def whole_loss(draft, rows, totals):
    return gradient_of(draft, batch_of(draft, rows, totals))


def test_the_loss_of_a_batch_is_the_sum_of_its_dialogues_losses(any_draft):
    """The totals are the same: padding, neighbours and the split into micro-batches change nothing."""
    rows, totals = wide_rows(), TOTALS
    loss, sums, gradient = whole_loss(any_draft, rows, totals)
    alone = [whole_loss(any_draft, [row], totals) for row in rows]
    assert loss == pytest.approx(sum(part[0] for part in alone), rel=1e-5)
    assert torch.allclose(gradient, sum(part[2] for part in alone), rtol=1e-4, atol=1e-6)
    for term, term_sums in sums.items():
        for name in {"positions", "agree"} & set(term_sums):
            assert term_sums[name] == sum(part[1][term][name] for part in alone)


def test_the_loss_weighs_sums_by_the_global_totals(draft):
    rows = wide_rows()
    totals = TOTALS | {1: 40, 2: 7}
    loss, sums, _ = whole_loss(draft, rows, totals)
    want = 0.0
    weights = {"next": (1, 1.0, 0.1), "ahead": (2, 1.0, 0.05), "ttt_2": (1, 1.0, 0.1)}
    if draft.needs.auxiliary:
        weights |= {"next": (1, 0, 1.0), "ahead": (2, 0, 0.5), "ttt_2": (1, 0, 0.8), "ttt_3": (1, 0, 0.64)}
    assert sums.keys() <= {*weights, "balance"}
    for term, (horizon, regression, classification) in weights.items():
        if term in sums:
            part = classification * sums[term]["classification"]
            part = part + (regression * sums[term]["regression"] if regression else 0)
            want += part.item() / totals[horizon]
    if "balance" in sums:
        want += 0.01 * sums["balance"]["penalty"].item() / totals[1]
    assert loss == pytest.approx(want, rel=1e-6)


def test_packed_dialogues_do_not_see_each_other(any_draft):
    """Two rows of two dialogues are four rows of one: loss, sums and gradient."""
    rows, totals = wide_rows(), TOTALS
    loss, sums, gradient = gradient_of(any_draft, batch_of(any_draft, rows, totals))
    both = packed_of(any_draft, [[rows[1], rows[0]], [rows[3], rows[2]]], totals, width=30)
    packed_loss, packed_sums, packed_gradient = gradient_of(any_draft, both)
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(packed_gradient, gradient, rtol=1e-4, atol=1e-6)
    for term in sums:
        for name, value in sums[term].items():
            assert packed_sums[term][name].item() == pytest.approx(value.item(), rel=1e-5)
    if isinstance(any_draft, Medusa):  # it reads only one position
        return
    # As if each row were one dialogue.
    whole_rows = {"begins_BT": torch.zeros_like(both.begins_BT), "lengths": [[30], [30]]}
    unmasked = gradient_of(any_draft, replace(both, **whole_rows))
    assert not torch.allclose(unmasked[2], gradient, rtol=1e-4, atol=1e-6)


def test_an_answer_at_position_0_that_is_packed_second_trains_as_it_does_alone(draft):
    """The template has no header: only another dialogue comes before the first token."""
    kinds = {"width": 32, "vocabulary": 260, "layers": 3}
    rows = [row_of(9, 1, [0, 0] + [1] * 7, **kinds), row_of(8, 2, [1] * 6 + [0] * 2, **kinds)]
    auxiliary, objective = range(len(draft.needs.auxiliary)), make_objective(draft.config)
    results = [
        gradient_of(
            draft,
            collate_packed([packed], positions_in(objective, [packed]), TOTALS, width=20, auxiliary=auxiliary),
        )
        for packed in ([rows[0]], [rows[1]], rows)
    ]
    assert results[2][0] == pytest.approx(results[0][0] + results[1][0], rel=1e-5)
    assert torch.allclose(results[2][2], results[0][2] + results[1][2], rtol=1e-4, atol=1e-6)


def test_recomputed_activations_give_the_same_gradient_to_the_bit(draft):
    rows, totals = wide_rows(), TOTALS
    for batch in (
        batch_of(draft, rows, totals),
        packed_of(draft, [rows], totals),
    ):
        loss, _, gradient = gradient_of(draft, batch)
        draft.recompute, calls = True, []
        hook = draft.block.post_attention_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        recomputed_loss, _, recomputed = gradient_of(draft, batch)
        draft.recompute = False
        hook.remove()
        assert loss == recomputed_loss and torch.equal(gradient, recomputed)
        assert len(calls) == 2 * draft.config.ttt_steps


def input_states(draft, batch):
    """Return the states that the draft reads from a batch, without a copy."""
    return batch.auxiliary_BTSD if draft.needs.auxiliary else batch.final_BLD


def test_an_emptied_batch_has_neither_loss_nor_gradient(draft):
    batch = batch_of(draft, wide_rows(), TOTALS)
    input_states(draft, batch)[1, 2] = float("nan")
    assert not torch.isfinite(make_objective(draft.config).loss(draft, batch)[0])
    loss, sums, gradient = gradient_of(draft, batch.empty_copy())
    assert loss == 0 and not gradient.any()
    assert not any(value for parts in sums.values() for value in parts.values())


@pytest.mark.parametrize("lengths", [(2, 2), (1, 12, 3)])
def test_a_batch_without_a_trained_position_has_neither_loss_nor_gradient(any_draft, lengths):
    rows = [row_of(n, n, [0] * n, width=32, vocabulary=260, layers=3) for n in lengths]
    loss, sums, gradient = gradient_of(any_draft, batch_of(any_draft, rows, TOTALS))
    assert loss == 0 and not gradient.any()
    assert not any(value for parts in sums.values() for value in parts.values())


def test_padding_changes_no_sum(any_draft):
    """The garbage that a longer neighbour's padding could hold is never read."""
    row, totals = wide_rows()[0], TOTALS | {1: 9, 2: 8}
    batch = batch_of(any_draft, [row, row_of(40, 9, [0] * 40, width=32, vocabulary=260, layers=3)], totals)
    n = len(row.input_ids) - 1
    batch.final_BLD[0, n + 1 :], batch.tokens_BT[0, n:] = 9.0, 42
    if batch.auxiliary_BTSD is not None:
        batch.auxiliary_BTSD[0, n:] = 7.0
    padded, padded_sums = make_objective(any_draft.config).loss(any_draft, batch)
    alone, sums = make_objective(any_draft.config).loss(any_draft, batch_of(any_draft, [row], totals))
    assert padded.item() == pytest.approx(alone.item(), rel=1e-5)
    for term in sums:
        for name, value in sums[term].items():
            assert padded_sums[term][name].item() == pytest.approx(value.item(), rel=1e-5)


# -- own heads, teachers, objectives --------------------------------------------------------------------------------


def teachers_distribution(teacher, logits_MV, ids_U):
    """Return p (m, U) and whether each row has a loss, by their definitions."""
    inside = logits_MV[:, ids_U]
    if teacher == "whole":
        return logits_MV.softmax(-1)[:, ids_U], torch.ones(len(logits_MV), dtype=torch.bool)
    has_loss = (
        torch.isin(logits_MV.argmax(-1), ids_U) if teacher == "masked" else torch.ones(len(inside), dtype=torch.bool)
    )
    return inside.softmax(-1), has_loss


def row_losses(objective, p, logits_MU):
    """Return each row's loss, for autograd."""
    log_q = logits_MU.log_softmax(-1)
    if objective == "soft-ce":
        return -(p * log_q).sum(-1)
    if objective == "l1":
        return 0.9 * (p - log_q.exp()).abs().sum(-1)
    a = torch.minimum(p, log_q.exp()).sum(-1)
    w = (-3 * a.detach()).exp()
    return w * (p * (p.log() - log_q)).sum(-1) - (1 - w) * a.log()


@pytest.mark.parametrize("rows_per_chunk", [2, 1000])
@pytest.mark.parametrize("objective", ["soft-ce", "acceptance", "l1"])
@pytest.mark.parametrize("teacher", ["masked", "renormalised", "whole"])
def test_an_own_heads_loss_and_gradients_are_autograds(
    monkeypatch, loaded_target, embed_head, teacher, objective, rows_per_chunk
):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", rows_per_chunk * 100 * 2)
    config = Eagle3Config(ttt_steps=2, vocabulary=100, objective=objective, teacher=teacher)
    draft = Eagle3(config, draft_shapes(loaded_target.config))
    draft.initialise(0)
    for weight in draft.parameters():
        weight.data.mul_(5)
    ids_U = torch.arange(0, 200, 2)
    draft.set_vocabulary(ids_U)
    draft.bind(embed_head)
    batch = batch_of(draft, wide_rows(), {1: 30})
    loss, sums, gradient = gradient_of(draft, batch)

    draft.zero_grad()
    mask, want = mask_of(batch), 0.0
    p, has_loss = teachers_distribution(teacher, embed_head.head(labels_of(batch)[mask]).float(), ids_U)
    for name, prediction, weight in zip(("next", "ttt_2"), draft(batch)[0], (1.0, 0.8), strict=True):
        logits = draft.lm_head(draft.norm(prediction[mask]))
        part = (row_losses(objective, p, logits) * has_loss).sum()
        if objective == "l1":
            text_M = vocabulary_indices(batch.following_BT[mask], ids_U)
            assert 0 < (text_M >= 0).sum() < len(text_M)
            part = part + 0.1 * torch.nn.functional.cross_entropy(logits, text_M, ignore_index=-1, reduction="sum")
        assert sums[name]["classification"].item() == pytest.approx(part.item(), rel=1e-5)
        if objective != "soft-ce" and teacher != "masked":
            accepted = torch.minimum(p, logits.softmax(-1)).sum()
            assert sums[name]["accept"].item() == pytest.approx(accepted.item(), rel=1e-5)
        want = want + weight * part / 30
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    direct_gradient = torch.cat([p.grad.flatten() for p in draft.parameters()])
    assert teacher == "renormalised" or not has_loss.all() or teacher == "whole"
    assert draft.lm_head.weight.grad.abs().max() > 1e-4
    assert torch.allclose(gradient, direct_gradient, rtol=1e-3, atol=1e-6)


def test_a_masked_teacher_drops_the_same_positions_in_every_pass_packed_or_not(loaded_target, embed_head):
    """The positions are those whose likeliest token is not in the draft's vocabulary."""
    draft = random_draft(Eagle3Config(ttt_steps=3, vocabulary=100), loaded_target, embed_head)
    rows, draft_tokens = wide_rows(), set(draft.token_ids_U.tolist())
    for packed in ([[row] for row in rows], [[rows[1], rows[0]], [rows[3], rows[2]]], [rows]):
        batch = packed_of(draft, packed, TOTALS)
        leaves = [feature.detach().requires_grad_() for feature in draft(batch)[0]]
        draft.forward = lambda _, leaves=leaves: (leaves, None)
        make_objective(draft.config).loss(draft, batch)[0].backward()
        del draft.forward
        likeliest_BT = embed_head.head(labels_of(batch)).argmax(-1)
        trained_BT = mask_of(batch) & torch.tensor(
            [[token in draft_tokens for token in row] for row in likeliest_BT.tolist()]
        )
        assert 0 < trained_BT.sum() < mask_of(batch).sum() and len(leaves) == 3
        for leaf in leaves:
            assert torch.equal(leaf.grad.abs().sum(-1) > 0, trained_BT)


def test_a_balanced_gate_has_a_penalty_of_one_and_one_expert_alone_of_all():
    """E sum_e share_e mean_e, by hand, is 1 for equal shares, and E if one expert has every slot and all of the
    probability.
    """
    batch = collate([row_of(9, 1, [0] + [1] * 8), row_of(5, 2, [0] + [1] * 4)], Horizons([1]), {1: 11})
    shape, positions = batch.tokens_BT.shape, int(mask_of(batch).sum())
    even = torch.arange(shape[0] * shape[1]).view(shape)[..., None] % 2
    scores = torch.zeros(*shape, 2)
    balanced = balance_penalty(scores, even, 2, batch)
    assert positions == 10 and abs(balanced.item() - positions) < 0.6  # an odd number of positions is not even
    alone = torch.stack([torch.full(shape, 40.0), torch.full(shape, -40.0)], dim=-1)
    assert balance_penalty(alone, torch.zeros(*shape, 1, dtype=torch.long), 2, batch).item() == pytest.approx(
        2 * positions
    )


@pytest.mark.parametrize("vocabulary", [None, 100])
@pytest.mark.parametrize(
    "config", [MedusaConfig(heads=3), HydraConfig(heads=3, blocks=1, objective="hard-ce", head_bias=True)]
)
def test_heads_of_their_own_learn_the_texts_tokens(loaded_target, embed_head, config, vocabulary):
    """The loss of head k at input i is the cross-entropy of t_{i+1+k}, read from the rows; 0 for a token outside of its
    vocabulary.
    """
    draft = build(replace(config, vocabulary=vocabulary), draft_shapes(loaded_target.config))
    draft.initialise(0)
    ids_U = torch.arange(260) if vocabulary is None else torch.arange(0, 200, 2)
    if vocabulary:
        draft.set_vocabulary(ids_U)
    draft.bind(embed_head)
    draft.start_from_target([])
    assert all(torch.equal(head.weight, draft.embed_head.head.linear.weight) for head in draft.own_heads)
    turns = [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    rows = [*wide_rows(), row_of(12, 99, turns, width=32, vocabulary=260, layers=3)]
    batch = batch_of(draft, rows, {1: 30, 2: 20, 3: 10})
    loss, sums, gradient = gradient_of(draft, batch)

    draft.zero_grad()
    want, number_of = 0.0, {int(token): number for number, token in enumerate(ids_U)}
    for k, (name, prediction) in enumerate(zip(sums, draft(batch)[0], strict=True), start=1):
        logits, part, agree = draft.own_heads[k - 1](prediction), 0.0, 0
        for b, row in enumerate(rows):
            for i in range(len(row.input_ids) - 1 - k):
                label = number_of.get(int(row.input_ids[i + 1 + k]))
                if row.loss_mask[i + 1 + k] and label is not None:
                    part = part - logits[b, i].log_softmax(-1)[label]
                    agree += int(logits[b, i].argmax() == label)
        assert sums[name]["classification"].item() == pytest.approx(part.item(), rel=1e-5)
        assert sums[name]["agree"] == agree
        want = want + config.decay**k * part / batch.totals[k]
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    expected = torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])
    assert expected.shape == gradient.shape and torch.allclose(gradient, expected, rtol=1e-3, atol=1e-6)


def test_gumihos_later_losses_are_of_two_steps_of_the_serial_part(loaded_target, embed_head):
    """MLP j at input i takes fc of (t_{i+2}, F_i) and (t_{i+3}, F_{i+1}), and its label is f_{i+3+j}. Classifications
    count after the first `regression_steps`.
    """
    draft = build(GumihoConfig(regression_steps=5), draft_shapes(loaded_target.config))
    draft.initialise(0)
    draft.bind(embed_head)
    row = wide_rows()[0]
    objective = make_objective(draft.config)
    batch = batch_of(draft, [row], dict.fromkeys(objective.groups, 10))
    names = [term.name for term in objective.terms(0)]
    features, tokens = dict(zip(names, draft(batch)[0], strict=True)), torch.from_numpy(row.input_ids.astype(np.int64))
    serial = features["next"][0]
    for i in range(len(tokens) - 5):
        pair = [
            draft.fc(torch.cat([embed_head.embedding_VD[tokens[i + 2 + offset]], serial[i + offset]]))
            for offset in (0, 1)
        ]
        for j, name in enumerate(("ahead_3", "ahead_4")):
            assert torch.allclose(draft.mlp.mlp[j](torch.cat(pair)), features[name][0, i], atol=1e-5)
            assert next(term for term in objective.terms(0) if term.name == name).group == 3 + j
    before, after = ({term.name: term.weights for term in objective.terms(step)}["ahead_4"] for step in (4, 5))
    assert before == {"regression": pytest.approx(0.64 / 9), "classification": 0.0}
    assert after == before | {"classification": pytest.approx(0.064 / 9)}
