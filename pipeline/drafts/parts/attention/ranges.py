"""Attention in which each query sees one range of a context's keys, and one range of the further keys.

The context is the text; the further keys belong to guesses: the places of a block (dflash.py), or the inputs that
follow one input of the text (p_eagle.py, chains.py). Queries are in the order of the text, so neighbours see nearly the
same keys. A piece is a number of successive queries with the keys that one of them sees, and it alone has a mask. The
pieces follow from the ranges, on the host, without a mask over all queries and keys.

N keys of context and M further ones cost R queries about as many scores as they see, and memory for the mask of one
piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pipeline.basics.accelerator import WIDTH_STEP, to_device
from pipeline.lm.attention import additive_mask, grouped_attention

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

RANGES = f"{__name__}.attention"  # the name of `attend` in transformers; a loaded release has its own
# Queries in a piece: more of them see others' keys in vain, fewer leave an accelerator idle.
CPU_QUERIES, QUERIES = 64, 256
CPU_PIECES = 128  # of a long row, about


@dataclass(frozen=True)
class RangePiece:
    """Queries, and the keys that one of them or several see: of the context, and further ones."""

    queries: slice
    context: slice
    further: slice


@dataclass(frozen=True)
class RangeMask:
    """The mask of R queries over N keys of a context, then M further ones."""

    ranges_R4: Tensor  # the first and the last key of each range, among all keys; a range is empty if first > last
    keys: int  # N + M
    pieces: list[RangePiece]

    def dense(self, queries: slice = slice(None), keys: Sequence[slice] = ()) -> Tensor:
        """Return the mask of these queries over these keys, all by default: bool (queries, keys)."""
        ranges_Q4, keys = self.ranges_R4[queries], keys or [slice(0, self.keys)]
        numbers_C = torch.cat([torch.arange(part.start, part.stop, device=ranges_Q4.device) for part in keys])
        first, last, further_first, further_last = (bound[:, None] for bound in ranges_Q4.unbind(1))
        in_context = (first <= numbers_C) & (numbers_C <= last)
        return in_context | ((further_first <= numbers_C) & (numbers_C <= further_last))


def range_mask(ranges_R4: np.ndarray, context: int, keys: int, device: torch.device) -> RangeMask:
    """Return the mask of queries with these ranges over `keys` keys, the first `context` of them the context's. On an
    accelerator few numbers of keys occur in a piece.
    """
    on_cpu = (max(CPU_QUERIES, len(ranges_R4) // CPU_PIECES), 1)
    size, step = on_cpu if is_cpu(device) else (QUERIES, WIDTH_STEP)
    pieces = []
    for begin in range(0, len(ranges_R4), size):
        part_Q4 = ranges_R4[begin : begin + size]
        spans = (_cover(part_Q4[:, :2], 0, context, step), _cover(part_Q4[:, 2:], context, keys, step))
        pieces.append(RangePiece(slice(begin, begin + len(part_Q4)), *spans))
    return RangeMask(to_device(ranges_R4, device), keys, pieces)


def _cover(ranges_Q2: np.ndarray, begin: int, end: int, step: int) -> slice:
    """Return the keys from the first to the last that a range holds, as multiples of `step` after `begin`."""
    first_Q, last_Q = ranges_Q2[ranges_Q2[:, 0] <= ranges_Q2[:, 1]].T
    if not len(first_Q):
        return slice(begin, begin)
    first, after = int(first_Q.min()) - begin, int(last_Q.max()) + 1 - begin
    return slice(begin + first // step * step, min(begin - (-after // step) * step, end))


def text_begins(batch: "Batch") -> np.ndarray:
    """Return the number of the first input of each input's text, among the B T inputs of a batch."""
    begins_BT = np.zeros(batch.tokens_BT.shape, dtype=np.int64)
    for rows, begin, end in batch.spans:
        begins_BT[rows, begin:end] = begin
    return (begins_BT + np.arange(len(begins_BT))[:, None] * begins_BT.shape[1]).ravel()


def is_cpu(device: torch.device) -> bool:
    """Return whether attention has a processor's kernel and pieces there."""
    return device.type == "cpu"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention under a `RangeMask`, or under a mask that is a tensor; the form is that of transformers."""
    if not isinstance(attention_mask, RangeMask):
        return grouped_attention(module, query, key, value, attention_mask, **options)
    kernel = FusedKernel(options["scaling"]) if is_cpu(query.device) else MaskedKernel(module, options)
    return _OverPieces.apply(kernel, attention_mask, query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(RANGES, attend)
AttentionMaskInterface.register(RANGES, sdpa_mask)


class _OverPieces(torch.autograd.Function):
    """The attention (1, H, R, d) of queries (1, H, R, d) over keys and values (1, G, N + M, d), piece by piece."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, mask: RangeMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse_BHR = None
        if isinstance(kernel, FusedKernel):
            lse_BHR = query.new_empty(query.shape[:3], dtype=exact_dtype(query))
        for piece in [] if isinstance(query, FakeTensor) else mask.pieces:  # a plan counts what is saved
            out[:, :, piece.queries], lse = kernel.forward(*_inputs(mask, piece, query, key, value))
            if lse_BHR is not None:
                lse_BHR[:, :, piece.queries] = lse
        ctx.kernel, ctx.mask = kernel, mask
        ctx.save_for_backward(query, key, value, out, lse_BHR)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, lse_BHR = ctx.saved_tensors
        totals = [torch.empty_like(query), *(torch.zeros_like(x, dtype=exact_dtype(x)) for x in (key, value))]
        for piece in ctx.mask.pieces:
            at = piece.queries
            results = (None if x is None else x[:, :, at] for x in (grads[0], out, lse_BHR))
            inputs = _inputs(ctx.mask, piece, query, key, value)
            totals[0][:, :, at], *parts = ctx.kernel.backward(*inputs, *results)
            count = piece.context.stop - piece.context.start
            for total, part in zip(totals[1:], parts, strict=True):
                total[:, :, piece.context] += part[:, :, :count]
                total[:, :, piece.further] += part[:, :, count:]
        return None, None, totals[0], totals[1].to(key.dtype), totals[2].to(value.dtype)


def _inputs(mask: RangeMask, piece: RangePiece, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return a piece's queries, keys, values and additive mask (1, 1, queries, keys)."""
    keys, values = (torch.cat([x[:, :, piece.context], x[:, :, piece.further]], 2) for x in (key, value))
    visible = mask.dense(piece.queries, (piece.context, piece.further))
    return query[:, :, piece.queries], keys, values, additive_mask(visible, query.dtype)[None, None]


def exact_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores are computed, and parts and gradients are added up."""
    return torch.promote_types(x.dtype, torch.float32)


class FusedKernel:
    """torch's kernel for processors. The backward takes the logarithms that the forward gave."""

    def __init__(self, scale: float):
        self._scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the logarithm of the summed exponentials (1, H, queries)."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=self._scale
        )

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grad: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=self._scale
        )


class MaskedKernel:
    """Masked attention as in decoding. It gives no logarithms: the backward computes a piece's output again."""

    def __init__(self, module: Any, options: dict[str, Any]):
        self._module, self._options = module, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        out, _ = grouped_attention(self._module, query, key, value, mask, **self._options)
        return out.transpose(1, 2), None

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grad: Tensor, *_: Any
    ) -> tuple[Tensor, ...]:
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            again = self.forward(query, key, value, mask)[0]
        return torch.autograd.grad(again, (query, key, value), grad)
