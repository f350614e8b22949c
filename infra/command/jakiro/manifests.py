"""Writes a recipe's stages as files for a cluster: what repeats in them (GPUs, nodes, paths, names) is the recipe's.

    jakiro manifests my.toml --for kubernetes --out deploy   run, dump, train, eval: kubectl apply -f, in this order
    jakiro manifests my.toml --for slurm --out deploy        submit.sh: three jobs, each behind the one before
    jakiro manifests my.toml --for docker --out deploy       run.sh: everything in a container of this machine
    jakiro manifests my.toml --for skypilot --out deploy     run.yaml for `sky launch`: a node with all GPUs

The files say what is theirs to change: image, volume, kind of GPU, bucket. Images: infra/docker/Dockerfile. What each
file needs before it works: docs/clusters.md.
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
CPUS, MEMORY = 8, 64  # of each GPU, or rank; GiB
KUBERNETES = {"image": "jakiro:cuda", "gpu_resource": "nvidia.com/gpu", "storage": "1Ti"}


@dataclass(frozen=True)
class Nodes:
    """How many nodes (or pods) a stage takes, and how many GPUs of each."""

    nodes: int
    gpus: int

    @classmethod
    def of(cls, gpus: float, given: argparse.Namespace) -> "Nodes":
        nodes = given.nodes or math.ceil(gpus / given.gpus_per_node) or 1
        return cls(nodes, math.ceil(gpus / nodes))


@dataclass(frozen=True)
class Stages:
    dump: Nodes
    train: Nodes  # on CPUs, too, `gpus` are ranks
    eval: Nodes
    eval_by_ray: bool

    @classmethod
    def of(cls, recipe: Recipe, given: argparse.Namespace) -> "Stages":
        """Raises PipelineError where the ranks do not fill their nodes, or cannot share a global batch."""

        def gpus(workers: int, each: float | None) -> float:
            return 0 if recipe.target.device == "cpu" else workers * (1 if each is None else each)

        ranks = recipe.train.ranks or given.gpus_per_node
        train = Nodes.of(ranks, given)
        if train.nodes * train.gpus != ranks:
            raise PipelineError(f"train.ranks={ranks} do not fill {train.nodes} nodes: change it, or --nodes")
        recipe.train.accumulation(ranks)
        features, measure = recipe.features, recipe.eval
        return cls(
            Nodes.of(gpus(features.workers, features.gpus_per_worker), given),
            train,
            Nodes.of(gpus(measure.workers, measure.gpus_per_worker), given),
            measure.workers > 1,
        )


def copy(recipe: Path, folder: Path) -> None:
    """The recipe goes along."""
    if recipe.resolve() != (folder / recipe.name).resolve():
        shutil.copyfile(recipe, folder / recipe.name)


class Writer:
    def __init__(self, recipe: Recipe, given: argparse.Namespace):
        self.recipe, self.given, self.stages = recipe, given, Stages.of(recipe, given)
        self.accelerated = recipe.target.device != "cpu"
        name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:40].rstrip("-")
        self.run = name if name[0].isalpha() else f"run-{name}"  # Kubernetes: a label of DNS that begins with a letter
        self._environment = Environment(
            loader=FileSystemLoader(INFRA), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=False
        )

    def put(self, name: str, template: str, **facts: Any) -> None:
        folder = (INFRA / template).parent
        environment = self._environment.overlay(loader=FileSystemLoader([folder, INFRA]))
        text = environment.get_template(template).render(run=self.run, accelerated=self.accelerated, **facts)
        write_text(self.given.out / name, text)

    def output(self, shared: str) -> list[str]:
        """The overrides of a run in a cluster, where `shared` is what all nodes see. Raises PipelineError for an output
        elsewhere.
        """
        place = self.recipe.output
        if not Path(place).is_absolute():
            place = f"{shared}/{place}"
        elif not place.startswith(f"{shared}/"):
            raise PipelineError(f"output={place} is not below {shared}, which all nodes see: change one of them")
        return override_arguments([*self.given.overrides, f"output={place}"])

    def asked(self, nodes: Nodes) -> dict[str, Any]:
        """Of a pod: CPUs and memory by its GPUs."""
        many = max(nodes.gpus, 1)
        return {"cpus": many * CPUS, "memory": f"{many * MEMORY}Gi", "shm": f"{max(many * 2, 4)}Gi"}

    def kubernetes(self) -> list[str]:
        shared, stages = self.given.shared.rstrip("/"), self.stages
        common = {"shared": shared, **KUBERNETES}
        recipe = recipe_file(self.given.recipe)
        file = f"recipe{recipe.suffix}"
        arguments = [f"/recipe/{file}", *self.output(shared)]
        facts = {"recipe": recipe.read_text().rstrip("\n"), "file": file}
        self.put("run.yaml", "kubernetes/run.yaml.jinja", **facts, **common)
        ray = {"ray_version": importlib.metadata.version("ray"), "head_cpus": 8, "head_memory": "32Gi"}

        def by_ray(stage: str, nodes: Nodes) -> None:
            facts = vars(nodes) | self.asked(nodes) | ray | common
            command = shlex.join(["jakiro", stage, *arguments])
            self.put(f"{stage}.yaml", "kubernetes/ray.yaml.jinja", stage=stage, command=command, **facts)

        def by_pods(stage: str, nodes: Nodes, command: list[str]) -> None:
            facts = vars(nodes) | self.asked(nodes) | common
            self.put(f"{stage}.yaml", "kubernetes/pods.yaml.jinja", stage=stage, command=command, **facts)

        by_ray("dump", stages.dump)
        first = f"{self.run}-train-pods-0-0.{self.run}-train"
        launch = f"torchrun --nnodes={stages.train.nodes} --nproc_per_node={stages.train.gpus}"
        launch += (
            f" --node_rank=$JOB_COMPLETION_INDEX --master_addr={first} --master_port=29500 --no_python jakiro rank"
        )
        by_pods("train", stages.train, ["bash", "-c", f"exec {launch} {shlex.join(arguments)}"])
        if self.recipe.fed:
            by_ray("feed", stages.dump)
        if stages.eval_by_ray:
            by_ray("eval", stages.eval)
        else:
            by_pods("eval", stages.eval, ["jakiro", "eval", *arguments])
        return ["run.yaml, then dump.yaml; when that job is done train.yaml; then eval.yaml: kubectl apply -f FILE"]

    def slurm(self) -> list[str]:
        facts = {name: vars(getattr(self.stages, name)) for name in ("dump", "train", "eval")}
        for script in ("ray.sbatch", "train.sbatch"):
            shutil.copyfile(INFRA / "slurm" / script, self.given.out / script)
        arguments = shlex.join([self.given.recipe, *override_arguments(self.given.overrides)])
        self.put(
            "submit.sh",
            "slurm/submit.sh.jinja",
            arguments=arguments,
            cpus_per_gpu=CPUS,
            memory_per_gpu=MEMORY,
            bin=Path(sys.executable).parent,
            fed=self.recipe.fed,
            **facts,
        )
        (self.given.out / "submit.sh").chmod(0o755)
        return ["bash submit.sh, in the folder that the recipe's paths begin in"]

    def docker(self) -> list[str]:
        recipe = recipe_file(self.given.recipe)
        arguments = shlex.join([f"/recipe/{recipe.name}", *self.output("/shared")])
        self.put("run.sh", "docker/run.sh.jinja", arguments=arguments)
        copy(recipe, self.given.out)
        (self.given.out / "run.sh").chmod(0o755)
        return ["bash run.sh, beside a folder `shared` for what the run reads and leaves"]

    def skypilot(self) -> list[str]:
        stages = (self.stages.dump, self.stages.train, self.stages.eval)
        most = max(stage.nodes for stage in stages)
        if most > 1:
            raise PipelineError(f"a stage takes {most} nodes, and this file has one: raise --gpus-per-node")
        gpus = max(stage.gpus for stage in stages) if self.accelerated else 0
        arguments = shlex.join([self.given.recipe, *self.output("/shared")])
        facts = {"gpus": gpus, "arguments": arguments, **self.asked(Nodes(1, gpus))}
        self.put("run.yaml", "skypilot/run.yaml.jinja", **facts)
        file = self.given.out / "run.yaml"
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
    given = parser.parse_args()
    recipe = load_recipe(given.recipe, given.overrides)
    given.out.mkdir(parents=True, exist_ok=True)
    for line in places[given.place](Writer(recipe, given)):
        print(f"{given.out}: {line}")
    say_paths(recipe)


def say_paths(recipe: Recipe) -> None:
    local = [f"{key} = {value}" for key, value in paths_in(recipe).items()]
    if local:
        print(f"paths of the recipe, which have to be there on every node: {', '.join(local)}", flush=True)


def paths_in(recipe: Recipe) -> dict[str, str]:
    """Keys that name a file or folder rather than an address."""
    target = recipe.target
    found = {"target.model": target.model, "target.chat_template": target.chat_template}
    found["data.source"] = recipe.data.source
    known = {key: value for key, value in found.items() if value and not (jakiro.HOME / value).is_file()}
    return {key: value for key, value in known.items() if value.startswith((".", "/", "~")) or Path(value).exists()}


if __name__ == "__main__":
    entry.run(main)
