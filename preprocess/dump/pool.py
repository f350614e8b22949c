"""The workers of the dump and of a regeneration."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pipeline.basics.progress import Progress
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Crew, Heartbeat, Worker
from pipeline.running.workers import Pool
from preprocess.dump.task import ShardTask, next_try


def crew_of(recipe: Recipe) -> Crew:
    settings = recipe.features
    return Crew(
        section="features",
        workers=settings.workers,
        cpus=settings.cpus_per_worker,
        gpus=recipe.worker_gpus,
        device="cpu" if recipe.target.engine == "server" else recipe.target.device,
        hang_seconds=settings.hang_seconds,
    )


def records(
    recipe: Recipe,
    make: Callable[[Heartbeat], Worker],
    tasks: Iterator[ShardTask],
    batch_key: str,
    progress: Progress,
    size: Callable[[Any], int],
) -> Iterator[Any]:
    """What the workers return for their tasks, as they finish. `progress` moves with their batches; `size` is what a
    record counts in it. Raises PipelineError; finished files stay finished.
    """
    done = progress.event.done

    def watch(in_work: int, doing: str) -> None:
        progress.reach(done + in_work, in_work, now=doing)

    progress.note("reading the source")
    for _, record in Pool(crew_of(recipe), make, partial(next_try, batch_key=batch_key)).results(tasks, watch):
        done += size(record)
        progress.reach(done)
        yield record
    progress.expect(done)  # the source may hold fewer
