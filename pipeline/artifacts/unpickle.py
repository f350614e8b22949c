"""Pickled weights -> safetensors, in a process of its own: python -m pipeline.artifacts.unpickle IN OUT SECONDS.

torch reads nothing but tensors (`weights_only`); the process ends with the file, whatever it held, and takes no more
memory, disk and CPU time than weights of the file's size need. The one place of the project where a pickle is read.
"""

import math
import resource
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

MULTIPLE = 4  # of the file's size, at most, that its tensors come to: one may stand under several names
SLACK = 1 << 30  # bytes of memory that reading takes whatever the size


def limit_resources(size: int, seconds: int) -> None:
    """Of this process, from now on. torch reads on one thread: each other one would reserve memory for itself."""
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + 2 * MULTIPLE * size + SLACK),
        (resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds),
        (resource.RLIMIT_FSIZE, MULTIPLE * size + SLACK // 8),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def tensors_of(found: object) -> dict[str, torch.Tensor]:
    """By name. Ends the process with a message where there is anything else."""
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):  # a trainer's checkpoint
        found = found["state_dict"]
    if not isinstance(found, dict):
        sys.exit(f"it holds a value of type {type(found).__name__}, expected tensors by name")
    if odd := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        sys.exit(f"{odd[0]!r} holds a value of type {type(found[odd[0]]).__name__}, expected tensors by name")
    return found


def main(source: Path, target: Path, seconds: int) -> None:
    size = source.stat().st_size
    limit_resources(size, seconds)
    tensors = tensors_of(torch.load(source, map_location="cpu", weights_only=True))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > MULTIPLE * size:
        sys.exit(f"its tensors come to {total} bytes, expected at most {MULTIPLE} times the file's {size}")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except MemoryError:
        sys.exit("it needs more memory than weights of its size do")
