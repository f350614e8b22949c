"""The drafts' losses as sums over trained positions; whoever knows the global batch forms the ratio.

Smooth L1 on features (beta 1, mean over D) and soft cross-entropy against the target's own head (EAGLE; Jakiro,
section on training). The teacher's probabilities are recomputed from the stored features: no logits are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.features.batch import Batch

Head = Callable[[Tensor], Tensor]
# Numbers of the largest tensor of a chunk, (rows x branches, U) in float32, a mixture of K features being K branches:
# bounds the memory of the vocabulary-wide part.
CHUNK_LOGITS = 1 << 25
CHUNK_ROWS_CPU = 128  # what comes after the matrix product finds its numbers in the cache
CHUNK_BYTES_GPU = 2 << 30  # of that tensor; all of a chunk take three to five times as much
CHUNK_SHARE_GPU = 32  # of a GPU with less than 64 GiB this part of its memory instead


def chunk_rows(vocabulary: int, branches: int, device: torch.device, gpu_bytes: int | None = None) -> int:
    """How many of the teacher's rows are worked on at a time. On a GPU that goes by how much memory it has, `gpu_bytes`
    where it is not here, never by what is free: the order of sums is the same in every run.
    """
    numbers = CHUNK_LOGITS
    if device.type == "cuda":
        whole = gpu_bytes or torch.cuda.get_device_properties(device).total_memory
        numbers = min(CHUNK_BYTES_GPU, whole // CHUNK_SHARE_GPU) // 4
    rows = max(1, numbers // (vocabulary * branches))
    return min(rows, CHUNK_ROWS_CPU) if device.type == "cpu" else rows


@dataclass
class Prediction:
    """What a branch says at every position: a feature, or several whose softmaxes are mixed."""

    horizon: int  # it answers at i with f_{i+horizon}
    features: list[Tensor]  # (B, T, D) each
    log_weights: Tensor | None = None  # (B, T, K) of a mixture of K features


class _SoftCrossEntropy(torch.autograd.Function):
    """Per branch, the sum of -p.log q over its rows. The gradient is formed in the forward: no logits outlive a chunk.

    The teacher's p is computed once for all branches, whose rows it shares.
    """

    @staticmethod
    def forward(
        ctx, teacher_MD: Tensor, head: Head, chunk: int, rows_of: list[Tensor], sizes: list[int], *tensors: Tensor
    ):
        """``rows_of[b]`` (bool [M]) are the teacher's rows that branch b answers with the rows of its ``sizes[b]``
        tensors: one feature, or the log-weights and the features of a mixture.
        """
        device = teacher_MD.device
        branches = _grouped(tensors, sizes)
        totals = [torch.zeros((), device=device) for _ in branches]
        agrees = [torch.zeros((), dtype=torch.long, device=device) for _ in branches]
        gradients = [torch.empty_like(x) if x.requires_grad else None for x in tensors]
        gradients_of = _grouped(gradients, sizes)
        index_of = [rows.nonzero()[:, 0] for rows in rows_of]
        firsts = torch.arange(0, len(teacher_MD) + chunk, chunk, device=device)
        ends = torch.stack(
            [torch.searchsorted(index, firsts) for index in index_of]
        ).tolist()  # once, not in every chunk
        for number, first in enumerate(range(0, len(teacher_MD), chunk)):
            teacher_logits = head(teacher_MD[first : first + chunk]).float()
            best, p = teacher_logits.argmax(-1), teacher_logits.softmax(-1)
            places, groups = [], {True: [], False: []}  # by whether a branch is one feature
            for branch, parts in enumerate(branches):
                begin, end = ends[branch][number : number + 2]
                places.append(slice(begin, end))
                rows = index_of[branch][begin:end] - first
                answered = (p, best) if end - begin == len(p) else (p[rows], best[rows])
                groups[len(parts) == 1].append((branch, [part[begin:end] for part in parts], answered))
            found = []
            if ones := groups[True]:
                differentiate = any(gradients_of[branch][0] is not None for branch, *_ in ones)
                features, answers = [parts[0] for _, parts, _ in ones], [answered for *_, answered in ones]
                found += zip(
                    (branch for branch, *_ in ones), _chunk(features, answers, head, differentiate), strict=True
                )
            for branch, parts, answered in groups[False]:
                differentiate = gradients_of[branch][0] is not None
                found.append((branch, _mixture_chunk(parts, *answered, head, differentiate)))
            for branch, (loss, agree, slopes) in found:
                totals[branch] += loss
                agrees[branch] += agree
                for kept, slope in zip(gradients_of[branch], slopes, strict=False):
                    if kept is not None:
                        kept[places[branch]] = slope
        ctx.sizes = sizes
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*agrees)
        return (*totals, *agrees)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        out = []
        for up, gradients in zip(upstream, _grouped(ctx.saved_tensors, ctx.sizes), strict=False):
            out += [None if g is None else (g.float() * up).to(g.dtype) for g in gradients]
        return None, None, None, None, None, *out


def _grouped(values, sizes: list[int]) -> list[list]:
    rest = iter(values)
    return [[next(rest) for _ in range(size)] for size in sizes]


def _chunk(features: list[Tensor], answers: list[tuple[Tensor, Tensor]], head: Head, differentiate: bool) -> list:
    """For each feature (m, D) and its teacher's (p, argmax): the sum of -p.log q, rows whose argmax is the teacher's,
    the gradient. With logits z, d/dz = q - p. One call of the head for all.
    """
    with torch.enable_grad():
        hidden = torch.cat(features).detach().requires_grad_(differentiate)
        logits = head(hidden)
    whole = logits.detach().float().log_softmax(-1)
    sizes, sums = [len(feature) for feature in features], []
    for log_q, (p, best) in zip(whole.split(sizes), answers, strict=True):
        sums.append((-torch.einsum("mv,mv->m", p, log_q).sum(), (log_q.argmax(-1) == best).sum()))
        if differentiate:
            log_q.exp_().sub_(p)  # in `whole`
    slopes = [[] for _ in features]
    if differentiate:
        (slope,) = torch.autograd.grad(logits, hidden, whole.to(logits.dtype))
        slopes = [[part] for part in slope.split(sizes)]
    return [(*pair, own) for pair, own in zip(sums, slopes, strict=True)]


def _mixture_chunk(parts: list[Tensor], p: Tensor, best: Tensor, head: Head, differentiate: bool):
    """The same for q = sum_j w_j softmax(head(f_j)); `parts` are log w (m, K) and the K features (m, D)."""
    with torch.enable_grad():
        log_weights, *features = (part.detach().requires_grad_(differentiate) for part in parts)
        log_q = torch.stack([head(feature).float().log_softmax(-1) for feature in features], dim=1)
        mixed = (log_q + log_weights.float()[:, :, None]).logsumexp(1)
        loss = -(p * mixed).sum()
    agree = (mixed.detach().argmax(-1) == best).sum()
    slopes = torch.autograd.grad(loss, [log_weights, *features]) if differentiate else []
    return loss.detach(), agree, slopes


def branch_sums(
    predictions: dict[str, Prediction], batch: Batch, head: Head, vocabulary: int
) -> dict[str, dict[str, Tensor]]:
    """By branch, sums over its trained positions: "regression", "classification", "agree" (top-1), "positions".

    `head` gives logits over `vocabulary` ids. A mixture has no feature of its own: its regression is that of its
    features' mean.
    """
    inputs = batch.labels_BTD.shape[1]
    answered = {}  # branch -> bool (B, T) over LABELS: the label of input i stands at i + h - 1
    for name, prediction in predictions.items():
        horizon = prediction.horizon
        mask_BT = torch.zeros_like(batch.trained[horizon])
        mask_BT[:, horizon - 1 :] = batch.trained[horizon][:, : inputs + 1 - horizon]
        answered[name] = mask_BT
    any_BT = torch.stack(list(answered.values())).any(0)
    teacher_MD = batch.labels_BTD[any_BT]
    rows_of = [mask_BT[any_BT] for mask_BT in answered.values()]
    tensors_of = [_trained_rows(prediction, batch, inputs) for prediction in predictions.values()]
    features = sum(len(prediction.features) for prediction in predictions.values())  # each has logits of its own
    chunk = chunk_rows(vocabulary, features, teacher_MD.device)
    sizes = [len(tensors) for tensors in tensors_of]
    flat = [tensor for tensors in tensors_of for tensor in tensors]
    found = _SoftCrossEntropy.apply(teacher_MD, head, chunk, rows_of, sizes, *flat)
    sums = {}
    for place, (name, prediction) in enumerate(predictions.items()):
        features = tensors_of[place][-len(prediction.features) :]
        hidden = features[0] if len(features) == 1 else sum(features) / len(features)
        label = teacher_MD[rows_of[place]]
        sums[name] = {
            "regression": F.smooth_l1_loss(hidden.float(), label.float(), reduction="none").mean(-1).sum(),
            "classification": found[place],
            "agree": found[len(predictions) + place],
            "positions": torch.tensor(len(label), device=label.device),
        }
    return sums


def _trained_rows(prediction: Prediction, batch: Batch, inputs: int) -> list[Tensor]:
    """The prediction's tensors at its trained positions."""
    last = inputs + 1 - prediction.horizon
    mask_BT = batch.trained[prediction.horizon][:, :last]
    whole = prediction.features if prediction.log_weights is None else [prediction.log_weights, *prediction.features]
    return [tensor[:, :last][mask_BT] for tensor in whole]
