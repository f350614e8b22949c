"""The residual block of drafts with heads. This file imports torch alone: vLLM's plug-in has it, too, by a link."""

from torch import Tensor, nn


class ResBlock(nn.Module):
    """A residual block ``r(x) + SiLU(W x + b)``. r is linear if the width changes, else the identity. W starts at 0."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.res_connection = nn.Linear(inputs, width) if inputs != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))
