"""The drafts: sizes, names, formulas."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pipeline.basics.errors import PipelineError
from pipeline.drafts import build, make_objective, parameter_count
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.jakiro import JakiroConfig, MixtureOfExperts
from pipeline.drafts.parts.layers import draft_shapes, layer_config
from pipeline.lm.states import EmbeddingAndHead, LMHead
from tests.pipeline.families import LLAMA_3


def shapes(width, mlp, heads, kv, vocabulary=32000, **more):
    return draft_shapes(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            vocab_size=vocabulary,
            **more,
        )
    )


PAPER = {
    "7B": ((4096, 11008, 32, 32), True),
    "8B": ((4096, 14336, 32, 8, 128256), False),
    "13B": ((5120, 13824, 40, 40), True),
    "33B": ((6656, 17920, 52, 52), True),
    "70B": ((8192, 28672, 64, 8), True),
}
TINY = (16, 40, 4, 2, 50)


def on_meta(config, *shape, **more):
    with torch.device("meta"):
        return build(config, shapes(*shape, **more))


def by_hand(kind, width, mlp, heads, kv, bias):
    """Return the parameters of fc, attention with grouped keys and values, one norm, and the MLP or experts."""
    shared = 2 * width * width + bias * width + 2 * width * width + 2 * width * (width // heads * kv) + width
    return shared + (3 * width * mlp if kind == "eagle" else 4 * width + 2 * 3 * width * width)


@pytest.mark.parametrize(
    ("kind", "target", "exact", "millions"),
    [
        ("jakiro", "7B", 201_351_168, 201),
        ("jakiro", "8B", 176_181_248, 176),
        ("jakiro", "13B", 314_603_520, 315),
        ("jakiro", "33B", 531_667_968, 532),
        ("jakiro", "70B", 687_915_008, 688),
        ("eagle", "7B", 235_937_792, 236),
        ("eagle", "8B", 251_662_336, 252),
        ("eagle", "13B", 369_633_280, 370),
        ("eagle", "33B", 623_653_888, 624),
        ("eagle", "70B", 989_872_128, 990),
    ],
)
def test_parameter_counts_in_the_shapes_of_the_papers_targets(kind, target, exact, millions):
    shape, bias = PAPER[target]
    config = (JakiroConfig if kind == "jakiro" else EagleConfig)(kind=kind, fc_bias=bias)
    count = parameter_count(on_meta(config, *shape))
    assert count == exact == by_hand(kind, *shape[:4], bias)
    assert round(count / 1e6) == millions


def names(config, *shape):
    return {name: list(value.shape) for name, value in on_meta(config, *shape).state_dict().items()}


@pytest.mark.parametrize(("experts", "bias"), [(2, True), (2, False), (4, True)])
def test_jakiros_tensors_are_the_released_checkpoints(experts, bias):
    want = {
        "fc.weight": [16, 32],
        "layers.0.self_attn.q_proj.weight": [16, 16],
        "layers.0.self_attn.k_proj.weight": [8, 16],
        "layers.0.self_attn.v_proj.weight": [8, 16],
        "layers.0.self_attn.o_proj.weight": [16, 16],
        "layers.0.post_attention_layernorm.weight": [16],
        "layers.0.mlp_moe.gate.weight": [experts + 2, 16],
    }
    for j in range(experts):
        want |= {f"layers.0.mlp_moe.experts.{j}.{part}_proj.weight": [16, 16] for part in ("gate", "up", "down")}
    if bias:
        want["fc.bias"] = [16]
    assert names(JakiroConfig(kind="jakiro", experts=experts, fc_bias=bias), *TINY) == want


def test_eagles_tensors_are_the_released_checkpoints():
    got = names(EagleConfig(kind="eagle", fc_bias=True), *TINY)
    assert {name.removeprefix("layers.0.") for name in got} == {
        "fc.weight",
        "fc.bias",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "post_attention_layernorm.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert got["layers.0.mlp.down_proj.weight"] == [16, 40]


def test_what_the_options_add_to_the_tensors():
    plain = names(JakiroConfig(kind="jakiro"), *TINY)
    scalar = names(JakiroConfig(kind="jakiro", contrast="scalar"), *TINY)
    assert scalar.pop("layers.0.mlp_moe.contrast_scalars") == [2]
    assert scalar.pop("layers.0.mlp_moe.gate.weight") == [2, 16]
    assert plain.pop("layers.0.mlp_moe.gate.weight") == [4, 16] and scalar == plain
    assert names(JakiroConfig(kind="jakiro", vocabulary=20), *TINY)["draft_token_ids"] == [20]
    wide = names(JakiroConfig(kind="jakiro", expert_width=24), *TINY)
    assert wide["layers.0.mlp_moe.experts.1.up_proj.weight"] == [24, 16]
    assert names(EagleConfig(kind="eagle", mlp_width=64), *TINY)["layers.0.mlp.up_proj.weight"] == [64, 16]


def tiny_embed_head(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return EmbeddingAndHead(
        torch.randn(50, 16, generator=generator), LMHead(torch.randn(50, 16, generator=generator)), "tiny"
    )


@pytest.mark.parametrize("config", [EagleConfig(kind="eagle"), JakiroConfig(kind="jakiro", vocabulary=20)])
def test_the_targets_ends_are_neither_saved_nor_trained(config):
    draft = build(config, shapes(*TINY))
    before = list(draft.state_dict()), [name for name, _ in draft.named_parameters()]
    embed_head = tiny_embed_head()
    draft.bind(embed_head)
    assert (list(draft.state_dict()), [name for name, _ in draft.named_parameters()]) == before
    assert draft.embed_head.embedding_VD is embed_head.embedding_VD  # by reference
    assert not any("head" in name or "embed" in name for name in draft.state_dict())


def test_a_reduced_vocabulary_restricts_the_head_to_its_ids():
    draft = build(JakiroConfig(kind="jakiro", vocabulary=3), shapes(*TINY))
    draft.set_vocabulary(torch.tensor([4, 30, 49]))
    embed_head = tiny_embed_head()
    draft.bind(embed_head)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(draft.embed_head.head(hidden), embed_head.head(hidden)[:, [4, 30, 49]], atol=1e-5)
    assert draft.vocabulary_size == 3
    assert build(EagleConfig(kind="eagle"), shapes(*TINY)).vocabulary_size == 50


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    build(EagleConfig(kind="eagle", vocabulary=50), shapes(*TINY))
    with pytest.raises(PipelineError, match=r"vocabulary=51 is more than the target's 50 tokens"):
        build(EagleConfig(kind="eagle", vocabulary=51), shapes(*TINY))


# -- initialisation and dtype ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [EagleConfig(kind="eagle", fc_bias=True), JakiroConfig(kind="jakiro", contrast="scalar")]
)
def test_initialisation_is_a_function_of_the_seed(config):
    def weights(seed, disturb):
        torch.manual_seed(disturb)
        draft = build(config, shapes(*TINY))
        draft.initialise(seed)
        return draft.state_dict()

    first, again, other_seed = weights(1, 10), weights(1, 20), weights(2, 10)
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other_seed[name]) for name in matrices)
    assert all(0.01 < first[name].std() < 0.03 for name in matrices)
    assert (first["layers.0.post_attention_layernorm.weight"] == 1).all()
    if config.fc_bias:
        assert (first["fc.bias"] == 0).all()
    if config.kind == "jakiro":
        assert first["layers.0.mlp_moe.contrast_scalars"].tolist() == [1, 0]


def test_a_cast_to_bf16_leaves_ropes_frequencies_in_fp32():
    draft = build(EagleConfig(kind="eagle"), shapes(*TINY))
    before = draft._rope[0].inv_freq.clone()
    draft.to(torch.bfloat16)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    assert draft._rope[0].inv_freq.dtype == torch.float32
    assert torch.equal(draft._rope[0].inv_freq, before)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA_3])
def test_rope_is_the_targets(rope):
    size = {"hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 50}
    target = LlamaConfig(**size, max_position_embeddings=512, rope_parameters=dict(rope))
    draft = build(EagleConfig(kind="eagle"), draft_shapes(target))
    positions, x = torch.arange(300)[None], torch.zeros(1, 300, 64)
    for got, want in zip(draft._rope[0](x, positions), LlamaRotaryEmbedding(target)(x, positions), strict=True):
        assert torch.equal(got, want)


# -- formulas -------------------------------------------------------------------------------------------------------


def parts(module, n):
    """Return the parts of a mixture without the residual: mixture, selected experts, log-weights, contrast."""
    heads = module(torch.zeros_like(n), n)
    return heads.ahead[0], torch.stack(heads.experts, dim=-2), heads.log_weights, *heads.ahead[1:]


def moe(experts, top_k, contrast="router", seed=0):
    config = JakiroConfig(kind="jakiro", experts=experts, experts_per_token=top_k, contrast=contrast, expert_width=12)
    module = MixtureOfExperts(layer_config(shapes(*TINY)), config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def swiglu(expert, n):
    gate = expert.gate_proj.weight @ n
    return expert.down_proj.weight @ (gate * torch.sigmoid(gate) * (expert.up_proj.weight @ n))


def inputs(count=40):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("experts", "top_k"), [(n, k) for n in range(2, 6) for k in range(2, n + 1)])
@torch.no_grad()
def test_the_mixture_is_a_softmax_over_the_kept_experts_scores(experts, top_k):
    module = moe(experts, top_k)
    mixture, *_ = parts(module, inputs())
    used = set()
    for n, got in zip(inputs(), mixture, strict=True):
        scores = (module.gate.weight @ n)[:experts].tolist()
        best = sorted(range(experts), key=lambda j: -scores[j])[:top_k]
        weights = torch.tensor([scores[j] for j in best]).softmax(0)
        want = sum(w * swiglu(module.experts[j], n) for w, j in zip(weights, best, strict=True))
        assert torch.allclose(got, want, atol=1e-5)
        used |= set(best)
    assert used == set(range(experts))


@pytest.mark.parametrize(
    ("experts", "top_k", "penalty", "warned"),
    [
        (8, 2, 1.0, False),
        (8, 2, 2.4, False),
        (8, 2, 2.6, True),
        (8, 2, 4.0, True),
        (3, 2, 1.4, True),
        (2, 2, 1.0001, False),
    ],
)
def test_a_gate_more_than_halfway_to_the_same_experts_is_a_warning(experts, top_k, penalty, warned):
    config = JakiroConfig(experts=experts, experts_per_token=top_k, balance_loss=0.1)
    objective = make_objective(config)
    assert bool(objective.warning({"balance_penalty": penalty})) == warned
    assert objective.warning({}) is None


@pytest.mark.parametrize(("experts", "top_k"), [(2, 2), (4, 3)])
@torch.no_grad()
def test_router_contrast_is_the_released_reading(experts, top_k):
    """The larger entry of v, the softmax of the gate's two more rows, is beta and selects E_a. The two best experts are
    in the order of their indices, whichever of them routing prefers.
    """
    module, cases = moe(experts, top_k), set()
    *_, contrast = parts(module, inputs(80))
    for n, got in zip(inputs(80), contrast, strict=True):
        scores = module.gate.weight @ n
        pair = sorted(scores[:experts].topk(2).indices.tolist())
        v = scores[experts : experts + 2].softmax(0)
        a = int(v.argmax())
        want = v[a] * swiglu(module.experts[pair[a]], n) - v[1 - a] * swiglu(module.experts[pair[1 - a]], n)
        assert torch.allclose(got, want, atol=1e-5)
        cases.add((a, bool(scores[pair[0]] > scores[pair[1]])))
    assert len(cases) == 4  # both signs of the contrast under both orders of routing


@torch.no_grad()
def test_the_contrasts_sign_is_decided_by_raw_scores_before_rounding():
    """Two weights may round to the same bfloat16 although the raw scores differ. If these are equal as well, E_a is the
    later expert, as in the released code.
    """
    module, n = moe(2, 2).to(torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16)
    n[0, :2] = 1.0
    outputs = [expert(n) for expert in module.experts]
    module.gate.weight.zero_()
    for scores, first in (((0.5, 0.498), 0), ((0.498, 0.5), 1), ((0.25, 0.25), 1)):
        module.gate.weight[2:4, 0] = torch.tensor(scores, dtype=torch.bfloat16)
        raw = module.gate(n)[0, 2:4]
        weights = raw.float().softmax(0).to(torch.bfloat16)
        assert weights[0] == weights[1] and (raw[0] == raw[1]) == (scores[0] == scores[1])
        *_, contrast = parts(module, n)
        assert torch.equal(contrast, weights[0] * outputs[first] - weights[1] * outputs[1 - first])
        assert not torch.equal(contrast, weights[0] * outputs[1 - first] - weights[1] * outputs[first])


@pytest.mark.parametrize("experts", [2, 4])
@torch.no_grad()
def test_scalar_contrast_subtracts_the_second_best_routed_expert_from_the_best(experts):
    module = moe(experts, 2, "scalar")
    module.contrast_scalars.copy_(torch.tensor([0.9, 0.3]))
    *_, contrast = parts(module, inputs())
    for n, got in zip(inputs(), contrast, strict=True):
        best, second = (module.gate.weight @ n)[:experts].topk(2).indices.tolist()
        want = 0.9 * swiglu(module.experts[best], n) - 0.3 * swiglu(module.experts[second], n)
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("contrast", ["router", "scalar"])
def test_the_contrast_is_learnable(contrast):
    module = moe(2, 2, contrast)
    parts(module, inputs())[-1].square().sum().backward()
    if contrast == "router":
        assert (module.gate.weight.grad[2:].abs().sum(1) > 0).all()
    else:
        assert (module.contrast_scalars.grad != 0).all()


@torch.no_grad()
def test_branches_add_the_residual():
    draft = build(JakiroConfig(kind="jakiro"), shapes(*TINY))
    draft.initialise(0)
    u, layer = inputs(5), draft.layers[0]
    mixture, chosen, log_weights, contrast = parts(layer.mlp_moe, layer.post_attention_layernorm(u))
    heads = draft.heads(u)
    assert [(term.name, term.group) for term in make_objective(draft.config).terms(0)] == [("next", 1), ("ahead", 2)]
    assert torch.equal(heads.ahead[0], u + mixture) and torch.equal(heads.ahead[1], u + contrast)
    assert all(torch.equal(got, u + chosen[:, place]) for place, got in enumerate(heads.experts))
    averaged = sum(w[:, None] * f for w, f in zip(log_weights.exp().T, heads.experts, strict=True))
    assert torch.allclose(averaged, heads.ahead[0], atol=1e-6)  # the weights sum to one, so the residual is added once
    eagle = build(EagleConfig(kind="eagle"), shapes(*TINY))
    assert make_objective(eagle.config).groups == [1]
    assert torch.equal(eagle.heads(u).ahead[0], u + eagle.layers[0].mlp(eagle.layers[0].post_attention_layernorm(u)))


@pytest.mark.parametrize("scale", [1.0, 4.0])
@torch.no_grad()
def test_the_trunk_is_fc_over_embedding_and_feature_then_attention_without_a_norm(scale):
    """The text has one position, where attention is only v and o, whatever RoPE does."""
    draft = build(EagleConfig(kind="eagle", fc_bias=True, embedding_scale=scale), shapes(*TINY))
    draft.initialise(0)
    draft.fc.bias.normal_(generator=torch.Generator().manual_seed(1))
    embed_head = tiny_embed_head()
    draft.bind(embed_head)
    f, token, attention = inputs(1)[0], 7, draft.layers[0].self_attn
    x = draft.fc.weight @ torch.cat([scale * embed_head.embedding_VD[token], f]) + draft.fc.bias
    v = (attention.v_proj.weight @ x).view(2, 1, 4).expand(2, 2, 4).reshape(16)  # each key head serves two
    got = draft.trunk(f[None, None], torch.tensor([[token]]), torch.tensor([[0]]), None, None)[0, 0]
    assert torch.allclose(got, x + attention.o_proj.weight @ v, atol=1e-6)
