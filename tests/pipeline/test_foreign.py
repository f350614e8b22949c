"""What others' folders say: read as their code computes it, or refused by the name of what is not computed here."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import their_config
from pipeline.artifacts.imported import import_draft
from pipeline.basics.errors import PipelineError
from pipeline.basics.parse import from_json
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.parts.one_layer import ttt_visible
from pipeline.drafts.parts.released import AUXILIARY
from pipeline.lm.attention import additive
from pipeline.recipe.recipe import Recipe
from tests.pipeline.taught import make_draft, prompt_of

EAGLE, EAGLE_3 = {"kind": "eagle"}, {"kind": "eagle3"}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("settings", "config", "complaint"),
    [
        (EAGLE_3, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act='gelu_pytorch_tanh', and only 'silu' or 'swish' is"),
        (EAGLE_3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is of kind 'dynamic'"),
        (EAGLE, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters turns 0.5 of a head"),
        (EAGLE, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "given by kind of layer"),
        (EAGLE, {"rope_scaling": {"rope_type": "linear"}}, "makes no layer: .*factor"),
        (EAGLE, {"rope_scaling": [2]}, "rope_scaling holds a list, expected an object"),
        (EAGLE, {"hidden_size": "32"}, "hidden_size='32', expected a positive number"),
        (EAGLE, {"num_attention_heads": 0}, "num_attention_heads=0, expected"),
        (EAGLE, {"num_attention_heads": 3, "head_dim": None}, "makes no "),
        (EAGLE, {"intermediate_size": -1}, "intermediate_size=-1, expected"),
        (EAGLE, {"rope_theta": "x"}, "rope_theta='x', expected"),
        (EAGLE, {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "has factor='2', expected"),
        (EAGLE, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "has factor=0, expected"),
        (EAGLE, {"rope_scaling": {"rope_type": ["linear"]}}, r"is of kind \['linear'\]"),
        (EAGLE, {"rope_parameters": {"partial_rotary_factor": [1]}}, r"turns \[1\] of a head"),
        (EAGLE, {"partial_rotary_factor": [1]}, r"partial_rotary_factor=\[1\], expected"),
        (EAGLE, {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}}, "factor=4.0, and 2.0 stands"),
        (
            EAGLE,
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
            "'default', and 'linear' stands",
        ),
        (EAGLE, {"rope_parameters": {"rope_theta": 7.0}}, "rope_theta=7.0, and 5000.0 stands elsewhere"),
        (
            EAGLE,
            {"model_type": "mistral", "sliding_window": 4096},
            "model_type='mistral', and only llama, qwen2, qwen3",
        ),
        (EAGLE, {"model_type": ["llama"]}, r"model_type=\['llama'\], expected a name"),
        (EAGLE, {"layer_types": [{"a": 1}]}, r"layer_types=\[\{'a': 1\}\], expected a list of names"),
        (EAGLE, {"layer_types": 3}, "layer_types=3, expected a list of names"),
        (
            EAGLE_3,
            {"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}},
            "=True and, nested, F",
        ),
        (EAGLE_3, {"norm_output": True, "eagle_config": {"norm_output": None}}, "norm_output=True: set draft"),
        (EAGLE_3, {"hidden_act": "gelu", "transformer_layer_config": {"hidden_act": None}}, "hidden_act='gelu', and"),
        (EAGLE_3, SLIDING, r"window=16: set draft\.theirs\.window \(it is None\)"),
        (EAGLE_3 | {"window": 16}, {}, r"window=None: set draft\.theirs\.window \(it is 16\)"),
        (EAGLE, SLIDING, r"window=16: set draft\.theirs\.window"),
        (EAGLE_3, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "window=8: set"),
        (EAGLE_3, SLIDING | {"sliding_window": None}, "sliding_attention layer with sliding_window=None"),
        (EAGLE_3, {"layer_types": ["chunked_attention"]}, "expected full_attention or sliding_attention"),
        (EAGLE, {"attention_bias": True}, "attention_bias=True, which is not known here for this kind of draft"),
        (EAGLE, {"mlp_bias": True}, "mlp_bias=True"),
        (EAGLE_3, {"is_causal": False}, "is_causal=False, and only True is computed here"),
        (EAGLE_3, {"logit_scale": 0.5}, "logit_scale=0.5"),
        (EAGLE_3, {"residual_multiplier": 0.22, "another": "x"}, "residual_multiplier=0.22, .*; another='x'"),
        (EAGLE_3, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (EAGLE_3, {"speculators_model_type": "peagle"}, "speculators_model_type='peagle'"),
        (EAGLE_3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False, and only True"),
        (EAGLE_3, {"eagle_config": [1]}, "eagle_config holds a list, expected an object"),
        (EAGLE_3, {"norm_before_fc": True}, "norm_before_fc=True: set draft"),
        (EAGLE_3, {"attention_bias": True}, "attention_bias=True: set draft"),
        (EAGLE_3, {AUXILIARY: ["1", "2"]}, r"eagle_aux_hidden_state_layer_ids=\['1', '2'\], expected numbers"),
        (EAGLE_3, {"is_neox_style": False}, "is_neox_style=False, and only True is computed here"),
        (EAGLE, {"rope_is_neox_style": False}, "rope_is_neox_style=False, and only True is computed here"),
        (EAGLE_3, {"target_hidden_size": 64}, "target_hidden_size is 64, that of target .* 32: it was trained for an"),
        (EAGLE_3, {"target_hidden_size": "32"}, "target_hidden_size='32', expected a positive number"),
        (EAGLE_3, SLIDING | {"sliding_window": 0}, "sliding_attention layer with sliding_window=0"),
        ({"kind": "jakiro", "experts": 3}, {"num_experts_per_tok": 3}, "experts_per_token=3: set draft.theirs"),
        (EAGLE, {"hidden_size": 24, "target_hidden_size": 32}, "narrower than its target has no place"),
        (EAGLE_3 | {"attention_bias": True}, {"qkv_bias": False}, None),
    ],
)
def test_what_is_not_computed_here_is_refused_by_its_key(released, settings, config, complaint):
    recipe, folder, _ = released(settings, **config)
    if complaint is None:  # told by its tensors
        import_draft(folder, recipe, "theirs")
        return
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")
    assert not (recipe.draft_dir("theirs") / checkpoint.CONFIG).exists()


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_config": None, "transformer_layer_config": None, "rope_scaling": None, "sliding_window": None},
        {"layer_types": ["full_attention"], "sliding_window": 2048},
        SLIDING | {"sliding_window": 100_000},  # no text of the target is so long
        {"sliding_window": 16, "use_sliding_window": True},  # of layers behind the 28th
        {"hidden_act": "swish", "logit_scale": 1.0, "is_causal": True, "partial_rotary_factor": 1.0},
        {"something": None, "something_else": False, "more": [], "and_more": {}},
        {"use_aux_hidden_state": True, "eagle_config": {"use_last_layernorm": True, "use_mtp_layernorm": False}},
    ],
)
def test_what_computes_the_same_is_read(released, config):
    recipe, folder, ours = released(EAGLE_3, **config)
    import_draft(folder, recipe, "theirs")
    found = load_file(recipe.draft_dir("theirs") / "model.safetensors")
    assert found.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in found.items())


SHAPES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
LLAMA = {
    **SHAPES,
    **{"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 2048, "num_hidden_layers": 1},
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 260},
    **{"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16", "transformers_version": "4.53.1"},
}
QWEN_3 = {  # layers of a block draft
    **LLAMA,
    **{"model_type": "qwen3", "attention_bias": False, "block_size": 4, "num_hidden_layers": 2, "num_target_layers": 2},
    **{"layer_types": ["full_attention"] * 2, "max_window_layers": 2, "use_sliding_window": False},
    **{"sliding_window": None, "rope_scaling": None, "rope_theta": 1000000},
}
DFLASH = {"kind": "dflash", "layers": 2, "block": 4, "auxiliary_layers": [1, 2], "mask_token": 258}
READ = {"mask_token_id": 258, "target_layer_ids": [0, 1]}
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
OF_DSPARK = {"markov_rank": 8, "markov_head_type": "vanilla"}
FORMS = {  # config.json as its writers save it, in small; the draft's settings
    "EAGLE's authors": ({**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": False, "pad_token_id": 0}, EAGLE),
    "SpecForge": (
        {
            **LLAMA,
            **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 260, "rope_theta": 5e5},
            "eagle_config": {AUXILIARY: [0, 1], "use_aux_hidden_state": True},
        },
        EAGLE_3,
    ),
    "ModelOpt": (
        {
            **LLAMA,
            **{"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "mlp_bias": False},
            "eagle_config": {
                **{AUXILIARY: [], "next_layer_regular": True, "parallel_draft_heads_num_layers": 1},
                **{"parallel_draft_step": 1, "use_aux_hidden_state": True, "use_last_layernorm": True},
                **{"use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "norm_before_fc": True},
            },
        },
        EAGLE_3 | {"norm_before_fc": True},
    ),
    "speculators": (
        {
            **{"architectures": ["Eagle3Speculator"], "auto_map": {}, "draft_vocab_size": 260, "fc_norm": False},
            **{"embed_requires_grad": False, "has_no_defaults_at_init": False, "norm_before_fc": True},
            **{"norm_before_residual": True, "norm_output": True, AUXILIARY: [1, 2], "target_hidden_size": None},
            **{"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "speculators_config": {"a": 1}},
            "transformer_layer_config": {
                **LLAMA,
                **{"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 16},
                **{"use_sliding_window": True, "max_window_layers": 28},
                "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
            },
        },
        EAGLE_3
        | {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "qk_norm": True}
        | {"window": 16},
    ),
    "DFlash's authors": (
        {
            **{key: value for key, value in QWEN_3.items() if key not in ("block_size", "layer_types")},
            **{"architectures": ["DFlashDraftModel"], "use_sliding_window": True, "sliding_window": 16},
            **{"max_window_layers": 28, "dflash_config": {"block_size": 4, **READ}},
        },
        DFLASH,
    ),
    "SpecForge's DFlash": ({**QWEN_3, "architectures": ["DFlashDraftModel"], "dflash_config": READ}, DFLASH),
    "SpecForge's DFlash, sliding layers": (  # which it trains as causal blocks
        {**QWEN_3, **SLIDES, "architectures": ["DFlashDraftModel"], "dflash_config": READ},
        DFLASH | {"window": 16, "causal": True},
    ),
    "SpecForge's DFlash, a window that no text reaches": (
        {**QWEN_3, **SLIDES, "sliding_window": 100_000, "dflash_config": READ},
        DFLASH | {"causal": True},
    ),
    "SpecForge's DFlash, sliding layers both ways": (
        {**QWEN_3, **SLIDES, "is_causal": False, "dflash_config": READ},
        DFLASH | {"window": 16},
    ),
    "speculators' DFlash": (
        {
            **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 4},
            **{"draft_vocab_size": 260, "max_anchors": 3072, "mask_token_id": 258, "sliding_window_non_causal": False},
            **{"aux_hidden_state_layer_ids": [1, 2], "target_hidden_size": None, "auf": False, "shift_label": False},
            "transformer_layer_config": {
                **{key: value for key, value in QWEN_3.items() if key not in ("block_size", "num_target_layers")},
                **SLIDES,
            },
        },
        DFLASH | {"window": 16, "causal": True},
    ),
    "SpecForge's DSpark": (
        {
            **{**QWEN_3, "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}},
            "dflash_config": {
                **{**READ, **OF_DSPARK, "projector_type": "dspark", "attention_mode": "gqa"},
                **{"confidence_head_alpha": 1.0, "enable_confidence_head": True, "confidence_head_with_markov": True},
            },
        },
        DFLASH | {"kind": "dspark", "rank": 8},
    ),
    "SpecForge's causal DSpark": (
        {
            **{**QWEN_3, "architectures": ["DSparkDraftModel"], "is_causal": True},
            "dflash_config": {
                **{**READ, **OF_DSPARK, "projector_type": "dspark", "attention_mode": "gqa"},
                **{"confidence_head_alpha": 0.0, "enable_confidence_head": False, "confidence_head_with_markov": False},
            },
        },
        DFLASH | {"kind": "dspark", "rank": 8, "causal": True},
    ),
    "DeepSpec's DSpark": (
        {
            **{**QWEN_3, **READ, **OF_DSPARK, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512},
            **{"enable_confidence_head": True, "confidence_head_with_markov": True},
        },
        DFLASH | {"kind": "dspark", "rank": 8},
    ),
    "SpecForge's P-EAGLE": (
        {
            **{**LLAMA, "architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "draft_vocab_size": 260},
            **{"attention_bias": False, "max_window_layers": 36, "use_sliding_window": False, "pard_token": 258},
            **{AUXILIARY: [1, 2]},
        },
        {"kind": "p-eagle", "layers": 2, "depths": 3, "auxiliary_layers": [1, 2], "mask_token": 258},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_config_as_its_writers_save_it_is_known(released, form):
    config, settings = FORMS[form]
    recipe, folder, _ = released(settings)
    (folder / "config.json").write_text(json.dumps(config))
    import_draft(folder, recipe, "theirs")
    saved = checkpoint.read_config(recipe.draft_dir("theirs"))
    assert saved.shapes["rms_norm_eps"] == 1e-5 and saved.config.to_json().items() >= settings.items()


@pytest.mark.parametrize(
    ("mine", "config", "complaint"),
    [
        ([1, 2], {AUXILIARY: [1, 2]}, None),
        ([2], {AUXILIARY: [1]}, "auxiliary_layers=[1]: set draft.theirs.aux"),  # as written, never one more
        ([1, 2], {"eagle_config": {AUXILIARY: [0, 1]}}, None),
        ([1], {"eagle_config": {AUXILIARY: [1]}}, "auxiliary_layers=[2]: set draft.theirs.auxiliary_la"),
        ([1, 2], {"eagle_config": {AUXILIARY: [1, 2]}}, None),  # no output has the number 2: by inputs
        ([1, 2], {AUXILIARY: [1, 2], "eagle_config": {AUXILIARY: [1, 2]}}, None),
        ([1, 2], {AUXILIARY: [1, 2], "eagle_config": {AUXILIARY: [0, 1]}}, None),
        ([2], {AUXILIARY: [2], "eagle_config": {AUXILIARY: [0]}}, "names other layers at each place"),
        ([2], {"eagle_config": {AUXILIARY: [1]}, "dflash_config": {AUXILIARY: [0]}}, "names other layers at each pl"),
        ([1, 2], {"speculators_model_type": "eagle3", "norm_before_residual": False, AUXILIARY: [1, 2]}, None),
        ([1], {AUXILIARY: [1, 2]}, None),  # the last one, of two, is listed for training
        ([1], {AUXILIARY: [1, 2, 2]}, "names the outputs of layers [1, 2, 2]"),
        ([1, 2], {AUXILIARY: [2, 1]}, "names the outputs of layers [2, 1]"),
        ([1, 2], {AUXILIARY: [0, 1]}, "names the outputs of layers [0, 1]"),
        ([1, 2], {AUXILIARY: [1, 3]}, "in rising order, from 1 to the target's 2"),
    ],
)
def test_layers_are_counted_as_their_form_counts_them(released, mine, config, complaint):
    recipe, folder, _ = released(EAGLE_3 | {"auxiliary_layers": mine}, **config)
    if complaint is None:
        import_draft(folder, recipe, "theirs")
    else:
        with pytest.raises(PipelineError, match=re.escape(complaint)):
            import_draft(folder, recipe, "theirs")


@pytest.mark.parametrize(
    ("settings", "config", "line"),
    [
        (EAGLE_3 | {"auxiliary_layers": [2]}, {}, "auxiliary_layers=[2], as the recipe says"),
        (
            EAGLE_3 | {"auxiliary_layers": [2]},
            {"eagle_config": {AUXILIARY: []}},
            "auxiliary_layers=[2], as the recipe says",
        ),
        (EAGLE_3, {}, "auxiliary_layers=[1, 2], this kind's default"),
        (DFLASH | {"auxiliary_layers": None}, {"mask_token_id": 258}, "auxiliary_layers=[2], this kind's default"),
        (DFLASH, {"target_layer_ids": [0, 1]}, "mask_token=258, as the recipe says"),
        (DFLASH | {"block": 16}, READ | {"block_size": None}, "block=16, this kind's default"),
    ],
)
def test_what_a_file_does_not_say_is_the_recipes_and_printed(released, settings, config, line):
    blocks = {"num_hidden_layers": 2, "block_size": 4} if settings["kind"] == "dflash" else {}
    recipe, folder, _ = released(settings, **(blocks | config))
    said = import_draft(folder, recipe, "theirs")
    assert [text for text in said if text.startswith("assumed ")] == [f"assumed {line}: the file does not say it"]


def test_keys_that_nothing_reads_are_printed(released):
    recipe, folder, _ = released(EAGLE_3, something_else=False, another=[], nothing=None)
    assert "not read, as false or empty: another, something_else" in import_draft(folder, recipe, "theirs")


@pytest.mark.parametrize(
    ("settings", "config", "complaint"),
    [
        (
            {"mask_token": None},
            {},
            "neither config.json nor the recipe names the mask token: set draft.theirs.",
        ),
        ({}, {"mask_token_id": 258, "pard_token": 257}, "pard_token=257 and mask_token_id=258: which one is"),
        ({}, {"mask_token_id": 257}, "mask_token=257: set draft.theirs.mask_token"),
    ],
)
def test_a_mask_token_that_is_not_known_is_refused(released, settings, config, complaint):
    p_eagle = {"kind": "p-eagle", "layers": 2, "depths": 3, "mask_token": 258}
    recipe, folder, _ = released(p_eagle | settings, num_hidden_layers=2, **config)
    with pytest.raises(PipelineError, match=re.escape(complaint)):
        import_draft(folder, recipe, "theirs")


def test_two_lists_of_a_block_drafts_layers_agree_or_are_refused(released):
    lists = {"aux_hidden_state_layer_ids": [1, 2], "dflash_config": {"target_layer_ids": [0, 1]}}
    recipe, folder, _ = released(DFLASH, num_hidden_layers=2, block_size=4, mask_token_id=258, **lists)
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(theirs | {"dflash_config": {"target_layer_ids": [1]}}))
    with pytest.raises(PipelineError, match=r"names other layers at each place.*dflash_config.target_layer_ids: \[2\]"):
        import_draft(folder, recipe, "theirs")
    (folder / "config.json").write_text(json.dumps(theirs))
    import_draft(folder, recipe, "theirs")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_config": {AUXILIARY: [1, 2]}}, None),
        ({"eagle_config": {AUXILIARY: [1, 4]}}, [1, 4]),  # the last layer's output has no such number
        ({AUXILIARY: [1, 2], "eagle_config": {AUXILIARY: [1, 2]}}, [1, 2]),
    ],
)
def test_nested_ids_of_gpt_oss_are_known_by_their_last_layer_alone(tmp_path, config, layers):
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = GptOssConfig(num_hidden_layers=4)
    if layers is None:
        with pytest.raises(PipelineError, match="SGLang takes such ids for those whose outputs are read before"):
            their_config(tmp_path, target)
    else:
        assert their_config(tmp_path, target)[AUXILIARY] == layers


def test_a_last_layer_that_is_fused_is_one_of_the_draft(released):
    recipe, folder, _ = released(EAGLE_3 | {"auxiliary_layers": [1, 2]}, **{AUXILIARY: [1, 2]})
    fewer = {"draft": {"theirs": EAGLE_3 | {"auxiliary_layers": [1]}}}
    with pytest.raises(PipelineError, match=r"auxiliary_layers=\[1, 2\]: set draft"):
        import_draft(folder, Recipe.model_validate(recipe.model_dump(mode="json") | fewer), "theirs")


def test_a_t2d_of_no_dimension_is_refused(released):
    recipe, folder, _ = released(EAGLE_3)
    changed(folder, lambda weights: weights | {"t2d": torch.tensor(True)})
    with pytest.raises(PipelineError, match="t2d names 1 tokens, but there is no d2t"):
        import_draft(folder, recipe, "theirs")


@pytest.mark.parametrize(
    ("config", "true"),
    [({}, False), ({"speculators_model_type": "eagle3"}, True), ({"norm_before_residual": True}, True)],
)
def test_a_missing_norm_before_residual_is_false_and_in_speculators_form_true(released, config, true):
    recipe, folder, _ = released(EAGLE_3 | {"norm_before_residual": true}, **config)
    wrong = {"draft": {"theirs": EAGLE_3 | {"norm_before_residual": not true}}}
    with pytest.raises(PipelineError, match=f"norm_before_residual={true}: set draft"):
        import_draft(folder, Recipe.model_validate(recipe.model_dump(mode="json") | wrong), "theirs")
    import_draft(folder, recipe, "theirs")


# -- tensors ----------------------------------------------------------------------------------------------------------


def changed(folder, change, name="model.safetensors"):
    """Writes the folder's weights anew."""
    save_file({key: x.contiguous() for key, x in change(load_file(folder / name)).items()}, folder / name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: {"t2d": w["t2d"].roll(1)}, "t2d names 64 tokens, but d2t 64 others"),
        (lambda w: {"t2d": torch.ones(260, dtype=torch.bool)}, "t2d names 260 tokens, but d2t 64 others"),
        (lambda w: {"d2t": w["d2t"].index_fill(0, torch.tensor([1]), 4)}, "t2d names 64 tokens, but d2t 64 others"),
        (lambda w: {"d2t": w["d2t"].index_fill(0, torch.tensor([1]), -1)}, "d2t leads to token 0 more than once"),
        (
            lambda w: {"d2t": torch.cat([torch.tensor([4, -1]), w["d2t"][2:]])},
            "d2t leads to token 4 and then to 0",
        ),
        (lambda w: {"draft_token_ids": torch.arange(256, 0, -4)}, "draft_token_ids leads to token 256 and then to 252"),
    ],
)
def test_a_vocabulary_that_contradicts_or_does_not_ascend_is_refused(released, change, complaint):
    recipe, folder, _ = released(EAGLE_3 | {"vocabulary": 64})
    changed(folder, lambda weights: weights | change(weights))
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")


