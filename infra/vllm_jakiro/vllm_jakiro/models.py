"""Jakiro's experts after the attention of vLLM's EAGLE drafts. They draft chains, one token per forward.

    f = u + sum_j w_j E_j(norm(u))        (arXiv 2502.06282, eq. 3 and 6; w: softmax over the kept experts' scores)

The branch two tokens ahead (eq. 7) is not used in a chain, nor are its rows of the gate and its scalars. All experts
are computed, and those that a token does not select have weight 0, so shapes never depend on the routing.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

Weights = Iterable[tuple[str, Tensor]]


class ExpertLayer(nn.Module):
    """A mixture of experts that replaces the MLP: (tokens, D) -> (tokens, D)."""

    def __init__(self, config, prefix: str):
        super().__init__()
        self.count, self.active = config.num_experts, config.num_experts_per_tok
        self.gate = ReplicatedLinear(config.hidden_size, config.gate_rows, bias=False, return_bias=False)
        width = config.intermediate_size
        self.experts = nn.ModuleList(
            LlamaMLP(config.hidden_size, width, config.hidden_act, prefix=f"{prefix}.experts.{place}")
            for place in range(self.count)
        )

    def forward(self, n: Tensor) -> Tensor:
        scores, selected = self.gate(n)[..., : self.count].topk(self.active, dim=-1)
        weights = torch.zeros(*n.shape[:-1], self.count, dtype=n.dtype, device=n.device)
        weights = weights.scatter(-1, selected, scores.float().softmax(-1).to(n.dtype))
        outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)
        return (weights[..., None] * outputs).sum(-2)


def _rename_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that a chain requires, under vLLM's names."""
    for name, tensor in weights:
        if not name.endswith("contrast_scalars"):
            yield name.replace(".mlp_moe.", ".mlp."), tensor


def _put_experts(model: nn.Module, prefix: str) -> None:
    for place, layer in enumerate(model.model.layers):
        layer.mlp = ExpertLayer(model.config, f"{prefix}.layers.{place}.mlp")


class EagleJakiroForCausalLM(EagleLlamaForCausalLM):
    """Jakiro in EAGLE-1's frame. It drafts with the target's head, and only tokens of the draft's vocabulary."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _put_experts(self, prefix)
        size = self.config.vocab_size if getattr(self.config, "reduced_vocabulary", None) else 0
        self.register_buffer(
            "outside", torch.zeros(size), persistent=False
        )  # -inf for tokens outside of the vocabulary

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits = super().compute_logits(hidden_states)
        return logits + self.outside if len(self.outside) and logits is not None else logits

    def load_weights(self, weights: Weights) -> None:
        def without_ids() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in _rename_weights(weights):
                if name == "draft_token_ids":
                    self.outside.fill_(-torch.inf).index_fill_(0, tensor.to(self.outside.device), 0.0)
                else:
                    yield name, tensor

        super().load_weights(without_ids())


class JakiroForCausalLMEagle3(Eagle3LlamaForCausalLM):
    """Jakiro in EAGLE-3's frame, with its own head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _put_experts(self, prefix)

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(_rename_weights(weights))
