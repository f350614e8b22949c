"""Linear layers laid out once for oneDNN's kernels on a CPU: the same for plain decoding, target and drafts, or it is
no contest.

Few rows run up to twice as fast. Layers of one input, such as an attention's queries, keys and values, are one product:
small ones cost more than their share. On some CPUs one row takes longer than several; there a single row is filled up
with copies of itself, so that plain decoding, whose rows are single ones, is as fast as it can be.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import Source
from pipeline.lm.model import Target

# Children of one module that transformers' decoders, and the drafts, give one and the same tensor.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
FILLED, TRIALS, WORTH_IT = 5, 7, 0.97  # of `rows_of_one`: rows, times each is timed, part of the time that is a gain


def pack(target: Target, drafts: dict[str, Source]) -> None:
    """Everything that decodes. Raises PipelineError where there are no such kernels."""
    if target.device.type != "cpu":
        raise PipelineError(
            f"eval.pack_linears=true is for CPUs, and the target is on {target.device}: set it to false"
        )
    own: list[nn.Module] = [target.decoder, target.head]
    modules = own + [module for draft in drafts.values() for module in draft.packable()]
    for module in modules:
        pack_linears(module)
    target.filled = rows_of_one([one for module in own for one in products(module)])
    for module in modules:
        for one in products(module):
            one.rows = target.filled
    target.model.set_output_embeddings(target.head.linear)  # so that transformers' generate() runs on it, too


def pack_linears(module: nn.Module) -> None:
    """Replaces every linear layer below `module`, which is frozen and on a CPU."""
    if not torch.backends.mkldnn.is_available():
        raise PipelineError("eval.pack_linears=true needs a CPU build of torch with oneDNN; set it to false")
    for names in TOGETHER:
        found: Any = [getattr(module, name, None) for name in names]
        if all(type(one) is nn.Linear for one in found) and one_product(found):
            shared = _Product(found)
            for place, name in enumerate(names):
                setattr(module, name, _Part(shared, place))
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def one_product(layers: list[nn.Linear]) -> bool:
    """Whether they take inputs of one width, all with a bias or all without."""
    return len({(one.in_features, one.bias is None, one.weight.dtype) for one in layers}) == 1


class Packed:
    """A weight in oneDNN's order."""

    rows = 1  # that a single one is filled up to

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        self.inputs, self._dtype = weight.shape[1], weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if self.rows == 1 or x.numel() != self.inputs:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        whole = x.reshape(1, -1).repeat(self.rows, 1)
        found = torch.ops.mkldnn._linear_pointwise(whole, self._weight, self._bias, "none", [], "")
        return found[:1].view(*x.shape[:-1], -1)

    def seconds(self, rows: int) -> float:
        """How long one product takes."""
        x = torch.zeros(rows, self.inputs, dtype=self._dtype)
        begin = time.perf_counter()
        self(x)
        return time.perf_counter() - begin


def products(module: nn.Module) -> list[Packed]:
    """All packed ones below it, each once."""
    found = [getattr(child, "packed", None) for child in module.modules()]
    return list({id(one): one for one in found if isinstance(one, Packed)}.values())


@torch.inference_mode()
def rows_of_one(found: list[Packed]) -> int:
    """How many rows a single one is to be filled up to, in this process on this machine: 1 unless more are faster."""
    took: dict[int, list[float]] = {1: [], FILLED: []}
    for _ in range(TRIALS):
        for rows, times in took.items():
            times.append(sum(one.seconds(rows) for one in found))
    one, filled = (statistics.median(times) for times in took.values())
    return FILLED if filled < WORTH_IT * one else 1


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = Packed(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


class _Product:
    """Layers that are given one tensor one after the other, which nobody changes in between: the first call computes
    all of them.
    """

    def __init__(self, layers: list[nn.Linear]):
        biases = [one.bias.detach() for one in layers if one.bias is not None]
        weight = torch.cat([one.weight.detach() for one in layers])
        self.packed = Packed(weight, torch.cat(biases) if biases else None)
        self._widths = [one.out_features for one in layers]
        self._given: Tensor | None = None
        self._left: dict[int, Tensor] = {}  # by place, what was not asked for yet

    def part(self, place: int, x: Tensor) -> Tensor:
        if self._given is not x or place not in self._left:
            self._given, self._left = x, dict(enumerate(self.packed(x).split(self._widths, dim=-1)))
        found = self._left.pop(place)
        if not self._left:
            self._given = None  # nothing is held between forwards
        return found


class _Part(nn.Module):
    def __init__(self, shared: _Product, place: int):
        super().__init__()
        self._shared, self._place, self.packed = shared, place, shared.packed

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(self._place, x)
