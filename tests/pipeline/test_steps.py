"""The merged attention of the training-time test equals attention under the mask over all steps' keys."""

import math
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.drafts.parts.attention import steps
from pipeline.drafts.parts.attention.steps import CpuKernel, FlashKernel, StepMask, attend, find_kernel, is_exact

HEADS, GROUPS, WIDTH, SCALE = 6, 2, 16, 0.3
CPU = torch.device("cpu")
LAYOUTS = {
    "whole rows": (None, None),
    "packed": ([[9, 1, 14], [24]], None),
    "packed, and padding": ([[5, 5], [2, 1]], None),
    "window": (None, 7),
    "packed, window": ([[9, 1, 14], [20]], 4),
    "window of the whole text": (None, 50),
}


def mask_of(number, lengths, window, count=24):
    if lengths is None:
        return StepMask(number, torch.arange(count), [(slice(None), 0, count)], None, window)
    spans, begins_BT = [], torch.zeros(len(lengths), count, dtype=torch.long)
    for row, counts in enumerate(lengths):
        ends = torch.tensor([0, *counts]).cumsum(0).tolist() + ([count] if sum(counts) < count else [])
        for begin, end in pairwise(ends):
            spans.append((slice(row, row + 1), begin, end))
            begins_BT[row, begin:end] = begin
    return StepMask(number, torch.arange(count), spans, begins_BT, window)


