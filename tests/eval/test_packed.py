"""Packed layers give the layers' outputs, in any order of calls."""

import pytest
import torch
from torch import nn

from eval.measure import packed
from eval.measure.packed import PackedLinear, choose_row_count, find_packed, pack_linears
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.lm.states import EmbeddingAndHead
from tests.pipeline.taught import NEVER, VARIANTS, greedy, make_draft, prompt_of


class Block(nn.Module):
    def __init__(self, bias: tuple[bool, bool, bool] = (False, False, False)):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=b) for n, b in zip((8, 4, 4), bias, strict=True))
        self.o_proj = nn.Linear(8, 8)
        self.inner = nn.ModuleList([nn.Linear(8, 3)])

    def outputs(self, *inputs):
        layers = (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.inner[0])
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]


@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("rows", [1, 5])
@torch.inference_mode()
def test_packed_layers_are_the_layers(bias, rows):
    plain, packed = Block(bias), Block(bias)
    pack_linears(packed)
    x, y = torch.randn(2, 1, rows, 8)
    for inputs in ([x] * 5, [x, y, x, y, x], [y] * 5, [y] * 5):  # of one tensor, of two, and the same one again
        for got, want in zip(packed.outputs(*inputs), plain.outputs(*inputs), strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)
    assert isinstance(packed.q_proj, PackedLinear) == (bias == (True, False, True))


def test_everything_that_decodes_is_packed_alike(tiny_target, monkeypatch):
    """The target, its head and a draft with a head over its own vocabulary: the same answers, single rows filled up."""
    monkeypatch.setattr(packed, "choose_row_count", lambda _: packed.FILLED_ROWS)
    target = Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")
    want = greedy(target, prompt_of(1), 16)
    embed_head = EmbeddingAndHead(target.embedding_VD, target.head, "x")
    draft = make_draft(target, embed_head, VARIANTS["reduced"])
    packed.pack(target, {"one": draft})
    for module in (target.decoder, target.head, draft, draft.embed_head.head):
        assert find_packed(module) and {layer.rows for layer in find_packed(module)} == {packed.FILLED_ROWS}
        assert not [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    method = LoadedMethod(draft, TreeConfig(depth=2, top_k=3, nodes=6))
    sampling = Sampling(16, NEVER)
    assert decode_speculative(target, method, prompt_of(1), sampling).tokens == want
    assert decode_plain(target, prompt_of(1), sampling).tokens == want


@pytest.mark.parametrize("kind", ["gumiho", "small-llama", "skipper"])
def test_every_kind_of_draft_is_packed_and_guesses_as_before(tiny_target, kind):
    target = Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")
    draft = make_draft(target, target.embed_head("x"), VARIANTS[kind])
    method, sampling = LoadedMethod(draft, TreeConfig(depth=2, top_k=3, nodes=6)), Sampling(16, NEVER)
    want = decode_speculative(target, method, prompt_of(1), sampling)
    if kind == "small-llama":
        draft._reader.clear()  # it would be there already
    draft.prepare()
    packed.pack(target, {"one": draft})
    assert not [layer for part in draft.packable() for layer in part.modules() if isinstance(layer, nn.Linear)]
    got = decode_speculative(target, method, prompt_of(1), sampling)
    assert got.tokens == want.tokens and got.acceptance == want.acceptance


@torch.inference_mode()
def test_a_single_row_is_filled_up_where_that_is_faster(monkeypatch):
    block, plain = Block(), Block()
    pack_linears(block)
    layers = find_packed(block)
    assert len(layers) == 3  # one product of queries, keys and values; two layers
    for slow_one, rows in ((1.0, packed.FILLED_ROWS), (0.5, 1)):
        monkeypatch.setattr(packed.Packed, "seconds", lambda _, rows, layer=slow_one: layer if rows == 1 else 0.6)
        assert choose_row_count(layers) == rows
    for layer in layers:
        layer.rows = packed.FILLED_ROWS
    for rows in (1, 2):
        x = torch.randn(1, rows, 8)
        for got, want in zip(block.outputs(*[x] * 5), plain.outputs(*[x] * 5), strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)
