"""Workers of a pool (workers.py): what they are asked for, and which CPUs and GPUs each gets.

Without Ray: workers are plain classes, which tests, estimates and benches call in their own process.
"""

import logging
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
        """Loads the target."""

    def work(self, task: Any) -> Any:
        """Returns the task's record: the same whoever does it, and however often."""


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed while it worked on a task."""

    items: tuple[str, ...]  # of the task, in the worker's last heartbeat
    reason: str
    exception: BaseException | None = None  # from the worker; None: its process died or hung


# Takes a task and the failure of its worker; returns the task for the next try, or raises PipelineError to end the job.
RetryPolicy = Callable[[Any, WorkerFailure], Any]


@dataclass(frozen=True)
class Crew:
    """How many workers there are and what each gets: keys of one section of the recipe."""

    section: str  # its name, for messages
    workers: int
    cpus: int  # of each
    gpus: float | None  # of each; None: one where a node has any
    device: str  # target.device
    hang_seconds: int
    all_at_once: bool = False  # fewer workers than asked for are refused


def room_for(crew: Crew, nodes: list[dict[str, float]]) -> float:
    """GPUs of one worker, on nodes with these resources. Not asked for: one where a node has any and the target is not
    to run on a CPU, else none. Raises PipelineError where there is no room for one worker, or not for all of a crew
    that works at once.
    """
    on_gpu = crew.device == "cuda" or (crew.device != "cpu" and any(node.get("GPU", 0) for node in nodes))
    gpus = float(on_gpu) if crew.gpus is None else crew.gpus
    if on_gpu and not gpus:  # Ray would not know that one is taken
        raise PipelineError(
            f"{crew.section}.gpus_per_worker=0, but target.device={crew.device!r} would have every worker of a node on "
            "its first GPU. Leave it out (one GPU a worker), or set target.device='cpu'"
        )
    wanted = {"CPU": crew.cpus, "GPU": gpus}
    room = sum(
        min(int(node.get(kind, 0) / amount + 1e-9) for kind, amount in wanted.items() if amount) for node in nodes
    )
    if room >= crew.workers:
        return gpus
    cpus, most = (max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted)
    lack = (
        f"{crew.section}.workers={crew.workers} want {crew.cpus} CPUs and {gpus:g} GPUs each, but the nodes have at "
        f"most {cpus:g} CPUs and {most:g} GPUs, and room for {room}"
    )
    if room == 0 or crew.all_at_once:
        raise PipelineError(
            f"{lack}. Lower {crew.section}.workers or what each gets (an engine's GPUs: target.tensor_parallel), or "
            "start larger nodes"
        )
    log.warning("%s now: the others wait", lack)
    return gpus
