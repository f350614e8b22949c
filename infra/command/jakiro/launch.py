"""Trains a recipe's drafts on this machine, as `jakiro run` does: DeepSpeed's launcher, and its ranks' output here.

    jakiro train RECIPE [--draft NAME]

Several nodes: `jakiro manifests`. What is behind it: `deepspeed train/main.py RECIPE`.
"""

import argparse
import os

from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry
from pipeline.running.gpus import require_choice
from pipeline.running.stages import stages
from pipeline.running.state import require_same_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="train only this one of the recipe's drafts")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe, given.overrides)
    require_choice(recipe)
    require_same_settings(recipe, [given.draft] if given.draft in recipe.to_train else recipe.to_train)
    stage = next(one for one in stages(given.recipe, given.overrides, recipe) if one.name == "train")
    command = [*stage.command, *(["--draft", given.draft] if given.draft else [])]
    os.execvpe(command[0], command, stage.environment)


if __name__ == "__main__":
    entry.run(main)
