"""DFlash and DSpark: their losses by hand, one block and one head at a time; faulty masks that change the loss; anchors
and layers; DSpark's tree by hand.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, silu

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import RoundInput
from pipeline.drafts import build, make_objective
from pipeline.drafts.parallel import dflash
from pipeline.drafts.parallel.dflash import DFlashConfig, even_layers
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parts.attention import ranges
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.positions import count_positions
from pipeline.features.schema import TextRow
from tests.pipeline.taught import make_draft, prompt_of

LENGTH, BLOCK, GAP = 24, 5, 12
LOSSES = {
    "decay": (DFlashConfig, {"gamma": 2.0}),
    "a window": (DFlashConfig, {"gamma": 2.0, "window": 6}),
    "causal, a window": (DFlashConfig, {"gamma": 2.0, "window": 6, "causal": True}),
    "D-PACE": (DFlashConfig, {"dpace": 0.4}),
    "dspark": (DSparkConfig, {"gamma": 3.0, "rank": 6}),
    "causal dspark": (DSparkConfig, {"gamma": 3.0, "rank": 6, "causal": True}),
    "dspark, D-PACE": (DSparkConfig, {"dpace": 0.4, "rank": 6, "objective": "hard-ce"}),
}


def config_of(kind=DFlashConfig, **more) -> DFlashConfig:
    return kind(**{"layers": 2, "block": BLOCK, "auxiliary_layers": [1, 2], "anchors": 7, **more})


def row() -> TextRow:
    """Return a row with a user's token in the middle of the assistant's."""
    mask = (np.arange(LENGTH) >= 3) & (np.arange(LENGTH) != GAP)
    states = torch.randn(LENGTH, 3, 32, generator=torch.Generator().manual_seed(1))
    tokens = np.array(prompt_of(4, LENGTH), np.int32)
    return TextRow("row", tokens, mask.astype(np.uint8), states[:, 0], states[:, 1:])


def loss_of(draft):
    """Return the loss, its gradient and the anchors."""
    objective, text_row = make_objective(draft.config), row()
    positions = objective.positions(text_row.input_ids, text_row.loss_mask)
    draft.zero_grad()
    loss, _ = objective.loss(draft, collate([text_row], objective, count_positions([positions]), range(2)))
    loss.backward()
    return loss.item(), [p.grad.clone() for p in draft.parameters()], (positions[1].inputs + 1).tolist()


def normed(x, module):
    return x * (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt() * module.weight


def turned(x_THI, positions, theta):
    half = x_THI.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x_THI[..., :half], x_THI[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def block_by_hand(draft, text_row: TextRow, anchor: int):
    """Return logits of the places that predict tokens after this anchor, from the states of the tokens before it;
    without DSpark's bias.
    """
    theta, size = draft.shapes["rope_parameters"]["rope_theta"], draft.shapes["head_dim"]
    context = normed(draft.fc(text_row.auxiliary_TKD[:anchor].flatten(1)), draft.hidden_norm)
    tokens = [text_row.input_ids[anchor], *[draft.mask_token_id.item()] * (BLOCK - 1)]
    x, at = draft.embed_head.embedding_VD[torch.tensor(tokens)], torch.arange(anchor + BLOCK)
    for layer in draft.layers:
        attention, n = layer.self_attn, normed(x, layer.input_layernorm)
        both = torch.cat([context, n])
        keys = turned(normed(attention.k_proj(both).unflatten(1, (-1, size)), attention.k_norm), at, theta)
        queries = turned(normed(attention.q_proj(n).unflatten(1, (-1, size)), attention.q_norm), at[anchor:], theta)
        values = attention.v_proj(both).unflatten(1, (-1, size))
        heads = []
        for head in range(queries.shape[1]):
            shared = head * keys.shape[1] // queries.shape[1]
            scores = queries[:, head] @ keys[:, shared].T / math.sqrt(size)
            hidden = (at[anchor:, None] - at).abs() >= (draft.config.window or anchor + BLOCK)
            hidden |= draft.config.causal & (at > at[anchor:, None])
            p = scores.masked_fill(hidden, -math.inf).softmax(-1)
            heads.append(p @ values[:, shared])
        x = x + attention.o_proj(torch.cat(heads, dim=1))
        n = normed(x, layer.post_attention_layernorm)
        x = x + layer.mlp.down_proj(silu(layer.mlp.gate_proj(n)) * layer.mlp.up_proj(n))
    return draft.embed_head.head(normed(x, draft.norm))[-draft.config.levels :]


def bias_by_hand(draft, token):
    markov_head = draft.markov_head
    return markov_head.markov_w2.weight @ markov_head.markov_w1.weight[token]


def place_loss_by_hand(draft, text_row: TextRow, at: int, logits):
    """Return the loss of a place whose label is token `at`, given the text's token before it."""
    if isinstance(draft.config, DSparkConfig):
        logits = logits + bias_by_hand(draft, text_row.input_ids[at - 1])
    ce = cross_entropy(logits, torch.tensor(int(text_row.input_ids[at])))
    if draft.config.objective == "hard-ce":
        return ce
    p = draft.embed_head.head(text_row.hidden_TD[at - 1]).softmax(-1)
    return 0.1 * ce + 0.9 * (p - logits.softmax(-1)).abs().sum()


