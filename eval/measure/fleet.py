"""Evaluation in Ray actors: each has the target and all drafts, and takes one prompt after the other.

Each actor interleaves all methods on its own device, so ratios are formed within one process, as on one machine.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch

from eval.measure.harness import EvalTask, Harness, Outcome
from eval.measure.tasks import make_harness
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import Method
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Crew, Heartbeat, WorkerFailure
from pipeline.running.workers import WorkerPool

ATTEMPTS = 3  # of a task, each by another worker
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class EvalWorker:
    def __init__(self, make: Callable[[], Harness], heartbeat: Heartbeat):
        self._make, self._heartbeat = make, heartbeat

    def ready(self) -> None:
        self._harness = self._make()

    def work(self, task: EvalTask) -> Outcome:
        return self._harness.decode(task, lambda: self._heartbeat(()))


class Attempts:
    """A task is tried again, unchanged, until ATTEMPTS workers have failed on it. An exception is raised at once, for
    the same random numbers would lead to it again; only memory may suffice the next time.
    """

    def __init__(self):
        self._failures: Counter[tuple[str, str, float]] = Counter()

    def retry(self, task: EvalTask, failure: WorkerFailure) -> EvalTask:
        """Return the task. Raise PipelineError if it is not to be tried again."""
        if failure.exception is not None and not isinstance(failure.exception, OUT_OF_MEMORY):
            raise PipelineError(f"{task.title}: {failure.reason}")
        self._failures[task.name] += 1
        if self._failures[task.name] == ATTEMPTS:
            raise PipelineError(
                f"{task.title}: {ATTEMPTS} workers failed, the last one because: {failure.reason.rstrip('.')}. "
                "Finished prompts are kept: look at the nodes (memory, GPUs), raise features.hang_seconds where it "
                "takes longer, and run the command again"
            )
        return task


def make_crew(recipe: Recipe, tasks: int) -> Crew:
    config = recipe.eval
    return Crew(
        section="eval",
        workers=min(config.workers, tasks),
        cpus=1,
        gpus=config.gpus_per_worker,
        device=recipe.target.device,
        hang_seconds=recipe.features.hang_seconds,
        all_at_once=True,  # the number of workers on a machine is part of the measurement
    )


def decode(recipe: Recipe, methods: dict[str, Method], tasks: list[EvalTask]) -> Iterator[tuple[EvalTask, Outcome]]:
    """Yield (task, outcome) as they are finished, in any order."""
    make = partial(EvalWorker, partial(make_harness, recipe, methods))
    return WorkerPool(make_crew(recipe, len(tasks)), make, Attempts().retry).results(iter(tasks))
