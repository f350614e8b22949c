"""Runs a recipe's stages: here, or on a cluster, with their output in this terminal.

    jakiro run RECIPE [--until STAGE]                            on this machine
    jakiro run RECIPE --on ray://HEAD                            as jobs of a Ray cluster (its dashboard's port, 8265)
    jakiro run RECIPE --on slurm [--partition=gpu ...]           through sbatch
    jakiro run RECIPE --on kubernetes --image REGISTRY/IMAGE     through kubectl: KubeRay and JobSet

What is done is not done again, there as here. Ctrl-C asks what is to become of the stage. `jakiro manifests --help` has
the options of each place; what is unknown goes to sbatch.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jakiro
from jakiro import manifests
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, python_path
from pipeline.recipe.load import add_recipe_arguments, load_recipe, override_arguments
from pipeline.recipe.read import recipe_file
from pipeline.recipe.recipe import Recipe
from pipeline.running import children, entry

STAGES = {"preprocess": "dump", "train": "train", "eval": "eval"}  # as `--until` calls them
RAY = "ray://"


@dataclass(frozen=True)
class Job:
    """A stage on a cluster: what starts it, shows its output and ends with its status; and what cancels it."""

    stage: str
    start: list[str]
    cancel: list[str]


def jobs_on(place: str, given: argparse.Namespace, more: list[str]) -> list[list[Job]]:
    """Jobs that run at once, one list after the other."""
    if more and place != "slurm":
        raise PipelineError(f"{more[0]}: no option of jakiro run, and only sbatch is given what it does not know")
    if place.startswith(RAY):
        make = _by_ray(place, given)
    elif place in ("slurm", "kubernetes"):
        make = {"slurm": _by_slurm, "kubernetes": _by_kubectl}[place](given, more)
    else:
        raise PipelineError(f"--on {place}: expected {RAY}HEAD, slurm or kubernetes")
    fed = load_recipe(given.recipe, given.overrides).fed
    last = list(STAGES).index(given.until)
    names = list(STAGES.values())[: last + 1]
    return [[make(name), make("feed")] if name == "train" and fed else [make(name)] for name in names]


def _folder(given: argparse.Namespace) -> Path:
    folder = Path.cwd() / "deploy" / load_recipe(given.recipe, given.overrides).name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _require(command: str) -> None:
    if shutil.which(command) is None:
        raise PipelineError(f"{command} is not here: run this on a machine that has it, or see jakiro manifests")


def _by_slurm(given: argparse.Namespace, more: list[str]) -> Callable[[str], Job]:
    _require("sbatch")
    folder, recipe = _folder(given), load_recipe(given.recipe, given.overrides)
    writer = manifests.Writer(recipe, argparse.Namespace(**vars(given) | {"out": folder}))
    writer.slurm()

    def make(stage: str) -> Job:
        name = f"{writer.run}-{stage}-{os.getpid()}"
        log = recipe.run_dir / "logs" / f"{stage}.log"
        start = ["bash", str(folder / "submit.sh"), "--follow", stage, name, str(log), *more]
        return Job(stage, start, ["scancel", "--me", f"--name={name}"])

    return make


def _by_kubectl(given: argparse.Namespace, more: list[str]) -> Callable[[str], Job]:
    _require("kubectl")
    folder, recipe = _folder(given), load_recipe(given.recipe, given.overrides)
    writer = manifests.Writer(recipe, argparse.Namespace(**vars(given) | {"out": folder}))
    writer.kubernetes()
    follow = str(jakiro.HOME / "infra/kubernetes/follow.sh")

    def make(stage: str) -> Job:
        file = folder / f"{stage}.yaml"
        kind = "rayjob" if "kind: RayJob" in file.read_text() else "jobset"
        shared = [str(folder / "run.yaml")] if stage == "dump" else []
        start = ["bash", follow, str(file), kind, f"{writer.run}-{stage}", *shared]
        return Job(stage, start, ["kubectl", "delete", f"--filename={file}"])

    return make


def _by_ray(place: str, given: argparse.Namespace) -> Callable[[str], Job]:
    """Jobs bring the recipe alone: the nodes have the project installed where the head has it. Training goes to one
    node, which Ray chooses.
    """
    host, _, port = place.removeprefix(RAY).partition(":")
    address = f"http://{host}:{port or 8265}"
    recipe, folder = load_recipe(given.recipe, given.overrides), _folder(given)
    if not Path(recipe.output).is_absolute():
        raise PipelineError(
            f"output={recipe.output}: a job runs in a temporary folder of the cluster. Give an absolute one that all "
            "nodes see: --set output=/shared/runs/NAME"
        )
    sent = folder / "job"
    sent.mkdir(exist_ok=True)
    shutil.copyfile(recipe_file(given.recipe), sent / recipe_file(given.recipe).name)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job"]

    def make(stage: str) -> Job:
        name = f"{recipe.name}-{stage}-{os.getpid()}"
        gpus = _gpus_of(stage, recipe, given)
        where = ["--address", address, "--submission-id", name, "--working-dir", str(sent)]
        where += ["--entrypoint-num-gpus", str(gpus)] if gpus else []
        arguments = [recipe_file(given.recipe).name, *override_arguments(given.overrides)]
        submit = [*ray, "submit", *where, "--", "jakiro", stage, *arguments]
        ask = [*ray, "status", "--address", address, name]  # for a job that somebody stopped, submit ends well, too
        start = ["bash", "-c", f"{shlex.join(submit)} && {shlex.join(ask)} 2>&1 | grep --quiet succeeded"]
        return Job(stage, start, [*ray, "stop", "--address", address, name])

    return make


def _gpus_of(stage: str, recipe: Recipe, given: argparse.Namespace) -> int:
    """What a job asks for itself; the workers that it starts ask for theirs."""
    stages = manifests.Stages.of(recipe, given)
    if recipe.target.device != "cpu" and not recipe.train.ranks:
        raise PipelineError("train.ranks is not set: how many GPUs has a node of that cluster? --set train.ranks=...")
    if stage == "train" and stages.train.nodes > 1:
        ranks = stages.train.nodes * stages.train.gpus
        raise PipelineError(f"train.ranks={ranks} are more than one node has: --on slurm or kubernetes")
    alone = {"train": stages.train.gpus, "eval": 0 if stages.eval_by_ray else stages.eval.gpus}
    return 0 if recipe.target.device == "cpu" else alone.get(stage, 0)


def follow(together: list[Job]) -> None:
    """Runs jobs that belong together. Raises PipelineError for the first that fails; then the others are cancelled."""
    print(f"{', '.join(job.stage for job in together)}: starts on the cluster", flush=True)
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    running = [(job, children.start(job.start, environment)) for job in together]
    watched = list(running)
    try:
        while watched:
            for one in list(watched):
                with suppress(children.subprocess.TimeoutExpired):
                    if one[1].wait(0.5):
                        raise PipelineError(f"{one[0].stage} failed (status {one[1].returncode}): its output is above")
                    watched.remove(one)
    except KeyboardInterrupt:
        _leave_or_cancel([job for job, _ in watched])
        raise
    except PipelineError:
        _cancel([job for job, process in running if process.poll() is None])
        raise
    finally:
        for _, process in running:
            children.end(process)


def _leave_or_cancel(jobs: list[Job]) -> None:
    for job in jobs:
        said = f"{job.stage} runs on the cluster. To cancel it: {shlex.join(job.cancel)}"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"\n{said}", flush=True)
        if sys.stdin.isatty() and input("Cancel it now? [y/N] ").strip().lower() == "y":
            _cancel([job])


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        print(f"{job.stage}: {'cancelled' if children.call(job.cancel, os.environ, ROOT) == 0 else 'not cancelled'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --mem is sbatch's
    )
    add_recipe_arguments(parser)
    parser.add_argument("--until", choices=list(STAGES), default="eval", help="the last stage")
    parser.add_argument("--on", metavar="PLACE", help="ray://HEAD, slurm or kubernetes; default: this machine")
    manifests.add_options(parser)
    given, more = parser.parse_known_args()
    if given.on is None:
        idle = [key for key, value in vars(given).items() if value != parser.get_default(key)]
        if odd := set(idle) - {"recipe", "overrides", "until"}:
            parser.error(f"--{odd.pop().replace('_', '-')}: an option of --on")
        jakiro.begin("run here", [given.recipe, *override_arguments(given.overrides), "--until", given.until, *more])
        return
    manifests.say_paths(load_recipe(given.recipe, given.overrides))
    for together in jobs_on(given.on, given, more):
        follow(together)
    print("all is done; jakiro status, where the output can be seen, says what")


if __name__ == "__main__":
    entry.run(main, keeps=True)
