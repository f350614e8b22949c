"""Attention of the training-time test, without a mask over the keys of all steps.

In step n, the query at place i sees the first step's keys up to place i - n + 1, and one key of each step m from 2 to
n, at place i - n + m. The first part is causal attention between the queries from place n - 1 on and the keys before
place T - n + 1, so a fused kernel computes it. Each further part is one score a query. The parts are merged by the
logarithm of their summed exponentials, as in ring attention (arXiv 2310.01889): a kernel's gradient is that of the
merged attention if it is given the merged output and logarithm.

T queries cost T^2 / 2 scores a step and no mask; attention under `ttt_mask`, the reference, costs n T^2 and a mask.
"""

import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from pipeline.basics.accelerator import to_device
from pipeline.drafts.parts.attention.chains import join_chains
from pipeline.drafts.parts.attention.ranges import RangeMask, exact_dtype
from pipeline.drafts.parts.attention.ranges import attend as attend_ranges
from pipeline.lm.attention import additive_mask, causal_mask, grouped_attention

STEPS = f"{__name__}.attention"  # the name of `attend` in transformers; a loaded release has its own
log = logging.getLogger(__name__)
Span = tuple[slice, int, int]  # rows, and the places of a text in them: the first, and the one after the last


class StepCache(DynamicCache):
    """The keys and values of the steps so far, each a tensor of its own: nothing is copied from step to step."""

    def __init__(self, keys_values: Sequence[Tensor] = ()):
        """Hold `keys_values`: all keys, then all values, each (B, G, T, d)."""
        super().__init__()
        half = len(keys_values) // 2
        self.keys, self.values = [*keys_values[:half]], [*keys_values[half:]]

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
        """Append a step's keys and values; return the lists of all."""
        self.keys.append(key_states)
        self.values.append(value_states)
        return self.keys, self.values


@dataclass(frozen=True)
class StepMask:
    """The mask of step `number`, from 1: which keys its queries see."""

    number: int
    places_T: Tensor  # 0, 1, ...
    spans: list[Span]  # the texts of the rows; every place is in one of them
    begins_BT: Tensor | None = None  # of each place's text; None: each row is one text
    window: int | None = None  # tokens that a query sees, itself included

    def dense(self) -> Tensor:
        """Return the mask over the keys of all steps so far, bool (B or 1, T, number * T)."""
        return ttt_mask(self.number, self.places_T, self.begins_BT, self.window)

    def part(self, number: int, of_queries: Tensor) -> Tensor:
        """Return the values (B, H, T, ...) of the queries that may have a key of step `number`, as a view."""
        return of_queries[:, :, self.number - number :]

    def has_key(self, number: int) -> Tensor:
        """Return which of these queries have one: the key is of their own text. Bool (B or 1, 1, their count)."""
        before = self.number - number
        begins_BQ = self.places_T.new_zeros(1, 1) if self.begins_BT is None else self.begins_BT[:, before:]
        return (self.places_T[: len(self.places_T) - before] >= begins_BQ)[:, None]

    def pieces(self, dtype: torch.dtype, device: torch.device) -> Iterator["Piece"]:
        """Yield the parts of the first step's attention: all of a text, or with a window block after block."""
        shift, masks = self.number - 1, dict[tuple[int, int], Tensor]()
        for rows, begin, end in self.spans:
            count = end - begin - shift
            if count <= 0:
                continue
            window = count if self.window is None else min(self.window - shift, count)
            for first in range(0, count, window):
                after = min(first + window, count)
                earliest = max(first - window + 1, 0)
                queries, keys = (begin + shift + first, begin + shift + after), (begin + earliest, begin + after)
                mask = None
                if window < count:
                    shape = first - earliest, after - first
                    if shape not in masks:
                        masks[shape] = additive_mask(causal_mask(*shape, device, window), dtype)[None, None]
                    mask = masks[shape]
                yield Piece(rows, slice(*queries), slice(*keys), mask)


Mask = Tensor | StepMask | RangeMask | None  # of an attention; None: causal, or a single query


@dataclass(frozen=True)
class Piece:
    """Queries and the keys of the first step that they see: a causal square, or what a mask leaves."""

    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None  # additive (1, 1, queries, keys); None: causal


