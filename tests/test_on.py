"""`jakiro run --on`: a real Ray cluster, and what follows its jobs."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from jakiro import run
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import Manifest
from pipeline.recipe.recipe import Recipe
from tests.kit import ROOT, call, command_environment, recipe_tree, wait_until, write_recipe, write_sharegpt

JAKIRO = [sys.executable, "-c", "import jakiro; jakiro.main()"]


@pytest.fixture
def recipe(tiny_target, tmp_path) -> Path:
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    del tree["draft"]["eagle"]
    return write_recipe(tree, tmp_path / "tiny.toml")


def job(stage: str, command: str, cancel: str = "true") -> run.ClusterJob:
    return run.ClusterJob(stage, ["bash", "-c", command], ["bash", "-c", cancel])


def test_a_stage_that_fails_ends_the_run(capfd):
    run.run_jobs([job("dump", "echo output of dump")])
    with pytest.raises(PipelineError, match=r"train failed \(status 3\): its output is above"):
        run.run_jobs([job("train", "echo output of training; exit 3")])
    shown = capfd.readouterr().out
    assert shown.index("output of dump") < shown.index("output of training")


def test_a_stage_that_fails_at_once_fails(monkeypatch):
    """Also one that has ended before it is first looked at."""
    start = run.children.start_command

    @contextmanager
    def start_and_wait(*arguments, **options):
        with start(*arguments, **options) as process:
            process.wait()
            yield process

    monkeypatch.setattr(run.children, "start_command", start_and_wait)
    with pytest.raises(PipelineError, match=r"train failed \(status 3\)"):
        run.run_jobs([job("train", "exit 3")])


def test_a_feeder_runs_beside_its_training_and_goes_when_that_fails(tmp_path, capsys):
    wait = f"until [ -e {tmp_path}/fed ]; do sleep 0.1; done; exit 3"
    feed = job("feed", f"touch {tmp_path}/fed; exec sleep 60", f"touch {tmp_path}/cancelled")
    with pytest.raises(PipelineError, match=r"train failed"):
        run.run_jobs([job("train", wait), feed])
    shown = capsys.readouterr().out
    assert "train, feed: starts on the cluster" in shown and "feed: cancelled" in shown
    assert (tmp_path / "cancelled").exists()


@pytest.mark.long
def test_an_interrupt_says_how_to_cancel_and_leaves_the_job(tmp_path):
    text = f"""
from jakiro import run
from pipeline.running import entry

job = run.ClusterJob("dump", ["bash", "-c", "touch {tmp_path}/began; exec sleep 60"], ["touch", "{tmp_path}/cancelled"])
entry.run(lambda: run.run_jobs([job]))
"""
    environment = command_environment(PYTHONPATH=f"{ROOT}:{ROOT}/infra/command")
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        wait_until((tmp_path / "began").exists)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"dump runs on the cluster. To cancel it: touch {tmp_path}/cancelled" in out
    assert not (tmp_path / "cancelled").exists()


def refusal(recipe: Path, *arguments: str) -> str:
    with pytest.raises(PipelineError) as refused:
        call(run.main, str(recipe), "--on", *arguments)
    return str(refused.value)


def test_what_cannot_be_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(recipe, "moon") == "--on moon: expected ray://HEAD"
    relative = refusal(recipe, "ray://head", "--set", "output=runs/tiny")
    assert relative.startswith("output=runs/tiny: a job runs in a temporary folder")
    keys = ("target.device=auto", "train.ranks=16", "train.micro_batch=1", "train.global_batch=16")
    too_many = refusal(recipe, "ray://head", *(word for key in keys for word in ("--set", key)))
    assert too_many == "train.ranks=16 are more than one node has (--gpus-per-node=8)"


def test_gpus_that_a_ray_job_asks_for_are_its_own(tiny_target, tmp_path):
    """Workers ask for theirs; how many ranks a node takes has to be said."""
    tree = recipe_tree(tiny_target, tmp_path / "data.json", "/shared/run")
    tree["target"]["device"], tree["eval"]["workers"], tree["train"]["ranks"] = "auto", 4, 8
    tree["train"] |= {"global_batch": 8, "micro_batch": 1}
    recipe = Recipe.model_validate(tree)
    gpus = {stage: run._gpus_of(stage, recipe, 8) for stage in ("dump", "feed", "train", "eval")}
    assert gpus == {"dump": 0, "feed": 0, "train": 8, "eval": 0}
    del tree["train"]["ranks"]
    with pytest.raises(PipelineError, match=r"train.ranks is not set"):
        run._gpus_of("train", Recipe.model_validate(tree), 8)


@pytest.mark.real
@pytest.mark.long
def test_ray_runs_all_stages_on_a_cluster_and_again_does_nothing(recipe, tmp_path, taking_jobs):
    """The job brings the recipe alone; the nodes have the project where it is installed."""
    environment = command_environment(PYTHONPATH=str(ROOT / "infra/command"))
    place = f"ray://{taking_jobs.dashboard.removeprefix('http://')}"

    def on(*arguments: str) -> subprocess.CompletedProcess:
        command = [*JAKIRO, "run", str(recipe), "--on", place, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=tmp_path)

    done = on()
    assert done.returncode == 0, done.stdout + done.stderr
    assert Manifest.load(tmp_path / "run/features").complete and (tmp_path / "run/release/release.json").exists()
    weights = (tmp_path / "run/drafts/jakiro/model.safetensors").stat().st_mtime_ns
    again = on()
    assert again.returncode == 0 and (tmp_path / "run/drafts/jakiro/model.safetensors").stat().st_mtime_ns == weights
    failing = on("--set", "data.max_length=7", "--set", f"output={tmp_path}/other")
    assert failing.returncode == 2 and "dump failed" in failing.stderr, failing.stdout
    assert json.loads((tmp_path / "run/release/provenance.json").read_text())["recipe"] == "tiny"
