"""vLLM's EAGLE drafts as a `Proposer` uses them: as they are, for prompt lookup, and with Jakiro's experts.

    f_1 = u + sum_j w_j E_j(n)            (arXiv 2502.06282, eq. 3 and 6; n = norm(u), w: softmax over the selected
    f_2 = u + beta E_a(n) - alpha E_b(n)   experts' scores; eq. 7)

The feature two tokens ahead, f_2, gives the last draft token if the exported draft says so. All experts are computed,
and those that a token does not select have weight 0, so shapes never depend on the routing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_jakiro.proposer import FurtherTokens, install

Weights = Iterable[tuple[str, Tensor]]


class ExpertLayer(nn.Module):
    """A mixture of experts that replaces the MLP: (tokens, D) -> (tokens, D). With hybrid drafting it stores f_2 - u of
    its last tokens, at a fixed address.
    """

    def __init__(self, config, prefix: str, tokens: int):
        """`tokens`: the most tokens of a forward, 0 without hybrid drafting."""
        super().__init__()
        self.count, self.active = config.num_experts, config.num_experts_per_tok
        self.contrast = getattr(config, "contrast", "none")
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("contrast_TD", torch.zeros(tokens, config.hidden_size), persistent=False)
        self.gate = ReplicatedLinear(config.hidden_size, config.gate_rows, bias=False, return_bias=False)
        width = config.intermediate_size
        self.experts = nn.ModuleList(
            LlamaMLP(config.hidden_size, width, config.hidden_act, prefix=f"{prefix}.experts.{place}")
            for place in range(self.count)
        )

    def forward(self, n: Tensor) -> Tensor:
        scores = self.gate(n)
        selected_scores, selected = scores[..., : self.count].topk(self.active, dim=-1)  # best first
        weights = torch.zeros(*n.shape[:-1], self.count, dtype=n.dtype, device=n.device)
        weights = weights.scatter(-1, selected, selected_scores.float().softmax(-1).to(n.dtype))
        outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)
        mixture = (weights[..., None] * outputs).sum(-2)
        if len(self.contrast_TD):
            self.contrast_TD[: len(n)] = self._contrast(scores, selected, outputs)
        return mixture

    def _contrast(self, scores: Tensor, selected: Tensor, outputs: Tensor) -> Tensor:
        best, second = (
            outputs.gather(-2, selected[..., place, None, None].expand(*selected.shape[:-1], 1, outputs.shape[-1]))
            for place in (0, 1)
        )
        best, second = best.squeeze(-2), second.squeeze(-2)
        if self.contrast == "scalar":
            beta, alpha = self.contrast_scalars
            return beta * best - alpha * second
        # The router's two rows belong to the two best experts in the order of their indices.
        raw = scores[..., self.count :]
        v_low, v_high = raw.float().softmax(-1).to(outputs.dtype).split(1, dim=-1)
        in_order = selected[..., :1] < selected[..., 1:2]
        low, high = torch.where(in_order, best, second), torch.where(in_order, second, best)
        return torch.where(raw[..., :1] > raw[..., 1:], v_low * low - v_high * high, v_high * high - v_low * low)


class AttentionNorm(RMSNorm):
    """The norm after the attention, which stores the attention's outputs u of its last tokens, at a fixed address."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        n, u = super().forward(x, residual)
        self.u_TD[: len(u)] = u
        return n, u


def _rename_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under vLLM's names."""
    for name, tensor in weights:
        yield name.replace(".mlp_moe.", ".mlp."), tensor


class EaglePromptLookupForCausalLM(FurtherTokens, EagleLlamaForCausalLM):
    """An EAGLE-1 draft with the target's head. It drafts tokens of its own vocabulary alone, if the export has one."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.needs_proposer():
            install(vllm_config)
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


class PromptLookupForCausalLMEagle3(FurtherTokens, Eagle3LlamaForCausalLM):
    """An EAGLE-3 draft, with its own head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.needs_proposer():
            install(vllm_config)

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(_rename_weights(weights))


class Hybrid(FurtherTokens):
    """Jakiro's experts in one of these drafts."""

    model: Any

    def needs_proposer(self) -> bool:
        return super().needs_proposer() or getattr(self.config, "parallel", 1) > 1

    def put_experts(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Replace the MLP, and prepare hybrid drafting if the draft's configuration says so."""
        (self._layer,) = self.model.layers
        self._tokens_ahead = getattr(self.config, "parallel", 1) - 1
        tokens = vllm_config.scheduler_config.max_num_batched_tokens if self._tokens_ahead else 0
        self._layer.mlp = ExpertLayer(self.config, f"{prefix}.layers.0.mlp", tokens)
        if self._tokens_ahead:
            norm = self._layer.post_attention_layernorm
            norm.__class__ = AttentionNorm
            norm.register_buffer("u_TD", torch.zeros(tokens, self.config.hidden_size), persistent=False)

    def count_forwards(self, tokens: int) -> int:
        return tokens - self._tokens_ahead if tokens > 1 else tokens

    def predict_next(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return self._layer.post_attention_layernorm.u_TD[rows] + self._layer.mlp.contrast_TD[rows]


class EagleJakiroForCausalLM(Hybrid, EaglePromptLookupForCausalLM):
    """Jakiro in EAGLE-1's frame."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.put_experts(vllm_config, prefix)


class JakiroForCausalLMEagle3(Hybrid, PromptLookupForCausalLMEagle3):
    """Jakiro in EAGLE-3's frame."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.put_experts(vllm_config, prefix)

    def predict_next(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return self.model.norm(super().predict_next(rows, tokens))
