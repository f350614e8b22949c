"""Every draft, tree and kind of attention on a simulated accelerator (tests/strict.py): the CPU's numbers, no mixing
of devices, and a count of the times that the host waits.
"""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.basics.accelerator import pad_width
from pipeline.decoding.accept import Sampler, accept_drawn, accept_drawn_on_device
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_speculative, prefill
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts import make_objective
from pipeline.drafts.parallel import dflash, p_eagle
from pipeline.drafts.parallel.dflash import pad_anchors
from pipeline.drafts.parts.attention import ranges, steps
from pipeline.features.batch import Batch, collate, collate_packed
from pipeline.features.schema import TextRow
from pipeline.lm import attention
from pipeline.lm.verifier import Verifier
from tests.kit import positions_in
from tests.pipeline.taught import KINDS, NEVER, VARIANTS, grown, make_draft, prompt_of
from tests.strict import DEVICE, Mixed, Strict, rehearsal


def total(counts: Counter) -> int:
    return sum(counts.values())


def move_to_device(target: Verifier) -> Verifier:
    """Return the same target on the device."""
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
        assert isinstance(x + torch.tensor(1.0), Strict)  # a scalar is passed to the kernel
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize("inference", [False, True])
def test_it_counts_what_an_accelerator_is_waited_for(inference):
    with rehearsal() as counts, torch.inference_mode(inference):
        x = torch.arange(3.0).pin_memory().to(DEVICE, non_blocking=True)
        assert not counts.waits and not counts.copies
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
            assert total(counts.waits) == number
            if ask == asks[-1]:  # of float32 and int64: a sum, an element, three, a bool and three
                assert total(counts.read) == 4 + 4 + 12 + 1 + 12, counts.read
        pageable = [lambda: torch.ones(3).to(DEVICE, non_blocking=True), lambda: torch.tensor([1], device=DEVICE)]
        for number, copy in enumerate([*pageable, lambda: torch.ones(3).pin_memory().to(DEVICE), lambda: x[[0]]], 1):
            copy()
            assert total(counts.copies) == number
        assert all(place.startswith("tests/pipeline/test_device.py:") for _, place in counts.waits)


# -- training ----------------------------------------------------------------------------------------------------------


def rows_for(draft) -> list[TextRow]:
    generator, rows, layers = torch.Generator().manual_seed(0), [], len(draft.needs.auxiliary)
    for number, length in enumerate((20, 14, 9, 3)):
        tokens = torch.randint(0, 256, (length,), generator=generator).int().numpy()
        mask = ((np.arange(length) >= 3) & (np.arange(length) != 7)).astype(np.uint8)
        states = torch.randn(length, 1 + layers, 32, generator=generator)
        rows.append(TextRow(f"row{number}", tokens, mask, states[:, 0], states[:, 1:]))
    return rows


def batch_for(draft, packed: bool) -> Batch:
    rows, auxiliary = rows_for(draft), range(len(draft.needs.auxiliary))
    totals = dict.fromkeys(make_objective(draft.config).groups, 30)
    if packed:
        packs = [[rows[0], rows[3]], [rows[1], rows[2]]]
        return collate_packed(packs, positions_in(make_objective(draft.config), packs), totals, auxiliary=auxiliary)
    return collate(rows, make_objective(draft.config), totals, auxiliary=auxiliary)


def compute_gradients(draft, batch: Batch):
    """Return loss, sums and gradients of a micro-batch."""
    loss, sums = make_objective(draft.config).loss(draft, batch)
    loss.backward()
    return loss, sums, {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}


def expected_waits(name: str) -> int:
    """Return the waits of a micro-batch: one in each forward for the experts' token counts, unless all are selected."""
    config = VARIANTS[name]
    top_k = getattr(config, "experts_per_token", None)
    return config.ttt_steps if top_k and config.experts > top_k else 0