def loss_by_hand(draft, anchors):
    """Return the loss, with every weight by its definition."""
    text_row, config, total, weights = row(), draft.config, 0.0, 0.0
    levels = config.levels
    for anchor in anchors:
        losses = []
        for place, logits in enumerate(block_by_hand(draft, text_row, anchor), start=1):
            before = text_row.loss_mask[anchor + 1 : anchor + place]
            has_label = anchor + place < LENGTH and text_row.loss_mask[anchor + place]
            has_label = has_label and (before.all() or not isinstance(config, DSparkConfig))
            losses.append(place_loss_by_hand(draft, text_row, anchor + place, logits) if has_label else None)
        if config.dpace is None:
            place_weights = [math.exp(-level / config.gamma) for level in range(levels)]
            weights += sum(w for w, loss in zip(place_weights, losses, strict=True) if loss is not None)
        else:
            alpha = config.dpace
            f = [1.0 if x is None else (1 - alpha) * math.exp(-x.item()) + alpha for x in losses]
            labelled = [j for j in range(levels) if losses[j] is not None]
            place_weights = [sum(math.prod(f[: j + 1]) for j in labelled if j >= k) for k in range(levels)]
            weights += 1
        total = total + sum(w * loss for w, loss in zip(place_weights, losses, strict=True) if loss is not None)
    return total / weights


@pytest.fixture
def draft(request, loaded_target, embed_head):
    made = make_draft(loaded_target, embed_head, config_of(LOSSES[request.param][0], **LOSSES[request.param][1]))
    return made.requires_grad_(True)


@pytest.mark.parametrize("queries", [256, 7], ids=["one piece", "pieces that cut blocks"])
@pytest.mark.parametrize("draft", LOSSES, indirect=True)
def test_the_loss_and_its_gradient_are_those_by_hand(draft, monkeypatch, queries):
    monkeypatch.setattr(ranges, "CPU_QUERIES", queries)
    loss, gradient, anchors = loss_of(draft)
    assert len(anchors) == 7 and any(anchor + BLOCK > LENGTH for anchor in anchors)
    assert any(anchor < GAP < anchor + draft.config.levels for anchor in anchors)  # and places after the gap
    draft.zero_grad()
    want = loss_by_hand(draft, anchors)
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    for computed, weight in zip(gradient, draft.parameters(), strict=True):
        torch.testing.assert_close(computed, weight.grad, rtol=1e-3, atol=1e-5)


FLAWS = {
    "its anchor's own state": lambda first, last, *rest: BLOCK_RANGES(first, last + 1, *rest),
    "states up to its own end": lambda first, last, count, block, *_: BLOCK_RANGES(
        first, np.minimum(last + block, count - 1), count, block
    ),
    "other blocks": lambda first, last, count, block, *_: (
        np.array([0, 0, count, count + block * len(last) - 1]) + BLOCK_RANGES(first, last, count, block) * [1, 1, 0, 0]
    ),
    "no place after it": lambda first, last, count, block, *_: BLOCK_RANGES(first, last, count, block, causal=True),
}
BLOCK_RANGES = dflash.block_ranges


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("draft", ["decay"], indirect=True)
def test_a_block_that_sees_what_it_must_not_has_another_loss(draft, monkeypatch, flaw):
    loss, _, anchors = loss_of(draft)
    monkeypatch.setattr(dflash, "block_ranges", FLAWS[flaw])
    wrong, _, same_anchors = loss_of(draft)
    assert same_anchors == anchors and abs(wrong - loss) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("draft", ["a window", "causal, a window", "causal dspark"], indirect=True)
