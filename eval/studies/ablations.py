"""Every method of a recipe at equal training, over several seeds: tau, and its difference to one of them.

    python -m eval.studies.ablations RECIPE [--seeds 3] [--against METHOD] [--out FOLDER]

Dumps once, trains every draft of the recipe once a seed (what is done is not done again), lets the target answer the
benchmarks' prompts once, and replays those answers with each method's tree (pipeline/decoding/replay.py: the tokens and
rounds of decoding, counted without verifying). Writes ablations.json, ablations.md and ablations.png. The last line is
JSON.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.measure import plots
from eval.measure.harness import Harness, Unit
from eval.measure.units import Measured, make_harness, methods_of, units_of
from eval.studies.compare import compared
from pipeline.artifacts.provenance import ROOT, provenance
from pipeline.basics import markdown
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json, write_text
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.features.shards import link_features
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import children, entry

Counts = dict[str, tuple[int, int]]  # by prompt: tokens and rounds, over all seeds


@dataclass(frozen=True)
class Answered:
    """A prompt's answer by the target."""

    unit: Unit
    prompt: list[int]
    answer: list[int]


def of_seed(arguments, seed: int) -> Recipe:
    """The recipe with another seed, in a folder of its own."""
    plain_recipe = load_recipe(arguments.recipe, arguments.overrides)
    overrides = [*arguments.overrides, f"seed={seed}", f"output={plain_recipe.output}/seed-{seed}"]
    return load_recipe(arguments.recipe, overrides)


def train(arguments, seed: int, first: Recipe) -> None:
    """Dump and training by their own commands; later seeds share the first one's features."""
    recipe = of_seed(arguments, seed)
    if seed != arguments.seed_list[0] and first.features_dir.exists():
        link_features(first.features_dir, recipe.features_dir)
    overrides = [*arguments.overrides, f"seed={seed}", f"output={recipe.output}"]
    handed, environment = hand_over(arguments.recipe, overrides)
    command = [sys.executable, "-m", "pipeline", "run", *handed, "--until", "train"]
    if children.call(command, environment, ROOT)[0]:
        raise PipelineError(
            f"seed {seed} was not trained; its logs are in {recipe.run_dir}/logs. Run again to continue"
        )


def answered(recipe: Recipe, harness: Harness) -> list[Answered]:
    """The target's own answers, the same for every method and seed."""
    found, units = [], units_of(recipe)
    with Progress("the target's answers", len(units), "prompts") as progress:
        for unit in units:
            found += [Answered(unit, *pair) for pair in harness.plain_answers(unit)]
            progress.advance(1)
    return found


def replayed(harness: Harness, answers: list[Answered]) -> dict[tuple[str, float, str], Counts]:
    """By benchmark, temperature and method, each prompt's tokens and rounds."""
    out: dict[tuple[str, float, str], Counts] = {}
    methods = harness.methods
    groups: dict[tuple[int, str], list[str]] = {}  # methods that grow selections of one large tree
    for name, method in methods.items():
        groups.setdefault((id(method.draft), method.tree.candidates), []).append(name)
    grown = []
    for names in groups.values():
        trees = [methods[name].tree for name in names]
        depth, top_k, parallel = (max(getattr(tree, key) for tree in trees) for key in ("depth", "top_k", "parallel"))
        largest = replay.largest_tree(depth, 2 * top_k, trees[0].candidates, parallel)
        grown.append((methods[names[0]].draft, largest))
    with Progress("replay", len(answers), "answers") as progress:
        for one in answers:
            tokens, begin = one.prompt + one.answer, len(one.prompt)
            states = harness.states(tokens, [draft for draft, _ in grown])
            for names, (draft, largest) in zip(groups.values(), grown, strict=True):
                counted = replay.counter(draft, states, tokens, begin, largest, one.unit.temperature)
                for name in names:
                    found = counted(methods[name].tree)
                    counts = out.setdefault((one.unit.benchmark, one.unit.temperature, name), {})
                    had = counts.get(one.unit.prompt.question_id, (0, 0))
                    counts[one.unit.prompt.question_id] = had[0] + found.tokens, had[1] + found.passes
            progress.advance(1)
    return out


def summed(by_seed: list[Counts]) -> Counts:
    """Over seeds, for prompts that all of them have."""
    common = set.intersection(*(set(counts) for counts in by_seed))
    return {key: tuple(int(x) for x in np.sum([counts[key] for counts in by_seed], axis=0)) for key in sorted(common)}


