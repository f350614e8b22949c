"""The GPUs that the commands of a run take: the recipe's choice, or else the user's environment."""

import os
import sys

import torch

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running.crew import CUDA, HIP

# Variables in which a user names GPUs, by numbers or UUIDs, and which DeepSpeed's launcher overwrites in its ranks: the
# one of CUDA and ROCm, and XPU's. (It leaves ROCm's own variable alone, which takes precedence over the first.)
DEVICE_VARIABLES = (CUDA, "ZE_AFFINITY_MASK")


def _environment_choice() -> dict[str, str]:
    return {name: os.environ[name] for name in DEVICE_VARIABLES if os.environ.get(name)}


def env_assignments(gpus: list[int] | None) -> list[str]:
    """Return the recipe's choice, or else the user's, as arguments of `env`."""
    accelerator = torch.accelerator.current_accelerator()
    name = DEVICE_VARIABLES[accelerator is not None and accelerator.type == "xpu"]
    chosen = {name: ",".join(map(str, gpus))} if gpus else _environment_choice()
    return [f"{name}={value}" for name, value in chosen.items()]


def launch_command(launcher: list[str], script: str, train: TrainConfig, device: str) -> list[str]:
    """Return the command with which DeepSpeed's `launcher` starts the ranks of the script: by default one for each
    accelerator that is chosen, or else visible on this machine. `device` is ``target.device``.

    Given a number of ranks, the launcher assigns accelerators 0, 1, ... whatever the user chose; without a number, it
    cannot read UUIDs. So the choice is hidden from it, and `env` sets it again in each rank.
    """
    chosen, ranks = env_assignments(train.gpus), train.ranks
    unset_variables = ["env", *(f"--unset={name}" for name in _environment_choice())] if _environment_choice() else []
    rank = [script]
    if chosen:  # without the hidden choice the launcher would count all accelerators
        ranks = train.ranks_of(1 if device == "cpu" else torch.accelerator.device_count())
    if chosen and device != "cpu":
        rank = ["--no_python", "--no_local_rank", "env", *chosen, sys.executable, "-u", script]
    return [*unset_variables, *launcher, *(["--num_accelerators", str(ranks)] if ranks else []), *rank]


def require_choice(recipe: Recipe) -> None:
    """Raise PipelineError where the recipe names GPUs that this machine lacks, or the environment chooses, too."""
    available, names = torch.accelerator.device_count(), (*DEVICE_VARIABLES, HIP)
    for key, gpus, extra in (("features", recipe.features.gpus, ["RAY_ADDRESS"]), ("train", recipe.train.gpus, [])):
        chosen = ", ".join(f"{name}={os.environ[name]}" for name in (*names, *extra) if os.environ.get(name))
        if gpus and chosen:
            raise PipelineError(f"{key}.gpus={gpus}, but {chosen} in the environment chooses, too: leave one out")
        if gpus and available <= max(gpus):
            raise PipelineError(f"{key}.gpus={gpus}, but this machine has {available}, counted from 0: name others")


def require_gpus(ranks: int) -> None:
    """Raise PipelineError where there are accelerators, but not one for each rank."""
    available = torch.accelerator.device_count()
    if 0 < available < ranks:
        chosen = ", ".join(env_assignments(None))
        raise PipelineError(
            f"train.ranks={ranks}, but the accelerators that are visible{chosen and f' ({chosen})'} are {available}, "
            "and each rank takes one: lower train.ranks, or choose more of them"
        )


def require_step(recipe: Recipe) -> None:
    """Raise PipelineError where the ranks of this machine cannot take a step as the recipe requires."""
    devices = 1 if recipe.target.device == "cpu" else torch.accelerator.device_count()
    accumulation = recipe.train.accumulation(recipe.train.ranks_of(devices))
    if any(not (recipe.paths.draft(name) / checkpoint.CONFIG).exists() for name in recipe.to_train):
        recipe.train.require_exact_sum(accumulation)
