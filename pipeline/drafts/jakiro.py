"""Jakiro (arXiv 2502.06282): a mixture of experts in EAGLE's layer and a contrast branch two tokens ahead.

With u the attention block's output, n = RMSNorm(u), E_j the experts and w the routing weights of the kept ones:

    horizon 1   f_moe   = u + sum_j w_j E_j(n)                  (eq. 3, 6)
    horizon 2   f_const = u + beta E_a(n) - alpha E_b(n)        (eq. 7)

beta and alpha are "learnable" in the paper. ``contrast = "router"`` takes the released code's reading: two more rows of
the gate, softmaxed; the larger is beta and names E_a. ``contrast = "scalar"`` learns two numbers, E_a being the
better-routed expert. ``contrast = "experts"`` contrasts nothing: horizon h is the h-th best-routed expert's own,
u + E_h(n), so that K kept experts look K tokens ahead. All N experts are computed for every token, of which K are kept:
no dispatch, and with N = K = 2 nothing is computed in vain.

The experts' own heads, u + E_j(n) (the paper's left and right; scaling ONE vector twice, its eq. 4, would rank tokens
identically), are what decoupled trees take candidates from. ``routing = "depth"`` has no gate: expert j answers where j
of the input's features are the draft's own.
"""

import torch
from torch import Tensor, nn

from pipeline.drafts.base import Draft, Heads
from pipeline.drafts.layers import AttentionBlock, swiglu
from pipeline.drafts.losses import Prediction
from pipeline.recipe.sections import BranchLoss, JakiroConfig


class MixtureOfExperts(nn.Module):
    """Tensor names are the released checkpoints': ``gate`` [N + 2, d] (N for scalar contrast), ``experts.j``."""

    def __init__(self, llama, config: JakiroConfig):
        super().__init__()
        self.kept, self.count, self.contrast = config.experts_per_token, config.experts, config.contrast
        router_rows = 2 if self.contrast == "router" else 0
        if config.routing == "learned":
            self.gate = nn.Linear(llama.hidden_size, self.count + router_rows, bias=False)
        width = config.expert_width or llama.hidden_size
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(self.count))
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.tensor([1.0, 0.0]))  # beta, alpha

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Without the residual u: the mixture (..., D), the K kept experts' outputs, best first (..., K, D), their
        log-weights (..., K), and the contrast (..., D) where there is one.
        """
        scores = self.gate(n)
        kept_scores, kept = scores[..., : self.count].topk(self.kept, dim=-1)  # best first
        outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)  # (..., E, D)
        chosen = outputs.gather(-2, kept[..., None].expand(*kept.shape, n.shape[-1]))  # (..., K, D)
        weights = kept_scores.float().softmax(-1).to(n.dtype)
        mixture = (weights[..., None] * chosen).sum(-2)
        contrast = self._contrast(scores, kept, chosen) if self.contrast in ("router", "scalar") else None
        return mixture, chosen, kept_scores.float().log_softmax(-1), contrast

    def _contrast(self, scores: Tensor, kept: Tensor, chosen: Tensor) -> Tensor:
        best, second = chosen[..., 0, :], chosen[..., 1, :]
        if self.contrast == "scalar":
            beta, alpha = self.contrast_scalars
            return beta * best - alpha * second
        # The router's two rows belong to the two best experts in the order of their numbers.
        raw = scores[..., self.count :]
        pair = raw.float().softmax(-1).to(chosen.dtype)
        in_order = (kept[..., 0] < kept[..., 1])[..., None]
        low, high = torch.where(in_order, best, second), torch.where(in_order, second, best)
        v_low, v_high = pair[..., :1], pair[..., 1:]
        # By the raw scores, as the released code: rounded to half precision, different weights become equal ones.
        return torch.where(raw[..., :1] > raw[..., 1:], v_low * low - v_high * high, v_high * high - v_low * low)


class JakiroLayer(AttentionBlock):
    def __init__(self, llama, config: JakiroConfig):
        super().__init__(llama)
        self.mlp_moe = MixtureOfExperts(llama, config)


class Jakiro(Draft):
    config: JakiroConfig

    def build_layer(self, llama) -> JakiroLayer:
        return JakiroLayer(llama, self.config)

    def heads(self, u: Tensor, depth: int) -> Heads:
        layer = self.layers[0]
        moe, n = layer.mlp_moe, layer.post_attention_layernorm(u)
        if self.config.routing == "depth":
            return Heads([u + moe.experts[min(depth, moe.count - 1)](n)])
        mixture, chosen, log_weights, contrast = moe(n)
        experts = [u + output for output in chosen.unbind(-2)]
        ahead = experts[1:] if self.config.contrast == "experts" else [u + contrast] if contrast is not None else []
        return Heads([u + mixture, *ahead], experts, log_weights)

    def expert_predictions(self, heads: Heads) -> dict[str, Prediction]:
        found = {}
        if self.config.expert_loss:
            found |= {f"expert_{place}": Prediction(1, [f]) for place, f in enumerate(heads.experts, start=1)}
        if self.config.mixture_loss:
            found["mixture"] = Prediction(1, heads.experts, heads.log_weights)
        return found

    def branch_losses(self) -> dict[str, BranchLoss]:
        losses, config = super().branch_losses(), self.config
        if config.expert_loss:
            share = {key: value / config.experts_per_token for key, value in config.expert_loss.model_dump().items()}
            losses |= {f"expert_{place}": BranchLoss(**share) for place in range(1, config.experts_per_token + 1)}
        if config.mixture_loss:
            losses["mixture"] = BranchLoss(regression=0.0, classification=config.mixture_loss)
        return losses

    @property
    def trained_features(self) -> int:
        return super().trained_features + (self.config.experts_per_token - 1 if self.config.mixture_loss else 0)
