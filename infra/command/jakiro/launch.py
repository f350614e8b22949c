"""Train a recipe's drafts on this machine, as `jakiro run` does: DeepSpeed's launcher, with its ranks' output here.

    jakiro train RECIPE [--draft NAME]

Several nodes: `jakiro manifests`. It runs `deepspeed train/main.py RECIPE`.
"""

import argparse
import os

from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry
from pipeline.running.gpus import require_choice
from pipeline.running.stages import list_stages
from pipeline.running.state import require_same_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="train only this draft of the recipe")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.overrides)
    require_choice(recipe)
    require_same_settings(recipe, [args.draft] if args.draft in recipe.to_train else recipe.to_train)
    stage = next(
        candidate for candidate in list_stages(args.recipe, args.overrides, recipe) if candidate.name == "train"
    )
    command = [*stage.command, *(["--draft", args.draft] if args.draft else [])]
    os.execvpe(command[0], command, stage.environment)


if __name__ == "__main__":
    entry.run(main)
