"""Tests of `jakiro manifests`: its files fit the published schemas, have the recipe's numbers, and work."""

import json
import random
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from kubeflow_trainer_api import models

from jakiro import manifests
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import Manifest
from pipeline.recipe.identity import run_hash
from pipeline.recipe.load import load_recipe
from pipeline.recipe.read import RECIPES
from tests.kit import BIN, ROOT, call, command_environment, recipe_tree, write_recipe, write_sharegpt

SCHEMAS = ROOT / "tests/schemas"
OF_ALL_KINDS = ["llama3.1-instruct-8b", "llama3.3-instruct-70b-eagle-3", "qwen3-8b-parallel", "demo"]


def write_files(place: str, out: Path, recipe: str, *more: str) -> Path:
    call(manifests.main, recipe, "--for", place, "--out", str(out), *more)
    return out


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def require_known(model: Any, document: dict[str, Any]) -> None:
    """Check that a generated model, which ignores unknown keys, keeps every key of the document."""

    def compare(value: Any, second: Any, path: str) -> None:
        if isinstance(value, dict):
            for key in value:
                assert key in second, f"{path}.{key} is not known"
                compare(value[key], second[key], f"{path}.{key}")
        elif isinstance(value, list):
            assert len(value) == len(second), path
            for number, (inner, second_inner) in enumerate(zip(value, second, strict=True)):
                compare(inner, second_inner, f"{path}[{number}]")
        else:
            assert value == second, path

    compare(document, model.from_dict(document).to_dict(), model.__name__)


def check_schema(schema: str, document: dict[str, Any]) -> None:
    jsonschema.validate(document, json.loads((SCHEMAS / schema).read_text()))


def require_pod(template: dict[str, Any]) -> None:
    require_known(models.IoK8sApiCoreV1PodTemplateSpec, template)
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


@pytest.mark.parametrize("name", OF_ALL_KINDS)
def test_kubernetes_files_fit_the_schemas_and_the_recipe(name, tmp_path):
    out, recipe = write_files("kubernetes", tmp_path, name), load_recipe(name)
    config_map, claim, policy = documents(out / "run.yaml")
    require_known(models.IoK8sApiCoreV1ConfigMap, config_map)
    require_known(models.IoK8sApiCoreV1PersistentVolumeClaim, claim)
    check_schema("networkpolicy.json", policy)
    shown = tmp_path / "shown.toml"
    shown.write_text(config_map["data"]["recipe.toml"])
    assert run_hash(load_recipe(shown)) == run_hash(recipe)
    [dump] = documents(out / "dump.yaml")
    check_schema("rayjob.json", dump)
    cluster = dump["spec"]["rayClusterSpec"]
    for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
        require_pod(template)
        assert template["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    require_known(models.IoK8sApiCoreV1PodTemplateSpec, dump["spec"]["submitterPodTemplate"])
    assert cluster["rayVersion"] == ray.__version__
    required = recipe.features.workers * (recipe.features.gpus_per_worker or 1)
    group = cluster["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = group["replicas"] * limits.get("nvidia.com/gpu", 0)
    assert gpus == 0 if recipe.target.device == "cpu" else required <= gpus < required + group["replicas"]
    output = recipe.output if recipe.output.startswith("/") else f"/shared/{recipe.output}"
    assert dump["spec"]["entrypoint"] == f"jakiro dump /recipe/recipe.toml --set output={output}"
    [train] = documents(out / "train.yaml")
    require_known(models.JobsetV1alpha2JobSet, train)
    job = train["spec"]["replicatedJobs"][0]["template"]["spec"]
    require_pod(job["template"])
    command = job["template"]["spec"]["containers"][0]["command"][-1]
    per_pod = int(command.partition("--nproc_per_node=")[2].split()[0])
    assert job["parallelism"] * per_pod == (recipe.train.ranks or 8)
    subprocess.run(["bash", "-n", "-c", command], check=True)
    [measured] = documents(out / "eval.yaml")
    by_ray = measured["kind"] == "RayJob"
    assert by_ray == (recipe.eval.workers > 1)
    check_schema("rayjob.json", measured) if by_ray else require_known(models.JobsetV1alpha2JobSet, measured)


def test_a_training_that_is_fed_gets_its_feeder(tmp_path):
    fed = ("--set", "features.keep=window", "--nodes", "2")
    out = write_files("kubernetes", tmp_path / "k", "llama3.1-instruct-8b", *fed)
    [feed] = documents(out / "feed.yaml")
    check_schema("rayjob.json", feed)
    entrypoint = feed["spec"]["entrypoint"]
    assert entrypoint.startswith("jakiro feed ") and "features.keep=window" in entrypoint
    submit = (write_files("slurm", tmp_path / "s", "llama3.1-instruct-8b", *fed) / "submit.sh").read_text()
    assert 'feed=$(submit 2 2 "$here/ray.sbatch" feed ' in submit


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (("--set", "output=/home/me/run"), "output=/home/me/run is not below /shared, which all nodes see"),
        (("--set", "train.ranks=8", "--nodes", "3"), "train.ranks=8 do not fill 3 nodes"),
        (("--set", "train.ranks=3"), "global_batch=16 is no multiple"),
    ],
)
def test_impossible_settings_are_refused(more, refused, tmp_path):
    with pytest.raises(PipelineError, match=refused):
        write_files("kubernetes", tmp_path, "llama3.1-instruct-8b", *more)


