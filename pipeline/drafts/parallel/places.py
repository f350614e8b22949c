"""An MLP for each group of places, in the layers of a draft that guesses several tokens in one forward.

There is no gate. Of L guesses, guess s from 0 is computed by expert s * E // L of every layer, so that each expert has
as many in a row as can be. What is no guess goes with guess 0: P-EAGLE's inputs of the text, a DFlash block's anchor.
A forward reads all experts, and computes each place with one.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.basics.accelerator import sent
from pipeline.drafts.parts.base import DraftConfig
from pipeline.drafts.parts.layers import in_parts, swiglu

Route = tuple[()] | tuple[Tensor, Tensor, list[int]]


@dataclass(frozen=True, kw_only=True)
class PlacesConfig(DraftConfig):
    mlp_width: int | None = None  # default: the target's
    experts: int = 1  # MLPs of a layer, each that wide and for as many guesses in a row

    @property
    @abstractmethod
    def levels(self) -> int:
        """How many tokens a forward guesses."""

    def check_mlps(self) -> None:
        self.at_least(1, "mlp_width", "experts")
        if self.experts > self.levels:
            raise ValueError(f"experts={self.experts} is more than the {self.levels} tokens that a forward guesses")

    def to_json(self) -> dict[str, Any]:
        """Without experts where there is one MLP, so that a draft from before them keeps its hash."""
        return {key: value for key, value in super().to_json().items() if key != "experts" or value > 1}


def mlp_of(config: PlacesConfig, llama: Any) -> nn.Module:
    """A layer's, which is called with its input and a route."""
    width = config.mlp_width or llama.intermediate_size
    return swiglu(llama, width) if config.experts == 1 else ByPlace(llama, width, config.experts)


def route(config: PlacesConfig, guess_R: np.ndarray, device: torch.device) -> Route:
    """Where rows go, by the number of their guess; padding may have higher ones. Empty where there is one MLP."""
    if config.experts == 1:
        return ()
    expert_R = np.minimum(guess_R, config.levels - 1).ravel() * config.experts // config.levels
    order_R = expert_R.argsort(kind="stable")
    order_R, back_R = sent(np.stack([order_R, order_R.argsort()]), device)
    return order_R, back_R, np.bincount(expert_R, minlength=config.experts).tolist()


class ByPlace(nn.Module):
    def __init__(self, llama: Any, width: int, count: int):
        super().__init__()
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(count))

    def forward(self, x: Tensor, order_R: Tensor, back_R: Tensor, sizes: list[int]) -> Tensor:
        """Of rows (..., D), as many as the route's."""
        parts = x.flatten(0, -2).index_select(0, order_R).split(sizes)
        return in_parts(self.experts, parts).index_select(0, back_R).view_as(x)
