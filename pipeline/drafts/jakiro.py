"""Jakiro (arXiv 2502.06282): a mixture of experts in EAGLE's layer and a contrast branch two tokens ahead.

With u the attention block's output, n = RMSNorm(u), E_j the experts and w the routing weights of the kept ones:

    horizon 1   f_moe   = u + sum_j w_j E_j(n)                  (eq. 3, 6)
    horizon 2   f_const = u + beta E_a(n) - alpha E_b(n)        (eq. 7)

beta and alpha are "learnable" in the paper. ``contrast = "router"`` takes the released code's reading: two more rows of
the gate, softmaxed; the larger is beta and names E_a. ``contrast = "scalar"`` learns two numbers, E_a being the
better-routed expert. All N experts are computed for every token, of which K are kept: no dispatch, and with N = K = 2
nothing is computed in vain.
"""

import torch
from torch import Tensor, nn

from pipeline.drafts.base import Draft
from pipeline.drafts.layers import AttentionBlock, swiglu
from pipeline.sections import BranchLoss, JakiroConfig


class MixtureOfExperts(nn.Module):
    """Tensor names are the released checkpoints': ``gate`` [N + 2, d] (N for scalar contrast), ``experts.j``."""

    def __init__(self, llama, config: JakiroConfig):
        super().__init__()
        self.kept, self.count, self.contrast = config.experts_per_token, config.experts, config.contrast
        router_rows = 2 if self.contrast == "router" else 0
        self.gate = nn.Linear(llama.hidden_size, self.count + router_rows, bias=False)
        width = config.expert_width or llama.hidden_size
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(self.count))
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.tensor([1.0, 0.0]))  # beta, alpha

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """``(mixture, contrast)``, both of the shape of `n` (..., D), without the residual u."""
        scores = self.gate(n)
        kept_scores, kept = scores[..., : self.count].topk(self.kept, dim=-1)  # best first
        outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)  # (..., E, D)
        chosen = outputs.gather(-2, kept[..., None].expand(*kept.shape, n.shape[-1]))  # (..., K, D)
        weights = kept_scores.float().softmax(-1).to(n.dtype)
        mixture = (weights[..., None] * chosen).sum(-2)
        return mixture, self._contrast(scores, kept, chosen)

    def _contrast(self, scores: Tensor, kept: Tensor, chosen: Tensor) -> Tensor:
        best, second = chosen[..., 0, :], chosen[..., 1, :]
        if self.contrast == "scalar":
            beta, alpha = self.contrast_scalars
            return beta * best - alpha * second
        # The router's two rows belong to the two best experts in the order of their numbers.
        pair = scores[..., self.count :].float().softmax(-1).to(chosen.dtype)
        in_order = (kept[..., 0] < kept[..., 1])[..., None]
        low, high = torch.where(in_order, best, second), torch.where(in_order, second, best)
        v_low, v_high = pair[..., :1], pair[..., 1:]
        return torch.where(v_low >= v_high, v_low * low - v_high * high, v_high * high - v_low * low)


class JakiroLayer(AttentionBlock):
    def __init__(self, llama, config: JakiroConfig):
        super().__init__(llama)
        self.mlp_moe = MixtureOfExperts(llama, config)


class Jakiro(Draft):
    config: JakiroConfig

    def build_layer(self, llama) -> JakiroLayer:
        return JakiroLayer(llama, self.config)

    def branches(self, u: Tensor) -> dict[int, Tensor]:
        layer = self.layers[0]
        mixture, contrast = layer.mlp_moe(layer.post_attention_layernorm(u))
        return {1: u + mixture, 2: u + contrast}

    def branch_losses(self) -> dict[int, BranchLoss]:
        return {1: self.config.next, 2: self.config.ahead}
