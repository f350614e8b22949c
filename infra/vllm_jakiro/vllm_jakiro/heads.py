"""Gumiho and Hydra++ in vLLM: drafts that guess several tokens from one forward of their layers.

Gumiho (arXiv 2503.10135)    x_j = MLP_j([fc(a, F_1); fc(b, F_2)])               a, b: the first two draft tokens
Hydra++ (arXiv 2402.05109)   x_k = blocks_k([s_i; e(t_{i+1}); ...; e(t_{i+k})])   s: of the prefix layer
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM, LlamaDecoderLayer, LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix

from vllm_jakiro.models import EaglePromptLookupForCausalLM, Weights
from vllm_jakiro.proposer import FurtherTokens, install
from vllm_jakiro.residual import ResBlock

SERIAL = 2  # forwards of Gumiho's layers in a round


def _check_length(vllm_config: VllmConfig, most: int) -> None:
    """Raise ValueError for more draft tokens than the draft has."""
    speculative: Any = vllm_config.speculative_config
    length = getattr(speculative.draft_model_config.hf_config, "prompt_lookup", None)
    if (count := length or speculative.num_speculative_tokens) > most:
        raise ValueError(f"num_speculative_tokens is {count}, but this draft guesses at most {most} tokens")


class JoinedInputs(ReplicatedLinear):
    """EAGLE's fc. It stores its outputs of the last forward, at a fixed address, as CUDA graphs require."""

    def forward(self, x: Tensor) -> Any:
        joined = super().forward(x)
        self.joined_TD[: len(joined)] = joined
        return joined


class EagleGumihoForCausalLM(EaglePromptLookupForCausalLM):
    """Gumiho: the first two tokens come from forwards of its two layers, each later one from an MLP."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        width, tokens = self.config.hidden_size, vllm_config.scheduler_config.max_num_batched_tokens
        _check_length(vllm_config, SERIAL + self.config.mlps)
        self.model.fc.__class__ = JoinedInputs
        self.model.fc.register_buffer("joined_TD", torch.zeros(tokens, width), persistent=False)
        self.register_buffer("features_TD", torch.zeros(tokens, width), persistent=False)
        self.model.mlp = nn.ModuleList(
            nn.Sequential(
                nn.Sequential(nn.Linear(SERIAL * width, width), nn.SiLU()),
                *(ResBlock(width, width) for _ in range(self.config.mlp_blocks)),
            )
            for _ in range(self.config.mlps)
        )

    def forward(self, *inputs: Any, **more: Any) -> tuple[Tensor, Tensor]:
        outputs = super().forward(*inputs, **more)
        self.features_TD[: len(outputs[0])] = outputs[0]
        return outputs

    def needs_proposer(self) -> bool:
        return True

    def count_forwards(self, tokens: int) -> int:
        return min(tokens, SERIAL)

    def predict_next(self, rows: Tensor, tokens: Tensor) -> Tensor:
        fc, place = self.model.fc, tokens.shape[1] - SERIAL
        if place == 0:
            before = fc.joined_TD[rows].clone()
            after = fc(torch.cat([self.model.embed_tokens(tokens[:, 1].int()), self.features_TD[rows]], dim=-1))
            self._pairs = torch.cat([before, after], dim=-1)
        return self.model.mlp[place](self._pairs)


@support_torch_compile
class PrefixModel(nn.Module):
    """Hydra++'s prefix layer and its first head: (input ids (T), states (T, D)) -> (head's inputs, features (T, D))."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", start_layer_id: int = 0):
        super().__init__()
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self.scale = config.embedding_scale
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        name = maybe_prefix(prefix, f"layers.{start_layer_id}")
        self.layers = nn.ModuleList([LlamaDecoderLayer(vllm_config, False, prefix=name, config=config)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        width = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(ResBlock((k + 1) * width, width), *(ResBlock(width, width) for _ in range(1, config.blocks)))
            for k in range(1, config.heads + 1)
        )

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.layers[0](positions, hidden_states, None)
        summary, _ = self.norm(x, residual)
        joined = torch.cat([summary, self.embed(input_ids)], dim=-1)
        return joined, self.heads[0](joined)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens) * self.scale

    def load_weights(self, weights: Weights) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=LlamaModel.hf_to_vllm_mapper)


class EagleHydraForCausalLM(FurtherTokens, EagleLlamaForCausalLM):
    """Hydra++: one forward of the prefix layer, then a head for each token, which sees the tokens before."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        speculative: Any = vllm_config.speculative_config
        self.config = speculative.draft_model_config.hf_config
        _check_length(vllm_config, self.config.heads)
        install(vllm_config)
        target_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.model = PrefixModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), start_layer_id=target_layers
        )
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        count = self.config.heads if self.config.own_head else 0
        self.model.token_heads = nn.ModuleList(
            nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=self.config.head_bias) for _ in range(count)
        )
        shape = vllm_config.scheduler_config.max_num_batched_tokens, 2 * self.config.hidden_size
        self.register_buffer("joined_TE", torch.zeros(shape), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Any = None) -> Any:
        joined, features = self.model(input_ids, positions, hidden_states)
        self.joined_TE[: len(joined)] = joined
        return features, features

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return (
            self.model.token_heads[self.place](hidden_states)
            if self.config.own_head
            else super().compute_logits(hidden_states)
        )

    def count_forwards(self, tokens: int) -> int:
        return min(tokens, 1)

    def predict_next(self, rows: Tensor, tokens: Tensor) -> Tensor:
        before = self.joined_TE[rows] if self.place == 1 else self._selected
        self._selected = torch.cat([before, self.model.embed(tokens[:, -1].int())], dim=-1)
        return self.model.heads[self.place](self._selected)
