"""Which GPUs a process gets: a Ray worker so many (the dump's and evaluation's, where Ray's nodes are known), a rank of
training those that the user chose.
"""

import os
import sys

import torch

from pipeline.basics.errors import PipelineError

# What a user names GPUs with, by numbers or UUIDs, and DeepSpeed's launcher overwrites in its ranks: of CUDA and ROCm,
# of XPU. (It leaves ROCm's own HIP_VISIBLE_DEVICES alone, which goes before the first.)
CHOICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # in the environment of a process that is to see none


def gpus_each(section: str, asked: float | None, device: str, there: bool) -> float:
    """GPUs of one worker. Not asked for: one where a node has any (`there`) and the target is not to run on a CPU, else
    none.

    `section` is the recipe's, for the message; `device` is ``target.device``. Raises PipelineError where none were
    asked for and the target would take one all the same: Ray does not know that it is taken, so all workers of a node
    would share its first.
    """
    if device == "cpu":
        return asked or 0
    if asked is None:
        return 1 if there or device == "cuda" else 0
    if asked == 0 and (there or device == "cuda"):
        raise PipelineError(
            f"{section}.gpus_per_worker=0, but target.device={device!r} would have every worker of a node on its "
            "first GPU. Leave it out (one GPU a worker), or set target.device='cpu'"
        )
    return asked


def hide_gpus(each: float) -> None:
    """In a worker, before it asks for a device: Ray hides the other workers' GPUs only from one that takes some."""
    if not each:
        os.environ |= NO_GPUS


def _chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in CHOICES if os.environ.get(name)}


def launch_command(launcher: list[str], script: str, ranks: int | None, device: str) -> list[str]:
    """`launcher`, DeepSpeed's, starting `ranks` of the script, else one for each accelerator that is visible here.
    `device` is ``target.device``.

    Told how many ranks to start, it gives them accelerators 0, 1, ... whatever the user chose; not told, it cannot read
    UUIDs. So it is not shown the choice, and each rank gets that back from `env`.
    """
    chosen = _chosen()
    hidden = ["env", *(f"--unset={name}" for name in chosen)] if chosen else []
    rank = [script]
    if chosen:  # hidden, it would count all that there are
        ranks = ranks or (1 if device == "cpu" else max(torch.accelerator.device_count(), 1))
    if chosen and device != "cpu":
        choice = [f"{name}={value}" for name, value in chosen.items()]
        rank = ["--no_python", "--no_local_rank", "env", *choice, sys.executable, "-u", script]
    return [*hidden, *launcher, *(["--num_accelerators", str(ranks)] if ranks else []), *rank]


def require_gpus(ranks: int) -> None:
    """Raises PipelineError where there are accelerators, but not one for each rank."""
    there = torch.accelerator.device_count()
    if 0 < there < ranks:
        chosen = ", ".join(f"{name}={value}" for name, value in _chosen().items())
        raise PipelineError(
            f"train.ranks={ranks}, but the accelerators that are visible{chosen and f' ({chosen})'} are {there}, and "
            "each rank takes one: lower train.ranks, or choose more of them"
        )
