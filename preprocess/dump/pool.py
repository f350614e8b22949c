"""The workers of the dump and of a regeneration, and their tasks that are tried again."""

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Crew, Heartbeat, Loss, Worker
from pipeline.running.workers import Pool
from preprocess.dump.task import History, ShardTask


class SetAside:
    """A dialogue that costs a worker even when it is worked on alone, twice, is set aside by id and counted."""

    def __init__(self, batch_key: str):
        self._batch_key = batch_key
        self._histories: dict[tuple[str, int], History] = {}

    def retry(self, task: ShardTask, loss: Loss) -> ShardTask:
        history = self._histories.setdefault((task.split, task.index), History(self._batch_key))
        return history.next_try(task, loss.busy, loss.why)


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
    recipe: Recipe, make: Callable[[Heartbeat], Worker], tasks: Iterator[ShardTask], batch_key: str
) -> Iterator[Any]:
    """What the workers return for their tasks, as they finish. Raises PipelineError; finished files stay finished."""
    for _, record in Pool(crew_of(recipe), make, SetAside(batch_key)).results(tasks):
        yield record