def attention_and_gradients(mask, dtype=torch.float32, count=24, kernel=None):
    generator = torch.Generator().manual_seed(mask.number)
    shapes = [(2, count, heads, WIDTH) for heads in (HEADS, *[GROUPS] * 2 * mask.number)]
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    query, *keys_values = (x.transpose(1, 2) for x in inputs)  # as linear layers give them
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // GROUPS
    out, _ = attend(module, query, keys_values[: mask.number], keys_values[mask.number :], mask, scaling=SCALE)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def masked(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(steps, "find_kernel", lambda *_: None)
        return attention_and_gradients(*arguments, **options)


def largest_difference(results, expected):
    """The largest difference, in parts of the largest value of the tensor."""
    pairs = zip(results, expected, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_merged_attention_is_the_masks(monkeypatch, layout, number):
    mask = mask_of(number, *LAYOUTS[layout])
    exact = masked(monkeypatch, mask, torch.float64)
    assert largest_difference(attention_and_gradients(mask), exact) < 1.5e-6
    assert largest_difference(masked(monkeypatch, mask), exact) < 1.5e-6, "the mask rounds as much"
    half = attention_and_gradients(mask, torch.bfloat16)
    assert largest_difference(half, masked(monkeypatch, mask, torch.bfloat16)) < 0.02


@pytest.mark.parametrize("count", [1, 2, 3])
def test_texts_shorter_than_the_number_of_steps(monkeypatch, count):
    mask = mask_of(4, None, None, count)
    exact = masked(monkeypatch, mask, torch.float64, count)
    results = attention_and_gradients(mask, count=count)
    assert largest_difference(results[:1], exact[:1]) < 1e-6
    for gradient, expected in zip(results[1:], exact[1:], strict=True):  # some are 0
        assert torch.allclose(gradient.double(), expected, rtol=1e-6, atol=3e-6)


def varlen_forward(query, key, value, ends, key_ends, longest, _, causal, scale, window, grouped):
    """What torch documents of `varlen_attn`, by plain formulas: outputs (N, H, d), logarithms (H, N)."""
    assert causal == (window == [-1, 0]) and grouped and ends.tolist() == key_ends.tolist()
    assert longest == ends.diff().max() and ends.dtype == torch.int32
    dtype, (query, key, value) = query.dtype, (x.float() for x in (query, key, value))  # as kernels accumulate
    out, logarithms = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for begin, end in pairwise(ends.tolist()):
        keys, values = (x[begin:end].repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
        scores_HQK = scale * torch.einsum("qhd,khd->hqk", query[begin:end], keys)
        places = torch.arange(end - begin)
        distance = places[:, None] - places
        visible = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        scores_HQK = scores_HQK.masked_fill(~visible, -math.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores_HQK.softmax(-1), values)
        logarithms[:, begin:end] = scores_HQK.logsumexp(-1)
    return out.to(dtype), logarithms, torch.zeros(2)


def varlen_backward(grad, query, key, value, out, logarithms, ends, _, longest, __, causal, random, scale, window):
    """The gradient of flash attention from its output and logarithm, which may be those of more keys than `key`."""
    dtype, (grad, query, key, value, out) = query.dtype, (x.float() for x in (grad, query, key, value, out))
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for begin, end in pairwise(ends.tolist()):
        keys, values = (x[begin:end].repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
        part, places = slice(begin, end), torch.arange(end - begin)
        distance = places[:, None] - places
        visible = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        weight = (scale * torch.einsum("qhd,khd->hqk", query[part], keys) - logarithms[:, part, None]).exp() * visible
        delta_HQ = (grad[part] * out[part]).sum(-1).T
        grad_scores = scale * weight * (torch.einsum("qhd,khd->hqk", grad[part], values) - delta_HQ[..., None])
        grads[0][part] = torch.einsum("hqk,khd->qhd", grad_scores, keys)
        for index, copies in (
            (1, torch.einsum("hqk,qhd->khd", grad_scores, query[part])),
            (2, torch.einsum("hqk,qhd->khd", weight, grad[part])),
        ):
            grads[index][part] = copies.unflatten(1, (GROUPS, -1)).sum(2)
    return tuple(x.to(dtype) for x in grads)


@pytest.fixture
def plain_varlen(monkeypatch):
    """torch's functions for texts of several lengths, which have no kernel on a CPU, by plain formulas."""
    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", varlen_forward, raising=False)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", varlen_backward, raising=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_gpus_kernel_gets_the_right_texts(monkeypatch, plain_varlen, layout, number):
    """The kernel itself runs on a GPU alone: `find_kernel` compares it there before its first use."""
    mask = mask_of(number, *LAYOUTS[layout])
    dense = masked(monkeypatch, mask)
    monkeypatch.setattr(steps, "find_kernel", lambda *_: FlashKernel)
    for merged, expected in zip(attention_and_gradients(mask), dense, strict=True):
        assert torch.allclose(merged, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [False, True])
def test_a_kernel_is_used_only_if_it_is_exact(monkeypatch, plain_varlen, dtype, window):
    shape = (dtype, HEADS, GROUPS, WIDTH)
    assert is_exact(CpuKernel, CPU, *shape, window) and find_kernel(CPU, *shape) is CpuKernel
    assert is_exact(FlashKernel, CPU, *shape, window)
    wrong = {
        "_varlen_attn_backward": lambda *a: tuple(1.05 * x for x in varlen_backward(*a)),
        "_varlen_attn": lambda *a: (lambda out, lse, rng: (out, lse + 0.1, rng))(*varlen_forward(*a)),
    }
    for name, function in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.torch_attn, name, function)
            assert not is_exact(FlashKernel, CPU, *shape, window), name
    assert find_kernel(torch.device("cuda"), torch.float32, HEADS, GROUPS, WIDTH) is None, "it has no flash attention"


def test_activation_checkpoints_do_not_see_the_check_of_a_kernel(plain_varlen):
    """The check runs in the first forward alone, and the recomputed one saves what the first one saved."""
    checked = []

    def forward(x):
        if not checked:
            checked.append(is_exact(FlashKernel, CPU, torch.bfloat16, HEADS, GROUPS, WIDTH))
        return (x.sin() * x).sum()

    x = torch.randn(5, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).backward()
    assert checked == [True] and x.grad is not None


def attention_flops(mask, count):
    """Floating-point operations of products in attention, forward and backward; a causal kernel counts as full."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    counts = {
        forward: lambda q, k, v, *_, **__: sdpa_flop_count(q, _with_heads(k), _with_heads(v)),
        backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, _with_heads(k), _with_heads(v)),
    }
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        attention_and_gradients(mask, count=count)
    return counter.get_total_flops()


def _with_heads(shape):
    return (shape[0], HEADS, *shape[2:])


def test_a_step_costs_one_attention(monkeypatch):
    """And with a window, or with packed texts, the less. Under a mask step 7 costs seven."""
    count = 512
    one = attention_flops(mask_of(1, None, None, count), count)
    merged = sum(attention_flops(mask_of(number, None, None, count), count) for number in range(1, 8))
    assert 7 * one * 0.9 < merged <= 7 * one * 1.1
    with monkeypatch.context() as patch:
        patch.setattr(steps, "find_kernel", lambda *_: None)
        assert attention_flops(mask_of(7, None, None, count), count) >= 6.9 * one
    assert attention_flops(mask_of(7, [[128] * 4] * 2, None, count), count) <= 1.1 * one / 4
    assert attention_flops(mask_of(7, None, 32, count), count) <= 2.2 * one * 32 / count


def test_a_mask_is_part_of_no_step(monkeypatch):
    """Whole texts need none; with a window it is one block's, as large as two windows."""
    masks = [piece.mask for piece in mask_of(3, None, 8, 64).pieces(torch.float32, CPU)]
    assert max(mask.numel() for mask in masks if mask is not None) <= 2 * 8 * 8
    assert all(piece.mask is None for piece in mask_of(3, None, None).pieces(torch.float32, CPU))
