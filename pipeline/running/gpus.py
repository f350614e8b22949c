"""Which GPUs the commands of a run take: a recipe's choice, or else the user's environment."""

import os
import sys

import torch

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running.crew import CUDA, HIP

# What a user names GPUs with, by numbers or UUIDs, and DeepSpeed's launcher overwrites in its ranks: of CUDA and ROCm,
# of XPU. (It leaves ROCm's own alone, which goes before the first.)
CHOICES = (CUDA, "ZE_AFFINITY_MASK")


def _chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in CHOICES if os.environ.get(name)}


def named(gpus: list[int] | None) -> list[str]:
    """Return a recipe's choice, or else the user's, as `env` takes it."""
    here = torch.accelerator.current_accelerator()
    name = CHOICES[here is not None and here.type == "xpu"]
    chosen = {name: ",".join(map(str, gpus))} if gpus else _chosen()
    return [f"{name}={value}" for name, value in chosen.items()]


def launch_command(launcher: list[str], script: str, train: TrainConfig, device: str) -> list[str]:
    """`launcher`, DeepSpeed's, starting the ranks of the script, by default one for each accelerator that is chosen, or
    else visible here. `device` is ``target.device``.

    Told how many ranks to start, it gives them accelerators 0, 1, ... whatever the user chose; not told, it cannot read
    UUIDs. So it is not shown the choice, and each rank gets that back from `env`.
    """
    chosen, ranks = named(train.gpus), train.ranks
    hidden = ["env", *(f"--unset={name}" for name in _chosen())] if _chosen() else []
    rank = [script]
    if chosen:  # hidden, it would count all that there are
        ranks = train.ranks_of(1 if device == "cpu" else torch.accelerator.device_count())
    if chosen and device != "cpu":
        rank = ["--no_python", "--no_local_rank", "env", *chosen, sys.executable, "-u", script]
    return [*hidden, *launcher, *(["--num_accelerators", str(ranks)] if ranks else []), *rank]


def require_choice(recipe: Recipe) -> None:
    """Raises PipelineError where the recipe names GPUs that are not here, or the environment chooses, too."""
    there, names = torch.accelerator.device_count(), (*CHOICES, HIP)
    for key, gpus, more in (("features", recipe.features.gpus, ["RAY_ADDRESS"]), ("train", recipe.train.gpus, [])):
        chosen = ", ".join(f"{name}={os.environ[name]}" for name in (*names, *more) if os.environ.get(name))
        if gpus and chosen:
            raise PipelineError(f"{key}.gpus={gpus}, but {chosen} in the environment chooses, too: leave one out")
        if gpus and there <= max(gpus):
            raise PipelineError(f"{key}.gpus={gpus}, but this machine has {there}, counted from 0: name others")


def require_gpus(ranks: int) -> None:
    """Raises PipelineError where there are accelerators, but not one for each rank."""
    there = torch.accelerator.device_count()
    if 0 < there < ranks:
        chosen = ", ".join(named(None))
        raise PipelineError(
            f"train.ranks={ranks}, but the accelerators that are visible{chosen and f' ({chosen})'} are {there}, and "
            "each rank takes one: lower train.ranks, or choose more of them"
        )


def require_step(recipe: Recipe) -> None:
    """Raises PipelineError where the ranks of this machine cannot take a step as the recipe wants it."""
    there = 1 if recipe.target.device == "cpu" else torch.accelerator.device_count()
    accumulation = recipe.train.accumulation(recipe.train.ranks_of(there))
    if any(not (recipe.paths.draft(name) / checkpoint.CONFIG).exists() for name in recipe.to_train):
        recipe.train.require_exact_sum(accumulation)
