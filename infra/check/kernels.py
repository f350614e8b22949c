"""Parts of `infra.check` that time single kernels of training: attention of new widths, the training-time test's
attention, the vocabulary losses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from infra.check.shapes import CheckSettings, device
from infra.check.timing import judge, time_call
from pipeline.basics.accelerator import WIDTH_STEP, synchronized_time
from pipeline.drafts.parts.attention import steps
from pipeline.drafts.parts.attention.steps import StepMask, attend, find_kernel
from pipeline.drafts.parts.losses import classify, renormalised_labels
from pipeline.lm.attention import WITHOUT_CUDNN, additive_mask, causal_mask
from pipeline.lm.model import DTYPES

WIDTHS = 10  # number of widths that are new to cuDNN
TTT_STEPS = 7  # as EAGLE-3's
LOSS_ROWS = 1024


def _random(settings: CheckSettings, *shape: int) -> Tensor:
    dtype = DTYPES[settings.half_dtype]
    return torch.randn(shape, device=device(), dtype=dtype, requires_grad=True)


def _heads(settings: CheckSettings) -> tuple[int, int, int]:
    """Return the heads, the heads of keys and values, and the width of a head."""
    config = settings.shape.config
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return heads, groups, config["hidden_size"] // heads


def measure_widths(settings: CheckSettings) -> dict[str, Any]:
    """Time masked attention, forward and backward, at widths that have not occurred, then at the same again; by default
    and without cuDNN. Training rounds widths up to multiples of `WIDTH_STEP`: what a new one costs, it saves.
    """
    heads, _, size = _heads(settings)

    def seconds(width: int) -> float:
        query, key, value = (_random(settings, 2, heads, width, size) for _ in range(3))
        mask = additive_mask(causal_mask(0, width, query.device), query.dtype)[None, None]
        begin = synchronized_time(query.device)
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
        return synchronized_time(query.device) - begin

    largest, figures = settings.recipe().data.max_length, {}
    widths = [largest - 3 * number - 1 for number in range(WIDTHS)]
    seconds(largest)  # loads the libraries
    for name, kernels in (("default", None), ("without_cudnn", WITHOUT_CUDNN)):
        for turn in ("new", "again"):
            if kernels is None:
                took = [seconds(width) for width in widths]
            else:
                with sdpa_kernel(kernels):
                    took = [seconds(width) for width in widths]
            figures[f"{name}_{turn}_ms"] = round(1e3 * sum(took) / WIDTHS, 3)
    return figures | {"rounded_to": WIDTH_STEP}


def measure_steps(settings: CheckSettings) -> dict[str, Any]:
    """Time the attention of the last step of EAGLE-3's training-time test, forward and backward: merged, and under a
    mask over the keys of all steps. The goal: a device has a kernel for the merged form, and it is faster.
    """
    heads, groups, size = _heads(settings)
    width, module = min(settings.recipe().data.max_length, 2048), torch.nn.Module()
    module.num_key_value_groups = heads // groups  # type: ignore[assignment]
    query = _random(settings, 2, heads, width, size)
    keys, values = ([_random(settings, 2, groups, width, size) for _ in range(TTT_STEPS)] for _ in range(2))
    places = torch.arange(width, device=query.device)
    mask = StepMask(TTT_STEPS, places, [(slice(None), 0, width)])

    def attention() -> None:
        attend(module, query, keys, values, mask, scaling=size**-0.5)[0].sum().backward()

    kernel = find_kernel(query.device, query.dtype, heads, groups, size)
    figures = {"kernel": kernel.__name__ if kernel else "none", "merged_ms": round(1e3 * time_call(attention), 3)}
    with mock.patch.object(steps, "find_kernel", lambda *_: None):
        figures["masked_ms"] = round(1e3 * time_call(attention), 3)
    ratio = figures["masked_ms"] / figures["merged_ms"]
    return figures | {"ratio": round(ratio, 3)} | judge({"masked over merged": (ratio, ">=", 1.0)})


def measure_loss(settings: CheckSettings) -> dict[str, Any]:
    """Time the soft cross-entropy of rows over the vocabulary with its gradient, and the teacher's distribution, eager
    and compiled (`train.compile`), per 1,000 rows; and a copy of the logits.
    """
    vocabulary, dtype = settings.shape.config["vocab_size"], DTYPES[settings.half_dtype]
    rows = min(LOSS_ROWS, (1 << 28) // vocabulary)
    target_logits, logits = torch.randn(2, rows, vocabulary, device=device(), dtype=dtype)

    def per_row(call: Callable[[], object]) -> float:
        return round(1e6 * time_call(call) / rows, 4)

    def compute(labels: Callable[..., Any], loss: Callable[..., Any]) -> object:
        return loss(logits, "soft-ce", *labels(target_logits), True)

    compiled = [torch.compile(function, **settings.compiler) for function in (renormalised_labels, classify)]
    return {
        "eager_ms": per_row(partial(compute, renormalised_labels, classify)),
        "compiled_ms": per_row(partial(compute, *compiled)),
        "a_copy_ms": per_row(logits.clone),
        "rows": rows,
    }
