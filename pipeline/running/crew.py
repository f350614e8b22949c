"""Workers of a pool (workers.py): what they are asked for, and which GPUs each gets.

Without Ray: workers are plain classes, which tests, estimates and benches call in their own process.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import BATCH_INVARIANT

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"  # ROCm knows both, and its own goes first
NO_GPUS = {CUDA: "", HIP: ""}  # in the environment of a process that is to see none
PASSED_ON = (BATCH_INVARIANT,)  # of the driver's environment, to workers on every node
NOT_YET: Any = object()  # a source of tasks that has none for now, but may have one later, yields this
Watch = Callable[[int, str], None]  # takes what is done of the tasks in work, and what the workers are doing
log = logging.getLogger(__name__)


class Heartbeat(Protocol):
    def __call__(self, items: tuple[str, ...], done: int = 0) -> None:
        """Name the items that are worked on from now on, and how much of the task is done, as its job counts it."""


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
    """Hides all GPUs from a worker that takes none, before it asks for a device: Ray hides the other workers' GPUs only
    from one that takes some.
    """
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
            f"{largest['GPU']:g} GPUs. Change the recipe's section [{crew.section}] (an engine's GPUs: "
            "target.tensor_parallel), or start larger nodes"
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
