"""`jakiro run --on`: a real Ray cluster; stand-ins for sbatch and kubectl that record what they get."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jakiro import run
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import Manifest
from pipeline.recipe.recipe import Recipe
from tests.kit import ROOT, call, recipe_tree, wait_until, write_recipe, write_sharegpt
from tests.test_manifests import tool

JAKIRO = [sys.executable, "-c", "import jakiro; jakiro.main()"]
# Says its job's name into the log that it was given; the environment says how a stage ends.
SBATCH = """
printf '%s\\n' "$*" >>"$LOG"
for word in "$@"; do case $word in --output=*) out=${word#*=} ;; --job-name=*) name=${word#*=} ;; esac; done
echo 17
[ -z "${HANGS:-}" ] || { touch "$LOG.hangs"; exec sleep 60; }
echo "output of $name" >>"$out"
case $name in *-$FAILS-*) exit 3 ;; *-feed-*) [ -z "$FAILS" ] || exec sleep 60 ;; esac
"""
KUBECTL = """
printf '%s\\n' "$*" >>"$LOG"
case $1 in
    apply) touch "$LOG.$(basename "${2#*=}" .yaml)" ;;
    get)
        [ -e "$LOG.${3#tiny-}" ] || exit 0 # not found
        case $* in *--output=name) echo "$2/$3" && exit ;; esac
        [ "$(grep -c "^get $2 $3 .*jsonpath" "$LOG")" -ge 2 ] || exit 0 # no state yet
        case $2 in rayjob) echo "${RAYJOB:-Complete/SUCCEEDED}" ;; *) echo Completed ;; esac
        ;;
    logs) echo "output of $4" ;;
