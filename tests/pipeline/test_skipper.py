"""The target as its own draft, on a target of five blocks whose routers let some tokens skip a block."""

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.contract import DraftRequest, Frontier, RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts import build, make_objective
from pipeline.drafts.native.skipper import SkipperConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.recipe.recipe import Recipe
from tests.kit import recipe_tree, save_tiny_target
from tests.pipeline.taught import NEVER, prompt_of

LAYERS, LENGTH = 5, 40
TEXTS = [prompt_of(seed, 60) for seed in range(4)]
TOKENS = prompt_of(9, LENGTH)
NO_STATES = torch.zeros(0, 0, 32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_tiny_target(tmp_path_factory.mktemp("five"), layers=LAYERS)
    return Target(TargetConfig(model=str(folder), device="cpu"), "float32")


def make_skipper(target, sparsity=0.4):
    """Return a skipper with static routers, which are not constant."""
    draft = build(SkipperConfig(sparsity=sparsity), draft_shapes(target.config))
    draft.initialise(0)
    draft.bind(target.embed_head("x"))
    draft.start_from_target(TEXTS)
    return draft.eval().requires_grad_(False)


def logits_along(draft, tokens):
    """Return the logits that training predicts after each token."""
    with torch.inference_mode():
        logits = draft.logits(draft.forward_texts(torch.tensor([tokens]), None))[0]
    computed = torch.stack(draft.routing.computed)[1:-1]
    assert 0.1 < computed.mean() < 0.9 and ((computed.mean((1, 2)) > 0) & (computed.mean((1, 2)) < 1)).sum() >= 2
    return logits


def test_the_static_routers_let_as_many_pass_by_as_asked(target):
    draft = make_skipper(target)
    draft.start_from_target(TEXTS)
    computed = torch.stack(draft.routing.computed)
    assert computed.shape == (LAYERS, 1, 240)
    assert computed.mean((1, 2)).tolist() == pytest.approx([1, *[1 / 3] * 3, 1], abs=0.02)
    alone = draft.forward_texts(torch.tensor(TEXTS[1:2]), None)
    # Each text by itself.
    assert torch.equal(torch.stack(draft.routing.computed)[:, 0].round(), computed[:, 0, 60:120].round())
    assert alone.shape == (1, 60, 32)


def test_static_routers_take_turns(target):
    """A third of the tokens skips each of three blocks: almost always one block for each token, not three for some."""
    draft = make_skipper(target, sparsity=0.2)
    draft.start_from_target(TEXTS)
    passed = (torch.stack(draft.routing.computed) < 0.5).sum(0)[0].view(4, 60)[:, 4:]
    assert passed.max() <= 2 and (passed == 1).float().mean() > 0.85


def test_decoding_in_pieces_answers_what_training_predicts(target):
    """Trees are rejected before and leave nothing in the cache; each node has a sibling that it does not attend to."""
    draft = make_skipper(target)
    want, state = logits_along(draft, TOKENS), draft.open()
    for end in (7, 8, 12, 13, 21):
        answer = draft.start(state, RoundInput(TOKENS[:end], NO_STATES), DraftRequest())
        assert torch.allclose(answer.logits_LWU[0][-1], want[end - 1], atol=1e-4)
        for depth in range(1, 4):
            visible = torch.zeros(2, 2 * (depth - 1), dtype=torch.bool)
            visible[:, 1::2] = True
            visible = torch.cat([visible, torch.eye(2, dtype=torch.bool)], dim=1)
            nodes = Frontier(torch.tensor([7, TOKENS[end + depth - 1]]), answer.carry_WD[[-1, -1]], visible, depth)
            answer = draft.step(state, nodes, DraftRequest())
            assert torch.allclose(answer.logits_LWU[0][-1], want[end + depth - 1], atol=1e-4)
    counts = [len(state.cache.places[block]) for block in range(LAYERS)]
    assert counts[0] == counts[-1] == 21 + 6 and all(0 < count < 27 for count in counts[1:-1])
    assert counts == [layer.keys.shape[2] for layer in state.cache.layers]
    all_logits = draft.start(draft.open(), RoundInput(TOKENS, NO_STATES), DraftRequest(), places=LENGTH).logits_LWU[0]
    assert torch.allclose(all_logits, want, atol=1e-4)


def test_answers_are_plain_decodings(target):
    method, sampling = (
        LoadedMethod(make_skipper(target), TreeConfig(depth=3, top_k=4, nodes=16)),
        Sampling(24, NEVER, 1.0),
    )
    for seed in range(4):
        got = decode_speculative(target, method, prompt_of(seed), sampling)
        assert got.tokens == decode_plain(target, prompt_of(seed), sampling).tokens
    assert got.acceptance.tau > 1


class Idle(nn.Module):
    """A decoder's block that leaves a text's later half as it is."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x, position_ids, **more):
        works = (position_ids < 30)[..., None]
        return torch.where(works, self.block(x, position_ids=position_ids, **more), x)


def test_training_finds_the_tokens_that_a_block_does_nothing_for(tmp_path):
    """These are half of the tokens; without them the pruned target equals the full one. The static router does not find
    them.
    """
    target = Target(TargetConfig(model=str(save_tiny_target(tmp_path, layers=LAYERS)), device="cpu"), "float32")
    target.decoder.layers[2] = Idle(target.decoder.layers[2])
    draft = make_skipper(target, [0.0, 0.0, 0.5, 0.0, 0.0]).train().requires_grad_(True)
    rows = [
        TextRow(
            f"row{n}", np.array(text, np.int32), np.ones(60, np.uint8), target.capture(torch.tensor([text]))[0].detach()
        )
        for n, text in enumerate(TEXTS)
    ]
    batch = collate(rows, make_objective(draft.config), {1: 4 * 58})
    optimizer, losses, early, late = torch.optim.Adam(draft.parameters(), lr=1e-2), [], [], []
    for _ in range(300):
        optimizer.zero_grad()
        loss, sums = make_objective(draft.config).loss(draft, batch)
        loss.backward()
        optimizer.step()
        losses.append(sums["next"]["classification"].item())
        computed = draft.routing.computed[2].detach()
        early.append(computed[:, 4:30].mean().item())
        late.append(computed[:, 30:59].mean().item())
    draft.shares = [0.0] * LAYERS
    least = make_objective(draft.config).loss(draft, batch)[1]["next"]["classification"].item()
    assert losses[0] - least > 50 and losses[-1] - least < (losses[0] - least) / 3
    assert early[0] < 0.5 and early[-1] > 0.8 and late[-1] < 0.3


@torch.inference_mode()
def test_a_token_that_passes_a_block_by_is_seen_by_nobody_there(target):
    """The second block, by hand, computes only the first four and even positions, among themselves."""
    draft, at, even = (
        make_skipper(target, [0.0, 0.5, 0.0, 0.0, 0.0]),
        torch.arange(LENGTH)[None],
        torch.arange(LENGTH) % 2 == 0,
    )
    even[:4] = True  # a text's first tokens

    class Even(nn.Module):
        def forward(self, numbers):
            return 1 - 2 * ((2 ** (16 * numbers[..., 0]) - 1).round() % 2)

    draft.routers["1"] = Even()
    decoder = target.decoder
    x, causal_bias = decoder.embed_tokens(torch.tensor([TOKENS])), torch.full((LENGTH, LENGTH), -1e30).triu(1)
    for number, block in enumerate(decoder.layers):
        chosen = even if number == 1 else torch.ones_like(even)
        rope = tuple(part[:, chosen] for part in decoder.rotary_emb(x, at))
        x[:, chosen] = block(
            x[:, chosen], attention_mask=causal_bias[chosen][:, chosen][None, None], position_embeddings=rope
        )
    state = draft.open()
    got = draft.start(state, RoundInput(TOKENS, NO_STATES), DraftRequest(), places=LENGTH).logits_LWU[0]
    assert torch.allclose(got, draft.logits(decoder.norm(x))[0], atol=1e-4)
    assert state.cache.places[1].tolist() == [0, 1, 2, 3, *range(4, LENGTH, 2)]


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        ({"sparsity": [0.0, 0.5]}, 3, "2 shares, but the target has 3 blocks"),
        ({"sparsity": 0.5}, 3, "less than 1/3"),
        ({"sparsity": 0.5}, 4, "less than 2/4"),
        ({"sparsity": 0.3}, 2, "less than 0/2"),
        ({"sparsity": 0.3}, 1, "less than 0/1"),
        ({"sparsity": 0.4}, 30, None),
    ],
)
def test_shares_are_one_a_block(settings, layers, message):
    config = SkipperConfig(**settings)
    if message is None:
        shares = config.shares(layers)
        assert sum(shares) == pytest.approx(0.4 * layers) and (shares[0], shares[-1]) == (0, 0)
        return
    with pytest.raises(PipelineError, match=message):
        config.shares(layers)


class FaultyDecoder(nn.Module):
    """A decoder around the tiny one that uses its blocks in another way."""

    def __init__(self, decoder: nn.Module, fault: str):
        super().__init__()
        self.inner, self.fault, self.config, self.dtype = decoder, fault, decoder.config, decoder.dtype
        if fault != "no layers":
            self.layers = decoder.layers
        if fault == "spread":
            self._hf_hook = object()

    def forward(self, **more):
        if self.fault == "by position":
            self.layers[0](torch.zeros(1, 8, 32), None, None)
        return self.inner(**more)  # whose blocks are not ours


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no layers", "has no `layers`"),
        ("spread", "is spread over devices"),
        ("by position", "takes its blocks otherwise"),
        ("its own blocks", "computes other states with these blocks than the target"),
    ],
)
def test_a_target_whose_blocks_cannot_be_passed_by_is_refused(target, fault, message):
    embed_head = target.embed_head("x")
    embed_head.decoder = FaultyDecoder(embed_head.decoder, fault)
    draft = build(SkipperConfig(sparsity=0.4), draft_shapes(target.config))
    draft.bind(embed_head)
    with pytest.raises(PipelineError, match=f"draft 'skipper': tokens cannot skip blocks of its target.*{message}"):
        draft.start_from_target(TEXTS)


def test_a_target_that_is_spread_is_refused(tmp_path):
    tree = recipe_tree(tmp_path, tmp_path / "data.json", tmp_path / "run")
    tree["draft"] = {"some": {"kind": "skipper"}}
    tree["publish"]["draft"] = "some"
    tree["target"]["device"] = "spread"
    with pytest.raises(ValueError, match="on one device"):
        Recipe.model_validate(tree)
