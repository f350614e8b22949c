"""The parts that one-layer drafts share, built from transformers' Llama modules in the target's shapes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from pipeline.drafts.native.families import layer_shapes
from pipeline.drafts.parallel.residual import ResBlock
from pipeline.drafts.parts.attention.steps import STEPS, Mask
from pipeline.lm.attention import FULL, declared_positions
from pipeline.lm.states import count_known_tokens

SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
)


MLP_RATIO, HEAD_WIDTH = 3, 64  # of a draft's layer, where the target's layers have neither MLP nor heads
ROPES = ("default", "linear", "llama3", "yarn")  # kinds whose angles depend only on the position


def draft_shapes(target: Any) -> dict[str, Any]:
    """Return the shapes that a draft's layer copies from its target's configuration (GQA, RoPE scaling, widths).

    If layers differ, a full-attention layer is used: a draft's layer attends to all earlier tokens.
    """
    kinds = getattr(target, "layer_types", None) or [FULL]
    layer = target.per_layer_config[kinds.index(FULL) if FULL in kinds else 0]
    shapes: dict[str, Any] = {field: getattr(layer, field, None) for field in SHAPE_FIELDS}
    width = shapes["hidden_size"]
    shapes["intermediate_size"] = shapes["intermediate_size"] or MLP_RATIO * width  # targets of experts or states alone
    shapes["num_attention_heads"] = shapes["num_attention_heads"] or max(width // HEAD_WIDTH, 1)
    shapes["num_key_value_heads"] = shapes["num_key_value_heads"] or shapes["num_attention_heads"]
    shapes["head_dim"] = shapes["head_dim"] or width // shapes["num_attention_heads"]
    shapes["max_position_embeddings"] = declared_positions(target)
    shapes["rms_norm_eps"] = shapes["rms_norm_eps"] or 1e-6
    shapes["rope_parameters"] = draft_rope(shapes["rope_parameters"])
    shapes["target_layers"] = target.num_hidden_layers
    head_layer = layer_shapes(target)
    return shapes | ({"layer": head_layer} if head_layer else {})


def mask_padding(shapes: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the shapes of a draft that never guesses the rows of an embedding that have no token."""
    count = count_known_tokens(tokenizer)
    return shapes | ({"known_tokens": count} if count < shapes["vocab_size"] else {})


def draft_rope(target: dict[str, Any] | None) -> dict[str, Any]:
    """Return a draft's RoPE: its target's base and scaling, over whole heads even if the target rotates a part of them.

    For a scaling that depends on the longest position of a forward, only the base is kept: nodes of a tree share
    positions.
    """
    rope = dict(target or {})
    if isinstance(rope.get(FULL), dict):  # by layer kind
        rope = dict(rope[FULL])
    base = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0}
    if rope.get("rope_type", "default") not in ROPES:
        return base
    for part in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(part, None)
    return base | rope


def layer_config(shapes: dict[str, Any]) -> LlamaConfig:
    fields = {field: shapes[field] for field in SHAPE_FIELDS}
    config = LlamaConfig(**fields, num_hidden_layers=1, attention_bias=False, mlp_bias=False)
    config._attn_implementation = STEPS
    return config


def swiglu(config: LlamaConfig, width: int) -> LlamaMLP:
    return LlamaMLP(LlamaConfig(**{**config.to_dict(), "intermediate_size": width}))


class UnregisteredModule:
    """A wrapper that keeps a module out of `nn.Module` registration: casts and state dicts of its owner skip it."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._module.to(x.device)(x, *args, **kwargs)


class AttentionBlock(nn.Module):
    """Attention, the norm before the MLP, and the modules `parts` by name. The attention takes `inputs` features; with
    `qk_norm`, each head's queries and keys are normalised.
    """

    def __init__(
        self,
        config: LlamaConfig,
        parts: dict[str, nn.Module],
        inputs: int | None = None,
        number: int = 0,
        qk_norm: bool = False,
    ):
        """Build the block. `number`: index of the layer in the cache."""
        super().__init__()
        attention: Any = Qwen3Attention if qk_norm else LlamaAttention
        self.self_attn = attention(config, layer_idx=number)
        if inputs:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(inputs, rows, bias=config.attention_bias))
        self.post_attention_layernorm = norm(config)
        for name, part in parts.items():
            self.add_module(name, part)

    def attend(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask, cache: DynamicCache | None) -> Tensor:
        out, _ = self.self_attn(x_BTD, position_embeddings=rope, attention_mask=mask, past_key_values=cache)
        return out


def norm(config: LlamaConfig, width: int | None = None) -> LlamaRMSNorm:
    return LlamaRMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)


def rotary(config: LlamaConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(config)


def initialise(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Initialise matrices with Normal(0, std), residual blocks' matrices and biases with 0; norms stay at 1.

    The result depends only on the generator.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=std, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for part in module.modules():
        if isinstance(part, ResBlock):
            nn.init.zeros_(part.linear.weight)
