"""Write a recipe's stages as files for a cluster. GPUs, nodes, paths and names in them come from the recipe.

    jakiro manifests my.toml --for kubernetes --out deploy   run, dump, train, eval: kubectl apply -f, in this order
    jakiro manifests my.toml --for slurm --out deploy        submit.sh: three jobs, each after the one before
    jakiro manifests my.toml --for docker --out deploy       run.sh: everything in a container of this machine
    jakiro manifests my.toml --for skypilot --out deploy     run.yaml for `sky launch`: a node with all GPUs

Comments in the files name what you may change: image, volume, kind of GPU, bucket. Images: infra/docker/Dockerfile. The
requirements of each file: docs/clusters.md.
"""

import argparse
import importlib.metadata
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import jakiro
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_text
from pipeline.recipe.load import add_recipe_arguments, load_recipe, override_arguments
from pipeline.recipe.read import recipe_file
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

INFRA = jakiro.HOME / "infra"
CPUS, MEMORY = 8, 64  # for each GPU, or rank; GiB
KUBERNETES = {"image": "jakiro:cuda", "gpu_resource": "nvidia.com/gpu", "storage": "1Ti"}


@dataclass(frozen=True)
class Nodes:
    """The number of nodes (or pods) of a stage, and of GPUs on each."""

    nodes: int
    gpus: int

    @classmethod
    def of(cls, gpus: float, args: argparse.Namespace) -> "Nodes":
        nodes = args.nodes or math.ceil(gpus / args.gpus_per_node) or 1
        return cls(nodes, math.ceil(gpus / nodes))


@dataclass(frozen=True)
class Stages:
    dump: Nodes
    train: Nodes  # `gpus` are ranks, also on CPUs
    eval: Nodes
    eval_by_ray: bool

    @classmethod
    def of(cls, recipe: Recipe, args: argparse.Namespace) -> "Stages":
        """Divide a recipe's stages. Raise PipelineError if ranks do not fill nodes or share a global batch."""

        def gpus(workers: int, gpus_each: float | None) -> float:
            return 0 if recipe.target.device == "cpu" else workers * (1 if gpus_each is None else gpus_each)

        ranks = recipe.train.ranks or args.gpus_per_node
        train = Nodes.of(ranks, args)
        if train.nodes * train.gpus != ranks:
            raise PipelineError(f"train.ranks={ranks} do not fill {train.nodes} nodes: change it, or --nodes")
        recipe.train.accumulation(ranks)
        features, measure = recipe.features, recipe.eval
        return cls(
            Nodes.of(gpus(features.workers, features.gpus_per_worker), args),
            train,
            Nodes.of(gpus(measure.workers, measure.gpus_per_worker), args),
            measure.workers > 1,
        )


def copy_recipe(recipe: Path, folder: Path) -> None:
    """Copy the recipe into the folder."""
    if recipe.resolve() != (folder / recipe.name).resolve():
        shutil.copyfile(recipe, folder / recipe.name)


