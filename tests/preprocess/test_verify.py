"""Checking and repairing a feature folder."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.features.shards import Manifest
from pipeline.files import sha256
from tests.kit import dump_command, recipe_tree, run_command, save_tiny_target, write_recipe, write_sharegpt

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, features folder)"""
    folder = tmp_path_factory.mktemp("verify")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    recipe = write_recipe(tree, folder / "recipe")
    done = run_command(dump_command(recipe))
    assert done.returncode == 0, done.stderr
    return recipe, folder / "run/features"


def verify(dumped, *more: str):
    recipe, features = dumped
    return run_command([sys.executable, "-m", "preprocess.verify", str(features), "--recipe", str(recipe), *more])


def test_a_whole_folder_passes_and_its_rows_are_the_targets(dumped):
    done = verify(dumped)
    assert done.returncode == 0, done.stderr
    shards = len(Manifest.load(dumped[1]).shards)
    assert f"{shards} of {shards} shards are whole; complete: True" in done.stdout
    assert re.search(r"16 rows forwarded again: largest relative error of a row 0\.00", done.stdout)


def test_the_recipe_is_found_beside_the_features_of_a_local_target(dumped, tmp_path):
    """Offline; what knows no local path is not asked of the Hub."""
    _, features = dumped
    done = run_command([sys.executable, "-m", "preprocess.verify", str(features)])
    assert done.returncode == 0, done.stderr
    assert "16 rows forwarded again" in done.stdout
    shutil.copytree(features, tmp_path / "run/features", ignore=shutil.ignore_patterns("own-recipe.json"))
    refused = run_command([sys.executable, "-m", "preprocess.verify", str(tmp_path / "run/features")])
    assert refused.returncode == 2 and "give the one that it was dumped with, --recipe RECIPE" in refused.stderr
    sums = run_command([sys.executable, "-m", "preprocess.verify", str(tmp_path / "run/features"), "--rows", "0"])
    assert sums.returncode == 0 and "complete: True" in sums.stdout


def test_every_damage_is_named_and_repaired_to_the_same_bytes(dumped):
    _, features = dumped
    before = {path.name: sha256(path) for path in features.glob("*.arrow")}
    truncated, flipped, missing, unknown = (features / f"features-train-00000{number}.arrow" for number in range(4))
    os.truncate(truncated, 100)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    missing.unlink()
    manifest = Manifest.load(features)
    manifest.shards = [record for record in manifest.shards if record.name != unknown.name]
    manifest.save(features)
    found = verify(dumped, "--rows", "0")
    assert found.returncode == 2 and "is not whole" in found.stderr
    for path, reason in (
        (truncated, "it has 100 bytes"),
        (flipped, "its SHA-256 is not the manifest's"),
        (missing, "it is missing"),
        (unknown, "the manifest does not know it"),
    ):
        assert f"{path.name}: {reason}" in found.stdout
    mended = verify(dumped, "--repair")
    assert mended.returncode == 0, mended.stderr
    assert {path.name: sha256(path) for path in features.glob("*.arrow")} == before


def test_rows_of_another_target_are_refused(dumped, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=1)
    done = verify(dumped, "--set", f"target.model={other}")
    assert done.returncode == 2 and "dumped from another target" in done.stderr
