"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): one dense Llama layer without input norm, no final norm.

Its frame is Jakiro's first one, too: fc over [embedding; feature], where the feature is the target's last hidden state,
and the target's own LM head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.drafts.parts.base import DenseConfig, ScaledConfig
from pipeline.drafts.parts.layers import AttentionBlock
from pipeline.drafts.parts.one_layer import WINDOW, Dense, OneLayer, OneLayerConfig, window_facts
from pipeline.drafts.parts.released import Released


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
        self.layers = nn.ModuleList([AttentionBlock(self.llama, self.follow(self.llama))])

    @property
    def block(self) -> AttentionBlock:
        return self.layers[0]  # type: ignore[return-value]

    def embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        found = nn.functional.embedding(tokens, self.embed_head.embedding_VD) * self.config.embedding_scale
        return found.to(like.dtype)

    def features(self, states_TSD: Tensor) -> Tensor:
        return states_TSD[..., 0, :]

    def inputs(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, features], dim=-1))
        return x, x


class Eagle(Dense, EagleFrame):
    config: EagleConfig


RELEASED = Released(facts=window_facts, keys=WINDOW)