def test_a_block_answers_in_decoding_what_it_answers_by_hand(draft):
    text_row = row()
    inputs = RoundInput(text_row.input_ids[:9].tolist(), text_row.auxiliary_TKD[:8])
    got_LD = draft._block_features(draft.open(), inputs, 1)[:, 0]
    torch.testing.assert_close(
        draft.embed_head.head(got_LD), block_by_hand(draft, text_row, 8).float(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("draft", ["dspark"], indirect=True)
def test_a_nodes_score_is_the_product_of_probabilities_conditioned_on_its_parent(draft):
    text_row, tree = row(), TreeConfig(depth=4, top_k=3, nodes=20)
    inputs = RoundInput(text_row.input_ids[:9].tolist(), text_row.auxiliary_TKD[:8])
    pool = draft.pool(draft.open(), inputs, draft.config.resolve(tree), 19)
    tokens, depths, totals = [inputs.tokens[-1], *pool.tokens], [0, *pool.depths()], [0.0]
    base_LU = block_by_hand(draft, text_row, 8).detach()
    for node, parent in enumerate(pool.parents, start=1):
        logits = base_LU[depths[parent]] + bias_by_hand(draft, tokens[parent])
        totals.append(totals[parent] + logits.log_softmax(-1)[tokens[node]].item())
    assert pool.scores == pytest.approx(totals[1:], abs=1e-4) and max(depths) == 4
    pairs = {(tokens[parent], tokens[node]) for node, parent in enumerate(pool.parents, start=1) if parent}
    assert len({token for _, token in pairs}) < len(pairs)  # one token below two parents


# -- anchors -----------------------------------------------------------------------------------------------------------


def test_anchors_are_the_assistants_and_drawn_by_seed_step_and_dialogue():
    text_row, objective = row(), make_objective(config_of())
    all_of = (
        make_objective(config_of(anchors=100)).positions(text_row.input_ids, text_row.loss_mask, (0, 1, 2))[1].inputs
        + 1
    )
    assert all_of.tolist() == [a for a in range(LENGTH - 1) if text_row.loss_mask[a] and text_row.loss_mask[a + 1]]
    drawn = {}
    for seed in [(), (0, 1, 2), (0, 2, 2), (0, 1, 3), (1, 1, 2)]:
        positions = objective.positions(text_row.input_ids, text_row.loss_mask, seed)
        again = objective.positions(text_row.input_ids, text_row.loss_mask, seed)
        drawn[seed] = tuple((positions[1].inputs + 1).tolist())
        assert len(drawn[seed]) == 7 and list(drawn[seed]) == sorted(set(drawn[seed]) & set(all_of.tolist()))
        for place in range(1, BLOCK):
            assert torch.equal(positions[place].inputs, again[place].inputs)
            labelled = [a for a in drawn[seed] if a + place < LENGTH and text_row.loss_mask[a + place]]
            assert (positions[place].inputs + 1).tolist() == labelled  # head(f_p) are the logits of token p + 1
            assert (positions[place].labels + 1).tolist() == [a + place for a in labelled]
    assert len(set(drawn.values())) == 5


# -- the target's layers and mask token --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "count", "reference"),
    [(36, 5, [1, 9, 17, 25, 33]), (32, 5, [1, 8, 15, 22, 29]), (30, 5, [1, 8, 14, 20, 27]), (8, 3, [1, 3, 5])],
)
def test_the_default_layers_are_the_references_which_count_from_0(layers, count, reference):
    assert even_layers(layers, count) == [layer + 1 for layer in reference]
    assert even_layers(layers, 1) == [layers // 2 + 1]
    assert even_layers(2, count) == [2] and even_layers(1, count) == [1]


def test_the_mask_token_is_one_that_the_texts_lack(loaded_target, embed_head):
    draft = make_draft(loaded_target, embed_head, config_of())
    draft.start_from_target([[1, 259], [258, 256]])
    assert draft.mask_token_id.item() == 257
    with pytest.raises(PipelineError, match=r"the training texts have all 260 tokens.*set its mask_token to the id"):
        draft.start_from_target([list(range(260))])
    configured = make_draft(loaded_target, embed_head, config_of(mask_token=9))
    configured.start_from_target([list(range(260))])
    assert configured.mask_token_id.item() == 9
    with pytest.raises(PipelineError, match="mask_token=260: the target's embedding has ids up to 259"):
        build(config_of(mask_token=260), draft_shapes(loaded_target.config))
