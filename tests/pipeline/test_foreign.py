"""The config.json of other projects' drafts: read as their code computes it, or refused with the name of the key."""

import json

import pytest
import torch
from transformers import GptOssConfig

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import read_foreign_config
from pipeline.artifacts.imported import import_draft
from pipeline.basics.errors import PipelineError
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.parts.attention.steps import ttt_mask
from pipeline.drafts.parts.names import AUXILIARY
from pipeline.lm.attention import additive_mask
from tests.pipeline.layouts import BLOCKS, DFLASH, EAGLE, EAGLE_3, P_EAGLE, assert_imported, with_settings
from tests.pipeline.taught import make_draft, prompt_of

AT = "eagle_config"
LINEAR = {"rope_type": "linear", "factor": 2.0}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 16}
TWO = {"num_hidden_layers": 2}
OF_BLOCKS = DFLASH | {"window": 24}
SPECULATORS = BLOCKS | {"speculators_model_type": "dflash"}
MUSE = BLOCKS | {"model_type": "muse_glimmer_assistant", "layer_types": None, "sliding_window": None}
LISTS = TWO | {"block_size": 4, "mask_token_id": 258, "aux_hidden_state_layer_ids": [1, 2]}


def layers(*auxiliary):
    return EAGLE_3 | {"auxiliary_layers": [*auxiliary]}


