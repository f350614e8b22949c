"""The workers of a pool (workers.py): their interface, and the CPUs and GPUs that each gets.

This file does not import Ray: workers are plain classes, which tests, estimates and benches call in their own process.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import BATCH_INVARIANT

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"  # ROCm reads both, HIP's first
NO_GPUS = {CUDA: "", HIP: ""}  # the environment of a process that must not see any GPU
FORWARDED_VARIABLES = (BATCH_INVARIANT,)  # copied from the driver's environment to workers on every node
NO_TASK_YET: Any = object()  # yielded by a source of tasks that has none for now, but may have one later
Watch = Callable[[int, str], None]  # takes the finished amount of the tasks in work, and the workers' activities
log = logging.getLogger(__name__)


class Heartbeat(Protocol):
    def __call__(self, items: tuple[str, ...], done: int = 0) -> None:
        """Name the items that are worked on from now on, and the finished amount of the task, in the job's unit."""


class Task(Protocol):
    @property
    def title(self) -> str:
        """The task's name in messages."""


class Worker(Protocol):
    def ready(self) -> None:
        """Load the target."""

    def work(self, task: Any) -> Any:
        """Return the task's record: the same for every worker and every try."""


@dataclass(frozen=True)
class WorkerFailure:
    """A worker that failed while it worked on a task."""

    items: tuple[str, ...]  # items of the task that the worker's last heartbeat named
    reason: str
    exception: BaseException | None = None  # from the worker; None: its process died or hung


# Takes a task and the failure of its worker; returns the task for the next try, or raises PipelineError to end the job.
RetryPolicy = Callable[[Any, WorkerFailure], Any]


@dataclass(frozen=True)
class Crew:
    """The number of workers and the resources of each: keys of one section of the recipe."""

    section: str  # its name, for messages
    workers: int
    cpus: int  # of each
    gpus: float | None  # of each; None: one GPU where a node has any
    device: str  # target.device
    hang_seconds: int
    all_at_once: bool = False  # fewer workers than requested are refused


def require_room(crew: Crew, nodes: list[dict[str, float]]) -> float:
    """Return the GPUs of one worker, on nodes with these resources. Where the recipe names no number: one where a node
    has any and the target may run on a GPU, else none. Raise PipelineError where there is no room for one worker, or
    not for all workers of a crew that works all at once.
    """
    on_gpu = crew.device == "cuda" or (crew.device != "cpu" and any(node.get("GPU", 0) for node in nodes))
    gpus = float(on_gpu) if crew.gpus is None else crew.gpus
    if on_gpu and not gpus:  # Ray would not count a GPU as taken
        raise PipelineError(
            f"{crew.section}.gpus_per_worker=0, but target.device={crew.device!r} would have every worker of a node on "
            "its first GPU. Leave it out (one GPU a worker), or set target.device='cpu'"
        )
    required = {"CPU": crew.cpus, "GPU": gpus}
    capacity = sum(
        min(int(node.get(kind, 0) / amount + 1e-9) for kind, amount in required.items() if amount) for node in nodes
    )
    if capacity >= crew.workers:
        return gpus
    max_cpus, max_gpus = (max((node.get(kind, 0) for node in nodes), default=0) for kind in required)
    shortage = (
        f"{crew.section}.workers={crew.workers} require {crew.cpus} CPUs and {gpus:g} GPUs each, but the nodes have at "
        f"most {max_cpus:g} CPUs and {max_gpus:g} GPUs, and room for {capacity}"
    )
    if capacity == 0 or crew.all_at_once:
        raise PipelineError(
            f"{shortage}. Lower {crew.section}.workers or what each gets (an engine's GPUs: target.tensor_parallel), "
            "or start larger nodes"
        )
    log.warning("%s now: the remaining workers wait", shortage)
    return gpus