def result(
    cell: tuple[str, float, str], by_seed: dict[int, dict], against: str, methods: dict[str, Measured]
) -> dict[str, Any]:
    """One method in one benchmark and temperature: tau by seed and pooled, and its difference over seeds that have
    both.
    """
    benchmark, temperature, name = cell
    reference = benchmark, temperature, against
    seeds = [seed for seed, found in by_seed.items() if cell in found and reference in found]
    mine, theirs = ([by_seed[seed][key] for seed in seeds] for key in (cell, reference))
    pooled = compared(summed(theirs), summed(mine))
    taus = [round(sum(t for t, _ in c.values()) / sum(r for _, r in c.values()), 4) for c in mine]
    differences = [round(compared(a, b)["difference"], 4) for a, b in zip(theirs, mine, strict=True)]
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "method": name,
        "draft_forwards": methods[name].tree.forwards,
        "nodes": methods[name].tree.nodes,
        "prompts": pooled["prompts"],
        "seeds": seeds,
        "tau": pooled["tau"][1],
        "tau_by_seed": taus,
        "difference": pooled["difference"],
        "interval": pooled["interval"],
        "difference_by_seed": differences,
    }


def table(results: list[dict], against: str) -> str:
    """Markdown, a line a method: its mean tau over all benchmarks and temperatures with the mean difference to
    `against`, and that of each seed; then the differences one by one, with a 95% interval over prompts. Such an
    interval does not hold the seeds' variance: see both.
    """
    cells = list(dict.fromkeys((r["benchmark"], r["temperature"]) for r in results))
    methods = list(dict.fromkeys(r["method"] for r in results))
    names = [f"{name}, T = {t:g}" for name, t in cells]
    head = ["method", "forwards", "mean tau", "mean difference (by seed)", *names]
    rows = []
    for method in methods:
        mine = [
            r for cell in cells for r in results if (r["benchmark"], r["temperature"], r["method"]) == (*cell, method)
        ]
        row = [method, str(mine[0]["draft_forwards"]), f"{np.mean([r['tau'] for r in mine]):.3f}"]
        if method == against:
            row += ["", *(f"tau {r['tau']:.3f}" for r in mine)]
        else:
            by_seed = ", ".join(f"{x:+.3f}" for x in np.mean([r["difference_by_seed"] for r in mine], axis=0))
            row.append(f"{np.mean([r['difference'] for r in mine]):+.3f} ({by_seed})")
            row += [f"{r['difference']:+.3f}{_bracketed(r['interval'])}" for r in mine]
        rows.append(row)
    return markdown.table(head, rows)


def _bracketed(interval: list[float] | None) -> str:
    return "" if interval is None else " [{:+.3f}, {:+.3f}]".format(*interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--against", default="dense", help="the method that the others are compared with")
    parser.add_argument("--out", type=Path, help="default: the recipe's output")
    arguments = parser.parse_args()
    arguments.seed_list = list(range(arguments.seeds))
    first = of_seed(arguments, 0)
    names = list(first.methods)
    if arguments.against not in names:
        parser.error(f"--against {arguments.against}: the recipe has {', '.join(names)}")
    for seed in arguments.seed_list:
        train(arguments, seed, first)
    by_seed, answers, methods = {}, None, {}
    for seed in arguments.seed_list:
        recipe = of_seed(arguments, seed)
        methods = methods_of(recipe)
        if odd := [name for name, method in methods.items() if method.tree.paths is not None]:
            raise PipelineError(f"method {odd[0]} has a static tree: only dynamic ones are selections of a larger tree")
        harness = make_harness(recipe, methods)
        answers = answers or answered(recipe, harness)
        by_seed[seed] = replayed(harness, answers)
    cells = list(by_seed[0])
    results = [result(cell, by_seed, arguments.against, methods) for cell in cells]
    results.sort(key=lambda r: list(methods).index(r["method"]))
    out = arguments.out or first.run_dir.parent
    said = table(results, arguments.against)
    write_json(
        out / "ablations.json", {"against": arguments.against, "provenance": provenance(first), "results": results}
    )
    write_text(out / "ablations.md", said + "\n")
    plots.draw_differences(results, arguments.against, out / "ablations.png")
    print(said)
    print(json.dumps({"against": arguments.against, "results": results}))


if __name__ == "__main__":
    entry.run(main)
