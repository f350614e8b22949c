"""Uploads a run's release, its features, or both to the Hub; a repository that is not there yet becomes private.

    jakiro push RECIPE OWNER/NAME [--features OWNER/DATASET] [--public]
    jakiro push RECIPE --features OWNER/DATASET

With --features the run's states go to a dataset repository, and the release's card names it. Behind the release is
`python eval/main.py RECIPE --push OWNER/NAME`, which measures first what is not measured yet.
"""

import argparse

import jakiro
from eval.release.features import push_features
from eval.release.hub import require_repository_name
from pipeline.recipe.load import add_recipe_arguments, load_recipe, override_arguments
from pipeline.running import entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("repository", metavar="OWNER/NAME", nargs="?", help="for the release")
    parser.add_argument("--features", metavar="OWNER/DATASET", help="a dataset repository for the run's states")
    parser.add_argument("--public", action="store_true", help="everybody may read what is made")
    given = parser.parse_args()
    if not given.repository and not given.features:
        parser.error("give OWNER/NAME for the release, --features OWNER/DATASET for the states, or both")
    if given.repository:
        require_repository_name(given.repository, "the release's repository")
    if given.features:
        require_repository_name(given.features, "--features")
        recipe = load_recipe(given.recipe, given.overrides)
        print("\n".join(push_features(recipe, given.features, private=not given.public)))
    if given.repository:
        public = ["--public"] if given.public else []
        jakiro.begin("eval", [given.recipe, *override_arguments(given.overrides), "--push", given.repository, *public])


if __name__ == "__main__":
    entry.run(main)
