"""Targets of other families, tiny and random, saved like real ones."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from pipeline.lm.ability import auto_class
from pipeline.lm.config import TargetConfig
from tests.kit import byte_tokenizer

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
WINDOW = 6  # of sliding layers: shorter than every prompt, and than many a tree with its prefix
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {  # name: (transformers' name, what is special about it)
    "llama-3.1": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": False}),
    "llama-3.2, tied head": ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "qwen2.5": ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
    "qwen2, sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": WINDOW}),
    "phi, head with bias": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "sliding_window": WINDOW, "rope_parameters": YARN}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma-2, soft caps": (
        "gemma2",
        {"sliding_window": WINDOW, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.0},
    ),
    "gemma-3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": WINDOW}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "olmo2": ("olmo2", {}),
}
# Of many families' settings each takes those that it knows.
MIXTURE = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 24,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
CONVOLUTION = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
FOUR_LAYERS = {"num_hidden_layers": 4}
LINEAR_TO_FULL = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_dt_rank": 4}
ROTARY_OF_IMAGES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
# More families that verify trees: their states and answers are checked, and no draft is trained for them.
DENSE = "smollm3 seed_oss ministral ministral3 olmo3 exaone4 cohere2 glm4 ernie4_5 apertus hunyuan_v1_dense gemma4_text"
OF_EXPERTS = "glm4_moe minimax_m2 mimo_v2_flash ernie4_5_moe afmoe dots1 solar_open hunyuan_v1_moe"
WITH_LATENTS = "glm4_moe_lite deepseek_v2 deepseek_v3"
MORE_TREES = {
    name: settings
    for names, settings in ((DENSE, {}), (OF_EXPERTS, MIXTURE), (WITH_LATENTS, LATENT | MIXTURE))
    for name in names.split()
}
MORE_TREES["longcat_flash"] = FOUR_LAYERS | LATENT | MIXTURE  # each of its layers counts twice
# Families that verify chains: their layers keep states, sparse or compressed keys, or count along the cache.
CHAINS = {
    "qwen3_next": MIXTURE | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": MIXTURE | DELTA,
    "kimi_linear": LATENT | MIXTURE | LINEAR_TO_FULL | {"linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": LATENT | MIXTURE | FOUR_LAYERS | {"layer_group_size": 2},
    "minimax": FOUR_LAYERS | MIXTURE,
    "olmo_hybrid": FOUR_LAYERS,
    "nemotron_h": FOUR_LAYERS | {"time_step_min": 1e-9},  # transformers 5.23 applies it to chunks, and not to steps
    "falcon_h1": FOUR_LAYERS | MAMBA | {"mamba_d_ssm": 64},
    "bamba": FOUR_LAYERS | MAMBA | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": FOUR_LAYERS | MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION | MIXTURE,
    "deepseek_v32": LATENT | MIXTURE,
    "deepseek_v4": FOUR_LAYERS | LATENT | MIXTURE,
    "glm_moe_dsa": LATENT | MIXTURE,
    "llama4_text": FOUR_LAYERS | MIXTURE,
}
# Families that are read alone: their layers forget the text before a chain, since they continue a state for one token.
READ_ALONE = {
    "mamba": FOUR_LAYERS,
    "falcon_mamba": FOUR_LAYERS,
    "jamba": FOUR_LAYERS | MIXTURE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
}
# As they are downloaded, with images: the decoder and the head are used on text alone.
MULTIMODAL = {
    "qwen2_vl": ROTARY_OF_IMAGES,
    "qwen2_5_vl": ROTARY_OF_IMAGES,
    "qwen3_vl": ROTARY_OF_IMAGES,
    "qwen3_vl_moe": MIXTURE | ROTARY_OF_IMAGES,
    "qwen3_5": DELTA,
    "qwen3_5_moe": MIXTURE | DELTA,
    "gemma3": {"num_hidden_layers": 6, "sliding_window": WINDOW},
    "gemma4": {"pad_token_id": 0},
    "glm4v": ROTARY_OF_IMAGES,
    "mistral3": {},
    "mistral4": LATENT | MIXTURE | {"head_dim": 8},
    "kimi_k25": LATENT | MIXTURE,
    "llama4": FOUR_LAYERS | MIXTURE,
    "lfm2_vl": CONVOLUTION,
    "minimax_m3_vl": MIXTURE,
    "internvl": {},
    "llava": {},
}
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
IMAGES |= {"depth": 1, "num_heads": 2, "embed_dim": 16, "out_hidden_size": 32, "image_size": 16, "mlp_ratio": 1}
IMAGES |= {"fullatt_block_indexes": [0], "deepstack_visual_indexes": []}


def family_config(family: str, **more) -> Any:
    """Return the configuration of a name above, or of transformers', tiny."""
    name, settings = FAMILIES.get(
        family, (family, {**MORE_TREES, **CHAINS, **READ_ALONE, **MULTIMODAL}.get(family, {}))
    )
    settings = {**SMALL, **settings, **more}
    defaults = AutoConfig.for_model(name)
    text = defaults.get_text_config()
    if text is defaults:
        return AutoConfig.for_model(name, **settings)
    vision = {key: value for key, value in IMAGES.items() if hasattr(defaults.vision_config, key)}
    settings["model_type"] = text.model_type
    return type(defaults)(text_config=settings, vision_config=vision, tie_word_embeddings=False)


def save(folder: Path, family: str, **more) -> TargetConfig:
    """A target of a name above, or of transformers'. Biases, sinks and norms are random, too: at zero and one some
    would not show.
    """
    config = family_config(family, **more)
    torch.manual_seed(0)
    model = auto_class(config, family).from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), device="cpu")
