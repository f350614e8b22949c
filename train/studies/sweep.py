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
from pipeline.running.stages import run_until, train_variant

SHOWN = {"estimated_tau": "tau", "next_agreement": "top-1", "next_classification": "cross-entropy"}


def measured(recipe: Recipe, rate: float) -> list[dict]:
    """What each draft's last validation measured, a line a draft; adds it to the run's table of results."""
    lines, rows = [], []
    for name in recipe.to_train:
        validation = checkpoint.require_trained_under(recipe, name).training["validation"]
        shown = {figure: validation[key] for key, figure in SHOWN.items() if key in validation}
        lines.append({"draft": name, "rate": rate, **shown})
        what = {"setting": {"learning_rate": rate}, "origin": origin_of(recipe, name)}
        rows += [Row("trained", name, figure, value, **what) for figure, value in shown.items()]
    put_rows(recipe.eval_dir, rows, whole=True)
    return lines


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
    source, lines = load_recipe(arguments.recipe, arguments.overrides), []
    for rate in arguments.rates:
        changes = [f"train.learning_rate={rate}", "train.learning_rates={}"]
        lines += measured(train_variant(arguments, changes, f"rate-{rate:g}", source), rate)
    lines.sort(key=lambda line: (line["draft"], line["rate"]))
    print(table(lines))
    print(json.dumps({"best": best_of(lines), "results": lines}))


if __name__ == "__main__":
    entry.run(main, keeps=True)
