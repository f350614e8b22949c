"""Targets of other families, tiny and random, saved like real ones."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def save(folder: Path, family: str, **more) -> TargetConfig:
    """A target of a name above, or of transformers'. Biases, sinks and norms are random, too: at zero and one some
    would not show.
    """
    name, settings = FAMILIES.get(family, (family, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **settings, **more}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), device="cpu")
