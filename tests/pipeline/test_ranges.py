"""Attention over ranges of keys equals attention under one mask over all of them, and costs what its queries see."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.drafts import make_objective
from pipeline.drafts.parallel.dflash import DFlashConfig, block_ranges
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.p_eagle import PEagle, PEagleConfig, lay_out_inputs
from pipeline.drafts.parts.attention import ranges
from pipeline.drafts.parts.attention.ranges import attend, range_mask, text_begins
from pipeline.features.positions import Positions

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 16, 0.3
CPU = torch.device("cpu")
CONFIGS = {
    "p-eagle": PEagleConfig(),
    "p-eagle, window": PEagleConfig(window=9),
    "p-eagle, window below its depths": PEagleConfig(depths=5, window=3),
    "dflash": DFlashConfig(anchors=40),
    "dflash, window": DFlashConfig(block=8, anchors=40, window=11),
    "dflash, causal": DFlashConfig(block=8, anchors=40, causal=True),
    "dspark": DSparkConfig(anchors=40),
}


def batch_of(config, texts):
    """Return what a mask reads of a batch of rows that hold texts of these numbers of inputs."""
    width, lengths = max(map(sum, texts)), texts
    spans, parts = [], []
    for row, counts in enumerate(lengths):
        begin = 0
        for number, count in enumerate(counts):
            spans.append((slice(row, row + 1), begin, begin + count))
            ids, trained = np.zeros(count + 1, np.int32), (np.arange(count + 1) >= 2).astype(np.uint8)
            positions = make_objective(config).positions(ids, trained, (row, number))
            at = row * width + begin
            parts.append({group: (x.inputs + at, x.labels + at - 1) for group, x in positions.items()})
            begin += count
        if begin < width:
            spans.append((slice(row, row + 1), begin, width))
    joined = {
        group: Positions(*map(torch.cat, zip(*(part[group] for part in parts), strict=True))) for group in parts[0]
    }
    return SimpleNamespace(tokens_BT=torch.zeros(len(texts), width), spans=spans, positions=joined)


def mask_of(config, texts, device=CPU):
    """Return the mask of a training forward, and the place, the text and the block or guessed-from input of each query.

    The third is -1 for an input of the text.
    """
    batch = batch_of(config, texts)
    begins_N = text_begins(batch)
    if isinstance(config, PEagleConfig):
        layout_R2, _ = lay_out_inputs(batch)
        place_R, depth_R = layout_R2.T
        mask = PEagle._mask(SimpleNamespace(config=config), begins_N[place_R], layout_R2, len(begins_N), device)
        return mask, place_R, depth_R, begins_N
    inputs_A = batch.positions[1].inputs.numpy()
    sizes = config.block, config.window, config.causal
    ranges_R4 = block_ranges(begins_N[inputs_A], inputs_A, len(begins_N), *sizes)
    mask = range_mask(ranges_R4, len(begins_N), len(begins_N) + len(ranges_R4), device)
    number_R = np.tile(np.arange(config.block), len(inputs_A))
    return mask, inputs_A.repeat(config.block), number_R, begins_N


def visible_by_definition(config, place_R, number_R, begins_N):
    """Return which keys each query sees, pair by pair, as the drafts' papers define it."""
    count, window = len(begins_N), config.window or math.inf
    is_guess = isinstance(config, DFlashConfig) | (number_R > 0)
    guesses = np.flatnonzero(np.broadcast_to(is_guess, len(place_R)))
    rows = []
    for place, number in zip(place_R, number_R, strict=True):
        at = place + number + isinstance(config, DFlashConfig)  # the query's position; a block begins after its input
        context = [i <= place and begins_N[i] == begins_N[place] and at - i < window for i in range(count)]
        if isinstance(config, PEagleConfig):
            further = [place_R[g] == place and number_R[g] <= number and number - number_R[g] < window for g in guesses]
        else:
            further = [place_R[g] == place and (not config.causal or number_R[g] <= number) for g in guesses]
        rows.append(context + further)
    return torch.tensor(rows)


