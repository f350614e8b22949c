"""Workers of a pool (workers.py) and ranks of a training: what they are asked for, and which GPUs each gets.

Without Ray: workers are plain classes, which tests, estimates and benches call in their own process.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.basics.errors import PipelineError

# What a user names GPUs with, by numbers or UUIDs, and DeepSpeed's launcher overwrites in its ranks: of CUDA and ROCm,
# of XPU. (It leaves ROCm's own HIP_VISIBLE_DEVICES alone, which goes before the first.)
CHOICES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # in the environment of a process that is to see none
Heartbeat = Callable[[tuple[str, ...]], None]  # takes the ids of the items that are worked on from now on
log = logging.getLogger(__name__)


class Task(Protocol):
    @property
    def title(self) -> str:
        """What messages call it."""


class Worker(Protocol):
    def ready(self) -> None:
        """Loads the target. A call of its own: an exception in an actor's constructor loses its message."""

    def work(self, task: Any) -> Any:
        """Returns the task's record: the same whoever does it, and however often."""


@dataclass(frozen=True)
class Loss:
    """What is known of a worker that was lost while it worked on a task."""

    busy: tuple[str, ...]  # the items that its last heartbeat named
    why: str
    raised: bool  # the task raised an exception; else the worker died or hung


class Losses(Protocol):
    def retry(self, task: Any, loss: Loss) -> Any:
        """The task as it is to be tried next. Raises PipelineError to end the job."""


@dataclass(frozen=True)
class Crew:
    """How many workers there are and what each gets: keys of one section of the recipe."""

    section: str  # its name, for messages
    workers: int
    cpus: int  # of each
    gpus: float | None  # of each; None: one where a node has any
    device: str  # target.device
    hang_seconds: int
    tasks_each: int = 2  # held by a worker: the second waits there, so that the worker never waits for the driver
    all_at_once: bool = False  # fewer workers than asked for are refused


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


def room_for(crew: Crew, nodes: list[dict[str, float]]) -> float:
    """GPUs of one worker, on nodes with these resources. Raises PipelineError where no node has room for one worker, or
    the nodes together have no room for all of a crew that works at once.
    """
    gpus = gpus_each(crew.section, crew.gpus, crew.device, any(node.get("GPU", 0) for node in nodes))
    wanted = {"CPU": crew.cpus, "GPU": gpus}
    keys = f"{crew.section}.workers={crew.workers} want {crew.cpus} CPUs and {gpus:g} GPUs each"
    room = sum(
        min(int(node.get(kind, 0) / amount + 1e-9) for kind, amount in wanted.items() if amount) for node in nodes
    )
    if room == 0:
        largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
        raise PipelineError(
            f"no node has room for one worker: {keys}, the nodes have at most {largest['CPU']:g} CPUs and "
            f"{largest['GPU']:g} GPUs. Change the recipe's section [{crew.section}], or start larger nodes"
        )
    if room < crew.workers:
        shared = (
            f". Two share a GPU with {crew.section}.gpus_per_worker=0.5"
            if gpus == 1 and crew.section == "features"
            else ""
        )
        if crew.all_at_once:
            raise PipelineError(f"{keys}, but the nodes have room for {room}: lower {crew.section}.workers{shared}")
        log.warning("%s, but the nodes have room for %d now: the others wait%s", keys, room, shared)
    return gpus


# -- ranks -----------------------------------------------------------------------------------------------------------


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
