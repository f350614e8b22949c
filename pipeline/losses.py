"""The drafts' losses as sums over trained positions; whoever knows the global batch forms the ratio.

Smooth L1 on features (beta 1, mean over D) and soft cross-entropy against the target's own head (EAGLE; Jakiro,
section on training). The teacher's probabilities are recomputed from the stored features: no logits are stored.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batch import Batch

Head = Callable[[Tensor], Tensor]
CHUNK_LOGITS = 1 << 25  # numbers of one (rows, U) tensor: bounds the memory of the vocabulary-wide part


class _SoftCrossEntropy(torch.autograd.Function):
    """Per branch, the sum of -p.log q over its rows. The gradient is formed in the forward: no logits outlive a chunk.

    The teacher's p is computed once for all branches, whose rows it shares.
    """

    @staticmethod
    def forward(ctx, teacher_MD: Tensor, head: Head, chunk: int, rows_of: list[Tensor], *hidden_of: Tensor):
        """``rows_of[b]`` (bool [M]) are the teacher's rows that branch b answers with the rows of ``hidden_of[b]``."""
        device = teacher_MD.device
        totals = [torch.zeros((), device=device) for _ in hidden_of]
        agrees = [torch.zeros((), dtype=torch.long, device=device) for _ in hidden_of]
        gradients = [torch.empty_like(hidden) if hidden.requires_grad else None for hidden in hidden_of]
        used = [0] * len(hidden_of)
        for first in range(0, len(teacher_MD), chunk):
            teacher_logits = head(teacher_MD[first : first + chunk]).float()
            best, p = teacher_logits.argmax(-1), teacher_logits.softmax(-1)
            for branch, hidden in enumerate(hidden_of):
                rows = rows_of[branch][first : first + chunk]
                count = int(rows.sum())
                mine = slice(used[branch], used[branch] + count)
                used[branch] += count
                whole = count == len(rows)
                loss, agree, gradient = _chunk(
                    hidden[mine],
                    p if whole else p[rows],
                    best if whole else best[rows],
                    head,
                    gradients[branch] is not None,
                )
                totals[branch] += loss
                agrees[branch] += agree
                if gradient is not None:
                    gradients[branch][mine] = gradient
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*agrees)
        return (*totals, *agrees)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        gradients = [
            None if g is None else g * up.to(g.dtype) for g, up in zip(ctx.saved_tensors, upstream, strict=False)
        ]
        return None, None, None, None, *gradients


def _chunk(hidden: Tensor, p: Tensor, best: Tensor, head: Head, differentiate: bool):
    """(sum of -p.log q, rows whose argmax is the teacher's, gradient to `hidden`): with logits z, d/dz = q - p."""
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_(differentiate)
        logits = head(hidden)
    z = logits.detach().float()
    log_partition = z.logsumexp(-1)
    loss = (log_partition - torch.einsum("mv,mv->m", p, z)).sum()
    agree = (z.argmax(-1) == best).sum()
    if not differentiate:
        return loss, agree, None
    slope = torch.exp(z - log_partition[:, None]).sub_(p)
    return loss, agree, torch.autograd.grad(logits, hidden, slope.to(logits.dtype))[0]


def branch_sums(
    predictions: dict[int, Tensor], batch: Batch, head: Head, vocabulary: int
) -> dict[int, dict[str, Tensor]]:
    """By horizon, sums over its trained positions: "regression", "classification", "agree" (top-1), "positions".

    Parameters: ``predictions[h]`` (B, T, D) answers at i with f_{i+h}; `head` gives logits over `vocabulary` ids.
    """
    inputs = batch.labels_BTD.shape[1]
    answered = {}  # horizon -> bool (B, T) over LABELS: the label of input i stands at i + h - 1
    for horizon in predictions:
        mask_BT = torch.zeros_like(batch.trained[horizon])
        mask_BT[:, horizon - 1 :] = batch.trained[horizon][:, : inputs + 1 - horizon]
        answered[horizon] = mask_BT
    any_BT = torch.stack(list(answered.values())).any(0)
    teacher_MD = batch.labels_BTD[any_BT]
    rows_of = [mask_BT[any_BT] for mask_BT in answered.values()]
    hidden_of = [
        prediction_BTD[:, : inputs + 1 - horizon][batch.trained[horizon][:, : inputs + 1 - horizon]]
        for horizon, prediction_BTD in predictions.items()
    ]
    chunk = max(1, CHUNK_LOGITS // vocabulary)
    found = _SoftCrossEntropy.apply(teacher_MD, head, chunk, rows_of, *hidden_of)
    sums = {}
    for place, horizon in enumerate(predictions):
        hidden, label = hidden_of[place], teacher_MD[rows_of[place]]
        sums[horizon] = {
            "regression": F.smooth_l1_loss(hidden.float(), label.float(), reduction="none").mean(-1).sum(),
            "classification": found[place],
            "agree": found[len(predictions) + place],
            "positions": torch.tensor(len(hidden), device=hidden.device),
        }
    return sums
