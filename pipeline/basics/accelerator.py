"""What all accelerators have in common, asked through torch.accelerator: CUDA, ROCm and XPU take the same branches.

What is one maker's alone (CUDA graphs, the properties of a device) says so where it is used. The tests have an
accelerator that refuses and counts: tests/strict.py.
"""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipeline.basics.errors import PipelineError


def kind() -> torch.device | None:
    """The kind of this process's accelerator; None where torch sees none, or Apple's, which has no float64 to draw
    with. Nothing is set up for the answer: a process may still fork, or hide GPUs from itself.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else found


def accelerator() -> torch.device | None:
    """This process's own, with its number."""
    found = kind()
    return found and torch.device(found.type, torch.accelerator.current_device_index())


@cache
def bfloat16_cost(device: torch.device) -> float:
    """Time of a product in bfloat16 over that in float32, on the device: 0.1 to 0.6 where it is computed natively, 2 to
    10 where it is emulated. CUDA and ROCm know; elsewhere, and under oneDNN's limits on its instruction set, no
    question to torch gives the answer on AMX, AVX-512, AVX2 and Arm, so products are timed: 0.1 s.
    """
    if device.type == "cuda":
        return 0.5 if torch.cuda.is_bf16_supported(including_emulation=False) else 10.0
    seconds = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    for _ in range(5):
        for dtype in seconds:
            states_ND, weight_DD = (torch.ones(n, 1024, device=device, dtype=dtype) for n in (128, 1024))
            begin = now(device)
            linear(states_ND, weight_DD)
            seconds[dtype] = min(seconds[dtype], now(device) - begin)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def now(device: torch.device) -> float:
    """Seconds, once the device has done all that it was asked for: what begins or ends here is timed alone."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def sent(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The host's numbers, a tensor or what makes one, on a device, for which the host does not stand still: they leave
    from memory that the device reads by itself.
    """
    here = torch.as_tensor(numbers, dtype=dtype)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def resolve_device(name: str) -> torch.device:
    """The device of this name; of "spread" the first. Where the target's hidden states arrive, `Target.device` says."""
    here = accelerator()
    if name == "cpu" or (name == "auto" and here is None):
        return torch.device("cpu")
    if here is None or (name == "cuda" and here.type != "cuda"):
        what = "no accelerator" if here is None else f"one of kind {here.type!r}"
        raise PipelineError(f"target.device={name!r}, but torch sees {what} here: use 'auto' or 'cpu'")
    return here
