"""Every method of a recipe at equal training, over several seeds: tau, and its difference to another's.

    python -m eval.studies.ablations RECIPE [--seeds 3] [--against METHOD] [--pair METHOD:OTHER ...] [--out FOLDER]

Methods are compared with `--against`, those of a `--pair` with the other one. Over all benchmarks and temperatures a
method is worth its while if the mean difference is at least `--worth`, its interval excludes 0 and all seeds have its
sign; it is not if the interval's upper end is below `--worth`; else the runs do not decide.

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
from eval.measure.harness import EvalTask, Harness
from eval.measure.tasks import Measured, make_harness, methods_of, units_of
from eval.studies.compare import compared
from pipeline.artifacts.provenance import ROOT, provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json, write_text
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.features.shards import link_features
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import children, entry, markdown

Counts = dict[str, tuple[int, int]]  # by prompt: tokens and rounds, over all seeds


@dataclass(frozen=True)
class Answered:
    """A prompt's answer by the target."""

    unit: EvalTask
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
        wide = top_k if len(set(trees)) == 1 else 2 * top_k  # a tree by itself is the one that decoding grows
        largest = replay.largest_tree(depth, wide, trees[0].candidates, parallel)
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
    cell: tuple[str, float, str], by_seed: dict[int, dict], references: dict[str, str], methods: dict[str, Measured]
) -> dict[str, Any]:
    """One method in one benchmark and temperature: tau by seed and pooled, and its difference over seeds that have
    both.
    """
    benchmark, temperature, name = cell
    reference = benchmark, temperature, references[name]
    seeds = [seed for seed, found in by_seed.items() if cell in found and reference in found]
    mine, theirs = ([by_seed[seed][key] for seed in seeds] for key in (cell, reference))
    pooled = compared(summed(theirs), summed(mine))
    taus = [round(sum(t for t, _ in c.values()) / sum(r for _, r in c.values()), 4) for c in mine]
    differences = [round(compared(a, b)["difference"], 4) for a, b in zip(theirs, mine, strict=True)]
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "method": name,
        "against": references[name],
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


def overall(mine: list[dict], by_seed: dict[int, dict], worth: float) -> dict[str, Any]:
    """One method's `result`s together: benchmarks and temperatures weigh alike. The mean difference, that of each seed,
    a 95% bootstrap interval over prompts (a benchmark's are drawn once for all its temperatures), and a verdict.
    """
    name, against = mine[0]["method"], mine[0]["against"]
    rng, drawn, draws = np.random.default_rng(0), {}, []
    for place in [(one["benchmark"], one["temperature"]) for one in mine]:
        theirs, ours = (summed([found[*place, who] for found in by_seed.values()]) for who in (against, name))
        prompts = sorted(theirs.keys() & ours.keys())
        a, b, c, d = (np.array([of[key][which] for key in prompts]) for of in (theirs, ours) for which in (0, 1))
        if (place[0], len(prompts)) not in drawn:
            drawn[place[0], len(prompts)] = rng.integers(len(prompts), size=(2000, len(prompts)))
        index = drawn[place[0], len(prompts)]
        draws.append(c[index].sum(1) / d[index].sum(1) - a[index].sum(1) / b[index].sum(1))
    low, high = np.quantile(np.mean(draws, axis=0), [0.025, 0.975])
    mean = np.mean([one["difference"] for one in mine])
    each = np.mean([one["difference_by_seed"] for one in mine], axis=0)
    pays = mean >= worth and low > 0 and (np.sign(each) == np.sign(mean)).all()
    return {
        "method": name,
        "against": against,
        "difference": round(float(mean), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "difference_by_seed": [round(float(one), 4) for one in each],
        "verdict": "pays" if pays else "does not pay" if high < worth else "undecided",
    }


def table(results: list[dict], means: list[dict]) -> str:
    """Markdown, a line a method: its mean tau over all benchmarks and temperatures; the mean difference to the method
    it is compared with, that of each seed, and what it is worth; then the differences one by one. The 95% intervals are
    over prompts, and do not hold the seeds' variance: see both.
    """
    cells = list(dict.fromkeys((r["benchmark"], r["temperature"]) for r in results))
    methods, of = list(dict.fromkeys(r["method"] for r in results)), {one["method"]: one for one in means}
    names = [f"{name}, T = {t:g}" for name, t in cells]
    head = ["method", "against", "forwards", "mean tau", "mean difference (by seed)", "verdict", *names]
    rows = []
    for method in methods:
        mine = [
            r for cell in cells for r in results if (r["benchmark"], r["temperature"], r["method"]) == (*cell, method)
        ]
        row = [method, mine[0]["against"], str(mine[0]["draft_forwards"]), f"{np.mean([r['tau'] for r in mine]):.3f}"]
        if method not in of:
            row[1] = ""
            row += ["", "", *(f"tau {r['tau']:.3f}" for r in mine)]
        else:
            one = of[method]
            by_seed = ", ".join(f"{x:+.3f}" for x in one["difference_by_seed"])
            row += [f"{one['difference']:+.3f}{bracketed(one['interval'])} ({by_seed})", one["verdict"]]
            row += [f"{r['difference']:+.3f}{bracketed(r['interval'])}" for r in mine]
        rows.append(row)
    return markdown.table(head, rows)


def bracketed(interval: list[float] | None) -> str:
    return "" if interval is None else " [{:+.3f}, {:+.3f}]".format(*interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--against", default="dense", help="the method that the others are compared with")
    parser.add_argument("--pair", action="append", default=[], help="METHOD:OTHER, what this one is compared with")
    parser.add_argument("--worth", type=float, default=0.02, help="of tau: less than this is not worth its while")
    parser.add_argument("--out", type=Path, help="default: the recipe's output")
    arguments = parser.parse_args()
    arguments.seed_list = list(range(arguments.seeds))
    first = of_seed(arguments, 0)
    references = dict.fromkeys(first.methods, arguments.against)
    for pair in arguments.pair:
        name, _, other = pair.partition(":")
        references[name] = other
    if odd := [name for name in (*references, *references.values()) if name not in first.methods]:
        parser.error(f"--against and --pair: {odd[0]!r} is none of the recipe's {', '.join(first.methods)}")
    for seed in arguments.seed_list:
        train(arguments, seed, first)
    by_seed, answers, methods = {}, None, {}
    for seed in arguments.seed_list:
        recipe = of_seed(arguments, seed)
        methods = methods_of(recipe)
        if static := [name for name, method in methods.items() if method.tree.paths is not None]:
            raise PipelineError(f"method {static[0]} has a static tree: only dynamic ones are selections of another")
        harness = make_harness(recipe, methods)
        answers = answers or answered(recipe, harness)
        by_seed[seed] = replayed(harness, answers)
    results = [result(cell, by_seed, references, methods) for cell in by_seed[0]]
    results.sort(key=lambda r: list(methods).index(r["method"]))
    means = [
        overall([r for r in results if r["method"] == name], by_seed, arguments.worth)
        for name, other in references.items()
        if name != other
    ]
    out = arguments.out or first.run_dir.parent
    said = table(results, means)
    found = {"worth": arguments.worth, "means": means, "results": results}
    write_json(out / "ablations.json", {"provenance": provenance(first), **found})
    write_text(out / "ablations.md", said + "\n")
    plots.draw_differences(results, out / "ablations.png")
    print(said)
    print(json.dumps(found))


if __name__ == "__main__":
    entry.run(main)
