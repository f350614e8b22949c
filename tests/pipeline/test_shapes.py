"""The shapes that drafts copy from the configurations of other families: widths, heads, and the RoPE of the layers
with full attention.
"""

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pipeline.drafts import build
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.layers import draft_shapes
from tests.pipeline.families import FAMILIES, LLAMA_3, LONG, SMALL, YARN

TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ROPES = {  # family: (its RoPE, the draft's)
    "llama-3.1": (LLAMA_3, LLAMA_3),
    "gpt-oss": (YARN, YARN),
    "gemma-3": (TWO_BASES, TWO_BASES["full_attention"]),
    "phi, head with bias": (
        {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 5e4},
    ),
    "phi3, longrope": (LONG, {"rope_type": "default", "rope_theta": 1e4}),
    "qwen3": ({"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
    "mistral, sliding": ({"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
}


def make_config(family: str, **more):
    name, settings = FAMILIES[family]
    return AutoConfig.for_model(name, **{**SMALL, **settings, **more})


@pytest.mark.parametrize("family", ROPES)
def test_a_drafts_rope_is_that_of_its_targets_full_layers(family):
    rope_parameters, want = ROPES[family]
    shapes = draft_shapes(make_config(family, rope_parameters=dict(rope_parameters)))
    reference = LlamaRotaryEmbedding(
        LlamaConfig(**{**SMALL, "head_dim": shapes["head_dim"]}, rope_parameters=dict(want))
    )
    again = json.loads(json.dumps(shapes))  # as a checkpoint keeps them
    rope = build(EagleConfig(kind="eagle"), again)._rope[0]
    assert torch.equal(rope.inv_freq, reference.inv_freq) and rope.attention_scaling == reference.attention_scaling
    assert len(rope.inv_freq) == shapes["head_dim"] // 2  # whole heads are turned


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_have_the_targets_heads_and_no_biases(family):
    config = make_config(family)
    shapes = draft_shapes(config)
    size = 16 if family == "qwen3" else 8
    want = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size, "vocab_size": 260}
    assert {key: shapes[key] for key in want} == want
    for settings in (EagleConfig(kind="eagle"), JakiroConfig(kind="jakiro")):
        tensors = build(settings, shapes).state_dict()
        assert tensors["layers.0.self_attn.q_proj.weight"].shape == (4 * size, 32)
        assert tensors["layers.0.self_attn.o_proj.weight"].shape == (32, 4 * size)
        assert not [name for name in tensors if name.endswith("bias")]


def test_where_heads_differ_by_layer_kind_drafts_take_the_full_layers():
    config = AutoConfig.for_model("gemma4_text", **{**SMALL, "num_hidden_layers": 6}, global_head_dim=16)
    assert config.layer_types[0] == "sliding_attention"
    shapes = draft_shapes(config)
    assert shapes["head_dim"] == 16
    assert shapes["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    build(EagleConfig(kind="eagle"), shapes)


def test_a_target_without_rope_leaves_the_draft_an_ordinary_one():
    assert draft_shapes(AutoConfig.for_model("gpt2", n_inner=64))["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
