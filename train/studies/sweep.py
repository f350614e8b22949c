"""Trains a recipe's drafts at several learning rates on the same shards, and says which gave the largest tau.

    python -m train.studies.sweep RECIPE --rates 5e-4 1e-3 2e-3

Dumps once (what is done is not done again), trains every draft once a rate, each in OUTPUT/rate-R, and reads what the
last validation of each measured on held-out text and on the calibration prompts. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import fetch
from pipeline.artifacts.provenance import ROOT
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import link_features
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import children, entry, markdown

SHOWN = {"estimated_tau": "tau", "next_agreement": "top-1", "next_classification": "cross-entropy"}


def of_rate(arguments, rate: float) -> tuple[Recipe, list[str]]:
    """The recipe at one rate, in a folder of its own, and the overrides that make it."""
    output = load_recipe(arguments.recipe, arguments.overrides).output
    here = f"output={Path(output) / f'rate-{rate:g}'}"
    overrides = [*arguments.overrides, f"train.learning_rate={rate}", "train.learning_rates={}", here]
    return load_recipe(arguments.recipe, overrides), overrides


def run(recipe_path: str, overrides: list[str], until: str) -> None:
    arguments, environment = hand_over(recipe_path, overrides)
    command = [sys.executable, "-m", "pipeline", "run", *arguments, "--until", until]
    if children.call(command, environment, ROOT)[0]:
        raise PipelineError("the sweep stopped where that command failed; run it again to continue")


def results(recipe: Recipe, rate: float) -> list[dict]:
    """One line a draft."""
    out = []
    for name in recipe.to_train:
        facts = checkpoint.require_trained_under(recipe, name).training
        measured = {key: facts["validation"][key] for key in SHOWN if key in facts["validation"]}
        out.append({"draft": name, "rate": rate, "trained_tokens": facts["trained_tokens"], **measured})
    return out


def table(found: list[dict]) -> str:
    """Markdown; per draft the largest tau is marked."""
    best, rows = {draft: best_of(found, draft) for draft in {one["draft"] for one in found}}, []
    for one in sorted(found, key=lambda one: (one["draft"], one["rate"])):
        mark = " **best**" if best[one["draft"]] is one else ""
        cells = [f"{one[key]:.3f}" if key in one else "-" for key in SHOWN]
        rows.append([one["draft"], f"{one['rate']:g}{mark}", *cells])
    return markdown.table(["draft", "learning rate", *SHOWN.values()], rows)


def best_of(found: list[dict], draft: str) -> dict:
    """By tau; by cross-entropy where the dump holds no calibration prompts."""
    mine = [one for one in found if one["draft"] == draft]
    return max(mine, key=lambda one: one.get("estimated_tau", -one["next_classification"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    arguments = parser.parse_args()
    run(arguments.recipe, arguments.overrides, "preprocess")
    source, found = load_recipe(arguments.recipe, arguments.overrides), []
    fetch(source, folder=source.shards_dir)  # once, where the features are in a store
    for rate in arguments.rates:
        recipe, overrides = of_rate(arguments, rate)
        link_features(source.features_dir, recipe.features_dir)
        run(arguments.recipe, overrides, "train")
        found += results(recipe, rate)
    print(table(found))
    best = {draft: best_of(found, draft)["rate"] for draft in sorted(source.to_train)}
    print(json.dumps({"best": best, "results": found}))


if __name__ == "__main__":
    entry.run(main)
