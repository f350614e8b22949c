"""Trains a recipe's drafts at several learning rates on the same shards, and says which gave the largest tau.

    python -m train.studies.sweep RECIPE --rates 5e-4 1e-3 2e-3

Dumps once (what is done is not done again) and trains every draft once a rate, each in OUTPUT/rate-R. What the last
validation of each measured, on held-out text and on the calibration prompts, goes to results.jsonl of its run:
``python -m eval.results OUTPUT`` shows it. The last line is JSON.
"""

import argparse
import json

from pipeline.artifacts import checkpoint
from pipeline.artifacts.reports import Row, origin_of, put_rows
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.running.variants import run_until, train_variant

SHOWN = {"estimated_tau": "tau", "next_agreement": "top-1", "next_classification": "cross-entropy"}


def results(recipe: Recipe, rate: float) -> list[Row]:
    """What each draft's last validation measured."""
    out = []
    for name in recipe.to_train:
        measured = checkpoint.require_trained_under(recipe, name).training["validation"]
        shown = {figure: measured[key] for key, figure in SHOWN.items() if key in measured}
        what = {"setting": {"learning_rate": rate}, "origin": origin_of(recipe, name)}
        out += [Row("trained", name, figure, value, **what) for figure, value in shown.items()]
    return out


def grouped(rows: list[Row]) -> list[dict]:
    """One line a draft and rate."""
    out: dict[tuple[str, float], dict] = {}
    for row in sorted(rows, key=lambda row: (row.method, row.setting["learning_rate"])):
        rate = row.setting["learning_rate"]
        out.setdefault((row.method, rate), {"draft": row.method, "rate": rate})[row.figure] = row.value
    return list(out.values())


def best_of(lines: list[dict]) -> dict[str, float]:
    """Each draft's best rate: by tau, or by cross-entropy where the dump holds no calibration prompts."""
    worst_first = sorted(lines, key=lambda line: line.get("tau", -line["cross-entropy"]))
    return {line["draft"]: line["rate"] for line in worst_first}


def table(lines: list[dict]) -> str:
    """Markdown; each draft's best rate is marked."""
    best, cells = best_of(lines), []
    for line in lines:
        mark = " **best**" if best[line["draft"]] == line["rate"] else ""
        figures = [f"{line[figure]:.3f}" if figure in line else "-" for figure in SHOWN.values()]
        cells.append([line["draft"], f"{line['rate']:g}{mark}", *figures])
    return markdown.table(["draft", "learning rate", *SHOWN.values()], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    arguments = parser.parse_args()
    run_until(arguments.recipe, arguments.overrides, "preprocess")
    source, found = load_recipe(arguments.recipe, arguments.overrides), []
    for rate in arguments.rates:
        changes = [f"train.learning_rate={rate}", "train.learning_rates={}"]
        recipe = train_variant(arguments, changes, f"rate-{rate:g}", source)
        rows = results(recipe, rate)
        put_rows(recipe.eval_dir, rows, whole=True)
        found += rows
    lines = grouped(found)
    print(table(lines))
    print(json.dumps({"best": best_of(lines), "results": lines}))


if __name__ == "__main__":
    entry.run(main)
