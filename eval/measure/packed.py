"""Linear layers laid out once for oneDNN's kernels on a CPU: the same for plain decoding, target and drafts, so that
the comparison is fair.

Few rows run up to twice as fast. Layers of one input, such as an attention's queries, keys and values, are one product:
small ones cost more than their share. On some CPUs one row takes longer than several; there a single row is filled up
with copies of itself, so that plain decoding, which computes single rows, is as fast as possible.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import Source
from pipeline.lm.model import Target

# Children of one module that get the same input tensor, in transformers' decoders and in the drafts.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Of `choose_row_count`: rows; timings of each; largest share of the time that counts as a gain.
FILLED_ROWS, TRIALS, MAX_SHARE = 5, 7, 0.97


def pack(target: Target, drafts: dict[str, Source]) -> None:
    """Pack every layer that decodes. Raise PipelineError if there are no such kernels."""
    if target.device.type != "cpu":
        raise PipelineError(
            f"eval.pack_linears=true is for CPUs, and the target is on {target.device}: set it to false"
        )
    target_modules: list[nn.Module] = [target.decoder, target.head]
    modules = target_modules + [module for draft in drafts.values() for module in draft.packable()]
    for module in modules:
        pack_linears(module)
    target.filled = choose_row_count(
        [packed_layer for module in target_modules for packed_layer in find_packed(module)]
    )
    for module in modules:
        for packed_layer in find_packed(module):
            packed_layer.rows = target.filled
    target.model.set_output_embeddings(target.head.linear)  # so that transformers' generate() runs on it, too


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`, which is frozen and on a CPU."""
    if not torch.backends.mkldnn.is_available():
        raise PipelineError("eval.pack_linears=true needs a CPU build of torch with oneDNN; set it to false")
    for names in SHARED_INPUT:
        layers: Any = [getattr(module, name, None) for name in names]
        if all(type(layer) is nn.Linear for layer in layers) and can_share_product(layers):
            shared = _Product(layers)
            for place, name in enumerate(names):
                setattr(module, name, _Part(shared, place))
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_share_product(layers: list[nn.Linear]) -> bool:
    """Return whether the layers take inputs of one width and dtype, all with a bias or all without."""
    return len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) == 1


class Packed:
    """A weight in oneDNN's order."""

    rows = 1  # that a single row is filled up to

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        self.inputs, self._dtype = weight.shape[1], weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if self.rows == 1 or x.numel() != self.inputs:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        filled = x.reshape(1, -1).repeat(self.rows, 1)
        output = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self._bias, "none", [], "")
        return output[:1].view(*x.shape[:-1], -1)

    def seconds(self, rows: int) -> float:
        """Return the seconds that one product takes."""
        x = torch.zeros(rows, self.inputs, dtype=self._dtype)
        begin = time.perf_counter()
        self(x)
        return time.perf_counter() - begin


def find_packed(module: nn.Module) -> list[Packed]:
    """Return all packed weights below `module`, each once."""
    candidates = [getattr(child, "packed", None) for child in module.modules()]
    return list({id(candidate): candidate for candidate in candidates if isinstance(candidate, Packed)}.values())


@torch.inference_mode()
def choose_row_count(packed_layers: list[Packed]) -> int:
    """Return how many rows a single row is filled up to, in this process on this machine: 1 unless more are faster."""
    seconds: dict[int, list[float]] = {1: [], FILLED_ROWS: []}
    for _ in range(TRIALS):
        for rows, times in seconds.items():
            times.append(sum(single.seconds(rows) for single in packed_layers))
    single, filled = (statistics.median(times) for times in seconds.values())
    return FILLED_ROWS if filled < MAX_SHARE * single else 1


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = Packed(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


class _Product:
    """Layers that get the same unchanged tensor one after the other: the first call computes all of them."""

    def __init__(self, layers: list[nn.Linear]):
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.packed = Packed(weight, torch.cat(biases) if biases else None)
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._pending: dict[int, Tensor] = {}  # by place, the outputs not yet taken

    def take_part(self, place: int, x: Tensor) -> Tensor:
        if self._input is not x or place not in self._pending:
            self._input, self._pending = x, dict(enumerate(self.packed(x).split(self._widths, dim=-1)))
        output = self._pending.pop(place)
        if not self._pending:
            self._input = None  # no tensor is held between forwards
        return output


class _Part(nn.Module):
    def __init__(self, shared: _Product, place: int):
        super().__init__()
        self._shared, self._place, self.packed = shared, place, shared.packed

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.take_part(self._place, x)
