"""A recipe with something changed, in a folder of its own, on the same shards: what studies over seeds and learning
rates train.
"""

import sys
from argparse import Namespace
from pathlib import Path

from pipeline.artifacts.features import fetch
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT
from pipeline.features.shards import link_features
from pipeline.recipe.load import hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import children


def run_until(recipe: str, overrides: list[str], stage: str) -> None:
    """`python -m pipeline run --until`: what is done is not done again. Raises PipelineError where it fails."""
    handed, environment = hand_over(recipe, overrides)
    command = [sys.executable, "-m", "pipeline", "run", *handed, "--until", stage]
    if children.call(command, environment, ROOT):
        raise PipelineError("the study stopped where that command failed; run it again to continue")


def train_variant(arguments: Namespace, changes: list[str], name: str, source: Recipe | None = None) -> Recipe:
    """Trains the recipe of a command's `arguments` with `changes` (overrides) in OUTPUT/`name`, on the shards of
    `source`, where there is one; returns it.
    """
    output = Path(load_recipe(arguments.recipe, arguments.overrides).output)
    overrides = [*arguments.overrides, *changes, f"output={output / name}"]
    recipe = load_recipe(arguments.recipe, overrides)
    if source is not None and source.features_dir.exists():
        if source.features.store:
            fetch(source)  # once
        link_features(source.features_dir, recipe.features_dir)
    run_until(arguments.recipe, overrides, "train")
    return recipe
