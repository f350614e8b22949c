"""The learning-rate sweep trains at each rate, and says which is best."""

import json
import sys

import pytest

from tests.kit import override_arguments, run_warm, write_recipe


@pytest.mark.real
def test_the_sweep_trains_at_each_rate_and_names_the_best(dumped, tmp_path):
    recipe, features = dumped
    (tmp_path / "features").symlink_to(features)
    tree = json.loads(recipe.read_text())
    del tree["draft"]["jakiro"]
    tree["draft"]["prompt-lookup"] = {"kind": "prompt-lookup"}  # nothing of it is trained
    tree["publish"]["draft"] = "eagle"
    recipe = write_recipe(tree, tmp_path / "recipe")
    sets = override_arguments([f"output={tmp_path}", "train.epochs=1", "train.warmup_steps=0"])
    done = run_warm([sys.executable, "-m", "train.studies.sweep", str(recipe), *sets, "--rates", "1e-9", "3e-3"])
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    crosses = {(one["draft"], one["rate"]): one["cross-entropy"] for one in figures["results"]}
    assert set(crosses) == {("eagle", rate) for rate in (1e-9, 3e-3)}
    assert crosses["eagle", 3e-3] < crosses["eagle", 1e-9]
    for draft, rate in figures["best"].items():
        mine = [one for one in figures["results"] if one["draft"] == draft]
        assert max(one["tau"] for one in mine) == next(one["tau"] for one in mine if one["rate"] == rate)
        assert f"| {draft} | {rate:g} **best** |" in done.stdout
