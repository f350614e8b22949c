"""Weights from other projects: safetensors, pickles, several files with an index.

A pickle is converted to safetensors in a process of its own: python -m pipeline.artifacts.unpickle IN OUT SECONDS.
torch reads nothing but tensors (`weights_only`); the process ends after the file, and may use no more memory, disk and
CPU time than weights of the file's size need. No other code of the project reads a pickle.
"""

import math
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, read_json

WEIGHTS = (
    *("model.safetensors", "pytorch_model.bin", "model.ckpt"),
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt"),
)
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")  # of weights in several files
SECONDS, SPEED = 60, 10_000_000  # CPU seconds that a pickle may take, plus one for each SPEED bytes of the file
PATIENCE = 10  # wall-clock time may be this many times the CPU time, since a disk may be slow
MULTIPLE = 4  # tensors may take this many times the file's size, since several names may share a tensor
SLACK = 1 << 30  # bytes of memory that reading takes for a file of any size


def weights_files(source: Path) -> list[Path]:
    """Return the file with the weights, or the files that an index lists. Raises PipelineError if they are missing."""
    existing = [source / name for name in WEIGHTS if (source / name).is_file()]
    files = existing[:1] or [source / name for name in shards(source)]
    if not files:
        raise PipelineError(f"{source} holds none of {', '.join((*WEIGHTS, *INDICES))}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise PipelineError(f"{source} holds no {missing[0]}, which its index lists: fetch the whole folder")
    return files


def shards(source: Path) -> list[str]:
    """Return the file names in an index of weights, or an empty list without one. Raises PipelineError for paths."""
    for name in INDICES:
        if (path := source / name).is_file():
            listed = as_object(f"{path}: weight_map", read_json(path).get("weight_map"))
            names = sorted({str(file) for file in listed.values()})
            if odd := [file for file in names if not re.fullmatch(r"\w[\w.-]*\.(safetensors|bin)", file)]:
                raise PipelineError(f"{path} lists {odd[0]!r}: expected names of files next to it")
            return names
    return []


def as_object(where: str, value: Any) -> dict[str, Any]:
    """Return `value`. Raises PipelineError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise PipelineError(f"{where} holds a {type(value).__name__}, expected an object")
    return value


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """Return the tensors of all files, by name. Raises PipelineError if a file cannot be read."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = _read(file)
        if twice := sorted(set(tensors) & set(part)):
            raise PipelineError(f"{file} holds {twice[0]}, which another file of its index holds, too")
        tensors |= part
    return tensors


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder) / "model.safetensors"
            _convert(path.resolve(), converted)
            return load_file(converted)
    except SafetensorError as error:
        raise PipelineError(f"{path} cannot be read: {error}") from None


def _convert(path: Path, converted: Path) -> None:
    """Convert a pickle. Raises PipelineError if it holds anything but weights, or needs more than such weights do."""
    seconds = SECONDS + path.stat().st_size // SPEED
    command = [sys.executable, "-m", "pipeline.artifacts.unpickle", str(path), str(converted), str(seconds)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, cwd=ROOT, timeout=PATIENCE * seconds
        )
    except subprocess.TimeoutExpired:
        reason = f"it took more than {PATIENCE * seconds} seconds, far more than weights of its size do"
    else:
        if not process.returncode:
            return
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        if process.returncode == -signal.SIGXCPU:
            reason = f"it took more than {seconds} seconds of CPU time, far more than weights of its size do"
        elif process.returncode < 0:
            reason = (
                f"the process that read it was ended by {signal.Signals(-process.returncode).name}: it is damaged, "
                "made to harm, or this machine is short of memory"
            )
    raise PipelineError(f"{path} cannot be read as weights alone: {reason}")


# -- in a process of its own -------------------------------------------------------------------------------------------


def limit_resources(size: int, seconds: int) -> None:
    """Limit the resources of this process from now on. torch reads on one thread, since each thread reserves memory."""
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


def require_tensors(content: object) -> dict[str, Tensor]:
    """Return the tensors by name. Ends the process with a message if there is anything else."""
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):  # a trainer's checkpoint
        content = content["state_dict"]
    if not isinstance(content, dict):
        sys.exit(f"it holds a value of type {type(content).__name__}, expected tensors by name")
    if odd := [name for name, value in content.items() if not isinstance(value, Tensor)]:
        sys.exit(f"{odd[0]!r} holds a value of type {type(content[odd[0]]).__name__}, expected tensors by name")
    return content


def main(source: Path, target: Path, seconds: int) -> None:
    size = source.stat().st_size
    limit_resources(size, seconds)
    tensors = require_tensors(torch.load(source, map_location="cpu", weights_only=True))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > MULTIPLE * size:
        sys.exit(f"its tensors come to {total} bytes, expected at most {MULTIPLE} times the file's {size}")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except MemoryError:
        sys.exit("it needs more memory than weights of its size do")
