"""Ray actors that work on tasks, and what happens to them. The only file of this stage that imports Ray.

Terms: a worker is an actor with a target; a task is a shard to write. A worker holds at most two tasks, of which the
one given first is running, so that plans stay in the source and workers never wait for the driver.

Guarantees: every task is finished, or the job ends with an error; a worker that dies or hangs is replaced and its tasks
are given out again, unchanged, so the shard is the same as if nothing had happened; a dialogue that costs a worker even
when it is worked on alone, twice, is set aside by id and counted; nothing waits for ever.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.artifacts.provenance import ROOT
from pipeline.basics.errors import PipelineError
from pipeline.basics.public import scrubbed
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import FeaturesConfig
from pipeline.running.cores import require_few, workers_as_everyone
from pipeline.running.gpus import gpus_each, hide_gpus
from pipeline.running.signals import kept_handlers
from preprocess.dump.task import KILLS_WORKERS, ShardTask, Tell, Worker

LOOK_SECONDS = 1.0  # between two looks at the beats of the running tasks
log = logging.getLogger(__name__)


class _Beats:
    """The workers' signs of life, beside the driver: what a worker was busy with is known after it is gone."""

    def __init__(self):
        self._beats: dict[int, tuple[int, tuple[str, ...]]] = {}

    def tell(self, number: int, doc_ids: tuple[str, ...]) -> None:
        self._beats[number] = (self._beats.get(number, (0, ()))[0] + 1, doc_ids)

    def read(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """By worker: how many signs it has given, and the dialogues that it named in the last."""
        return self._beats


class _Employee:
    """What Ray runs: a worker whose signs of life arrive before it does what they announce."""

    def __init__(self, make: Callable[[Tell], Worker], number: int, beats: Any, gpus: float):
        hide_gpus(gpus)
        self._make, self._tell = make, lambda doc_ids: ray.get(beats.tell.remote(number, doc_ids))

    def ready(self) -> None:
        self._worker = self._make(self._tell)
        self._worker.ready()

    def work(self, task: ShardTask) -> Any:
        self._tell(())
        return self._worker.work(task)


@dataclass
class _Worker:
    """An actor and its tasks in the order in which they were given to it."""

    number: int
    actor: Any
    loading: Any  # the reference that answers when the target is loaded; None from then on
    since: float  # when its last sign of life was new, or it was hired
    tasks: dict[Any, ShardTask] = field(default_factory=dict)  # by reference
    beat: int = 0  # signs of life seen


class Pool:
    """Iterate over `records(tasks)`; the pool starts Ray with the first task and shuts it down after the last."""

    def __init__(self, recipe: Recipe, make: Callable[[Tell], Worker], batch_key: str):
        """`batch_key`: the recipe's key for the size of a batch, to be named where one is too large."""
        self._recipe, self._make, self._settings, self._batch_key = recipe, make, recipe.features, batch_key
        self._beats: Any = None
        self._gpus = 0.0  # of a worker; known when Ray's nodes are
        self._hired = 0
        self._workers: list[_Worker] = []
        self._again: deque[ShardTask] = deque()  # tasks whose worker was lost
        self._histories: dict[tuple[str, int], _History] = {}  # by task
        self._ever_ready = False  # has one worker loaded its target? Else the first that cannot ends the job
        self._lost_in_a_row = 0  # workers lost since the last finished shard

    def records(self, tasks: Iterator[ShardTask]) -> Iterator[Any]:
        """What the workers return for their tasks, as they finish. Raises PipelineError; finished shards stay
        finished.
        """
        first = next(tasks, None)
        if first is None:
            return
        self._again.append(first)
        start_ray(self._recipe)
        try:
            self._gpus = room_for(self._recipe)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._beats = ray.remote(num_cpus=0, scheduling_strategy=here)(_Beats).remote()
            self._workers = [self._hire() for _ in range(self._settings.workers)]
            more = True
            while more or self._again or any(worker.tasks for worker in self._workers):
                more = self._hand_out(tasks, more)
                yield from self._collect()
            waiting = sum(worker.loading is not None for worker in self._workers)
            if waiting:
                log.warning("%d of %d workers were never ready: no room, or no time", waiting, len(self._workers))
        except ray.exceptions.RayError as error:
            raise PipelineError(f"Ray failed: {_first_line(error)} Run the job again to continue") from None
        finally:
            ray.shutdown()

    # -- workers ---------------------------------------------------------------------------------------------------

    def _hire(self) -> _Worker:
        settings = self._settings
        remote = ray.remote(num_cpus=settings.cpus_per_worker, num_gpus=self._gpus)(_Employee)
        self._hired += 1
        actor = remote.remote(self._make, self._hired, self._beats, self._gpus)
        return _Worker(self._hired, actor, actor.ready.remote(), time.monotonic())

    def _hand_out(self, tasks: Iterator[ShardTask], more: bool) -> bool:
        """Gives every ready worker two tasks; says whether the plan has more."""
        for held in range(2):
            for worker in self._workers:
                if worker.loading is None and len(worker.tasks) == held:
                    task = self._again.popleft() if self._again else next(tasks, None) if more else None
                    if task is None:
                        return False
                    if not worker.tasks:
                        worker.since = time.monotonic()
                    worker.tasks[worker.actor.work.remote(task)] = task
        return more

    # -- results ---------------------------------------------------------------------------------------------------

    def _collect(self) -> Iterator[Any]:
        """Everything that is finished, or lost, by now; waits one look for something."""
        references = [worker.loading for worker in self._workers if worker.loading is not None]
        references += [reference for worker in self._workers for reference in worker.tasks]
        if not references:  # the last look brought everything, and the plan turned out to have no more
            return
        ray.wait(references, num_returns=1, timeout=LOOK_SECONDS)
        # All that is ready: what is finished but waits to be collected would seem to hang.
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in done:
            worker = next((w for w in self._workers if reference == w.loading or reference in w.tasks), None)
            if worker is not None:  # else of a worker lost a moment ago
                yield from self._answer(worker, reference)
        self._look_for_hangs()

    def _answer(self, worker: _Worker, reference: Any) -> Iterator[Any]:
        try:
            record = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PipelineError) and not (worker.loading is not None and self._ever_ready):
                raise error.cause from None
            self._lose(worker, f"{type(error.cause).__name__}: {_first_line(error.cause)}")
            return
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self._lose(worker, _first_line(error))
            return
        except ray.exceptions.RayError as error:
            raise PipelineError(f"Ray cannot run the workers: {_first_line(error)}") from None
        if reference == worker.loading:
            worker.loading, self._ever_ready = None, True
            return
        task = worker.tasks.pop(reference)
        worker.since, self._lost_in_a_row = time.monotonic(), 0
        if task.set_aside:
            log.warning("%s: set aside, for they kill workers: %s", _name(task), ", ".join(task.set_aside))
        yield record

    def _look_for_hangs(self) -> None:
        now, patience, beats = time.monotonic(), self._settings.hang_seconds, ray.get(self._beats.read.remote())
        for worker in list(self._workers):
            if worker.tasks:
                beat, _ = beats.get(worker.number, (0, ()))
                if beat != worker.beat:
                    worker.beat, worker.since = beat, now
                if now - worker.since > patience:
                    self._lose(worker, f"it gave no sign of life for {patience} s")
        if all(w.loading is not None for w in self._workers) and all(now - w.since > patience for w in self._workers):
            raise PipelineError(
                f"no worker became ready within features.hang_seconds={patience}: is there room on the cluster for "
                f"{self._settings.cpus_per_worker} CPUs and {self._gpus:g} GPUs? Does loading take longer?"
            )

    # -- losses ----------------------------------------------------------------------------------------------------

    def _lose(self, worker: _Worker, why: str) -> None:
        """Replaces a worker that died, hung or failed; its tasks are given out again, the running one after a closer
        look.
        """
        ray.kill(worker.actor)  # one that only seemed dead must not go on writing
        self._lost_in_a_row += 1
        if self._lost_in_a_row > 10 + 3 * self._settings.workers:
            raise PipelineError(
                f"{self._lost_in_a_row} workers were lost in a row, the last one because: {why} Finished shards are "
                "kept: look at the nodes (memory, GPUs) and run the job again to continue"
            )
        queued = list(worker.tasks.values())
        log.warning("a worker was lost (%s): %s", _name(queued[0]) if queued else "idle", why)
        if queued:
            history = self._histories.setdefault((queued[0].split, queued[0].index), _History(self._batch_key))
            _, busy = ray.get(self._beats.read.remote()).get(worker.number, (0, ()))
            queued[0] = history.next_try(queued[0], busy, why)
        self._workers[self._workers.index(worker)] = self._hire()
        self._again.extend(queued)