REFUSED = [  # the draft's settings, what config.json says, the error's words
    (EAGLE_3, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh', and only 'silu' or 'swish' is"),
    (EAGLE_3, {"hidden_act": "gelu", "transformer_layer_config": {"hidden_act": None}}, "hidden_act='gelu', and"),
    (EAGLE_3, {"is_causal": False}, "is_causal=False, and only True is computed here"),
    (EAGLE_3, {"is_neox_style": False}, "is_neox_style=False, and only True is computed here"),
    (EAGLE, {"rope_is_neox_style": False}, "rope_is_neox_style=False, and only True is computed here"),
    (EAGLE_3, {"logit_scale": 0.5}, "logit_scale=0.5"),
    (EAGLE_3, {"speculators_model_type": "peagle"}, "speculators_model_type='peagle'"),
    (EAGLE_3, {AT: {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False, and only True"),
    (EAGLE_3, {"residual_multiplier": 0.22, "another": "x"}, "residual_multiplier=0.22, .*; another='x'"),
    (EAGLE, {"mlp_bias": True}, "mlp_bias=True"),
    (EAGLE_3, {"quantization_config": {"bits": 4}}, "quantization_config="),
    (EAGLE, {"attention_bias": True}, "attention_bias=True, which is not known here for this kind of draft"),
    # of the wrong type, out of bounds, or said twice
    (EAGLE, {"hidden_size": "32"}, "hidden_size='32', expected a positive number"),
    (EAGLE, {"num_attention_heads": 0}, "num_attention_heads=0, expected"),
    (EAGLE, {"intermediate_size": -1}, "intermediate_size=-1, expected"),
    (EAGLE, {"num_attention_heads": 3, "head_dim": None}, "makes no "),
    (EAGLE, {"rope_theta": "x"}, "rope_theta='x', expected"),
    (EAGLE, {"model_type": ["llama"]}, r"model_type=\['llama'\], expected a name"),
    (EAGLE, {"model_type": "mistral", "sliding_window": 9}, "model_type='mistral', and only llama, qwen2, qwen3"),
    (EAGLE_3, {AT: [1]}, "eagle_config holds a list, expected an object"),
    (EAGLE_3, {"norm_before_residual": True, AT: {"norm_before_residual": False}}, "=True and, nested, F"),
    (EAGLE_3, {"target_hidden_size": "32"}, "target_hidden_size='32', expected a positive number"),
    (EAGLE_3, {"target_hidden_size": 64}, "target_hidden_size is 64, that of target .* 32: it was trained for an"),
    (EAGLE, {"hidden_size": 64}, "hidden_size is 64.* trained for another target"),
    (EAGLE, {"hidden_size": 24, "target_hidden_size": 32}, "narrower than its target has no place"),
    # RoPE
    (EAGLE, {"rope_scaling": [2]}, "rope_scaling holds a list, expected an object"),
    (EAGLE_3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is of kind 'dynamic'"),
    (EAGLE, {"rope_scaling": {"rope_type": ["linear"]}}, r"is of kind \['linear'\]"),
    (EAGLE, {"rope_scaling": {"rope_type": "linear"}}, "makes no layer: .*factor"),
    (EAGLE, {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "has factor='2', expected"),
    (EAGLE, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "has factor=0, expected"),
    (EAGLE, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters rotates 0.5 of a head"),
    (EAGLE, {"rope_parameters": {"partial_rotary_factor": [1]}}, r"rotates \[1\] of a head"),
    (EAGLE, {"partial_rotary_factor": [1]}, r"partial_rotary_factor=\[1\], expected"),
    (EAGLE, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "given for each kind of layer"),
    (
        EAGLE,
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}},
        "factor=4.0, but another key of the file says 2.0",
    ),
    (
        EAGLE,
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        "'default', but another key of the file says 'linear'",
    ),
    (EAGLE, {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta=7.0, but another key of the file says 5000.0"),
    # a window
    (EAGLE, {"layer_types": [{"a": 1}]}, r"layer_types=\[\{'a': 1\}\], expected a list of names"),
    (EAGLE, {"layer_types": 3}, "layer_types=3, expected a list of names"),
    (EAGLE_3, {"layer_types": ["chunked_attention"]}, "expected full_attention or sliding_attention"),
    (EAGLE_3, SLIDING | {"sliding_window": None}, "sliding_attention layer with sliding_window=None"),
    (EAGLE_3, SLIDING | {"sliding_window": 0}, "sliding_attention layer with sliding_window=0"),
    (EAGLE_3, SLIDING, r"window=16: set draft\.theirs\.window \(it is None\)"),
    (EAGLE_3 | {"window": 16}, {}, r"window=None: set draft\.theirs\.window \(it is 16\)"),
    (EAGLE, SLIDING, r"window=16: set draft\.theirs\.window"),
    (EAGLE_3, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "window=8: set"),
    # one position more in transformers than in vLLM; and it is the default of the form
    (DFLASH, MUSE, "muse_glimmer_assistant with a window, whose ends transformers counts"),
    (DFLASH, MUSE | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "assistant with a window, whose"),
    # a setting of the draft
    (EAGLE_3, {"norm_output": True, AT: {"norm_output": None}}, "norm_output=True: set draft"),
    (EAGLE_3, {"norm_before_fc": True}, "norm_before_fc=True: set draft"),
    (EAGLE_3, {"attention_bias": True}, "attention_bias=True: set draft"),
    ({"kind": "jakiro", "experts": 3}, {"num_experts_per_tok": 3}, "experts_per_token=3: set draft.theirs"),
    (P_EAGLE | {"mask_token": None}, TWO, "neither config.json nor the recipe names the mask token: set draft.theirs."),
    (P_EAGLE, TWO | {"mask_token_id": 258, "pard_token": 257}, "pard_token=257 and mask_token_id=258: which one is"),
    (P_EAGLE, TWO | {"mask_token_id": 257}, "mask_token=257: set draft.theirs.mask_token"),
    # the layers of the target, as written at the top and counted from 0 in a nested object
    (EAGLE_3, {AUXILIARY: ["1", "2"]}, r"eagle_aux_hidden_state_layer_ids=\['1', '2'\], expected numbers"),
    (layers(2), {AUXILIARY: [1]}, r"auxiliary_layers=\[1\]: set draft.theirs.aux"),
    (layers(1), {AT: {AUXILIARY: [1]}}, r"auxiliary_layers=\[2\]: set draft.theirs.auxiliary_la"),
    (layers(2), {AUXILIARY: [2], AT: {AUXILIARY: [0]}}, "names other layers at each place"),
    (layers(2), {AT: {AUXILIARY: [1]}, "dflash_config": {AUXILIARY: [0]}}, "names other layers at each pl"),
    (
        DFLASH,
        LISTS | {"dflash_config": {"target_layer_ids": [1]}},
        r"each place.*dflash_config.target_layer_ids: \[2\]",
    ),
    (layers(1), {AUXILIARY: [1, 2, 2]}, r"names the outputs of layers \[1, 2, 2\]"),
    (layers(1, 2), {AUXILIARY: [2, 1]}, r"names the outputs of layers \[2, 1\]"),
    (layers(1, 2), {AUXILIARY: [0, 1]}, r"names the outputs of layers \[0, 1\]"),
    (layers(1, 2), {AUXILIARY: [1, 3]}, "in rising order, from 1 to the target's 2"),
    # a block as speculators trains it
    (OF_BLOCKS, SPECULATORS | {"sliding_window_non_causal": False}, r"causal=True: set draft\.theirs\.causal"),
    (
        OF_BLOCKS,
        SPECULATORS | {"sliding_window_non_causal": False, "sliding_window": 100_000},
        r"causal=True: set draft\.theirs\.causal",
    ),
    (
        OF_BLOCKS,
        SPECULATORS | {"sliding_window_non_causal": None},
        "no sliding_window_non_causal: whether blocks are c",
    ),
    (OF_BLOCKS, SPECULATORS | {"causal": True}, "causal=True, sliding_window_non_causal=True: whether blocks are c"),
    (
        OF_BLOCKS,
        SPECULATORS | {"is_causal": False, "dflash_config": {"causal": True}},
        "is_causal=False, causal=True, s",
    ),
    (OF_BLOCKS, SPECULATORS | {"is_causal": "no"}, "is_causal='no', and only False or True is computed here"),
    (OF_BLOCKS, SPECULATORS | {"sample_from_anchor": True}, "sample_from_anchor=True, and only False is computed here"),
    (OF_BLOCKS, SPECULATORS | {"projector_type": "domino"}, "projector_type='domino'"),
    (OF_BLOCKS, SPECULATORS | {"shift_label": True}, "shift_label=True"),
    (
        OF_BLOCKS,
        SPECULATORS | {"aux_hidden_state_layer_ids": [2]},
        r"set draft.theirs.auxiliary_layers \(it is \[1, 2\]\)",
    ),
]


@pytest.mark.parametrize(("settings", "config", "complaint"), REFUSED)
def test_what_is_not_computed_here_is_refused_by_its_key(released, settings, config, complaint):
    recipe, folder, _ = released(settings, **config)
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")
    assert not (recipe.paths.draft("theirs") / checkpoint.CONFIG).exists()


@pytest.mark.parametrize(
    ("settings", "config", "recipe_value", "complaint"),
    [
        (EAGLE, {}, {"mlp_width": 9}, r"size mismatch for layers.0.mlp.gate_proj.weight: .*\[64, 32\].*\[9, 32\]"),
        # a last layer that is fused is one of the draft
        (EAGLE_3, {AUXILIARY: [1, 2]}, {"auxiliary_layers": [1]}, r"auxiliary_layers=\[1, 2\]: set draft"),
        # false where it is missing, and in speculators' form true
        (EAGLE_3, {}, {"norm_before_residual": True}, "norm_before_residual=False: set draft"),
        (EAGLE_3, {"speculators_model_type": "eagle3"}, {}, "norm_before_residual=True: set draft"),
        (EAGLE_3, {"norm_before_residual": True}, {}, "norm_before_residual=True: set draft"),
    ],
)
def test_another_setting_of_the_recipe_is_refused_with_the_true_one(
    released, settings, config, recipe_value, complaint
):
    recipe, folder, _ = released(settings, **config)
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, with_settings(recipe, settings | recipe_value), "theirs")


READ = [  # the draft's settings, what config.json says
    (EAGLE_3, {AT: None, "transformer_layer_config": None, "rope_scaling": None, "sliding_window": None}),
    (EAGLE_3, {"layer_types": ["full_attention"], "sliding_window": 2048}),
    (EAGLE_3, SLIDING | {"sliding_window": 100_000}),  # no text of the target is so long
    (EAGLE_3, {"sliding_window": 16, "use_sliding_window": True}),  # of layers behind the 28th
    (EAGLE_3, {"hidden_act": "swish", "logit_scale": 1.0, "is_causal": True, "partial_rotary_factor": 1.0}),
    (EAGLE_3, {"something": None, "something_else": False, "more": [], "and_more": {}}),
    (EAGLE_3, {"use_aux_hidden_state": True, AT: {"use_last_layernorm": True, "use_mtp_layernorm": False}}),
    (EAGLE_3 | {"attention_bias": True}, {"qkv_bias": False}),  # told by its tensors
    (EAGLE_3 | {"norm_before_residual": True}, {"norm_before_residual": True}),
    (layers(1, 2), {AUXILIARY: [1, 2]}),
    (layers(1, 2), {AT: {AUXILIARY: [0, 1]}}),
    (layers(1, 2), {AT: {AUXILIARY: [1, 2]}}),  # no output has the number 2: by inputs
    (layers(1, 2), {AUXILIARY: [1, 2], AT: {AUXILIARY: [1, 2]}}),
    (layers(1, 2), {AUXILIARY: [1, 2], AT: {AUXILIARY: [0, 1]}}),
    (layers(1, 2), {"speculators_model_type": "eagle3", "norm_before_residual": False, AUXILIARY: [1, 2]}),
    (layers(1), {AUXILIARY: [1, 2]}),  # the last one, of two, is listed for training
    (DFLASH, LISTS | {"dflash_config": {"target_layer_ids": [0, 1]}}),
]


@pytest.mark.parametrize(("settings", "config"), READ)
def test_what_computes_the_same_is_read(released, settings, config):
    recipe, folder, weights = released(settings, **config)
    import_draft(folder, recipe, "theirs")
    assert_imported(recipe, weights)


SHAPES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
LLAMA = {
    **SHAPES,
    **{"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 2048, "num_hidden_layers": 1},
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 260},
    **{"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16", "transformers_version": "4.53.1"},
}
BLOCK_LAYERS = {"num_hidden_layers": 2, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False}
UNWINDOWED = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 2}
QWEN_3 = LLAMA | BLOCK_LAYERS | UNWINDOWED | {"model_type": "qwen3", "layer_types": ["full_attention"] * 2}
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
OUTPUTS = {"mask_token_id": 258, "target_layer_ids": [0, 1]}
DFLASH_CONFIG = QWEN_3 | {"architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 2}
DFLASH_AUTHORS = {  # whose windows are not used, and whose size of a block is in the nested object
    **{key: value for key, value in DFLASH_CONFIG.items() if key not in ("block_size", "layer_types")},
    **{"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 28},
}
SPECFORGE_DFLASH = DFLASH_CONFIG | {"dflash_config": OUTPUTS}
DSPARK = DFLASH | {"kind": "dspark", "rank": 8}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
UNSURE = {"confidence_head_alpha": 0.0, "enable_confidence_head": False, "confidence_head_with_markov": False}
SPECFORGE_DSPARK = OUTPUTS | MARKOV | {"projector_type": "dspark", "attention_mode": "gqa"}
AUTO = {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}
DEEPSPEC = DFLASH_CONFIG | OUTPUTS | MARKOV | CONFIDENT | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
SPECFORGE = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 260, "rope_theta": 5e5}
SPECFORGE_P_EAGLE = LLAMA | {
    **{"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "draft_vocab_size": 260, AUXILIARY: [1, 2]},
    **{"attention_bias": False, "max_window_layers": 36, "use_sliding_window": False, "pard_token": 258},
}
MODELOPT = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "mlp_bias": False}
OF_MODELOPT = {
    **{AUXILIARY: [], "next_layer_regular": True, "parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1},
    **{"use_aux_hidden_state": True, "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True},
    **{"use_mtp_layernorm": False, "norm_before_fc": True},
}
NORMS = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
SPECULATORS_EAGLE_3 = NORMS | {
    **{"architectures": ["Eagle3Speculator"], "auto_map": {}, "draft_vocab_size": 260, "fc_norm": False},
    **{"embed_requires_grad": False, "has_no_defaults_at_init": False, AUXILIARY: [1, 2], "target_hidden_size": None},
    **{"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "speculators_config": {"a": 1}},
    "transformer_layer_config": {
        **LLAMA,
        **{"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 16},
        **{"use_sliding_window": True, "max_window_layers": 28},
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    },
}
SPECULATORS_DFLASH = {
    **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 4},
    **{"draft_vocab_size": 260, "max_anchors": 3072, "mask_token_id": 258, "sliding_window_non_causal": False},
    **{"aux_hidden_state_layer_ids": [1, 2], "target_hidden_size": None, "auf": False, "shift_label": False},
    "transformer_layer_config": QWEN_3 | SLIDES,
}
FORMS = {  # config.json as its writers save it, in small; the draft's settings
    "EAGLE's authors": (LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": False, "pad_token_id": 0}, EAGLE),
    "SpecForge": (SPECFORGE | {AT: {AUXILIARY: [0, 1], "use_aux_hidden_state": True}}, EAGLE_3),
    "ModelOpt": (MODELOPT | {AT: OF_MODELOPT}, EAGLE_3 | {"norm_before_fc": True}),
    "speculators": (SPECULATORS_EAGLE_3, EAGLE_3 | NORMS | {"qk_norm": True, "window": 16}),
    "DFlash's authors": (DFLASH_AUTHORS | {"dflash_config": OUTPUTS | {"block_size": 4}}, DFLASH),
    "SpecForge's DFlash": (SPECFORGE_DFLASH, DFLASH),
    # whose sliding layers it trains as causal blocks, also with a window that no text reaches
    "SpecForge's DFlash, sliding": (SPECFORGE_DFLASH | SLIDES, DFLASH | {"window": 16, "causal": True}),
    "SpecForge's DFlash, wide": (SPECFORGE_DFLASH | SLIDES | {"sliding_window": 100_000}, DFLASH | {"causal": True}),
    "SpecForge's DFlash, both ways": (SPECFORGE_DFLASH | SLIDES | {"is_causal": False}, DFLASH | {"window": 16}),
    "speculators' DFlash": (SPECULATORS_DFLASH, DFLASH | {"window": 16, "causal": True}),
    "SpecForge's DSpark": (
        DFLASH_CONFIG | AUTO | {"dflash_config": SPECFORGE_DSPARK | CONFIDENT | {"confidence_head_alpha": 1.0}},
        DSPARK,
    ),
    "SpecForge's causal DSpark": (
        DFLASH_CONFIG | AUTO | {"is_causal": True, "dflash_config": SPECFORGE_DSPARK | UNSURE},
        DSPARK | {"causal": True},
    ),
    "DeepSpec's DSpark": (DEEPSPEC, DSPARK),
    "SpecForge's P-EAGLE": (SPECFORGE_P_EAGLE, P_EAGLE | {"auxiliary_layers": [1, 2]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_config_as_its_writers_save_it_is_known(released, form):
    config, settings = FORMS[form]
    recipe, folder, _ = released(settings)
    (folder / "config.json").write_text(json.dumps(config))
    import_draft(folder, recipe, "theirs")
    saved = checkpoint.read_config(recipe.paths.draft("theirs"))
    assert saved.shapes["rms_norm_eps"] == 1e-5 and saved.config.to_json().items() >= settings.items()


@pytest.mark.parametrize(
    ("settings", "config", "line"),
    [
        (layers(2), {}, "auxiliary_layers=[2], as the recipe says"),
        (layers(2), {AT: {AUXILIARY: []}}, "auxiliary_layers=[2], as the recipe says"),
        (EAGLE_3, {}, "auxiliary_layers=[1, 2], this kind's default"),
        (DFLASH | {"auxiliary_layers": None}, {"mask_token_id": 258}, "auxiliary_layers=[2], this kind's default"),
        (DFLASH, {"target_layer_ids": [0, 1]}, "mask_token=258, as the recipe says"),
        (DFLASH | {"block": 16}, OUTPUTS | {"block_size": None}, "block=16, this kind's default"),
    ],
)
def test_what_a_file_does_not_say_is_the_recipes_and_printed(released, settings, config, line):
    blocks = TWO | {"block_size": 4} if settings["kind"] == "dflash" else {}
    recipe, folder, _ = released(settings, **(blocks | config))
    lines = import_draft(folder, recipe, "theirs")
    assert [text for text in lines if text.startswith("assumed ")] == [f"assumed {line}: the file does not say it"]


def test_keys_that_nothing_reads_are_printed(released):
    recipe, folder, _ = released(EAGLE_3, something_else=False, another=[], nothing=None)
    assert "not read, as false or empty: another, something_else" in import_draft(folder, recipe, "theirs")


def test_nested_ids_of_gpt_oss_are_known_by_their_last_layer_alone(tmp_path):
    def ids(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_foreign_config(tmp_path, GptOssConfig(num_hidden_layers=4))[AUXILIARY]

    assert ids(eagle_config={AUXILIARY: [1, 4]}) == [1, 4]  # the last layer's output has no such number
    assert ids(eagle_config={AUXILIARY: [1, 2]}, **{AUXILIARY: [1, 2]}) == [1, 2]
    with pytest.raises(PipelineError, match="SGLang takes such ids for those whose outputs are read before"):
        ids(eagle_config={AUXILIARY: [1, 2]})


# -- what others publish on EAGLE-3's frame ---------------------------------------------------------------------------


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def by_hand(w, states_TSD, embedded_TD, rope, window):
    """Logits (T, V), straight from what engines compute: norms of the fused states, of queries and keys, biases, a
    window, the residual from behind `hidden_norm`.
    """
    count, heads, size = len(embedded_TD), 4, 8
    g = rms(rms(states_TSD.flatten(1), w["input_norm.weight"]) @ w["fc.weight"].T, w["midlayer.hidden_norm.weight"])
    x = torch.cat([rms(embedded_TD, w["midlayer.input_layernorm.weight"]), g], dim=1)
    made = {n: x @ w[f"midlayer.self_attn.{n}_proj.weight"].T + w[f"midlayer.self_attn.{n}_proj.bias"] for n in "qkv"}
    q, k, v = (made[n].view(count, -1, size) for n in "qkv")
    cos, sin = (part[0][:, None] for part in rope)

    def turned(y):
        return y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], dim=-1) * sin

    q = turned(rms(q, w["midlayer.self_attn.q_norm.weight"]))
    k = turned(rms(k, w["midlayer.self_attn.k_norm.weight"])).repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    out = torch.zeros(count, heads, size)
    for i in range(count):
        first = max(0, i - window + 1)
        scores = torch.einsum("hd,jhd->hj", q[i], k[first : i + 1]) / size**0.5
        out[i] = torch.einsum("hj,jhd->hd", scores.softmax(-1), v[first : i + 1])
    u = g + out.flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T + w["midlayer.self_attn.o_proj.bias"]
    n = rms(u, w["midlayer.post_attention_layernorm.weight"])
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return rms(u + (torch.nn.functional.silu(n @ gate) * (n @ up)) @ down, w["norm.weight"]) @ w["lm_head.weight"].T


@torch.inference_mode()
def test_norms_biases_and_window_compute_what_engines_compute(loaded_target, embed_head):
    flags = {"norm_before_fc": True, "qk_norm": True, "attention_bias": True, "norm_before_residual": True}
    draft = make_draft(loaded_target, embed_head, Eagle3Config(ttt_steps=1, window=3, **flags))
    for weight in draft.parameters():
        if weight.ndim == 1:
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 4
    tokens = torch.tensor(prompt_of(2))
    states = loaded_target.capture_all(tokens[None], list(draft.needs.auxiliary))[0]
    embedded = embed_head.embedding_VD[tokens]
    rope = draft._rope[0](embedded[None], torch.arange(len(tokens))[None])
    expected = by_hand(draft.state_dict(), states[:, -len(draft.needs.auxiliary) :], embedded, rope, window=3)
    features = draft.features(states[:, -len(draft.needs.auxiliary) :])[None]
    mask = additive_mask(ttt_mask(1, torch.arange(len(tokens)), None, draft.config.window), torch.float32)[:, None]
    u = draft.trunk(features, tokens[None], torch.arange(len(tokens))[None], mask, None)
    torch.testing.assert_close(draft.logits(draft.heads(u).ahead[0])[0], expected, rtol=1e-4, atol=1e-4)


def test_options_that_make_no_draft_are_refused():
    with pytest.raises(ValueError, match="normed once before fc"):
        Eagle3Config(norm_before_fc=True, fc_norm=True)
    with pytest.raises(ValueError, match="window=3: expected at least 7"):
        Eagle3Config(window=3)
    config = Eagle3Config(ttt_steps=1, window=4)
    config.resolve(checkpoint.TreeConfig(depth=4, top_k=2, nodes=8))
    with pytest.raises(ValueError, match=r"tree\.depth=5 is more than this draft's window=4"):
        config.resolve(checkpoint.TreeConfig(depth=5, top_k=2, nodes=8))
