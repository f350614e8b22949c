"""The losses' passes over the vocabulary, compiled: the same sums and gradients, and a fifth of the memory traffic."""

import logging

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.drafts import make_objective
from pipeline.drafts.parts.losses import classify, compiled, full_vocabulary_labels, renormalised_labels, text_labels
from tests.pipeline.taught import VARIANTS, make_draft
from tests.pipeline.test_losses_batch import batch_of, wide_rows

ROWS, VOCABULARY, TARGET_VOCABULARY = 64, 2048, 5000


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write; views move none."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def inputs_of(kind, rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits, p = (torch.randn(rows, VOCABULARY, generator=generator) for _ in range(2))
    text = torch.randint(-1, VOCABULARY, (rows,), generator=generator)
    p, best, mass = text_labels(text, VOCABULARY) if kind == "hard-ce" else renormalised_labels(p)
    return logits.to(dtype), kind, p, text if kind == "l1" else best, mass, True


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("hard-ce", "l1")]


@pytest.mark.parametrize("kind", ["soft-ce", "acceptance", *LONG])
def test_sums_and_gradients_are_those_of_eager_losses(kind):
    for rows in (ROWS, 37, 1):
        inputs = inputs_of(kind, rows)
        loss, agree, accept, slope = classify(*inputs)
        got = compiled(classify)(*inputs)
        assert got[0].tolist() == pytest.approx(loss.tolist(), rel=1e-6)
        assert got[1] == agree and got[2].item() == pytest.approx(accept.item(), rel=1e-6)
        assert (got[3] - slope).abs().max() <= 1e-6 * slope.abs().max()


@pytest.mark.parametrize("masked", [False, True])
def test_labels_over_the_full_vocabulary_are_those_of_eager_ones(masked):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, TARGET_VOCABULARY, generator=generator)
    ids_U = torch.randperm(TARGET_VOCABULARY, generator=generator)[:VOCABULARY].sort().values
    p, best, mass = full_vocabulary_labels(logits, ids_U, masked)
    got = compiled(full_vocabulary_labels)(logits, ids_U, masked)
    assert torch.equal(got[1], best) and torch.allclose(got[2], mass, rtol=1e-6)
    assert (got[0] - p).abs().max() <= 1e-6 * p.max()


def test_a_draft_is_trained_by_the_same_gradient(loaded_target, embed_head):
    draft = make_draft(loaded_target, embed_head, VARIANTS["jakiro"]).requires_grad_()
    objective = make_objective(draft.config)
    batch = batch_of(draft, wide_rows(), dict.fromkeys(objective.groups, 10))
    gradients = []
    for draft.compiled in (False, True):
        draft.zero_grad()
        objective.loss(draft, batch)[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]))
    assert (gradients[1] - gradients[0]).abs().max() <= 1e-6 * gradients[0].abs().max()


def test_memory_traffic_of_a_row_and_token(caplog):
    """In bfloat16, as on a GPU, with the teacher's part. A compiled kernel reads its inputs and writes its outputs."""
    logits = inputs_of("soft-ce", dtype=torch.bfloat16)[0]
    parts = {renormalised_labels: (logits,), classify: inputs_of("soft-ce", dtype=torch.bfloat16)}
    eager, fused = 0.0, 0.0
    caplog.set_level(logging.INFO, inductor_metrics_log.name)  # else the bytes are not counted
    for function, arguments in parts.items():
        with Traffic() as traffic:
            function(*arguments)
        eager += traffic.bytes / logits.numel()
        torch._dynamo.reset()
        metrics.reset()
        with inductor.patch(force_disable_caches=True):
            torch.compile(function)(*arguments)
        fused += metrics.num_bytes_accessed / logits.numel()
    print(f"bytes a row and token: {eager:.1f} eager, {fused:.1f} compiled")
    assert 10 <= fused <= 15 and eager >= 65