def test_paths_that_only_this_machine_has_are_named(tmp_path, capsys):
    write_files("docker", tmp_path, "llama3.1-instruct-8b", "--set", "data.source=/data/chat.json")
    assert "have to be there on every node: data.source = /data/chat.json" in capsys.readouterr().out


def test_the_skypilot_file_fits_its_schema(tmp_path):
    for name, gpus in (("llama3.1-instruct-8b", "H100:8"), ("demo", None)):
        [task] = documents(write_files("skypilot", tmp_path, name) / "run.yaml")
        check_schema("skypilot-task.json", task)
        assert task["resources"].get("accelerators") == gpus and f"jakiro run {name}" in task["run"]


def fake_tool(name: str, folder: Path, text: str) -> dict[str, str]:
    """Return an environment in which a command of the cluster is the script `text`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)
    return command_environment(PATH=f"{folder}:{command_environment()['PATH']}", LOG=str(folder / "log"))


def test_slurm_gets_three_jobs_each_after_the_one_before(tmp_path):
    more = ("--set", "train.ranks=16", "--set", "train.micro_batch=1")
    out = write_files("slurm", tmp_path / "out", "llama3.1-instruct-8b", *more, "--gpus-per-node", "4")
    sbatch = 'printf "%s\\n" "$*" >>"$LOG"; wc -l <"$LOG"'
    environment = fake_tool("sbatch", tmp_path / "bin", sbatch)
    done = subprocess.run(
        ["bash", str(out / "submit.sh"), "--partition=gpu"], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "submitted: dump 1, train 2, eval 3\n"
    dump, train, measure = (tmp_path / "bin/log").read_text().splitlines()
    common = " ".join(more)
    assert dump.startswith("--parsable --nodes=1 ") and "--gpus-per-node=4 --partition=gpu" in dump
    assert dump.endswith(f"ray.sbatch dump llama3.1-instruct-8b {common}") and "--dependency" not in dump
    assert "--nodes=4 " in train and train.endswith(f"train.sbatch llama3.1-instruct-8b {common}")
    assert "--dependency=afterok:1 " in train and "--dependency=afterok:2 " in measure
    assert measure.endswith(f"ray.sbatch eval llama3.1-instruct-8b {common}")
    failing = fake_tool("sbatch", tmp_path / "bin", "echo no >&2; exit 1")
    done = subprocess.run(["bash", str(out / "submit.sh")], capture_output=True, text=True, env=failing)
    assert done.returncode == 1 and "submitted" not in done.stdout


@pytest.fixture
def short() -> Iterator[str]:
    """Yield a folder whose name is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield folder


@pytest.mark.real
@pytest.mark.long
def test_the_slurm_script_dumps_with_its_own_ray(tiny_target, tmp_path, short):
    """One node requires no srun: the cluster, the token and the job are real."""
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    recipe = write_recipe(tree, tmp_path / "tiny.toml")
    environment = fake_tool("scontrol", tmp_path / "bin", "echo 127.0.0.1")
    slurm = {"JOB_ID": random.randrange(12000), "JOB_NODELIST": "x", "NNODES": 1, "CPUS_PER_TASK": 2}
    environment = {key: value for key, value in environment.items() if not key.startswith("RAY_AUTH")}
    environment |= {f"SLURM_{key}": str(value) for key, value in slurm.items()} | {
        "JAKIRO_BIN": str(BIN),
        "HOME": str(tmp_path),
        "RAY_TMPDIR": short,
    }
    command = ["bash", str(ROOT / "infra/slurm/ray.sbatch"), "dump", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    token = (tmp_path / ".ray/auth_token").stat()
    assert token.st_size and token.st_mode & 0o777 == 0o600
    assert Manifest.load(tmp_path / "run/features").complete


def test_docker_gets_the_recipe_the_gpus_and_a_folder(tmp_path):
    out = write_files("docker", tmp_path / "out", "llama3.1-instruct-8b")
    environment = fake_tool("docker", tmp_path / "bin", 'printf "%s\\n" "$@" >"$LOG"')
    subprocess.run(["bash", str(out / "run.sh"), "--until", "train"], env=environment, check=True)
    words = (tmp_path / "bin/log").read_text().splitlines()
    assert words[:3] == ["run", "--rm", "--init"] and "--gpus" in words and f"{out}/shared:/shared" in words
    assert words[words.index("jakiro:cuda") :] == [
        *("jakiro:cuda", "run", "/recipe/llama3.1-instruct-8b.toml", "--set"),
        *("output=/shared/runs/llama3.1-instruct-8b", "--until", "train"),
    ]
    assert (out / "llama3.1-instruct-8b.toml").read_text() == (RECIPES / "llama3.1-instruct-8b.toml").read_text()
    assert "--gpus" not in (write_files("docker", tmp_path / "cpu", "demo") / "run.sh").read_text()


def test_shell_scripts_and_the_dockerfile_are_clean(tmp_path):
    scripts = [str(path) for path in (ROOT / "infra/slurm").glob("*.sbatch")]
    scripts += [
        str(write_files(place, tmp_path, "demo") / name)
        for place, name in (("slurm", "submit.sh"), ("docker", "run.sh"))
    ]
    for command in (
        [str(BIN / "shellcheck"), *scripts],
        [str(BIN / "hadolint"), str(ROOT / "infra/docker/Dockerfile")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
