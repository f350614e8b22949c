"""What a run tells Prometheus, `jakiro metrics` and `jakiro status --watch`."""

import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.basics import progress
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive
from pipeline.basics.progress import METRICS, Progress, lines_of, publish, told_by
from pipeline.running import stages
from tests.kit import ROOT, command_environment, free_port, recipe_tree, write_recipe, write_sharegpt


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run's folder; what this process tells ends with the test."""
    for name, value in (("_place", None), ("_told", 0.0), ("TELL_EVERY", 0.0)):
        monkeypatch.setattr(progress, name, value)
    return tmp_path / "tiny"


def values(run: Path) -> dict[tuple[str, str], float]:
    """By metric (or the shown figure) and stage."""
    found = {}
    for metric in told_by(run):
        for sample in metric.samples:
            found[sample.labels.get("name", metric.name), sample.labels["stage"]] = sample.value
    return found


def test_numbers_that_people_read_are_numbers_there(run):
    publish(run, "train")
    with Progress("train eagle", 20, "steps", quiet=False) as shown:
        shown.advance(5, **{"loss": "2.135", "tokens/s": "1,234", "waiting": "12%", "benchmark": "humaneval"})
    found = values(run)
    assert found["loss", "train"] == 2.135 and found["tokens/s", "train"] == 1234 and found["waiting", "train"] == 0.12
    assert found["jakiro_done", "train"] == 5 and found["jakiro_total", "train"] == 20
    assert ("benchmark", "train") not in found
    [line] = lines_of(run)
    assert line.startswith("train eagle: 5 of 20 steps (25%), loss 2.135, tokens/s 1,234, waiting 12%; told 0 s ago")
    with Progress("train eagle", 20, "steps", start=19) as shown:
        shown.advance(1)
    assert not list(lines_of(run))  # it is done


def test_stages_stand_side_by_side_and_each_metric_once(run):
    for stage in ("dump", "feed"):
        publish(run, stage)
        with Progress(stage, 0, "tokens") as shown:
            shown.advance(7)
    names = [metric.name for metric in told_by(run)]
    assert len(names) == len(set(names)) and {stage for _, stage in values(run)} == {"dump", "feed"}
    assert next(lines_of(run)).startswith("dump: 7 tokens; told")
    shown.expect(7)  # as a source that held fewer turns out to
    assert [line.split(":")[0] for line in lines_of(run)] == ["dump"]  # the feeder's is done


def test_who_is_quiet_or_has_not_said_where_tells_nothing(run):
    with Progress("dump", 3, "tokens") as shown:
        shown.advance(1)
    publish(run, "train")
    with Progress("train", 3, "steps", quiet=True) as shown:
        shown.advance(1)
    assert not run.exists()


def test_a_place_that_cannot_be_written_stops_nobody(run):
    run.write_text("a file is in the way")
    publish(run, "dump")
    with Progress("dump", 3, "tokens") as shown:
        shown.advance(1)


def test_it_is_served_on_this_machine_alone_as_prometheus_reads_it(run, tmp_path, tiny_target):
    publish(run, "dump")
    with Progress("dump", 10, "tokens") as shown:
        shown.advance(4, shards=2)
    recipe = write_recipe(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), run), tmp_path / "tiny.toml")
    assert (run / METRICS / "dump.prom").is_file()
    port = free_port()
    command = [sys.executable, "-c", "import jakiro; jakiro.main()", "metrics", str(recipe), "--port", str(port)]
    environment = command_environment(PYTHONPATH=str(ROOT / "infra/command"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout.readline() == f"http://127.0.0.1:{port}/metrics\n"
            text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            again = subprocess.run(command, capture_output=True, text=True, env=environment)
        finally:
            process.terminate()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"tiny"}
    assert [one.value for one in samples if one.labels.get("name") == "shards"] == [2]
    assert again.returncode == 2 and f"port {port} of 127.0.0.1: Address already in use" in again.stderr


def test_status_watches_until_all_is_done(run, tmp_path, tiny_target, monkeypatch, capsys):
    recipe = write_recipe(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), run), tmp_path / "tiny.toml")
    publish(run, "dump")
    with Progress("dump", 10, "tokens") as shown:
        shown.advance(4)
    looks = []

    def state(_: object) -> tuple[bool, str]:
        return len(looks) >= 2, "so far"

    monkeypatch.setattr(stages, "features_state", state)
    monkeypatch.setattr(stages, "train_state", state)
    monkeypatch.setattr(stages, "eval_state", state)
    monkeypatch.setattr(stages.time, "sleep", looks.append)
    stages.status(str(recipe), [], watch=3)
    told = capsys.readouterr().out
    assert looks == [3, 3] and told.count("to do  preprocess") == 2 and told.count("done   preprocess") == 1
    assert told.count("  dump: 4 of 10 tokens (40%)") == 2


@pytest.mark.parametrize(("stage", "folder"), [("preprocess", "features"), ("train", "drafts/eagle"), ("eval", "eval")])
def test_status_says_which_stage_runs(run, tmp_path, tiny_target, capsys, stage, folder):
    recipe = write_recipe(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), run), tmp_path / "tiny.toml")
    with exclusive(run / folder, "work"):
        stages.status(str(recipe), [])
        with pytest.raises(PipelineError), exclusive(run / folder, "work"):  # to look holds nothing, and frees nothing
            pass
    stages.status(str(recipe), [])
    words = [line.split() for line in capsys.readouterr().out.splitlines() if "preprocess" in line or line[:2] == "  "]
    names = ["preprocess", "train", "eval"]
    assert [line[0] for line in words[:3]] == ["runs" if name == stage else "to" for name in names]
    assert [line[0] for line in words[3:]] == ["to"] * 3