def compute_as_the_device_does(monkeypatch) -> None:
    """Make CPU tensors take the simulated device's shapes and kernels: others round differently on some CPUs."""
    monkeypatch.setattr(attention, "PER_HEAD", ())
    monkeypatch.setattr(steps, "find_kernel", lambda *_: None)
    monkeypatch.setattr(p_eagle, "pad_width", lambda inputs, _: pad_width(inputs, DEVICE))
    monkeypatch.setattr(ranges, "is_cpu", lambda _: False)
    monkeypatch.setattr(dflash, "pad_anchors", lambda anchors, block, _: pad_anchors(anchors, block, DEVICE))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed, in chunks"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_training_micro_batch_is_the_cpus_and_is_not_waited_for(loaded_target, embed_head, monkeypatch, name, packed):
    monkeypatch.setattr("pipeline.drafts.parts.objective.chunk_rows", lambda *_: 7 if packed else 1 << 20)
    draft = make_draft(loaded_target, embed_head, VARIANTS[name]).train().requires_grad_(True)
    batch = batch_for(draft, packed)
    compute_as_the_device_does(monkeypatch)
    want_loss, want_sums, want = compute_gradients(draft, batch)
    loaded_target.unhook()
    # A copy, since moving it would move the other draft's.
    own_embed_head = replace(embed_head, decoder=copy.deepcopy(embed_head.decoder))
    device_draft = make_draft(loaded_target, own_embed_head, VARIANTS[name]).train().requires_grad_(True)
    with rehearsal() as counts:
        device_draft.to(DEVICE)
        device_draft.move_embed_head(DEVICE, torch.float32)
        compute_gradients(device_draft, batch.pin_memory().to(DEVICE, torch.float32))  # what is brought there once
        device_draft.zero_grad()
        counts.waits.clear()
        counts.copies.clear()
        loss, sums, got = compute_gradients(device_draft, batch.pin_memory().to(DEVICE, torch.float32))
        assert total(counts.waits) == expected_waits(name), counts.waits
        assert total(counts.copies) == 0, counts.copies
        assert torch.equal(loss.cpu(), want_loss)
        assert {n: {p: x.item() for p, x in parts.items()} for n, parts in sums.items()} == {
            n: {p: x.item() for p, x in parts.items()} for n, parts in want_sums.items()
        }
        assert set(got) == set(want)
        for weight, gradient in got.items():
            torch.testing.assert_close(gradient.cpu(), want[weight], rtol=0, atol=1e-6)


# -- decoding ----------------------------------------------------------------------------------------------------------


def rounds_of(target, method: LoadedMethod, temperature: float):
    """Return a function that decodes an answer after a prompt that is in the cache already."""
    sampling = Sampling(6, NEVER, temperature=temperature, seed=3)
    ready = prefill(target, prompt_of(3), 6 + method.room(False), method.draft.needs.auxiliary)
    return lambda: decode_speculative(target, method, prompt_of(3), sampling, prefilled=ready)


def check_decodes_alike(
    target, embed_head, config, tree: dict, temperature: float = 0.0, fixed_shapes: bool = False
) -> None:
    want = rounds_of(target, grown(make_draft(target, embed_head, config), **tree), temperature)()
    method = grown(make_draft(target, embed_head, config), **tree)
    with rehearsal() as counts:
        device_target, draft = move_to_device(target), method.draft.to(DEVICE)
        draft.bind(device_target.embed_head("there"))
        draft.prepare()
        if fixed_shapes:
            draft.compile_rounds(backend=None)
            assert draft.rounds is not None
        rounds_of(device_target, method, temperature)()  # what is brought there once
        decode = rounds_of(device_target, method, temperature)
        counts.waits.clear()
        counts.copies.clear()
        counts.read.clear()
        got = decode()
    assert got.tokens == want.tokens
    assert got.acceptance == want.acceptance
    rounds = got.acceptance.passes
    forwards, blocks = got.draft_forwards, target.config.num_hidden_layers
    # The waits for the tokens of its blocks, and the size of their caches.
    router_waits = forwards * 2 * blocks if config.kind == "skipper" else 0
    loop_waits = 2 * rounds + 3  # the first token, and two readings of the clock
    assert loop_waits <= total(counts.waits) <= loop_waits + router_waits, counts.waits
    assert total(counts.copies) == 0, counts.copies
    row = 8 * method.draft.target_vocabulary
    print(f"bytes read a round: {total(counts.read) / rounds:.0f}; one float64 distribution: {row}")
    assert total(counts.read) < rounds * row, counts.read  # so none of a tree's distributions is copied to the host


WITHOUT_KIND = set(VARIANTS) - {name for name, _ in KINDS.values()}  # drafts that no kind of tree is tested with


@pytest.mark.parametrize("kind", [*KINDS, *sorted(WITHOUT_KIND)])
def test_every_draft_and_kind_of_tree_decodes_as_on_the_cpu_with_two_waits_a_round(loaded_target, embed_head, kind):
    name, tree = KINDS.get(kind, (kind, {"depth": 4, "top_k": 4, "nodes": 16}))
    check_decodes_alike(
        loaded_target, embed_head, VARIANTS[name], tree, temperature=1.0 if "drawn" in str(tree) else 0.0
    )


