"""Linear layers packed for CPUs: with few rows, as in decoding, they run up to twice as fast."""

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError


class PackedLinear(nn.Module):
    """A frozen linear layer whose weight is laid out once for oneDNN (CPU): few rows run up to twice as fast."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def pack_linears(module: nn.Module) -> None:
    """Replaces every linear layer below `module`. For frozen CPU modules; the same for target and draft, or it is no
    contest.
    """
    if not torch.backends.mkldnn.is_available():
        raise PipelineError("eval.pack_linears=true needs a CPU build of torch with oneDNN; set it to false")
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
