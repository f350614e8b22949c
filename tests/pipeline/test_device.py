"""Every draft, tree and kind of attention on a make-believe accelerator (tests/strict.py): the CPU's numbers, no mixing
of devices, and waits that are counted.
"""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, prefill, speculative
from pipeline.drafts import objective_of
from pipeline.features.batch import Batch, collate, collate_packed
from pipeline.features.schema import Row
from pipeline.lm import attention
from pipeline.lm.verifier import Verifier
from tests.kit import positions_in
from tests.pipeline.taught import KINDS, NEVER, VARIANTS, grown, make_draft, prompt_of
from tests.strict import DEVICE, Mixed, Strict, rehearsal


def total(counts: Counter) -> int:
    return sum(counts.values())


def moved(target: Verifier) -> Verifier:
    """The same target on the device."""
    target.unhook()
    return Verifier(copy.deepcopy(target.model).to(DEVICE), target.config, "there")


# -- the device itself ------------------------------------------------------------------------------------------------


def test_it_refuses_what_an_accelerator_refuses():
    assert not torch.accelerator.is_available()
    with rehearsal():
        assert torch.accelerator.current_accelerator(check_available=True).type == DEVICE.type
        x = torch.ones(3).to(DEVICE)
        for mixing in (
            lambda: x + torch.ones(3),
            lambda: torch.ones(3)[x.long()],
            lambda: torch.cat([x, torch.ones(3)]),
            lambda: x.numpy(),
            lambda: torch.rand(3, device=DEVICE, generator=torch.Generator()),
            lambda: x.pin_memory(),
            lambda: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3)] * 2, torch.ones(1, 1, 3)),
        ):
            with pytest.raises(Mixed):
                mixing()
        assert isinstance(x + torch.tensor(1.0), Strict)  # a number goes along with the kernel
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize("inference", [False, True])
def test_it_counts_what_an_accelerator_is_waited_for(inference):
    with rehearsal() as seen, torch.inference_mode(inference):
        x = torch.arange(3.0).pin_memory().to(DEVICE, non_blocking=True)
        assert not seen.waits and not seen.copies
        asks = [
            x.sum().item,
            lambda: int(x[0]),
            x.tolist,
            x.nonzero,
            lambda: x[x > 1],
            lambda: bool((x > 1).all()),
            x.cpu,
        ]
        for number, ask in enumerate([*asks, lambda: torch.bincount(x.long()), torch.accelerator.synchronize], start=1):
            ask()
            assert total(seen.waits) == number
        pageable = [lambda: torch.ones(3).to(DEVICE, non_blocking=True), lambda: torch.tensor([1], device=DEVICE)]
        for number, copy in enumerate([*pageable, lambda: torch.ones(3).pin_memory().to(DEVICE), lambda: x[[0]]], 1):
            copy()
            assert total(seen.copies) == number
        assert all(place.startswith("tests/pipeline/test_device.py:") for _, place in seen.waits)


# -- training ----------------------------------------------------------------------------------------------------------


def rows_for(draft) -> list[Row]:
    generator, rows, layers = torch.Generator().manual_seed(0), [], len(draft.needs.auxiliary)
    for number, length in enumerate((20, 14, 9, 3)):
        tokens = torch.randint(0, 256, (length,), generator=generator).int().numpy()
        mask = ((np.arange(length) >= 3) & (np.arange(length) != 7)).astype(np.uint8)
        states = torch.randn(length, 1 + layers, 32, generator=generator)
        rows.append(Row(f"row{number}", tokens, mask, states[:, 0], states[:, 1:]))
    return rows


def batch_for(draft, packed: bool) -> Batch:
    rows, auxiliary = rows_for(draft), range(len(draft.needs.auxiliary))
    totals = dict.fromkeys(objective_of(draft.config).groups, 30)
    if packed:
        packs = [[rows[0], rows[3]], [rows[1], rows[2]]]
        return collate_packed(packs, positions_in(objective_of(draft.config), packs), totals, auxiliary=auxiliary)
    return collate(rows, objective_of(draft.config), totals, auxiliary=auxiliary)


def stepped(draft, batch: Batch):
    """Loss, sums and gradients of a micro-batch."""
    loss, sums = objective_of(draft.config).loss(draft, batch)
    loss.backward()
    return loss, sums, {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}