@dataclass
class _History:
    """What a shard's workers were busy with when they were lost, and what follows from it.

    A loss alone proves nothing (a node may go at any time), so the first on a batch changes nothing. A batch that was
    lost twice has its dialogues worked on one by one; one that is lost alone twice is set aside. Dialogues that came
    through alone are cleared.
    """

    batch_key: str = "features.batch_tokens"
    batches: list[tuple[str, ...]] = field(default_factory=list)  # busy with several dialogues
    alone: Counter = field(default_factory=Counter)  # losses of each dialogue by itself
    cleared: set[str] = field(default_factory=set)

    def next_try(self, task: ShardTask, busy: tuple[str, ...], why: str) -> ShardTask:
        """The task as it is to be tried next. Raises PipelineError where no single dialogue is to blame."""
        if len(busy) == 1:
            return self._after_one(task, busy[0])
        if not busy:  # lost between batches
            return task
        self.cleared |= set(task.suspects)  # they are forwarded first: this worker came through them
        seen_before = {doc_id for batch in self.batches for doc_id in batch}
        self.batches.append(busy)
        suspects = tuple(doc_id for doc_id in busy if doc_id in seen_before and doc_id not in self.cleared)
        if not suspects and seen_before.issuperset(busy):
            raise PipelineError(
                f"{_name(task)} lost workers on the same dialogues again and again, the last one because: {why} Each "
                f"of them comes through alone, so the batch is too large: lower {self.batch_key} and run the job again"
            )
        return replace(task, suspects=suspects)

    def _after_one(self, task: ShardTask, doc_id: str) -> ShardTask:
        self.alone[doc_id] += 1
        place = task.suspects.index(doc_id) if doc_id in task.suspects else 0
        self.cleared |= set(task.suspects[:place] if doc_id in task.suspects else task.suspects)
        left = task.suspects[place:] if doc_id in task.suspects else (doc_id,)
        if self.alone[doc_id] == 1:
            return replace(task, suspects=left)
        return replace(task, suspects=left[1:], set_aside={**task.set_aside, doc_id: KILLS_WORKERS})


