"""One dump for all trainings, and one training that nothing disturbs."""

from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from tests.kit import dump_here, recipe_tree, write_recipe, write_sharegpt
from tests.train.runs import losses, run_training


@pytest.fixture(scope="session")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, features folder): dumped in this process, without Ray. 20 steps of 8 dialogues in 4 epochs."""
    folder = tmp_path_factory.mktemp("train")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json", 60), folder / "run")
    tree["data"]["max_dialogues"] = 40
    tree["train"]["epochs"] = 4
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path)
    assert dump_here(recipe).total("train", "rows") == 40
    return path, recipe.features_dir


@pytest.fixture(scope="session")
def undisturbed(dumped, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    done = run_training(dumped, output, "train.micro_batch=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(output)) == 20
    return output
