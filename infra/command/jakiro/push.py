"""Upload a run's release, its features, or both to the Hub; a new repository is private by default.

    jakiro push RECIPE OWNER/NAME [--features OWNER/DATASET] [--public]
    jakiro push RECIPE --features OWNER/DATASET

With --features the run's states go to a dataset repository, and the release's card names it. The release is uploaded
by `python eval/main.py RECIPE --push OWNER/NAME`, which first measures what is not measured yet.
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
    parser.add_argument("--public", action="store_true", help="new repositories are public")
    args = parser.parse_args()
    if not args.repository and not args.features:
        parser.error("give OWNER/NAME for the release, --features OWNER/DATASET for the states, or both")
    if args.repository:
        require_repository_name(args.repository, "the release's repository")
    if args.features:
        require_repository_name(args.features, "--features")
        recipe = load_recipe(args.recipe, args.overrides)
        print("\n".join(push_features(recipe, args.features, private=not args.public)))
    if args.repository:
        public = ["--public"] if args.public else []
        jakiro.start_command(
            "eval", [args.recipe, *override_arguments(args.overrides), "--push", args.repository, *public]
        )


if __name__ == "__main__":
    entry.run(main)
