"""A draft's layer as transformers writes a config, which engines read."""

from typing import Any

from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.drafts.jakiro import ExpertsConfig
from pipeline.lm.attention import SLIDING


def layer_of(saved: checkpoint.Saved, config: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The draft's layer: a Llama's with its window, and the experts behind it where there are some."""
    slides = {"layer_types": [SLIDING], "sliding_window": config.window, "use_sliding_window": True}
    more = slides if config.window else {}
    if not isinstance(config, ExpertsConfig):
        return llama_of(saved, config.mlp_width, weights) | more
    (gate,) = (tensor for name, tensor in weights.items() if name.endswith("gate.weight"))
    experts = {
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "gate_rows": len(gate),  # two more than experts where the contrast has a router
        "reduced_vocabulary": config.vocabulary,  # type: ignore[attr-defined]
    }
    return llama_of(saved, config.expert_width or saved.shapes["hidden_size"], weights) | experts | more


def llama_of(saved: checkpoint.Saved, width: int | None, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One Llama layer in the draft's shapes, as transformers writes a config, and as it wrote one before 5.0."""
    shapes = saved.shapes
    rope = dict(shapes["rope_parameters"])
    theta, kind = rope.get("rope_theta", 10000.0), rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shapes["hidden_size"],
        "intermediate_size": width or shapes["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": shapes["num_attention_heads"],
        "num_key_value_heads": shapes["num_key_value_heads"],
        "head_dim": shapes["head_dim"],
        "rms_norm_eps": shapes["rms_norm_eps"],
        "max_position_embeddings": shapes["max_position_embeddings"],
        "vocab_size": shapes["vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "torch_dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
    }
