"""Functions common to all accelerators, by torch.accelerator: CUDA, ROCm and XPU take the same branches.

Code for one vendor only (CUDA graphs, the properties of a device) says so where it is used. The tests use a simulated
accelerator that refuses illegal transfers and counts waits: tests/strict.py.
"""

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipeline.basics.errors import PipelineError

log = logging.getLogger(__name__)

COMPILATIONS = 256  # of one function, at most: one for every width, capacity, kind of loss; the tuner tries many
WIDTH_STEP = 128  # inputs: the widths of batches on an accelerator are multiples of it


def accelerator_kind() -> torch.device | None:
    """Return the kind of this process's accelerator; None where torch sees none, or only Apple's, which has no float64
    to draw with. Nothing is initialised by this: a process may still fork, or hide GPUs from itself.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "mps" else device


def current_accelerator() -> torch.device | None:
    """Return this process's own accelerator, with its index; None without one."""
    device = accelerator_kind()
    return device and torch.device(device.type, torch.accelerator.current_device_index())


@cache
def bfloat16_cost(device: torch.device) -> float:
    """Return the time of a product in bfloat16 divided by that in float32, on the device: 0.1 to 0.6 where it is
    computed natively, 2 to 10 where it is emulated. CUDA and ROCm report it; elsewhere, and under oneDNN's limits on
    its instruction set, no query of torch gives the answer on AMX, AVX-512, AVX2 and Arm, so products are timed: 0.1 s.
    """
    if device.type == "cuda":
        return 0.5 if torch.cuda.is_bf16_supported(including_emulation=False) else 10.0
    seconds = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    for _ in range(5):
        for dtype in seconds:
            states_ND, weight_DD = (torch.ones(n, 1024, device=device, dtype=dtype) for n in (128, 1024))
            begin = synchronized_time(device)
            linear(states_ND, weight_DD)
            seconds[dtype] = min(seconds[dtype], synchronized_time(device) - begin)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds after the device has finished all queued work, so that an interval between two calls
    measures only the work in it.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers (a tensor, or anything that makes one) to the device without blocking the host: they are copied from
    pinned memory.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pad_width(inputs: int, device: torch.device) -> int:
    """Return the width of rows of at most this many inputs: on an accelerator a multiple of WIDTH_STEP.

    cuDNN's attention makes a plan, which takes tens of milliseconds, for every new width, and dialogues have nearly as
    many lengths as there are dialogues.
    """
    return inputs if device.type == "cpu" else -(-inputs // WIDTH_STEP) * WIDTH_STEP


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; for "spread" the first one. `Target.device` is the device where the target's
    hidden states arrive.
    """
    device = current_accelerator()
    if name == "cpu" or (name == "auto" and device is None):
        return torch.device("cpu")
    if device is None or (name == "cuda" and device.type != "cuda"):
        description = "no accelerator" if device is None else f"one of kind {device.type!r}"
        raise PipelineError(f"target.device={name!r}, but torch sees {description} here: use 'auto' or 'cpu'")
    return device


def compile_or_stay_eager(function: Callable[..., Any], description: str, **options: Any) -> Callable[..., Any]:
    """Compile a function, with options of `torch.compile`. If the compiler refuses it, it stays eager, with a warning;
    errors of the function itself are raised.
    """
    from torch._dynamo.exc import TorchDynamoException  # which takes a second to import

    torch._dynamo.config.recompile_limit = COMPILATIONS
    compiled, eager = torch.compile(function, **options), False

    def run(*arguments: Any) -> Any:
        nonlocal eager
        if not eager:
            try:
                return compiled(*arguments)
            except TorchDynamoException as error:
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
                log.warning(f"{description} cannot be compiled here, and stay eager ({reason})")
                eager = True
        return function(*arguments)

    return run