def test_a_t2d_alone_tells_no_vocabulary_but_the_whole(released):
    recipe, folder, _ = released(EAGLE_3 | {"vocabulary": 64})
    changed(folder, lambda weights: {name: x for name, x in weights.items() if name != "d2t"})
    with pytest.raises(PipelineError, match="t2d names 64 tokens, but there is no d2t"):
        import_draft(folder, recipe, "theirs")


def test_a_d2t_of_all_tokens_is_no_vocabulary_of_its_own(released):
    """As SpecForge writes it."""
    recipe, folder, ours = released(EAGLE_3)
    maps = {"d2t": torch.zeros(260, dtype=torch.long), "t2d": torch.ones(260, dtype=torch.bool)}
    changed(folder, lambda weights: weights | maps)
    assert "dropped d2t: every token of the target is one of the draft's" in import_draft(folder, recipe, "theirs")
    assert load_file(recipe.draft_dir("theirs") / "model.safetensors").keys() == ours.keys()


def test_one_tensor_under_two_names_is_read_once_and_two_are_refused(released, tmp_path):
    recipe, folder, _ = released(EAGLE_3)
    changed(folder, lambda weights: weights | {"model.norm.weight": weights["norm.weight"].clone()})
    said = import_draft(folder, recipe, "theirs")
    assert any(line.startswith("dropped ") and "norm.weight: the same as " in line for line in said)
    other = Recipe.model_validate(recipe.model_dump(mode="json") | {"output": str(tmp_path / "other")})
    changed(
        folder, lambda weights: weights | {"layers.0.mlp.up_proj.weight": 2 * weights["midlayer.mlp.up_proj.weight"]}
    )
    with pytest.raises(PipelineError, match=r"are both midlayer\.mlp\.up_proj\.weight, and differ"):
        import_draft(folder, other, "theirs")