def attend(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention under a `StepMask`, a `RangeMask` or a tensor's mask; the form is that of transformers."""
    mask = attention_mask
    keys, values = (key, value) if isinstance(key, list) else ([key], [value])
    if isinstance(mask, RangeMask):
        return attend_ranges(module, query, join_chains(keys), join_chains(values), mask, **options)
    if not isinstance(mask, StepMask):
        return grouped_attention(module, query, keys[0], values[0], mask, **options)
    shape = query.shape[1], keys[0].shape[1], query.shape[3]
    kernel = find_kernel(query.device, query.dtype, *shape, mask.window is not None)
    if kernel is None:
        dense = additive_mask(mask.dense(), query.dtype)[:, None]
        return grouped_attention(module, query, torch.cat(keys, 2), torch.cat(values, 2), dense, **options)
    out = _OverSteps.apply(kernel, mask, options["scaling"], query, *keys, *values)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(STEPS, attend)
AttentionMaskInterface.register(STEPS, sdpa_mask)


def ttt_mask(number: int, places_T: Tensor, begins_BT: Tensor | None, window: int | None = None) -> Tensor:
    """Return the attention mask of step `number`, bool (B or 1, T, number * T), over the keys of all steps so far.

    A position attends only to its own dialogue, if `begins_BT` is given because rows hold several dialogues, and only
    to the last `window` positions.
    """
    distance = places_T[:, None] - places_T[None, :]  # i - j
    true = distance >= number - 1
    if window:
        true &= distance < window
    visible = torch.cat([true, *(distance == number - earlier for earlier in range(2, number + 1))], dim=1)[None]
    if begins_BT is None:
        return visible
    same_dialogue = begins_BT[:, :, None] == begins_BT[:, None, :]
    return visible & same_dialogue.repeat(1, 1, number)


# -- the merged attention ----------------------------------------------------------------------------------------------


class _OverSteps(torch.autograd.Function):
    """The merged attention (B, H, T, d) of queries (B, H, T, d) over the keys and values (B, G, T, d) of n steps."""

    @staticmethod
    def forward(
        ctx: Any, kernel: "Kernel", mask: StepMask, scale: float, query: Tensor, *keys_values: Tensor
    ) -> Tensor:
        keys, values = _split_halves(keys_values)
        first = kernel(mask, query)
        out, lse_BHT = first.forward(query, keys[0], values[0], scale)
        exact = query.to(exact_dtype(query)) if mask.number > 1 else query
        scores = [_scores(mask, n, exact, keys[n - 1], scale) for n in range(2, mask.number + 1)]
        if scores:
            merged_BHT = torch.stack([lse_BHT, *scores]).logsumexp(0)
            result = out.to(exact.dtype) * (lse_BHT - merged_BHT).exp()[..., None]
            for number, score_BHT in enumerate(scores, start=2):
                weight, part = mask.part(number, (score_BHT - merged_BHT).exp()), mask.part(number, result)
                part += weight[..., None] * _repeat_groups(values[number - 1], part)
            out, lse_BHT = result.to(query.dtype), merged_BHT
        ctx.first, ctx.mask, ctx.scale = first, mask, scale
        ctx.save_for_backward(query, out, lse_BHT, *keys_values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, out, lse_BHT, *keys_values = ctx.saved_tensors
        (keys, values), mask, scale, grad_out = _split_halves(keys_values), ctx.mask, ctx.scale, grads[0]
        first = ctx.first.backward(grad_out, query, keys[0], values[0], out, lse_BHT, scale)
        grad_query, grad_keys, grad_values = first[0].to(exact_dtype(query)), [first[1]], [first[2]]
        exact, exact_grad = query.to(exact_dtype(query)), grad_out.to(exact_dtype(query))
        delta_BHT = (exact_grad * out).sum(-1)
        for number in range(2, mask.number + 1):
            key, value = keys[number - 1], values[number - 1]
            grad_part, query_part, delta, into = (
                mask.part(number, x) for x in (exact_grad, exact, delta_BHT, grad_query)
            )
            weight = mask.part(number, (_scores(mask, number, exact, key, scale) - lse_BHT).exp())
            grad_weight = (grad_part * _repeat_groups(value, grad_part)).sum(-1)
            grad_score = (scale * weight * (grad_weight - delta))[..., None]
            into += grad_score * _repeat_groups(key, into)
            grad_keys.append(_sum_groups(grad_score * query_part, key))
            grad_values.append(_sum_groups(weight[..., None] * grad_part, value))
        return None, None, None, grad_query.to(query.dtype), *grad_keys, *grad_values


def _split_halves(keys_values: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    half = len(keys_values) // 2
    return keys_values[:half], keys_values[half:]


def _repeat_groups(values: Tensor, queries: Tensor) -> Tensor:
    """Return the first keys or values (B, G, T, d), one for each query (B, H, count, d)."""
    return values[:, :, : queries.shape[2]].repeat_interleave(queries.shape[1] // values.shape[1], 1)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of keys or values `like` (B, G, T, d) from that of each query's copy (B, H, count, d)."""
    total = torch.zeros_like(like)
    total[:, :, : grad.shape[2]] = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    return total


def _scores(mask: StepMask, number: int, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return each query's score of its key of step `number`, (B, H, T); minus infinity where it has none."""
    scores = query.new_full(query.shape[:3], -math.inf)
    queries = mask.part(number, query)
    products = (queries * _repeat_groups(key, queries)).sum(-1) * scale
    mask.part(number, scores).copy_(products.masked_fill(~mask.has_key(number), -math.inf))
    return scores


# -- the first part, by a fused kernel ---------------------------------------------------------------------------------


class CpuKernel:
    """torch's kernel for processors, piece by piece."""

    def __init__(self, mask: StepMask, query: Tensor):
        self._mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, T, d) and the logarithm of the summed exponentials (B, H, T) over the first step's
        keys; 0 and minus infinity where a query sees none.
        """
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=exact_dtype(query))
        for piece in self._mask.pieces(query.dtype, query.device):
            at, keys = (piece.rows, slice(None), piece.queries), (piece.rows, slice(None), piece.keys)
            out[at], lse[at] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[at], key[keys], value[keys], 0.0, piece.mask is None, attn_mask=piece.mask, scale=scale
            )
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, if `out` and `lse` are those of a merged attention."""
        grads = tuple(torch.zeros_like(x) for x in (query, key, value))
        for piece in self._mask.pieces(query.dtype, query.device):
            at, keys = (piece.rows, slice(None), piece.queries), (piece.rows, slice(None), piece.keys)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[at], query[at], key[keys], value[keys], out[at], lse[at], 0.0, piece.mask is None,
                attn_mask=piece.mask, scale=scale,
            )  # fmt: skip
            for total, place, part in zip(grads, (at, keys, keys), parts, strict=True):
                total[place] += part
        return grads  # type: ignore[return-value]


class FlashKernel:
    """Flash attention over texts of several lengths, by the functions of `torch.nn.attention.varlen`."""

    def __init__(self, mask: StepMask, query: Tensor):
        shift, (rows, _, width, _) = mask.number - 1, query.shape
        numbers = [(row, *places) for span, *places in mask.spans for row in range(rows)[span]]
        texts = [(row * width + begin, count) for row, begin, end in numbers if (count := end - begin - shift) > 0]
        self._longest = max((count for _, count in texts), default=0)
        keys = torch.cat([torch.arange(begin, begin + count) for begin, count in texts] or [torch.empty(0).long()])
        offsets = torch.tensor([0, *(count for _, count in texts)]).cumsum(0)
        self._keys_N, self._queries_N = (to_device(keys + add, query.device) for add in (0, shift))
        self._offsets = to_device(offsets, query.device, torch.int32)
        self._window = [-1 if mask.window is None else mask.window - mask.number, 0]
        self._causal = mask.window is None  # a window of (-1, 0)

    def _gather(self, x: Tensor, places_N: Tensor) -> Tensor:
        """Return (N, heads, d) of (B, heads, T, d)."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, places_N)

    def _scatter(self, part: Tensor, places_N: Tensor, like: Tensor, empty: float = 0.0) -> Tensor:
        """Return (B, heads, T, ...) of (N, heads, ...)."""
        rows, heads, width = like.shape[:3]
        flat = part.new_full((rows * width, heads, *like.shape[3:]), empty).index_copy_(0, places_N, part)
        return flat.unflatten(0, (rows, width)).transpose(1, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if not self._longest:
            return torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=exact_dtype(query))
        places, offsets = (self._queries_N, self._keys_N, self._keys_N), (self._offsets, self._offsets)
        inputs = (self._gather(x, place) for x, place in zip((query, key, value), places, strict=True))
        out, lse_HN, self._random = torch.ops.torch_attn._varlen_attn(
            *inputs, *offsets, self._longest, self._longest, self._causal, scale, self._window, True
        )
        lse = self._scatter(lse_HN.T.contiguous(), self._queries_N, query[..., 0], -math.inf)
        return self._scatter(out, self._queries_N, query), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._longest:
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        queries_N, keys_N = self._queries_N, self._keys_N
        at = (queries_N, queries_N, keys_N, keys_N, queries_N)
        inputs = (self._gather(x, place) for x, place in zip((grad, query, key, value, out), at, strict=True))
        lse_HN = lse.transpose(1, 2).flatten(0, 1).index_select(0, queries_N).T.contiguous()
        parts = torch.ops.torch_attn._varlen_attn_backward(
            *inputs, lse_HN, self._offsets, self._offsets, self._longest, self._longest,
            self._causal, self._random, scale, self._window,
        )  # fmt: skip
        return tuple(
            self._scatter(part, place, like)
            for part, place, like in zip(parts, (queries_N, keys_N, keys_N), (query, key, value), strict=True)
        )  # type: ignore[return-value]


Kernel = type[CpuKernel] | type[FlashKernel]


@cache
def find_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, width: int, window: bool = False
) -> Kernel | None:
    """Return the kernel for queries of `heads` heads, over keys of `groups` heads, each of `width`; None where only a
    mask works. An accelerator's kernel is used only if its result and gradients are the mask's on small examples.
    """
    if device.type == "cpu":
        return CpuKernel
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    try:
        importlib.import_module("torch.nn.attention.varlen")  # registers the functions
        if is_exact(FlashKernel, device, dtype, heads, groups, width, window):
            return FlashKernel
        reason = "its results are not the mask's"
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, RuntimeError) as error:  # an older torch, another GPU's kernels
        reason = str(error).partition("\n")[0]
    log.warning("no flash attention for the training-time test (%s): a mask takes more memory and time", reason)
    return None


def is_exact(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    width: int,
    window: bool = False,
) -> bool:
    """Return whether the attention and its gradients equal the mask's within the dtype's rounding: in steps 1 to 3, of
    two rows of packed texts, some of them shorter than the step, others longer than a kernel's tile.
    """
    limits, count = ([1, 3, 160, 300], [210, 211, 300]), 300
    spans: list[Span] = []
    begins_BT = torch.zeros(len(limits), count, dtype=torch.long)
    for row, row_limits in enumerate(limits):
        for begin, end in pairwise([0, *row_limits]):
            spans.append((slice(row, row + 1), begin, end))
            begins_BT[row, begin:end] = begin
    places_T = torch.arange(count, device=device)
    return all(
        _is_exact_under(
            kernel,
            StepMask(number, places_T, spans, begins_BT.to(device), 40 if window else None),
            dtype,
            (heads, groups, width),
        )
        for number in (1, 2, 3)
    )


def _is_exact_under(kernel: Kernel, mask: StepMask, dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    (heads, groups, width), generator = sizes, torch.Generator().manual_seed(0)
    assert mask.begins_BT is not None
    rows, count = mask.begins_BT.shape
    shapes = [(rows, part, count, width) for part in (heads, *[groups] * 2 * mask.number, heads)]
    *inputs, grad = (torch.randn(shape, generator=generator).to(mask.places_T.device, dtype) for shape in shapes)
    results, scale = [], width**-0.5
    # Activation checkpointing around the caller must not see what is saved here.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        for merged in (True, False):
            query, *keys_values = (x.clone().requires_grad_() for x in inputs)
            if merged:
                out = _OverSteps.apply(kernel, mask, scale, query, *keys_values)
            else:
                keys, values = (
                    torch.cat([*part], 2).repeat_interleave(heads // groups, 1) for part in _split_halves(keys_values)
                )
                scores = (scale * query.float() @ keys.float().mT).masked_fill(~mask.dense()[:, None], -math.inf)
                out = (scores.softmax(-1) @ values.float()).to(dtype)
            results.append([out.detach(), *torch.autograd.grad(out, [query, *keys_values], grad)])
    bound = max(4 * torch.finfo(dtype).eps, 1e-5)
    pairs = [(a.float(), b.float()) for a, b in zip(*results, strict=True)]
    return all(bool((a - b).abs().max() <= bound * b.abs().max()) for a, b in pairs)
