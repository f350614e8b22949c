"""Dumps the target's hidden states over the recipe's dialogues.

python preprocess/dump_features.py RECIPE                                    (starts Ray on this machine)
ray job submit --working-dir . -- python preprocess/dump_features.py RECIPE  (on a cluster)
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder

from pipeline import entry
from pipeline.recipe import add_recipe_arguments, load_recipe
from preprocess.driver import dump


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    arguments = parser.parse_args()
    for line in dump(load_recipe(arguments.recipe, arguments.overrides)):
        print(line)


if __name__ == "__main__":
    entry.run(main)
