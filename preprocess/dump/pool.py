"""The worker pool of the dump and of a regeneration."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pipeline.basics.progress import Progress
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Crew, Heartbeat, Worker
from pipeline.running.workers import WorkerPool
from preprocess.dump.task import ShardTask, next_try


def dump_crew(recipe: Recipe) -> Crew:
    settings = recipe.features
    return Crew(
        section="features",
        workers=settings.workers,
        cpus=settings.cpus_per_worker,
        gpus=recipe.worker_gpus,
        device="cpu" if recipe.target.engine == "server" else recipe.target.device,
        hang_seconds=settings.hang_seconds,
    )


def run_tasks(
    recipe: Recipe,
    make: Callable[[Heartbeat], Worker],
    tasks: Iterator[ShardTask],
    batch_key: str,
    progress: Progress,
    size: Callable[[Any], int],
) -> Iterator[Any]:
    """Yield the records that workers return for their tasks, as they finish. `progress` moves with their batches;
    `size` returns a record's amount in it. Raise PipelineError; finished files stay finished.
    """
    done = progress.event.done

    def watch(in_work: int, doing: str) -> None:
        progress.reach(done + in_work, in_work, now=doing)

    progress.note("reading the source")
    for _, record in WorkerPool(dump_crew(recipe), make, partial(next_try, batch_key=batch_key)).results(tasks, watch):
        done += size(record)
        progress.reach(done)
        yield record
    progress.expect(done)  # the source may hold fewer
