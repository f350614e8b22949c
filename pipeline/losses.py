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
    """Sum of -p.log q over rows, in chunks; the gradient is formed in the forward, so no logits outlive their chunk."""

    @staticmethod
    def forward(ctx, hidden_MD: Tensor, teacher_MD: Tensor, head: Head, chunk: int):
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        agree = torch.zeros((), dtype=torch.long, device=hidden_MD.device)
        gradient = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        for rows in range(0, len(hidden_MD), chunk):
            part = slice(rows, rows + chunk)
            teacher_logits = head(teacher_MD[part]).float()
            probabilities = teacher_logits.softmax(-1)
            with torch.enable_grad():
                hidden = hidden_MD[part].detach().requires_grad_(gradient is not None)
                logits = head(hidden).float()
                loss = -(probabilities * logits.log_softmax(-1)).sum()
            if gradient is not None:
                gradient[part] = torch.autograd.grad(loss, hidden)[0]
            total += loss.detach()
            agree += (logits.detach().argmax(-1) == teacher_logits.argmax(-1)).sum()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agree)
        return total, agree

    @staticmethod
    def backward(ctx, upstream: Tensor, _agree: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def branch_sums(prediction_BTD: Tensor, batch: Batch, horizon: int, head: Head, vocabulary: int) -> dict[str, Tensor]:
    """Sums over the trained positions of one branch: "regression", "classification", "agree" (top-1), "positions".

    Parameters: ``prediction_BTD`` answers at i with f_{i+h}; `head` gives logits over `vocabulary` ids.
    """
    mask_BT = batch.trained[horizon]
    kept = prediction_BTD.shape[1] + 1 - horizon  # the label of i stands at i + horizon - 1
    mask = mask_BT[:, :kept]
    prediction_MD = prediction_BTD[:, :kept][mask]
    label_MD = batch.labels_BTD[:, horizon - 1 :][mask]
    regression = F.smooth_l1_loss(prediction_MD.float(), label_MD.float(), reduction="none").mean(-1).sum()
    chunk = max(1, CHUNK_LOGITS // vocabulary)
    classification, agree = _SoftCrossEntropy.apply(prediction_MD, label_MD, head, chunk)
    positions = torch.tensor(len(label_MD), device=label_MD.device)
    return {"regression": regression, "classification": classification, "agree": agree, "positions": positions}