class Writer:
    def __init__(self, recipe: Recipe, args: argparse.Namespace):
        self.recipe, self.args, self.stages = recipe, args, Stages.of(recipe, args)
        self.accelerated = recipe.target.device != "cpu"
        name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:40].rstrip("-")
        self.run = name if name[0].isalpha() else f"run-{name}"  # Kubernetes: a label of DNS that begins with a letter
        self._environment = Environment(
            loader=FileSystemLoader(INFRA), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=False
        )

    def render(self, name: str, template: str, **facts: Any) -> None:
        folder = (INFRA / template).parent
        environment = self._environment.overlay(loader=FileSystemLoader([folder, INFRA]))
        text = environment.get_template(template).render(run=self.run, accelerated=self.accelerated, **facts)
        write_text(self.args.out / name, text)

    def output_overrides(self, shared: str) -> list[str]:
        """Return the overrides of a run in a cluster whose nodes all see the folder `shared`. Raise PipelineError for
        an output outside of it.
        """
        place = self.recipe.output
        if not Path(place).is_absolute():
            place = f"{shared}/{place}"
        elif not place.startswith(f"{shared}/"):
            raise PipelineError(f"output={place} is not below {shared}, which all nodes see: change one of them")
        return override_arguments([*self.args.overrides, f"output={place}"])

    def pod_resources(self, nodes: Nodes) -> dict[str, Any]:
        """Return the CPUs and the memory of a pod, by its number of GPUs."""
        gpus = max(nodes.gpus, 1)
        return {"cpus": gpus * CPUS, "memory": f"{gpus * MEMORY}Gi", "shm": f"{max(gpus * 2, 4)}Gi"}

    def kubernetes(self) -> list[str]:
        shared, stages = self.args.shared.rstrip("/"), self.stages
        common = {"shared": shared, **KUBERNETES}
        recipe = recipe_file(self.args.recipe)
        file = f"recipe{recipe.suffix}"
        arguments = [f"/recipe/{file}", *self.output_overrides(shared)]
        facts = {"recipe": recipe.read_text().rstrip("\n"), "file": file}
        self.render("run.yaml", "kubernetes/run.yaml.jinja", **facts, **common)
        ray = {"ray_version": importlib.metadata.version("ray"), "head_cpus": 8, "head_memory": "32Gi"}

        def add_ray_job(stage: str, nodes: Nodes) -> None:
            facts = vars(nodes) | self.pod_resources(nodes) | ray | common
            command = shlex.join(["jakiro", stage, *arguments])
            self.render(f"{stage}.yaml", "kubernetes/ray.yaml.jinja", stage=stage, command=command, **facts)

        def add_pods(stage: str, nodes: Nodes, command: list[str]) -> None:
            facts = vars(nodes) | self.pod_resources(nodes) | common
            self.render(f"{stage}.yaml", "kubernetes/pods.yaml.jinja", stage=stage, command=command, **facts)

        add_ray_job("dump", stages.dump)
        first = f"{self.run}-train-pods-0-0.{self.run}-train"
        launch = f"torchrun --nnodes={stages.train.nodes} --nproc_per_node={stages.train.gpus}"
        launch += (
            f" --node_rank=$JOB_COMPLETION_INDEX --master_addr={first} --master_port=29500 --no_python jakiro rank"
        )
        add_pods("train", stages.train, ["bash", "-c", f"exec {launch} {shlex.join(arguments)}"])
        if self.recipe.fed:
            add_ray_job("feed", stages.dump)
        if stages.eval_by_ray:
            add_ray_job("eval", stages.eval)
        else:
            add_pods("eval", stages.eval, ["jakiro", "eval", *arguments])
        return ["run.yaml, then dump.yaml; when that job is done train.yaml; then eval.yaml: kubectl apply -f FILE"]

    def slurm(self) -> list[str]:
        facts = {name: vars(getattr(self.stages, name)) for name in ("dump", "train", "eval")}
        for script in ("ray.sbatch", "train.sbatch"):
            shutil.copyfile(INFRA / "slurm" / script, self.args.out / script)
        arguments = shlex.join([self.args.recipe, *override_arguments(self.args.overrides)])
        self.render(
            "submit.sh",
            "slurm/submit.sh.jinja",
            arguments=arguments,
            cpus_per_gpu=CPUS,
            memory_per_gpu=MEMORY,
            bin=Path(sys.executable).parent,
            fed=self.recipe.fed,
            **facts,
        )
        (self.args.out / "submit.sh").chmod(0o755)
        return ["bash submit.sh, in the folder that the recipe's paths are relative to"]

    def docker(self) -> list[str]:
        recipe = recipe_file(self.args.recipe)
        arguments = shlex.join([f"/recipe/{recipe.name}", *self.output_overrides("/shared")])
        self.render("run.sh", "docker/run.sh.jinja", arguments=arguments)
        copy_recipe(recipe, self.args.out)
        (self.args.out / "run.sh").chmod(0o755)
        return ["bash run.sh, next to a folder `shared` for the run's input and output"]

    def skypilot(self) -> list[str]:
        stages = (self.stages.dump, self.stages.train, self.stages.eval)
        max_nodes = max(stage.nodes for stage in stages)
        if max_nodes > 1:
            raise PipelineError(
                f"a stage takes {max_nodes} nodes, but this file can have only one: raise --gpus-per-node"
            )
        gpus = max(stage.gpus for stage in stages) if self.accelerated else 0
        arguments = shlex.join([self.args.recipe, *self.output_overrides("/shared")])
        facts = {"gpus": gpus, "arguments": arguments, **self.pod_resources(Nodes(1, gpus))}
        self.render("run.yaml", "skypilot/run.yaml.jinja", **facts)
        file = self.args.out / "run.yaml"
        return [f"in the checkout: sky launch --secret HF_TOKEN {file}; sky jobs launch survives a lost spot node"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    places: dict[str, Callable[[Writer], list[str]]] = {
        name: getattr(Writer, name) for name in ("kubernetes", "slurm", "docker", "skypilot")
    }
    parser.add_argument("--for", dest="place", required=True, choices=places)
    parser.add_argument("--out", type=Path, required=True, help="a folder; files of the same names are replaced")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--nodes", type=int, help="of each stage; default: as few as hold its GPUs")
    parser.add_argument("--shared", default="/shared", help="a folder that all nodes see; default: %(default)s")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.overrides)
    args.out.mkdir(parents=True, exist_ok=True)
    for line in places[args.place](Writer(recipe, args)):
        print(f"{args.out}: {line}")
    print_paths(recipe)


def print_paths(recipe: Recipe) -> None:
    paths = [f"{key} = {value}" for key, value in local_paths(recipe).items()]
    if paths:
        print(f"paths of the recipe, which have to be there on every node: {', '.join(paths)}", flush=True)


def local_paths(recipe: Recipe) -> dict[str, str]:
    """Return the keys whose value is a file or folder, not an address, with their values."""
    target = recipe.target
    candidates = {"target.model": target.model, "target.chat_template": target.chat_template}
    candidates["data.source"] = recipe.data.source
    external = {key: value for key, value in candidates.items() if value and not (jakiro.HOME / value).is_file()}
    return {key: value for key, value in external.items() if value.startswith((".", "/", "~")) or Path(value).exists()}


if __name__ == "__main__":
    entry.run(main)
