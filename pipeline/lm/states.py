"""The parts of a target that drafts take: the hidden states of its forwards, its embedding and its head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.basics.accelerator import to_device


@dataclass(frozen=True)
class Needs:
    """The states of its target's forwards that a draft requires."""

    final: bool = True  # hidden states after the final norm
    auxiliary: tuple[int, ...] = ()  # decoder layers, counted from 1, whose outputs come after the final ones


@dataclass
class States:
    """The states of one forward of the target for N tokens, or for every token of a batch: N may be two dimensions."""

    final_ND: Tensor
    auxiliary_NSD: Tensor | None = None  # outputs of decoder layers
    layers: tuple[int, ...] = ()  # their numbers, counted from 1

    def select(self, needs: Needs) -> Tensor:
        """Return ``states_NSD`` in the order of `needs`; S may be 0. Nothing is copied where one of the two parts is
        sufficient.
        """
        final_NSD = self.final_ND[..., None, :]
        if not needs.auxiliary:
            return final_NSD if needs.final else final_NSD[..., :0, :]
        auxiliary_NSD = self.auxiliary_NSD
        assert auxiliary_NSD is not None
        if needs.auxiliary != self.layers:
            indices = [self.layers.index(layer) for layer in needs.auxiliary]
            auxiliary_NSD = torch.stack([auxiliary_NSD[..., place, :] for place in indices], dim=-2)
        return torch.cat([final_NSD, auxiliary_NSD], dim=-2) if needs.final else auxiliary_NSD

    def to(self, device: torch.device, dtype: torch.dtype) -> "States":
        auxiliary_NSD = None if self.auxiliary_NSD is None else self.auxiliary_NSD.to(device, dtype)
        return States(self.final_ND.to(device, dtype), auxiliary_NSD, self.layers)

    def rows(self, nodes: list[int]) -> "States":
        """Return the states of these nodes."""
        at_P = to_device(nodes, self.final_ND.device)
        auxiliary_NSD = None if self.auxiliary_NSD is None else self.auxiliary_NSD[at_P]
        return States(self.final_ND[at_P], auxiliary_NSD, self.layers)


class LMHead(nn.Module):
    """The target's head: logits from its hidden state after the final norm, in the arithmetic of the stored weights.

    It has ``weight_VD``, an optional bias, and two effects that some families apply afterwards: a scale and a soft cap.
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

    def copy_to(self, device: torch.device, dtype: torch.dtype) -> "LMHead":
        """Copy the head to the device. Weights that are mapped from a file go straight to a GPU."""
        weight, bias = (
            None if x is None else x.to(device, dtype, copy=True) for x in (self.linear.weight, self.linear.bias)
        )
        return LMHead(weight, bias, self.scale, self.softcap)

    def restrict(self, ids_U: Tensor) -> "LMHead":
        """Return the head over the ids of a reduced vocabulary."""
        bias = self.linear.bias
        return LMHead(self.linear.weight[ids_U], None if bias is None else bias[ids_U], self.scale, self.softcap)


def count_known_tokens(tokenizer: Any) -> int:
    """Return the number of ids that have a token; a padded embedding and its head have more rows."""
    return max(tokenizer.get_vocab().values()) + 1


def head_effects(config: Any) -> dict[str, Any]:
    """Return the scale and soft cap that a target's configuration applies to its logits."""
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    if getattr(config, "logits_scaling", None):  # Granite
        scale = 1.0 / config.logits_scaling
    return {"scale": scale, "softcap": getattr(config, "final_logit_softcapping", None)}  # Gemma


@dataclass
class EmbeddingAndHead:
    """The target's frozen embedding and head: the parts of it that training a draft needs."""

    embedding_VD: Tensor
    head: LMHead
    fingerprint: str
    decoder: nn.Module | None = None  # the layers between them, if a draft's `Needs` include these; of its own dtype

    def to(self, device: torch.device, dtype: torch.dtype) -> "EmbeddingAndHead":
        decoder = None if self.decoder is None else self.decoder.to(device)
        return EmbeddingAndHead(
            self.embedding_VD.to(device, dtype), self.head.copy_to(device, dtype), self.fingerprint, decoder
        )


def shared_parts(model: Any, text: Any) -> tuple[Tensor, LMHead]:
    """Return a loaded model's embedding and head; `text` is its text configuration."""
    output = model.get_output_embeddings()
    return model.get_input_embeddings().weight, LMHead(output.weight, output.bias, **head_effects(text))