def test_biases_of_q_k_and_v_alone_are_those_of_four_with_zeros(released):
    recipe, folder, ours = released(EAGLE_3 | {"attention_bias": True}, qkv_bias=True)
    bias = "midlayer.self_attn.o_proj.bias"
    changed(folder, lambda weights: {name: x for name, x in weights.items() if name != bias})
    assert f"made {bias}: zeros, as the file has none" in import_draft(folder, recipe, "theirs")
    found = load_file(recipe.draft_dir("theirs") / "model.safetensors")
    assert not found[bias].any() and found.keys() == ours.keys()


# -- files ------------------------------------------------------------------------------------------------------------


def sharded(folder, ending="safetensors"):
    """Its weights in two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, names = ("model" if ending == "safetensors" else "pytorch_model"), sorted(weights)
    parts = {f"{stem}-0000{n}-of-00002.{ending}": names[n - 1 :: 2] for n in (1, 2)}
    for file, own in parts.items():
        (save_file if ending == "safetensors" else torch.save)({name: weights[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return folder / f"{stem}.{ending}.index.json", index


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_in_several_files_are_read_by_their_index(released, ending):
    recipe, folder, ours = released(EAGLE_3 | {"vocabulary": 64})
    sharded(folder, ending)
    import_draft(folder, recipe, "theirs")
    found = load_file(recipe.draft_dir("theirs") / "model.safetensors")
    assert found.keys() == ours.keys() and all(torch.equal(x, ours[name]) for name, x in found.items())
    assert checkpoint.read_config(recipe.draft_dir("theirs")).training["imported"]["sha256"].count(", ") == 1


def test_an_index_that_leads_elsewhere_or_to_nothing_is_refused(released):
    recipe, folder, _ = released(EAGLE)
    path, index = sharded(folder)
    one, two = sorted(set(index["weight_map"].values()))
    for file, complaint in ((f"../{one}", "expected names of files beside it"), ("no.bin", "holds no no.bin, which")):
        path.write_text(json.dumps({"weight_map": {"fc.weight": file}}))
        with pytest.raises(PipelineError, match=complaint):
            import_draft(folder, recipe, "theirs")
    path.write_text(json.dumps([1]))
    with pytest.raises(PipelineError, match="is a JSON list, expected an object"):
        import_draft(folder, recipe, "theirs")
    path.write_text(json.dumps(index))
    (folder / one).write_bytes((folder / two).read_bytes())
    with pytest.raises(PipelineError, match="which another file of its index holds, too"):
        import_draft(folder, recipe, "theirs")


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        (lambda weights: {"state_dict": weights, "epoch": 3}, None),
        (lambda weights: weights | {"epoch": 3}, r"'epoch' holds a value of type int, expected tensors by name"),
        (
            lambda weights: {"model": {"state_dict": weights}},
            r"'model' holds a value of type dict, expected tensors by name",
        ),
        (lambda weights: list(weights.values()), "it holds a value of type list, expected tensors by name"),
    ],
)
def test_a_pickle_of_a_trainer_is_read_or_told_apart(released, saved, complaint):
    recipe, folder, ours = released(EAGLE)
    (folder / "model.safetensors").unlink()
    torch.save(saved(ours), folder / "pytorch_model.bin")
    if complaint:
        with pytest.raises(PipelineError, match=f"cannot be read as weights alone: {complaint}"):
            import_draft(folder, recipe, "theirs")
    else:
        import_draft(folder, recipe, "theirs")
        assert load_file(recipe.draft_dir("theirs") / "model.safetensors").keys() == ours.keys()


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
    mask = additive(ttt_visible(1, torch.arange(len(tokens)), None, draft.config.window), torch.float32)[:, None]
    u = draft._trunk(features, tokens[None], torch.arange(len(tokens))[None], mask, None)
    torch.testing.assert_close(draft.logits(draft.heads(u).ahead[0])[0], expected, rtol=1e-4, atol=1e-4)


def test_later_options_leave_an_earlier_drafts_settings_as_they_were():
    """So that its hash is, and its checkpoint loads."""
    plain = Eagle3Config().to_json()
    assert not {"norm_before_fc", "attention_bias", "qk_norm", "window"} & plain.keys()
    assert from_json(Eagle3Config, plain) == Eagle3Config()
    given = Eagle3Config(qk_norm=True, window=64)
    assert from_json(Eagle3Config, given.to_json()) == given


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "normed once before fc"),
        ({"window": 3}, "window=3: expected at least 7"),
    ],
)
def test_options_that_make_no_draft_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        Eagle3Config(**settings)


def test_a_tree_is_not_deeper_than_the_window():
    config = Eagle3Config(ttt_steps=1, window=4)
    config.resolve(checkpoint.TreeConfig(depth=4, top_k=2, nodes=8))
    with pytest.raises(ValueError, match=r"tree\.depth=5 is more than this draft's window=4"):
        config.resolve(checkpoint.TreeConfig(depth=5, top_k=2, nodes=8))