def _first_line(error: BaseException) -> str:
    return scrubbed(next(iter(str(error).splitlines()), "no message"))


def _name(task: ShardTask) -> str:
    return f"shard {task.split}-{task.index}"


# -- the cluster ---------------------------------------------------------------------------------------------------


def start_ray(recipe: Recipe) -> None:
    """Joins the cluster that started this job, else starts Ray on this machine with all of its GPUs, reachable from it
    alone.
    """
    settings = recipe.features
    with kept_handlers():
        if "RAY_ADDRESS" in os.environ:
            ray.init(logging_level="warning")
        else:
            require_few("features.workers", settings.workers)
            workers_as_everyone()
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",  # servers of a laptop run are not for the network
                num_cpus=max(settings.workers * settings.cpus_per_worker, 1),
                include_dashboard=False,
                logging_level="warning",
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            )


def room_for(recipe: Recipe) -> float:
    """GPUs of one worker on the nodes that Ray has now. Raises PipelineError where none of them has room for one
    worker.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    there = any(node.get("GPU", 0) for node in nodes)
    each = gpus_each("features", recipe.features.gpus_per_worker, recipe.target.device, there)
    _require_room(recipe.features, each, nodes)
    return each


def _require_room(settings: FeaturesConfig, gpus: float, nodes: list[dict[str, float]]) -> None:
    wanted = {"CPU": settings.cpus_per_worker, "GPU": gpus}
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
        raise PipelineError(
            f"no node has room for one worker: features wants {wanted['CPU']} CPUs and {wanted['GPU']:g} GPUs each, "
            "the "
            f"nodes have at most {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs. Set features.cpus_per_worker and "
            "features.gpus_per_worker, or start larger nodes"
        )
    room = sum(
        min(int(node.get(kind, 0) / amount + 1e-9) for kind, amount in wanted.items() if amount) for node in nodes
    )
    if room < settings.workers:
        shared = ". Two share a GPU with features.gpus_per_worker=0.5" if gpus == 1 else ""
        log.warning(
            "features.workers=%d, but the nodes have room for %d now: the others wait%s", settings.workers, room, shared
        )
