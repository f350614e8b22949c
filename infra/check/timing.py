"""Times, memory and goals of the parts of `infra.check`."""

from collections.abc import Callable
from typing import Any

import torch

from infra.check.shapes import GIB, device
from pipeline.basics.accelerator import synchronized_time

CALLS = 10  # timed calls, after one that warms up


def time_call(work: Callable[[], Any]) -> float:
    """Return the mean seconds of a call, over `CALLS` after one that warms up."""
    work()
    begin = synchronized_time(torch.device(device()))
    for _ in range(CALLS):
        work()
    return (synchronized_time(torch.device(device())) - begin) / CALLS


def peak_memory() -> dict[str, float]:
    """Return the largest GPU memory that this process has allocated, in GiB."""
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)} if device() == "cuda" else {}


def judge(goals: dict[str, tuple[float, str, float]]) -> dict[str, dict[str, str]]:
    """Return whether each figure reaches its goal, as text; a goal is (figure, ">=" or "<=", bound)."""
    verdicts = {}
    for name, (figure, relation, bound) in goals.items():
        is_met = figure >= bound if relation == ">=" else figure <= bound
        verdicts[f"{name} {relation} {bound:g}"] = f"{'met' if is_met else 'MISSED'}: {figure:.3g}"
    return {"goals": verdicts}
