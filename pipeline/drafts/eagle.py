"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): one dense Llama layer without input norm, no final norm.

Its frame, which Jakiro also uses, is fc over [embedding; feature], where the feature is the target's last hidden state,
and the target's LM head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.drafts.parts.base import DenseConfig, ScaledConfig
from pipeline.drafts.parts.layers import AttentionBlock
from pipeline.drafts.parts.names import DRAFT_TOKEN_IDS, Export, FileFormat, Names, llama_config
from pipeline.drafts.parts.one_layer import Dense, OneLayer, OneLayerConfig


@dataclass(frozen=True, kw_only=True)
class EagleFrameConfig(ScaledConfig, OneLayerConfig):
    next_weights: ClassVar = {"regression": 1.0, "classification": 0.1}
    ahead_weights: ClassVar = {"regression": 1.0, "classification": 0.05}

    fc_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DenseConfig, EagleFrameConfig):
    description: ClassVar = "EAGLE ([2401.15077](https://arxiv.org/abs/2401.15077)), one dense layer,"

    kind: Literal["eagle"] = "eagle"


class EagleFrame(OneLayer):
    config: EagleFrameConfig

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        width = self.llama.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([AttentionBlock(self.llama, self.mlp_modules(self.llama))])

    @property
    def block(self) -> AttentionBlock:
        return self.layers[0]  # type: ignore[return-value]

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        embedding = nn.functional.embedding(tokens, self.embed_head.embedding_VD) * self.config.embedding_scale
        return embedding.to(like.dtype)

    def features(self, states_TSD: Tensor) -> Tensor:
        return states_TSD[..., 0, :]

    def inputs(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, features], dim=-1))
        return x, x


class Eagle(Dense, EagleFrame):
    config: EagleConfig


# -- names in other software -------------------------------------------------------------------------------------------

NO_BIAS = {"fc_bias": "vLLM has no bias there; train with fc_bias=false, or export to sglang"}


def engine_config(draft: EagleFrame, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """Return vLLM's or SGLang's config; the embedding's scale goes into fc."""
    config, width, fc = draft.config, draft.shapes["hidden_size"], weights["fc.weight"]
    if config.embedding_scale != 1.0:
        scaled = fc[:, :width].float() * config.embedding_scale
        weights["fc.weight"] = torch.cat([scaled.to(fc.dtype), fc[:, width:]], dim=1)
    if export.engine == "sglang":  # SGLang would leave a missing bias random
        weights.setdefault("fc.bias", torch.zeros(width, dtype=fc.dtype))
    # vLLM numbers the draft's layers after the target's, and subtracts this number to index `layer_types`.
    window_keys = {"target_layer_count": draft.shapes["target_layers"]} if config.window else {}
    return {"architectures": [export.architecture]} | llama_config(draft, weights) | window_keys


NAMES = Names(
    forms={
        "vllm": FileFormat(
            architecture="LlamaForCausalLM", unsupported=NO_BIAS, with_lookup="EaglePromptLookupForCausalLM"
        ),
        "sglang": FileFormat(architecture="LlamaForCausalLMEagle", unsupported={"window": ""}),
    },
    engine_config=engine_config,
    method={"method": "eagle"},
    keys={"prompt_lookup": ()},
    not_exported=(DRAFT_TOKEN_IDS,),  # engines guess with the target's full head
)
