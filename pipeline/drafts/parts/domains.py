"""What a dialogue is, by the marks that its tokens bear: for experts that are routed by domain."""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

# Of a token's text. A dialogue belongs to the first domain whose marks at least `LEAST` of its trained tokens bear, and
# to the last one without.
MARKS = {
    "code": re.compile(r"```|[{}]|\(\)|\);|(?<!=)==(?!=)|->|=>|\\_"),
    "maths": re.compile(r"^\s*[\d*/-]*[=+^×÷√∑∫≤≥±][\d*/+^-]*\s*$|\\(frac|sqrt|sum|times)"),
}
DOMAINS = (*MARKS, "chat")
LEAST = 0.01


def marks(tokenizer: Any, size: int) -> Tensor:
    """Bool (V, domains with marks) over the target's vocabulary."""
    texts = tokenizer.batch_decode([[token] for token in range(min(len(tokenizer), size))])
    found = torch.zeros(size, len(MARKS), dtype=torch.bool)
    for place, pattern in enumerate(MARKS.values()):
        found[: len(texts), place] = torch.tensor([pattern.search(text) is not None for text in texts])
    return found


def domains(marks_VM: Tensor, batch: "Batch") -> Tensor:
    """Each dialogue's number among `DOMAINS` (N); a dialogue is numbered as by `Batch.sums_by_dialogue`."""
    sums_NM, positions_N = batch.sums_by_dialogue(marks_VM[batch.tokens_BT].float())
    bears_NM = sums_NM >= LEAST * positions_N.clamp_min(1)[:, None]
    last_N1 = torch.ones_like(bears_NM[:, :1])
    return torch.cat([bears_NM, last_N1], dim=1).int().argmax(1)


def surprise(scores_BTE: Tensor, marks_VM: Tensor, batch: "Batch") -> Tensor:
    """The cross-entropy of a gate's scores by domain, summed over trained positions."""
    domains_N = domains(marks_VM, batch)
    sums_NE, _ = batch.sums_by_dialogue(scores_BTE.float().log_softmax(-1))
    return -sums_NE.gather(1, domains_N[:, None]).sum()