esac
"""


@pytest.fixture
def recipe(tiny_target, tmp_path) -> Path:
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    del tree["draft"]["eagle"]
    return write_recipe(tree, tmp_path / "tiny.toml")


def on(place: str, recipe: Path, environment: dict[str, str], *more: str) -> subprocess.CompletedProcess:
    command = [*JAKIRO, "run", str(recipe), "--on", place, *more]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=recipe.parent)


def scheduler(name: str, text: str, folder: Path, **more: str) -> dict[str, str]:
    return {**tool(name, folder, text), "PYTHONPATH": str(ROOT / "infra/command"), "FAILS": "", "EVERY": "0.1", **more}


def asked(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_slurm_runs_stage_after_stage_and_shows_their_output(recipe, tmp_path):
    tools = tmp_path / "bin"
    done = on("slurm", recipe, scheduler("sbatch", SBATCH, tools), "--until", "train", "--partition=gpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("output of tiny-dump-") < done.stdout.index("output of tiny-train-")
    dump, train = asked(tools)
    assert "--partition=gpu --wait --job-name=tiny-dump-" in dump and dump.endswith(f"ray.sbatch dump {recipe}")
    assert f"--output={tmp_path}/run/logs/train.log" in train and train.endswith(f"train.sbatch {recipe}")


def test_a_stage_that_fails_ends_the_run(recipe, tmp_path):
    done = on("slurm", recipe, scheduler("sbatch", SBATCH, tmp_path / "bin", FAILS="dump"))
    assert done.returncode == 2 and "error: dump failed (status 3): its output is above" in done.stderr
    assert len(asked(tmp_path / "bin")) == 1


def test_a_feeder_runs_beside_its_training_and_goes_when_that_fails(recipe, tmp_path):
    environment = scheduler("sbatch", SBATCH, tmp_path / "bin", FAILS="train")
    tool("scancel", tmp_path / "bin", 'printf "scancel %s\\n" "$*" >>"$LOG"')
    done = on("slurm", recipe, environment, "--set", "features.keep=window")
    assert done.returncode == 2 and "train, feed: starts on the cluster" in done.stdout
    assert "feed: cancelled" in done.stdout
    assert asked(tmp_path / "bin")[-1].startswith("scancel --me --name=tiny-feed-")


def test_an_interrupt_says_how_to_cancel_and_leaves_the_job(recipe, tmp_path):
    environment = scheduler("sbatch", SBATCH, tmp_path / "bin", HANGS="1")
    command = [*JAKIRO, "run", str(recipe), "--on", "slurm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        wait_until((tmp_path / "bin/log.hangs").exists)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "dump runs on the cluster. To cancel it: scancel --me --name=tiny-dump-" in out


def test_kubernetes_gets_each_file_and_is_watched_to_its_end(recipe, tmp_path):
    environment = scheduler("kubectl", KUBECTL, tmp_path / "bin")
    shared = ("--shared", str(tmp_path))
    done = on("kubernetes", recipe, environment, *shared, "--image", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    deploy, said = tmp_path / "deploy/tiny", asked(tmp_path / "bin")
    applied = [line.rpartition("/")[2] for line in said if line.startswith("apply")]
    assert applied == ["run.yaml", "dump.yaml", "train.yaml", "eval.yaml"]
    asks = [said.index(f"{what} --filename={deploy}/dump.yaml") for what in ("delete --ignore-not-found", "apply")]
    assert asks == sorted(asks)
    known = "--ignore-not-found --output=jsonpath="
    assert f"get rayjob tiny-dump {known}{{.status.jobDeploymentStatus}}/{{.status.jobStatus}}" in said
    assert f"get jobset tiny-train {known}{{.status.terminalState}}" in said
    assert "output of job/tiny-dump" in done.stdout and "output of job/tiny-train-pods-0" in done.stdout
    assert "image: mine" in (deploy / "train.yaml").read_text()
    for state in ("Failed/FAILED", "Complete/STOPPED", "ValidationFailed/"):
        failed = on("kubernetes", recipe, environment | {"RAYJOB": state}, *shared)
        assert failed.returncode == 2 and "dump failed (status 1)" in failed.stderr
        assert f"tiny-dump ended as {state}" in failed.stderr
    (tmp_path / "bin/log").write_text("")  # as if it had begun just now: there it is, and has no state yet
    joined = on("kubernetes", recipe, environment, *shared, "--until", "preprocess")
    assert joined.returncode == 0 and "tiny-dump runs already" in joined.stdout
    assert not any(line.startswith(("apply", "delete")) for line in asked(tmp_path / "bin"))


@pytest.mark.parametrize(
    ("place", "more", "refused"),
    [
        ("moon", (), "--on moon: expected ray://HEAD, slurm or kubernetes"),
        ("slurm", (), "sbatch is not here"),
        ("ray://head", ("--untill", "train"), "--untill: no option of jakiro run"),
        ("ray://head", ("--set", "output=runs/tiny"), "output=runs/tiny: a job runs in a temporary folder"),
        (
            "ray://head",
            ("--set", "target.device=auto", "--set", "train.ranks=16"),
            "train.ranks=16 are more than one node",
        ),
    ],
)
def test_what_cannot_be_is_refused(place, more, refused, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    sets = ("--set", "train.micro_batch=1", "--set", "train.global_batch=16") if "train.ranks=16" in more else ()
    with pytest.raises(PipelineError, match=refused):
        call(run.main, str(recipe), "--on", place, *more, *sets)


def test_gpus_that_a_ray_job_asks_for_are_its_own(tiny_target, tmp_path):
    """Workers ask for theirs; how many ranks a node takes has to be said."""
    tree = recipe_tree(tiny_target, tmp_path / "data.json", "/shared/run")
    tree["target"]["device"], tree["eval"]["workers"], tree["train"]["ranks"] = "auto", 4, 8
    tree["train"] |= {"global_batch": 8, "micro_batch": 1}
    given = argparse.Namespace(nodes=None, gpus_per_node=8)
    recipe = Recipe.model_validate(tree)
    asked = {stage: run._gpus_of(stage, recipe, given) for stage in ("dump", "feed", "train", "eval")}
    assert asked == {"dump": 0, "feed": 0, "train": 8, "eval": 0}
    del tree["train"]["ranks"]
    with pytest.raises(PipelineError, match=r"train.ranks is not set"):
        run._gpus_of("train", Recipe.model_validate(tree), given)


@pytest.mark.real
def test_ray_runs_all_stages_on_a_cluster_and_again_does_nothing(recipe, tmp_path, taking_jobs):
    """The job brings the recipe alone; the nodes have the project where it is installed."""
    environment = scheduler("true", "", tmp_path / "bin")
    place = f"ray://{taking_jobs.dashboard.removeprefix('http://')}"
    done = on(place, recipe, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Manifest.load(tmp_path / "run/features").complete and (tmp_path / "run/release/release.json").exists()
    weights = (tmp_path / "run/drafts/jakiro/model.safetensors").stat().st_mtime_ns
    again = on(place, recipe, environment)
    assert again.returncode == 0 and (tmp_path / "run/drafts/jakiro/model.safetensors").stat().st_mtime_ns == weights
    failing = on(place, recipe, environment, "--set", "data.max_length=7", "--set", f"output={tmp_path}/other")
    assert failing.returncode == 2 and "dump failed" in failing.stderr, failing.stdout
    assert json.loads((tmp_path / "run/release/provenance.json").read_text())["recipe"] == "tiny"
