"""Tests of `jakiro metrics`, which serves a run's progress, and of `jakiro status`, which prints it."""

from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jakiro import metrics
from pipeline.basics import progress
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import lock_folder
from pipeline.basics.progress import Progress, set_record_path
from pipeline.running import stages
from tests.kit import call, free_port, recipe_tree, write_recipe, write_sharegpt


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Return the folder of a run whose dump is at 4 of 10 tokens; this process records there until the test ends."""
    monkeypatch.setattr(progress, "_place", None)
    set_record_path(tmp_path / "tiny", "dump")
    with Progress("dump", 10, "tokens") as shown:
        shown.advance(4, **{"shards": 2, "tokens/s": "1,234", "waiting": "12%", "now": "shard 3"})
    return tmp_path / "tiny"


@pytest.fixture
def recipe(run, tmp_path, tiny_target) -> Path:
    return write_recipe(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), run), tmp_path / "tiny.toml")


def test_metrics_are_served_locally_in_prometheus_format(recipe, monkeypatch, capsys):
    """Figures that are formatted for people are served as numbers."""
    port, texts = free_port(), []

    def pause() -> None:
        texts.append(urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
        with pytest.raises(PipelineError, match=f"port {port} of 127.0.0.1: Address already in use"):
            call(metrics.main, str(recipe), "--port", str(port))

    monkeypatch.setattr(metrics.signal, "pause", pause)
    call(metrics.main, str(recipe), "--port", str(port))
    assert capsys.readouterr().out == f"http://127.0.0.1:{port}/metrics\n"
    samples = [sample for family in text_string_to_metric_families(texts[0]) for sample in family.samples]
    assert {(sample.labels["run"], sample.labels["stage"]) for sample in samples} == {("tiny", "dump")}
    values = {sample.labels.get("name", sample.name): sample.value for sample in samples}
    assert values.pop("jakiro_moved_seconds") > 0
    assert values == {"jakiro_done": 4, "jakiro_total": 10, "shards": 2, "tokens/s": 1234, "waiting": 0.12}


def test_status_watches_until_all_is_done(recipe, monkeypatch, capsys):
    looks = []

    def state(_: object) -> tuple[bool, str]:
        return len(looks) >= 2, "so far"

    for name in ("features_state", "train_state", "eval_state"):
        monkeypatch.setattr(stages, name, state)
    monkeypatch.setattr(stages.time, "sleep", looks.append)
    stages.print_status(str(recipe), [], watch=3)
    text = capsys.readouterr().out
    assert looks == [3, 3] and text.count("to do  preprocess") == 2 and text.count("done   preprocess") == 1
    assert text.count("  dump: 4 of 10 tokens (40%)") == 2


@pytest.mark.parametrize(("stage", "folder"), [("preprocess", "features"), ("train", "drafts/eagle"), ("eval", "eval")])
def test_status_says_which_stage_runs(run, recipe, capsys, stage, folder):
    with lock_folder(run / folder, "work"):
        stages.print_status(str(recipe), [])
        with (
            pytest.raises(PipelineError),
            lock_folder(run / folder, "work"),
        ):  # `status` neither takes nor releases the lock
            pass
    stages.print_status(str(recipe), [])
    lines = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in lines if line.startswith("  ") and "dump" not in line]
    assert words == ["runs" if name == stage else "to" for name in ("preprocess", "train", "eval")] + ["to"] * 3
