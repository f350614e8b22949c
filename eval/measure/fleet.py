"""Units on many GPUs: one Ray actor a worker, each with the target and all drafts. The only file of this stage that
imports Ray.

Each actor interleaves all methods on its own device, so ratios are formed within one process, as on one machine. An
actor that dies, or gives no sign of life for `eval.hang_seconds`, is replaced, and its unit decoded again, at most
ATTEMPTS times in all: nothing waits for ever.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eval.measure.harness import EvalTask, Harness, Outcome
from eval.measure.tasks import Method, make_harness
from pipeline.artifacts.provenance import ROOT
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.running.cores import require_few, workers_as_everyone
from pipeline.running.gpus import gpus_each, hide_gpus
from pipeline.running.signals import kept_handlers

ATTEMPTS = 3  # of a unit, each with another actor; of loading, while no unit is finished
LOOK_SECONDS = 1.0  # between two looks at the signs of life
Make = Callable[[Recipe, dict[str, Method]], Harness]
log = logging.getLogger(__name__)


class _Beats:
    """The workers' signs of life, counted beside the driver: a worker that hangs answers no question."""

    def __init__(self):
        self._beats: Counter[int] = Counter()

    def tell(self, number: int) -> None:
        self._beats[number] += 1

    def read(self) -> dict[int, int]:
        return dict(self._beats)


class _Employee:
    """What Ray runs."""

    def __init__(self, make: Callable[[], Harness], number: int, beats: Any, gpus: float):
        hide_gpus(gpus)
        self._make, self._tell = make, lambda: beats.tell.remote(number)

    def ready(self) -> None:
        """Loads. A call of its own: what goes wrong in a constructor on another machine loses its message."""
        self._harness = self._make()

    def decode(self, unit: EvalTask) -> Outcome:
        return self._harness.decode(unit, self._tell)


@dataclass
class _Worker:
    """An actor and what it is busy with."""

    number: int
    actor: Any
    # the reference of what it does now: loading, then one unit after the other; None where it has nothing to do
    answer: Any
    unit: EvalTask | None = None
    beat: int = 0  # signs of life seen
    since: float = field(default_factory=lambda: time.monotonic())  # when the last one was new


def decode(
    recipe: Recipe, methods: dict[str, Method], units: list[EvalTask], make: Make = make_harness
) -> Iterator[tuple[EvalTask, Outcome]]:
    """(unit, outcome) as they are finished, in any order. Joins the cluster of RAY_ADDRESS, else starts Ray on this
    machine.
    """
    with kept_handlers():
        _start_ray(recipe.eval.workers)
    try:
        gpus = _room_for(recipe)
        yield from _Fleet(recipe, partial(make, recipe, methods), units, gpus).outcomes()
    except ray.exceptions.RayError as error:
        raise PipelineError(
            f"Ray failed: {_last_line(error)} Run the command again: finished prompts are kept"
        ) from None
    finally:
        ray.shutdown()


def _start_ray(workers: int) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level="warning")
        return
    require_few("eval.workers", workers)
    workers_as_everyone()
    local = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False, "log_to_driver": False}
    runtime = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(**local, num_cpus=workers, logging_level="warning", runtime_env=runtime)


