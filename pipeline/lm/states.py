"""The hidden states that a forward of the target gives, and those that a draft requires."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
