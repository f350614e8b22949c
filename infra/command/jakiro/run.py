"""Run a recipe's stages, on this machine or on a Ray cluster, with their output in this terminal.

    jakiro run RECIPE [--until STAGE]                            on this machine
    jakiro run RECIPE --on ray://HEAD                            as jobs of a Ray cluster (its dashboard's port, 8265)

Finished work is not repeated, on either. Ctrl-C asks whether to cancel the stage. `jakiro manifests` writes files for
other clusters.
"""

import argparse
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import jakiro
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import python_path
from pipeline.recipe.load import add_recipe_arguments, load_recipe, override_arguments
from pipeline.recipe.read import recipe_file
from pipeline.recipe.recipe import Recipe
from pipeline.running import children, entry
from pipeline.running.stages import STAGES

RAY = "ray://"


@dataclass(frozen=True)
class ClusterJob:
    """A stage on a cluster: the command that starts it, shows its output and exits with its status; and the one that
    cancels it.
    """

    stage: str
    start: list[str]
    cancel: list[str]


def jobs_on(place: str, args: argparse.Namespace) -> list[list[ClusterJob]]:
    """Return lists of jobs; those of one list run at the same time, and the lists one after the other. Only the recipe
    is uploaded: every node has the project installed in the same place as the head. Ray chooses the one node of the
    training.
    """
    if not place.startswith(RAY):
        raise PipelineError(f"--on {place}: expected {RAY}HEAD")
    recipe = load_recipe(args.recipe, args.overrides)
    host, _, port = place.removeprefix(RAY).partition(":")
    address = f"http://{host}:{port or 8265}"
    if not Path(recipe.output).is_absolute():
        raise PipelineError(
            f"output={recipe.output}: a job runs in a temporary folder of the cluster. Give an absolute one that all "
            "nodes see: --set output=/shared/runs/NAME"
        )
    job_folder = Path.cwd() / "deploy" / recipe.name / "job"
    job_folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(recipe_file(args.recipe), job_folder / recipe_file(args.recipe).name)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job"]

    def job(stage: str) -> ClusterJob:
        name = f"{recipe.name}-{stage}-{os.getpid()}"
        gpus = _gpus_of(stage, recipe, args.gpus_per_node)
        flags = ["--address", address, "--submission-id", name, "--working-dir", str(job_folder)]
        flags += ["--entrypoint-num-gpus", str(gpus)] if gpus else []
        arguments = [recipe_file(args.recipe).name, *override_arguments(args.overrides)]
        submit = [*ray, "submit", *flags, "--", "jakiro", stage, *arguments]
        status = [*ray, "status", "--address", address, name]  # submit exits with 0 also for a job that was stopped
        start = ["bash", "-c", f"{shlex.join(submit)} && {shlex.join(status)} 2>&1 | grep --quiet succeeded"]
        return ClusterJob(stage, start, [*ray, "stop", "--address", address, name])

    names = list(STAGES.values())[: list(STAGES).index(args.until) + 1]
    return [[job(name), job("feed")] if name == "train" and recipe.fed else [job(name)] for name in names]


def _gpus_of(stage: str, recipe: Recipe, gpus_per_node: int) -> int:
    """Return the GPUs that a job requests for itself; the workers that it starts request their own."""
    if recipe.target.device == "cpu":
        return 0
    ranks, measure = recipe.train.ranks, recipe.eval
    if not ranks:
        raise PipelineError("train.ranks is not set: how many GPUs has a node of that cluster? --set train.ranks=...")
    if ranks > gpus_per_node:
        raise PipelineError(f"train.ranks={ranks} are more than one node has (--gpus-per-node={gpus_per_node})")
    recipe.train.accumulation(ranks)
    if stage == "eval" and measure.workers == 1:
        return 1 if measure.gpus_per_worker is None else math.ceil(measure.gpus_per_worker)
    return ranks if stage == "train" else 0


def run_jobs(jobs: list[ClusterJob]) -> None:
    """Run the jobs at the same time. Raise PipelineError for the first that fails, after cancelling the others."""
    print(f"{', '.join(job.stage for job in jobs)}: starts on the cluster", flush=True)
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    with ExitStack() as stack:
        running = [(job, stack.enter_context(children.start_command(job.start, environment))) for job in jobs]
        try:
            while True:
                statuses = [(job, process.poll()) for job, process in running]
                for job, status in statuses:
                    if status:
                        raise PipelineError(f"{job.stage} failed (status {status}): its output is above")
                if all(status == 0 for _, status in statuses):
                    break
                time.sleep(0.5)
        except KeyboardInterrupt:
            _leave_or_cancel([job for job, process in running if process.poll() is None])
            raise
        except PipelineError:
            _cancel([job for job, process in running if process.poll() is None])
            raise


def _leave_or_cancel(jobs: list[ClusterJob]) -> None:
    for job in jobs:
        message = f"{job.stage} runs on the cluster. To cancel it: {shlex.join(job.cancel)}"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"\n{message}", flush=True)
        if sys.stdin.isatty() and input("Cancel it now? [y/N] ").strip().lower() == "y":
            _cancel([job])


def _cancel(jobs: list[ClusterJob]) -> None:
    for job in jobs:
        print(f"{job.stage}: {'cancelled' if subprocess.call(job.cancel) == 0 else 'not cancelled'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--until", choices=list(STAGES), default="eval", help="the last stage")
    parser.add_argument("--on", metavar="PLACE", help="ray://HEAD; default: this machine")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="of that cluster")
    args = parser.parse_args()
    if args.on is None:
        jakiro.start_command("run here", [args.recipe, *override_arguments(args.overrides), "--until", args.until])
        return
    from jakiro import manifests  # imported late: it is a command, too, and runpy warns about an early import

    manifests.print_paths(load_recipe(args.recipe, args.overrides))
    for jobs in jobs_on(args.on, args):
        run_jobs(jobs)
    print("all stages are done; jakiro status shows them, on a machine that sees the output")


if __name__ == "__main__":
    entry.run(main, keeps=True)