class _Fleet:
    def __init__(self, recipe: Recipe, make: Callable[[], Harness], units: list[EvalTask], gpus: float):
        self._config, self._make, self._gpus = recipe.eval, make, gpus
        self._left = deque(units)
        self._attempts: Counter[tuple[str, str, float]] = Counter()  # that were lost, by unit
        self._not_loaded = 0  # workers lost while they loaded, since the last finished unit
        self._hired = 0
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._beats = ray.remote(num_cpus=0, scheduling_strategy=here)(_Beats).remote()
        self._workers = [self._hire() for _ in range(min(self._config.workers, len(units)))]

    def _hire(self) -> _Worker:
        self._hired += 1
        remote = ray.remote(num_cpus=1, num_gpus=self._gpus)(_Employee)
        actor = remote.remote(self._make, self._hired, self._beats, self._gpus)
        return _Worker(self._hired, actor, actor.ready.remote())

    def outcomes(self) -> Iterator[tuple[EvalTask, Outcome]]:
        while self._left or any(worker.unit for worker in self._workers):
            for worker in self._workers:
                if worker.answer is None and self._left:
                    worker.unit, worker.since = self._left.popleft(), time.monotonic()
                    worker.answer = worker.actor.decode.remote(worker.unit)
            busy = {worker.answer: worker for worker in self._workers if worker.answer is not None}
            ray.wait(list(busy), num_returns=1, timeout=LOOK_SECONDS)
            # All that is ready: what is finished but waits to be collected would seem to hang.
            done, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0)
            for answer in done:
                yield from self._collect(busy[answer])
            self._look_for_hangs()

    def _collect(self, worker: _Worker) -> Iterator[tuple[EvalTask, Outcome]]:
        try:
            outcome = ray.get(worker.answer)
        except ray.exceptions.RayTaskError as error:  # it would happen again
            raise PipelineError(f"{_name(worker)}: {_cause(error)}") from None
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self._lose(worker, _last_line(error))
            return
        unit, worker.unit, worker.answer = worker.unit, None, None
        if unit is not None:
            self._not_loaded = 0
            yield unit, outcome

    def _look_for_hangs(self) -> None:
        now, patience, beats = time.monotonic(), self._config.hang_seconds, ray.get(self._beats.read.remote())
        for worker in list(self._workers):
            beat = beats.get(worker.number, 0)
            if worker.answer is None or beat != worker.beat:
                worker.beat, worker.since = beat, now
            elif now - worker.since > patience:
                self._lose(worker, f"it gave no sign of life for eval.hang_seconds={patience}.")

    def _lose(self, worker: _Worker, why: str) -> None:
        """Replaces a worker that died or hangs; its unit comes next. Raises PipelineError where that was tried ATTEMPTS
        times.
        """
        ray.kill(worker.actor)
        log.warning("a worker was lost (%s): %s", _name(worker), why)
        if worker.unit is None:
            self._not_loaded += 1
            lost = self._not_loaded
        else:
            self._attempts[worker.unit.name] += 1
            lost = self._attempts[worker.unit.name]
            self._left.appendleft(worker.unit)
        if lost == ATTEMPTS:
            raise PipelineError(
                f"{_name(worker)}: {ATTEMPTS} workers were lost, the last one because: {why} Finished prompts are "
                "kept: look at the nodes (memory, GPUs), raise eval.hang_seconds where it takes longer, and run the "
                "command again"
            )
        self._workers[self._workers.index(worker)] = self._hire()


def _name(worker: _Worker) -> str:
    unit = worker.unit
    return f"benchmark {unit.benchmark}, prompt {unit.prompt.question_id}" if unit else "loading the target"


def _cause(error: ray.exceptions.RayTaskError) -> str:
    """A PipelineError's own words; of another one its kind and its last line."""
    cause = error.cause
    return str(cause) if isinstance(cause, PipelineError) else f"{type(cause).__name__}: {_last_line(cause)}"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _room_for(recipe: Recipe) -> float:
    """GPUs of one worker. Raises PipelineError where the cluster has no room for all."""
    there, workers = ray.cluster_resources(), recipe.eval.workers
    each = gpus_each("eval", recipe.eval.gpus_per_worker, recipe.target.device, bool(there.get("GPU")))
    for what, wanted in (("CPU", workers), ("GPU", workers * each)):
        if there.get(what, 0) < wanted:
            raise PipelineError(
                f"eval.workers={workers} want {wanted:g} {what}s, but the Ray cluster has {there.get(what, 0):g}: "
                "lower eval.workers or eval.gpus_per_worker"
            )
    return each
