"""The estimate against the dump that follows it."""

import json
import sys

import pytest

from pipeline.recipe.load import load_recipe
from preprocess.estimate import disk_warning
from tests.kit import dump_here, recipe_tree, run_warm, write_recipe, write_sharegpt


def test_a_full_disk_is_not_told_to_store_what_it_stores_already():
    assert "stored_dtype='float8_e4m3fn'" in disk_warning("bfloat16")
    assert "stored_dtype" not in disk_warning("float8_e4m3fn")


@pytest.mark.real
def test_the_planned_disk_and_tokens_are_those_of_the_dump(tiny_target, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json", 200), tmp_path / "run")
    tree["data"] |= {"max_tokens": 5000, "validation_dialogues": 1000}
    recipe = write_recipe(tree, tmp_path / "recipe")
    planned = run_warm(
        [
            sys.executable,
            "-m",
            "pipeline",
            "plan",
            str(recipe),
            "--set",
            "features.batch_tokens=256",
            "--train-speed",
            "5000",
        ]
    )
    assert planned.returncode == 0, planned.stderr
    figures = json.loads(planned.stdout.splitlines()[-1])
    assert "WARNING" not in planned.stdout
    assert all(figures[stage]["hours"] > 0 and figures[stage]["memory_bytes"] > 0 for stage in ("dump", "eval"))
    assert set(figures["train"]["drafts"]) == {"eagle", "jakiro"}
    figures = figures["dump"]
    shards = dump_here(load_recipe(recipe)).shards
    tokens, size = sum(shard.tokens for shard in shards), sum(shard.bytes for shard in shards)
    assert abs(figures["tokens"] / tokens - 1) < 0.1
    assert abs(figures["disk_bytes"] / size - 1) < 0.2  # so small shards are mostly frame
