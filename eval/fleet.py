"""Units on many GPUs: one Ray actor a worker, each with the target and all drafts. The only file of this stage that imports Ray.

Each actor interleaves all methods on its own device, so ratios are formed within one process, as on one machine. An
actor that dies is started again and its unit decoded again (Ray's own restarts and retries).
"""

import os
from collections.abc import Iterator

import ray
from ray.util import ActorPool

from eval.harness import Outcome, Unit
from eval.units import Method, make_harness
from pipeline.cores import require_few
from pipeline.errors import PipelineError
from pipeline.provenance import ROOT
from pipeline.recipe import Recipe
from pipeline.signals import kept_handlers

ATTEMPTS = 3  # of a unit, with an actor that was started again


class _Worker:
    def __init__(self, recipe: Recipe, methods: dict[str, Method]):
        self._harness = make_harness(recipe, methods)
        self._alone = self._harness.target.device.type == "cpu" or recipe.eval.gpus_per_worker >= 1

    def decode(self, unit: Unit) -> tuple[Unit, Outcome | None, str]:
        """A PipelineError is an answer, not a failure: Ray would try it again."""
        if not self._alone:
            return unit, None, "workers would share a GPU and measure each other's work: set eval.gpus_per_worker=1"
        try:
            return unit, self._harness.decode(unit), ""
        except PipelineError as error:
            return unit, None, str(error)


def decode(recipe: Recipe, methods: dict[str, Method], units: list[Unit]) -> Iterator[tuple[Unit, Outcome]]:
    """(unit, outcome) as they are finished, in any order. Joins the cluster of RAY_ADDRESS, else starts Ray on this machine."""
    config = recipe.eval
    with kept_handlers():
        _start_ray(config.workers)
    try:
        _require_room(config.workers, config.gpus_per_worker)
        remote = ray.remote(
            num_cpus=1, num_gpus=config.gpus_per_worker, max_restarts=ATTEMPTS - 1, max_task_retries=ATTEMPTS - 1
        )(_Worker)
        pool = ActorPool([remote.remote(recipe, methods) for _ in range(min(config.workers, len(units)))])
        for unit, outcome, why in pool.map_unordered(lambda actor, unit: actor.decode.remote(unit), units):
            if outcome is None:
                raise PipelineError(f"benchmark {unit.benchmark}, prompt {unit.prompt.question_id}: {why}")
            yield unit, outcome
    except ray.exceptions.RayError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise PipelineError(f"Ray failed: {first} Run the command again: finished prompts are kept") from None
    finally:
        ray.shutdown()


def _start_ray(workers: int) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level="warning")
        return
    require_few("eval.workers", workers)
    local = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False, "log_to_driver": False}
    runtime = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(**local, num_cpus=workers, logging_level="warning", runtime_env=runtime)


def _require_room(workers: int, gpus: float) -> None:
    there = ray.cluster_resources()
    for what, wanted in (("CPU", workers), ("GPU", workers * gpus)):
        if there.get(what, 0) < wanted:
            raise PipelineError(
                f"eval.workers={workers} want {wanted:g} {what}s, but the Ray cluster has {there.get(what, 0):g}: lower eval.workers or "
                "eval.gpus_per_worker"
            )