@pytest.mark.parametrize("kind", ["eagle-3", "jakiro, decoupled", "scalar", "reduced", "four-experts"])
def test_rounds_of_fixed_shapes_decode_as_on_the_cpu_with_two_waits_a_round(loaded_target, embed_head, kind):
    name, tree = KINDS.get(kind, (kind, {"depth": 4, "top_k": 4, "nodes": 16}))
    check_decodes_alike(loaded_target, embed_head, VARIANTS[name], tree, fixed_shapes=True)


def drawn_round(nodes: int, vocabulary: int, seed: int) -> tuple[Tree, torch.Tensor]:
    """Return a random tree of drawn siblings, at most four of a node, and p after each node, which resembles q."""
    generator = torch.Generator().manual_seed(seed)
    parents, children = [], [0] * nodes
    for node in range(1, nodes):
        free = [parent for parent in range(node) if children[parent] < 4]
        parents.append(free[int(torch.randint(len(free), (), generator=generator)) // 2])  # rather a deep tree's
        children[parents[-1]] += 1
    q_NV = (2 * torch.randn(nodes, vocabulary, generator=generator)).double().softmax(-1)
    tokens = torch.multinomial(q_NV[1:], 1, generator=generator)[:, 0].tolist()
    tree = build_tree(0, tokens, parents, torch.device("cpu"))
    tree.proposals = list(q_NV)
    p_NV = 0.1 * (2 * torch.randn(nodes, vocabulary, generator=generator)).softmax(-1)
    for node, parent in enumerate(parents, start=1):
        p_NV[parent] += q_NV[node].float() * 0.9 / children[parent]
    return tree, p_NV / p_NV.sum(-1, keepdim=True)


@pytest.mark.parametrize(("nodes", "vocabulary", "rounds"), [(13, 40, 60), (60, 128_256, 3)])
def test_drawn_siblings_are_accepted_on_the_device_as_on_the_host_with_one_small_read(nodes, vocabulary, rounds):
    host, ahead, lengths = Sampler(7), Sampler(7), Counter()
    for seed in range(rounds):
        tree, p_NV = drawn_round(nodes, vocabulary, seed)
        want = accept_drawn(tree, p_NV, host)
        with rehearsal() as counts:
            device_tree = replace(tree, proposals=[q_V.to(DEVICE) for q_V in tree.proposals])
            device_p_NV = p_NV.to(DEVICE)
            counts.copies.clear()
            assert accept_drawn_on_device(device_tree, device_p_NV, ahead) == want
        assert total(counts.waits) == 1, counts.waits
        assert total(counts.copies) == 0, counts.copies
        assert total(counts.read) == 8 * (2 * nodes - 1), counts.read
        lengths[len(want[0])] += 1
    distributions = sum(x.nbytes for x in (*tree.proposals[1:], p_NV.double()))
    print(f"{nodes} nodes: {total(counts.read)} bytes read; p and the proposals: {distributions}; {dict(lengths)}")
    assert host.accept(0.5) == ahead.accept(0.5)
    assert torch.equal(host.draw_rows(p_NV[:1]), ahead.draw_rows(p_NV[:1]))  # as many numbers were used
    assert rounds < 10 or {0, 1, 2} <= set(lengths)


@pytest.mark.parametrize(
    ("queries", "keys", "masked", "trained", "sound"),
    [
        (192, 192, True, True, False),
        (130, 192, True, True, False),  # the number of keys decides
        (192, 256, True, True, True),
        (193, 193, True, True, True),
        (192, 192, False, True, True),
        (192, 192, True, False, True),
    ],
)
def test_cudnn_is_not_asked_for_a_gradient_that_it_makes_nan(monkeypatch, queries, keys, masked, trained, sound):
    """The fault needs a mask and 64 keys more than a multiple of 128; checked on the strict device and off it."""
    enabled = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(*arguments, **options):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    layer = torch.nn.Module()
    layer.is_causal, layer.num_key_value_groups = True, 2
    q, k = torch.randn(1, 4, queries, 8, requires_grad=trained), torch.randn(1, 2, keys, 8)
    visible = attention.causal_mask(keys - queries, queries, k.device)
    mask = attention.additive_mask(visible, k.dtype)[None, None] if masked else None
    with torch.set_grad_enabled(trained):
        attention.grouped_attention(layer, q, k, k, mask, scaling=1.0)
        with rehearsal():
            device_mask = None if mask is None else mask.to(DEVICE)
            attention.grouped_attention(layer, q.to(DEVICE), k.to(DEVICE), k.to(DEVICE), device_mask, scaling=1.0)
    assert enabled == [sound] * 2
    assert torch.backends.cuda.cudnn_sdp_enabled()