def waits_of(name: str) -> int:
    """Of a micro-batch. Which experts have how many tokens is asked once in each pass, where not all are kept."""
    config = VARIANTS[name]
    kept = getattr(config, "experts_per_token", None)
    return config.ttt_steps if kept and config.experts > kept else 0


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed, in chunks"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_training_micro_batch_is_the_cpus_and_is_not_waited_for(loaded_target, embed_head, monkeypatch, name, packed):
    monkeypatch.setattr("pipeline.drafts.parts.objective.chunk_rows", lambda *_: 7 if packed else 1 << 20)
    draft = make_draft(loaded_target, embed_head, VARIANTS[name]).train().requires_grad_(True)
    batch = batch_for(draft, packed)
    monkeypatch.setattr(attention, "PER_HEAD", ())  # the device's shapes: others round otherwise on some CPUs
    want_loss, want_sums, want = stepped(draft, batch)
    loaded_target.unhook()
    mine = replace(embed_head, decoder=copy.deepcopy(embed_head.decoder))  # moving it would move the others'
    there = make_draft(loaded_target, mine, VARIANTS[name]).train().requires_grad_(True)
    with rehearsal() as seen:
        there.to(DEVICE)
        there.move_embed_head(DEVICE, torch.float32)
        stepped(there, batch.pinned().to(DEVICE, torch.float32))  # what is brought there once
        there.zero_grad()
        seen.waits.clear()
        seen.copies.clear()
        loss, sums, got = stepped(there, batch.pinned().to(DEVICE, torch.float32))
        assert total(seen.waits) == waits_of(name), seen.waits
        assert total(seen.copies) == 0, seen.copies
        assert torch.equal(loss.cpu(), want_loss)
        assert {n: {p: x.item() for p, x in parts.items()} for n, parts in sums.items()} == {
            n: {p: x.item() for p, x in parts.items()} for n, parts in want_sums.items()
        }
        assert set(got) == set(want)
        for weight, gradient in got.items():
            torch.testing.assert_close(gradient.cpu(), want[weight], rtol=0, atol=1e-6)


# -- decoding ----------------------------------------------------------------------------------------------------------


def rounds_of(target, method: LoadedMethod, temperature: float):
    """An answer from a prompt that is in the cache already."""
    sampling = Sampling(6, NEVER, temperature=temperature, seed=3)
    ready = prefill(target, prompt_of(3), 6 + method.room(False), method.draft.needs.auxiliary)
    return lambda: speculative(target, method, prompt_of(3), sampling, prefilled=ready)


def decodes_alike(target, embed_head, config, tree: dict, temperature: float = 0.0) -> None:
    want = rounds_of(target, grown(make_draft(target, embed_head, config), **tree), temperature)()
    method = grown(make_draft(target, embed_head, config), **tree)
    with rehearsal() as seen:
        there, draft = moved(target), method.draft.to(DEVICE)
        draft.bind(there.embed_head("there"))
        draft.prepare()
        rounds_of(there, method, temperature)()  # what is brought there once
        decode = rounds_of(there, method, temperature)
        seen.waits.clear()
        seen.copies.clear()
        got = decode()
    assert got.tokens == want.tokens
    assert got.acceptance == want.acceptance
    rounds = got.acceptance.passes
    forwards, blocks = got.draft_forwards, target.config.num_hidden_layers
    asked = forwards * 2 * blocks if config.kind == "skipper" else 0  # its blocks' tokens, and what their caches keep
    own = 2 * rounds + 3  # the first token, and the clock's two looks
    assert own <= total(seen.waits) <= own + asked, seen.waits
    assert total(seen.copies) == 0, seen.copies


OTHERS = set(VARIANTS) - {name for name, _ in KINDS.values()}  # that no kind of tree is shown with


@pytest.mark.parametrize("kind", [*KINDS, *sorted(OTHERS)])
def test_every_draft_and_kind_of_tree_decodes_as_on_the_cpu_with_two_waits_a_round(loaded_target, embed_head, kind):
    name, tree = KINDS.get(kind, (kind, {"depth": 4, "top_k": 4, "nodes": 16}))
    decodes_alike(loaded_target, embed_head, VARIANTS[name], tree, temperature=1.0 if "drawn" in str(tree) else 0.0)


@pytest.mark.parametrize(
    ("queries", "keys", "masked", "trained", "sound"),
    [
        (192, 192, True, True, False),
        (130, 192, True, True, False),  # what counts are the keys
        (192, 256, True, True, True),
        (193, 193, True, True, True),
        (192, 192, False, True, True),
        (192, 192, True, False, True),
    ],
)
def test_cudnn_is_not_asked_for_a_gradient_that_it_makes_nan(monkeypatch, queries, keys, masked, trained, sound):
    """Behind a mask, of keys 64 more than a multiple of 128, on the strict device and off it."""
    asked = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def seen(*given, **options):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    layer = torch.nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, 2
    q, k = torch.randn(1, 4, queries, 8, requires_grad=trained), torch.randn(1, 2, keys, 8)
    visible = attention.behind(keys - queries, queries, k.device)
    mask = attention.additive(visible, k.dtype)[None, None] if masked else None
    with torch.set_grad_enabled(trained):
        attention.grouped(layer, q, k, k, mask, scaling=1.0)
        with rehearsal():
            there = None if mask is None else mask.to(DEVICE)
            attention.grouped(layer, q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), there, scaling=1.0)
    assert asked == [sound] * 2
    assert torch.backends.cuda.cudnn_sdp_enabled()
