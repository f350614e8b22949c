"""What all accelerators have in common, asked through torch.accelerator: CUDA, ROCm and XPU take the same branches.

What is one maker's alone (CUDA graphs, the properties of a device) says so where it is used. The tests have an
accelerator that refuses and counts: tests/strict.py.
"""

import time
from typing import Any

import torch
from torch import Tensor


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
