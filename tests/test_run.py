"""The whole path as a user walks it, on the tiny target: run, run again, status, failures, release, card, upload."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.files import sha256
from tests.hub import Hub
from tests.kit import ROOT, command_environment, recipe_tree, run_command, write_recipe, write_sharegpt

pytestmark = pytest.mark.real
RELEASE = {
    "README.md",
    "acceptance_by_depth.png",
    "config.json",
    "loss_curves.png",
    "model.safetensors",
    "provenance.json",
    "recipe.json",
    "report.json",
    "tau_and_speed.png",
}


def pipeline(command: str, recipe: Path, *more: str) -> subprocess.CompletedProcess:
    return run_command([sys.executable, "-m", "pipeline", command, str(recipe), *more])


@pytest.fixture(scope="module")
def finished(tiny_target, tmp_path_factory) -> tuple[Path, Path, str]:
    """(recipe file, run folder, what the run printed)"""
    folder = tmp_path_factory.mktemp("whole")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["eval"]["benchmarks"]["heldout"]["prompts"] = 3
    recipe = write_recipe(tree, folder / "recipe")
    done = pipeline("run", recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe, folder / "run", done.stdout


def test_a_run_ends_with_its_table_its_release_and_its_plots(finished):
    _, run, printed = finished
    for stage in ("preprocess: ", "train: ", "eval: ", "| heldout | 0 | eagle | 3 |", "| heldout | 1 | jakiro | 3 |"):
        assert stage in printed
    unwrapped = printed.replace("\n", "")
    assert f"release: {run}/release/" in unwrapped and f"{run}/release/tau_and_speed.png" in unwrapped
    assert {path.name for path in (run / "release").iterdir()} == RELEASE


def test_a_second_run_does_nothing_again(finished):
    recipe, run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = pipeline("run", recipe)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("done already") == 3
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_status_says_what_is_done_and_what_is_not(finished, tmp_path):
    recipe, _, _ = finished
    lines = pipeline("status", recipe).stdout.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["done", "preprocess"], ["done", "train"], ["done", "eval"]]
    lines = pipeline("status", recipe, "--set", "train.epochs=3").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["done", "to", "to"]
    lines = pipeline("status", recipe, "--set", f"output={tmp_path / 'new'}").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["to", "to", "to"]


def test_a_failing_stage_stops_the_run_with_its_own_message(finished, tmp_path):
    recipe, _, _ = finished
    source = tmp_path / "data.json"
    source.write_text("no JSON")
    failed = pipeline("run", recipe, "--set", f"output={tmp_path / 'run'}", "--set", f'data.source="{source}"')
    assert failed.returncode == 2
    assert "stage preprocess failed" in failed.stderr and "its first record cannot be parsed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "run/drafts").exists()


def test_a_run_that_is_ended_leaves_no_process_behind(finished, tmp_path):
    recipe, run, _ = finished
    (tmp_path / "run").mkdir()
    (tmp_path / "run/features").symlink_to(run / "features")
    mark = f"output={tmp_path / 'run'}"
    command = [sys.executable, "-m", "pipeline", "run", str(recipe), "--set", mark, "--set", "train.epochs=500"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=command_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/drafts/eagle/metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    process.wait(60)
    while any(mark in command_line(number) for number in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline, "a rank or its launcher still runs"
        time.sleep(0.2)


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_the_report_measured_exactly_the_released_weights_and_nothing_was_lost(finished):
    _, run, _ = finished
    report = json.loads((run / "release/report.json").read_text())
    weights = sha256(run / "release/model.safetensors")
    assert report["drafts"]["jakiro"]["weights_sha256"] == weights == sha256(run / "drafts/jakiro/model.safetensors")
    for entry in report["results"]:
        assert entry["gate"]["passed"] and entry["gate"]["checked"] > 0 and entry["speedup"] is not None
        if entry["temperature"] == 0:
            assert entry["gate"]["identical"] == entry["gate"]["checked"]
        else:
            assert entry["gate"]["largest_error"] <= 1e-6


def test_no_private_path_and_no_foreign_tensor_leaves_with_a_release(finished, tiny_target):
    _, run, _ = finished
    for path in (run / "release").iterdir():
        if path.suffix in (".md", ".json"):
            text = path.read_text()
            assert str(run) not in text and str(tiny_target.parent) not in text, path.name
    tensors = load_file(run / "release/model.safetensors")
    assert not [name for name in tensors if "embed" in name or "head" in name]


def test_the_code_on_the_card_runs(finished, tiny_target):
    _, run, _ = finished
    card = (run / "release/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
    code = code.replace(f'model="{tiny_target.name}"', f'model="{tiny_target}"').replace(
        "PATH/TO/THIS/FOLDER", str(run / "release")
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tau \d", done.stdout, re.MULTILINE)


def test_weights_that_were_not_measured_are_not_released(finished, tmp_path):
    recipe, run, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(copy / "drafts/eagle" / name, copy / "drafts/jakiro" / name)
    status = pipeline("status", recipe, "--set", f"output={copy}")
    assert "to do  train" in status.stdout and "to do  eval" in status.stdout


@pytest.mark.parametrize("damage", ["missing", "foreign", "other settings"])
def test_evaluation_refuses_a_missing_or_foreign_checkpoint(finished, tmp_path, damage):
    recipe, run, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("eval", "release"))
    config, sets = copy / "drafts/jakiro/config.json", []
    if damage == "missing":
        config.unlink()
        message = "holds no draft checkpoint"
    elif damage == "other settings":
        sets = ["--set", "train.epochs=9"]
        message = "trained with other settings"
    else:
        changed = json.loads(config.read_text())
        changed["target"]["fingerprint"] = "0123456789abcdef"
        config.write_text(json.dumps(changed))
        message = "A draft works with its own target only"
    done = run_command([sys.executable, "eval/main.py", str(recipe), "--set", f"output={copy}", *sets])
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (copy / "release").exists()


def test_push_uploads_the_release_and_only_on_demand(finished):
    recipe, run, _ = finished
    with Hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "eval/main.py", str(recipe)]
        quiet = run_command(command, **environment)
        assert quiet.returncode == 0 and not hub.requests
        pushed = run_command([*command, "--push", "me/draft"], **environment)
        assert pushed.returncode == 0, pushed.stdout + pushed.stderr
        assert f"uploaded: {hub.url}/me/draft/commit/" in pushed.stdout
        assert hub.created[0]["visibility"] == "private"
        assert {path: len(content) for path, content in hub.files.items()} == {
            path.name: path.stat().st_size for path in (run / "release").iterdir()
        }
        refused = run_command([*command, "--push", "me/draft"], **{**environment, "HF_TOKEN": "hf_wrong"})
        assert refused.returncode == 2
        assert "the Hub refused the upload to me/draft (401)" in refused.stderr
        assert "hf_wrong" not in refused.stdout + refused.stderr
    for repository, reach, message in (
        ("me/draft", environment, "the Hub cannot be reached"),  # the server is gone
        ("me/draft", {**environment, "HF_HUB_OFFLINE": "1"}, "the Hub cannot be reached"),
        ("no good/name", environment, "--push 'no good/name'"),
    ):
        failed = run_command([*command, "--push", repository], **reach)
        assert failed.returncode == 2, failed.stderr
        assert message in failed.stderr and "Traceback" not in failed.stderr
