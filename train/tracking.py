"""The metrics of a training: metrics.jsonl is the record; TensorBoard and one optional tracker are views of it."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from pipeline.artifacts.curves import METRICS
from pipeline.artifacts.provenance import public_recipe
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_text
from pipeline.recipe.identity import digest, train_hash
from pipeline.recipe.recipe import Recipe

PROJECT = "jakiro"


@dataclass(frozen=True)
class Tracker:
    log: Callable[[dict[str, float], int], None]  # (values, step)
    close: Callable[[bool], None]  # (whether an error ended the training)


def _wandb(package: Any, name: str, run_id: str, config: dict, folder: Path) -> Tracker:
    # Switch off what it collects by itself: command lines with private paths, host, user, git remote, console.
    quiet = package.Settings(x_disable_meta=True, host="", disable_git=True, console="off", save_code=False)
    run = package.init(
        project=PROJECT, name=name, id=run_id, resume="allow", config=config, dir=str(folder), settings=quiet
    )
    return Tracker(lambda values, step: run.log(values, step=step), lambda failed: run.finish(exit_code=int(failed)))


def _trackio(package: Any, name: str, run_id: str, config: dict, folder: Path) -> Tracker:
    package.init(project=PROJECT, name=f"{name}-{run_id}", config=config, resume="allow")
    return Tracker(lambda values, step: package.log(values, step=step), lambda failed: package.finish())


def _mlflow(package: Any, name: str, run_id: str, config: dict, folder: Path) -> Tracker:
    package.set_experiment(PROJECT)
    tag = "jakiro.id"
    runs = package.search_runs(filter_string=f"tags.`{tag}` = '{run_id}'", max_results=1, output_format="list")
    if runs:
        package.start_run(run_id=runs[0].info.run_id)
    else:
        package.start_run(run_name=name, tags={tag: run_id, "mlflow.source.name": "train/main.py", "mlflow.user": ""})
        package.log_dict(config, "recipe.json")
    return Tracker(
        lambda values, step: package.log_metrics(values, step=step, synchronous=False),
        lambda failed: package.end_run("FAILED" if failed else "FINISHED"),
    )


TRACKERS = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}


def require_tracker(recipe: Recipe) -> Any:
    """Return the tracker's package, None without a tracker. Raise PipelineError if it is missing: on every rank, before
    the first collective.
    """
    kind = recipe.train.tracker
    if kind is None:
        return None
    try:
        return import_module(kind)
    except ImportError as error:
        raise PipelineError(f"train.tracker={kind!r} cannot be used ({error}): pip install {kind}") from None


def open_tracker(recipe: Recipe, draft: str, folder: Path) -> Tracker | None:
    """Open the recipe's tracker, through its own package and that package's settings (WANDB_MODE, MLFLOW_TRACKING_URI,
    ...). A resumed training continues the same run. Raise PipelineError as `require_tracker` does.
    """
    package = require_tracker(recipe)
    if package is None:
        return None
    kind = recipe.train.tracker
    run_id = digest([train_hash(recipe, draft), str(folder.resolve())])
    return TRACKERS[kind](package, f"{recipe.name}-{draft}", run_id, public_recipe(recipe), folder)


class Metrics:
    """The metrics of one draft, on rank 0. Lines after the resumed step are dropped."""

    def __init__(self, folder: Path, resumed: int, tracker: Tracker | None):
        self._path, self._tracker = folder / METRICS, tracker
        lines = self._path.read_text(errors="replace").splitlines() if self._path.exists() else []
        kept_lines = [line for line in lines if _parse_step(line) <= resumed] if resumed else []
        write_text(self._path, "".join(f"{line}\n" for line in kept_lines))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._tracker:
            self._tracker.log(numbers, step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Close TensorBoard and the tracker; tell the tracker whether an error ended the training."""
        self._board.close()
        if self._tracker:
            self._tracker.close(kind is not None)


def _parse_step(line: str) -> float:
    """Return the step of a line; infinity for a line that was cut short by a full disk or a power failure."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
