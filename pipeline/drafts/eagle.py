"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): one dense Llama layer without input norm, no final norm."""

from torch import Tensor

from pipeline.drafts.base import Draft
from pipeline.drafts.layers import AttentionBlock, swiglu
from pipeline.sections import BranchLoss, EagleConfig


class EagleLayer(AttentionBlock):
    def __init__(self, llama, config: EagleConfig):
        super().__init__(llama)
        self.mlp = swiglu(llama, config.mlp_width or llama.intermediate_size)


class Eagle(Draft):
    config: EagleConfig

    def build_layer(self, llama) -> EagleLayer:
        return EagleLayer(llama, self.config)

    def branches(self, u: Tensor) -> dict[int, Tensor]:
        layer = self.layers[0]
        return {1: u + layer.mlp(layer.post_attention_layernorm(u))}

    def branch_losses(self) -> dict[int, BranchLoss]:
        return {1: self.config.next}
