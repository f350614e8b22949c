"""Uploads a run's release to a repository on the Hub, private unless you say otherwise.

    jakiro push RECIPE OWNER/NAME [--public]

What is behind it: `python eval/main.py RECIPE --push OWNER/NAME`, which measures first what is not measured yet.
"""

import argparse

import jakiro
from pipeline.recipe.load import add_recipe_arguments, override_arguments
from pipeline.running import entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--public", action="store_true", help="everybody may read it")
    given = parser.parse_args()
    public = ["--public"] if given.public else []
    jakiro.begin("eval", [given.recipe, *override_arguments(given.overrides), "--push", given.repository, *public])


if __name__ == "__main__":
    entry.run(main)
