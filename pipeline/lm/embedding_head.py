"""The target's embedding and head: all that training a draft needs of the target, and all that a draft borrows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class LMHead(nn.Module):
    """The target's logits from its post-final-norm hidden state, in the arithmetic of the stored weights.

    ``weight_VD``, optional bias, and the two after-effects some families have: a scale and a soft cap.
    """

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
    ):
        super().__init__()
        vocabulary, width = weight_VD.shape
        self.linear = nn.Linear(width, vocabulary, bias=bias_V is not None, device="meta")
        self.linear.weight = nn.Parameter(weight_VD, requires_grad=False)
        if bias_V is not None:
            self.linear.bias = nn.Parameter(bias_V, requires_grad=False)
        self.scale, self.softcap = scale, softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def copied(self, device: torch.device, dtype: torch.dtype) -> "LMHead":
        """The same head there. Weights that are mapped from a file go straight to a GPU."""
        weight, bias = (
            None if x is None else x.to(device, dtype, copy=True) for x in (self.linear.weight, self.linear.bias)
        )
        return LMHead(weight, bias, self.scale, self.softcap)

    def restricted(self, ids_U: Tensor) -> "LMHead":
        """The same head over the ids of a reduced vocabulary."""
        bias = self.linear.bias
        return LMHead(self.linear.weight[ids_U], None if bias is None else bias[ids_U], self.scale, self.softcap)


def known_tokens(tokenizer: Any) -> int:
    """Ids from here on have no token: a padded embedding and its head have rows for them."""
    return max(tokenizer.get_vocab().values()) + 1


def head_effects(config: Any) -> dict[str, Any]:
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    if getattr(config, "logits_scaling", None):  # Granite
        scale = 1.0 / config.logits_scaling
    return {"scale": scale, "softcap": getattr(config, "final_logit_softcapping", None)}  # Gemma


@dataclass
class EmbeddingAndHead:
    """The target's frozen embedding and head: all that training a draft needs of the target."""

    embedding_VD: Tensor
    head: LMHead
    fingerprint: str
    decoder: nn.Module | None = None  # all between the two, for a draft whose `Needs` say so; of its own dtype

    def to(self, device: torch.device, dtype: torch.dtype) -> "EmbeddingAndHead":
        decoder = None if self.decoder is None else self.decoder.to(device)
        return EmbeddingAndHead(
            self.embedding_VD.to(device, dtype), self.head.copied(device, dtype), self.fingerprint, decoder
        )
