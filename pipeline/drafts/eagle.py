"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): one dense Llama layer without input norm, no final norm.

With more horizons than one, each further one is ``f_h = u + D_h(a)`` from the same MLP activation a: what a second
prediction from one forward is worth without experts.
"""

from torch import Tensor, nn

from pipeline.drafts.base import Draft, Heads
from pipeline.drafts.layers import AttentionBlock, swiglu
from pipeline.recipe.sections import EagleConfig


class EagleLayer(AttentionBlock):
    def __init__(self, llama, config: EagleConfig):
        super().__init__(llama)
        width = config.mlp_width or llama.intermediate_size
        self.mlp = swiglu(llama, width)
        further = (nn.Linear(width, llama.hidden_size, bias=False) for _ in range(1, config.horizons))
        self.ahead_projs = nn.ModuleList(further)


class Eagle(Draft):
    config: EagleConfig

    def build_layer(self, llama) -> EagleLayer:
        return EagleLayer(llama, self.config)

    def heads(self, u: Tensor, depth: int) -> Heads:
        layer = self.layers[0]
        n = layer.post_attention_layernorm(u)
        if not layer.ahead_projs:
            return Heads([u + layer.mlp(n)])
        activation = layer.mlp.act_fn(layer.mlp.gate_proj(n)) * layer.mlp.up_proj(n)
        return Heads([u + down(activation) for down in (layer.mlp.down_proj, *layer.ahead_projs)])
