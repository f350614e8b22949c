"""The learning-rate sweep trains at each rate, and says which is best."""

import json
from pathlib import Path

import pytest

from pipeline.recipe.load import load_recipe
from pipeline.running import stages
from tests.kit import call, override_arguments, write_recipe
from tests.train.runs import train_here
from train.studies import sweep


@pytest.mark.real
def test_the_sweep_trains_at_each_rate_and_names_the_best(dumped, tmp_path, monkeypatch, capsys):
    """In this process: that `run_until` starts a run is shown by tests/test_run.py's ablations."""
    recipe, features = dumped
    (tmp_path / "features").symlink_to(features)
    tree = json.loads(recipe.read_text())
    del tree["draft"]["jakiro"]
    tree["draft"]["prompt-lookup"] = {"kind": "prompt-lookup"}  # nothing of it is trained
    tree["publish"]["draft"] = "eagle"
    recipe = write_recipe(tree, tmp_path / "recipe")

    def run_until(recipe, overrides, stage):
        if stage == "train":
            output = Path(load_recipe(recipe, overrides).output)
            train_here((recipe, features), output, *overrides, draft="eagle")

    monkeypatch.setattr(sweep, "run_until", run_until)
    monkeypatch.setattr(stages, "run_until", run_until)
    sets = override_arguments([f"output={tmp_path}", "train.epochs=1", "train.warmup_steps=0"])
    call(sweep.main, str(recipe), *sets, "--rates", "1e-9", "3e-3")
    said = capsys.readouterr().out
    figures = json.loads(said.strip().splitlines()[-1])
    crosses = {(one["draft"], one["rate"]): one["cross-entropy"] for one in figures["results"]}
    assert set(crosses) == {("eagle", rate) for rate in (1e-9, 3e-3)}
    assert crosses["eagle", 3e-3] < crosses["eagle", 1e-9]
    for draft, rate in figures["best"].items():
        mine = [one for one in figures["results"] if one["draft"] == draft]
        assert max(one["tau"] for one in mine) == next(one["tau"] for one in mine if one["rate"] == rate)
        assert f"| {draft} | {rate:g} **best** |" in said