@pytest.mark.parametrize("texts", [[[37]], [[20, 1, 9], [35]]], ids=["one text", "packed, and padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_ranges_are_those_of_the_definition(name, texts):
    """And each piece has every key that one of its queries sees."""
    mask, *layout = mask_of(CONFIGS[name], texts)
    visible = visible_by_definition(CONFIGS[name], *layout)
    assert torch.equal(mask.dense(), visible) and visible.any(1).all()
    for piece in mask.pieces:
        keys = torch.zeros(mask.keys, dtype=torch.bool)
        keys[piece.context] = keys[piece.further] = True
        assert not visible[piece.queries, ~keys].any()


def attention_and_gradients(attend_to, mask, dtype=torch.float32):
    generator, queries = torch.Generator().manual_seed(0), len(mask.ranges_R4)
    shapes = [(1, count, heads, WIDTH) for count, heads in ((queries, HEADS), *[(mask.keys, GROUPS)] * 2)]
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    out = attend_to(*(x.transpose(1, 2) for x in inputs), mask)  # as linear layers give them
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).to(dtype))]


def in_pieces(query, key, value, mask):
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // GROUPS
    return attend(module, query, key, value, mask, scaling=SCALE)[0]


def at_once(query, key, value, mask):
    keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = (SCALE * query @ keys.mT).masked_fill(~mask.dense(), -math.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


def largest_difference(results, expected):
    """The largest difference, in parts of the largest value of the tensor."""
    pairs = zip(results, expected, strict=True)
    return max(((a.double() - b.double()).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["the CPU's kernel", "an accelerator's pieces"])
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_in_pieces_is_that_under_one_mask(monkeypatch, name, on_cpu):
    monkeypatch.setattr(ranges, "is_cpu", lambda _: on_cpu)
    mask, *_ = mask_of(CONFIGS[name], [[200, 1, 70], [230]])
    assert len(mask.pieces) > 1
    exact = attention_and_gradients(at_once, mask, torch.float64)
    difference = largest_difference(attention_and_gradients(in_pieces, mask), exact)
    at_once_difference = largest_difference(attention_and_gradients(at_once, mask), exact)
    print(f"{name}: {difference:.1e} of the largest value; under one mask {at_once_difference:.1e}")
    assert difference < 1e-6
    half = largest_difference(attention_and_gradients(in_pieces, mask, torch.bfloat16), exact)
    assert half < 0.02


def attention_flops(mask):
    """Floating-point operations of the products in attention, forward and backward."""
    aten = torch.ops.aten
    repeat = lambda shape: (shape[0], HEADS, *shape[2:])  # noqa: E731
    counts = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, repeat(k), repeat(v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, repeat(k), repeat(v))
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        attention_and_gradients(in_pieces, mask)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["p-eagle", "dflash", "dspark"])
def test_attention_costs_the_pairs_that_are_visible(name):
    """A visible pair takes two products of a head's width forward and five backward; so does a row of the default
    512 anchors.
    """
    config = {"p-eagle": PEagleConfig(), "dflash": DFlashConfig(), "dspark": DSparkConfig()}[name]
    mask, *_ = mask_of(config, [[2047]])
    first, last, further_first, further_last = mask.ranges_R4.unbind(1)
    pairs = int(((last - first + 1).clamp_min(0) + (further_last - further_first + 1).clamp_min(0)).sum())
    assert pairs > 500_000
    ratio = attention_flops(mask) / (7 * 2 * HEADS * WIDTH * pairs)
    largest = max(
        (p.queries.stop - p.queries.start) * (p.context.stop - p.context.start + p.further.stop - p.further.start)
        for p in mask.pieces
    )
    everything = len(mask.ranges_R4) * mask.keys
    print(f"{name}: {ratio:.3f} of the ideal, one mask {everything / pairs:.2f}; {largest} of {everything} elements")
    assert 1 <= ratio < 1.1 and largest < 0.01 * everything
