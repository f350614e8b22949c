"""Chooses the dynamic tree that is fastest on this machine, predicts its speed, and measures it.

python eval/tune.py RECIPE [--draft NAME]

Measured: the target's time for verifying n tokens, a draft forward's for w nodes, and what a round costs beside them.
Replayed: the target's own answers to calibration prompts (held-out dialogues that no benchmark of the recipe uses, at
all of its temperatures). At every place the draft grows one large tree; every smaller one is a selection of its
candidates, so how far each would have been accepted there is counted, not estimated (pipeline/decoding/replay.py).
Least predicted time a token wins. What was chosen is written to eval/tuned.json of the run: eval/main.py measures it
beside the recipe's tree and releases it. The last line is JSON.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from eval.measure.costs import Costs, measure_costs
from eval.measure.harness import PLAIN, Harness, Unit, pooled
from eval.measure.prompts import HELDOUT, load_prompts
from eval.measure.units import make_harness, methods_of, read_tuned
from pipeline.artifacts.provenance import provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draft, Method
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig
from pipeline.running import entry

TOP_K = (1, 2, 3, 4, 6, 8, 10)


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to do."""

    depth: int
    top_k: int
    nodes: int
    parallel: int
    tau: float
    speedup: float  # over plain decoding


def calibration_units(recipe: Recipe, count: int) -> list[Unit]:
    """First turns of the last held-out dialogues, which no benchmark uses. Raises PipelineError when there are none."""
    used = max(
        [b.prompts or recipe.data.heldout_prompts for b in recipe.eval.benchmarks.values() if b.source == HELDOUT]
        or [0]
    )
    found = load_prompts("calibration", BenchmarkConfig(source=HELDOUT), recipe)[used:][-count:]
    if not found:
        raise PipelineError(
            f"no held-out prompts are left to calibrate with: data.heldout_prompts={recipe.data.heldout_prompts}, of "
            f"which the benchmarks use {used}. Let them use fewer (eval.benchmarks.NAME.prompts)"
        )
    firsts = [replace(prompt, turns=prompt.turns[:1]) for prompt in found]
    return [Unit("calibration", prompt, t) for t in recipe.eval.temperatures for prompt in firsts]


def predict(
    counters: list[replay.Counter],
    costs: Costs,
    parallels: Callable[[int], list[int]],
    depth: int,
    sizes: list[int],
    candidates: str = "plain",
) -> list[Prediction]:
    """Every tree's prediction, fastest first. In units of plain decoding: the machine's own speed drifts while it is
    measured.
    """
    out = []
    for top_k in TOP_K:
        for levels in range(1, depth + 1):
            for parallel in sorted(parallels(levels)):
                most = 1 + top_k + top_k * top_k * (levels - 1)
                for nodes in [n for n in sizes if levels + 1 <= n <= most]:
                    shape = {"depth": levels, "top_k": top_k, "nodes": nodes, "parallel": parallel}
                    tree, counts = TreeConfig(**shape, candidates=candidates), Acceptance()
                    for counted in counters:
                        counts.merge(counted(tree))
                    seconds = costs.round(levels, top_k, nodes, parallel) / counts.tau
                    out.append(Prediction(levels, top_k, nodes, parallel, counts.tau, costs.plain / seconds))
    return sorted(out, key=lambda one: -one.speedup)


def largest(method: Method, depth: int) -> tuple[Draft, TreeConfig]:
    """The draft and the largest tree that is considered of it."""
    most = max(method.draft.config.parallels(depth))
    return method.draft, replay.largest_tree(depth, max(TOP_K), method.tree.candidates, most)


def tree_of(given: TreeConfig, best: Prediction) -> TreeConfig:
    shape = {key: value for key, value in asdict(best).items() if key in ("depth", "top_k", "nodes", "parallel")}
    return TreeConfig(**shape, candidates=given.candidates)


def measure(
    recipe: Recipe, harness: Harness, methods: dict[str, Method], units: list[Unit]
) -> dict[str, dict[str, float | None]]:
    """Of plain decoding and of each draft, taking turns: milliseconds a token, speed-up and tau over all units. Raises
    PipelineError where the losslessness gate fails.
    """
    trial = Harness(recipe, harness.target, methods)
    records, gates, _ = pooled([(unit.benchmark, trial.decode(unit)) for unit in units])
    if lossy := [name for (_, name, _), gate in gates.items() if not gate.passed]:
        raise PipelineError(f"the losslessness gate failed for the {lossy[0]} tree: there is no speed to speak of")
    out = {}
    for name in (PLAIN, *methods):
        mine = [record.generation for record in records if record.method == name]
        counts = Acceptance()
        for one in mine:
            counts.merge(one.acceptance)
        seconds, tokens = sum(one.seconds for one in mine), sum(len(one.tokens) - 1 for one in mine)
        out[name] = {
            "ms_per_token": round(1e3 * seconds / tokens, 3),
            "tau": round(counts.tau, 4) if counts.passes else None,
        }
    for one in out.values():
        one["speedup"] = round(out[PLAIN]["ms_per_token"] / one["ms_per_token"], 4)
    return out


def answered(harness: Harness, units: list[Unit]) -> list[tuple[list[int], list[int]]]:
    """The target's answers of two tokens and more. Raises PipelineError when there are none."""
    answers = [pair for unit in units for pair in harness.plain_answers(unit)]
    if not answers:
        raise PipelineError("no calibration prompt has room for an answer of two tokens: lower eval.max_new_tokens")
    return answers


def tune(
    recipe: Recipe,
    harness: Harness,
    name: str,
    units: list[Unit],
    counters: list[replay.Counter],
    costs: Costs,
    depth: int,
) -> dict:
    """Chooses, measures and describes one draft's tree."""
    given = harness.methods[name]
    print(costs.said())
    ranked = predict(counters, costs, given.draft.config.parallels, depth, costs.sizes, given.tree.candidates)
    print("fastest trees by prediction:")
    for one in ranked[:5]:
        print(
            f"  depth {one.depth}, top-k {one.top_k}, {one.nodes} nodes, last {one.parallel} level(s) from one "
            f"forward: tau {one.tau:.2f}, {one.speedup:.2f}x"
        )
    best, tree = ranked[0], tree_of(given.tree, ranked[0])
    found = measure(recipe, harness, {"tuned": Method(given.draft, tree), "given": given}, units)
    plainly, tuned, given = (found[method] for method in (PLAIN, "tuned", "given"))
    predicted = plainly["ms_per_token"] / best.speedup  # with the machine as fast as it was just now
    ratio = predicted / tuned["ms_per_token"]
    print(
        f"{name}: predicted {best.speedup:.2f}x at tau {best.tau:.2f}, measured {tuned['speedup']:.2f}x at "
        f"{tuned['tau']:.2f} ({tuned['ms_per_token']:.1f} ms a token, predicted / measured time {ratio:.3f}); the "
        f"recipe's tree {given['speedup']:.2f}x at {given['tau']:.2f}"
    )
    return {
        "tree": tree.to_json(),
        "predicted": {"speedup": round(best.speedup, 4), "tau": round(best.tau, 4)},
        "measured": tuned,
        "recipes_tree": given,
        "plain_ms_per_token": plainly["ms_per_token"],
        "predicted_over_measured": round(ratio, 4),
        "weights_sha256": methods_of(recipe)[name].weights_sha256,
        "dtype": recipe.eval.dtype,
        "temperatures": recipe.eval.temperatures,
        "prompts": len({unit.prompt for unit in units}),
        "hardware": provenance(recipe)["hardware"],
        "costs": asdict(costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="only this one of the recipe's drafts")
    parser.add_argument("--prompts", type=int, default=10, help="for calibration")
    parser.add_argument("--depth", type=int, default=6, help="deepest tree that is considered")
    parser.add_argument("--max-nodes", type=int, default=64, help="largest tree that is considered")
    parser.add_argument("--repeats", type=int, default=2, help="of the measurement at the end")
    arguments = parser.parse_args()
    if arguments.max_nodes < 2 or arguments.depth < 1 or arguments.prompts < 1:
        parser.error("--max-nodes must be at least 2, --depth and --prompts at least 1")
    repeats = [f"eval.{key}={arguments.repeats}" for key in ("repeats", "sampled_repeats")]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *repeats])
    names = [arguments.draft] if arguments.draft else sorted(recipe.draft)
    if unknown := set(names) - set(recipe.draft):
        parser.error(f"--draft {unknown.pop()}: the recipe has {', '.join(sorted(recipe.draft))}")
    path = recipe.tuned_file
    known = read_tuned(recipe)
    path.unlink(missing_ok=True)  # what is tuned now may have been tuned for other weights
    own = {name: method for name, method in methods_of(recipe).items() if name in names}
    harness, units = make_harness(recipe, own), calibration_units(recipe, arguments.prompts)
    answers, found = answered(harness, units), {}
    context = int(np.median([len(ids) for ids, _ in answers]))
    samplings = [harness.sampling(t, "costs") for t in recipe.eval.temperatures]
    costs = measure_costs(harness.target, harness.methods, context, arguments.max_nodes, samplings, answers[0][0])
    depth = arguments.depth
    grown = [largest(harness.methods[name], depth) for name in names]
    counters = zip(*(harness.counters(grown, *pair) for pair in answers), strict=True)
    for name, of_draft in zip(names, counters, strict=True):
        found[name] = tune(recipe, harness, name, units, list(of_draft), costs[name], depth)
        write_sealed(path, known | found)
    print(
        json.dumps(
            {
                "predicted_over_measured": {n: one["predicted_over_measured"] for n, one in found.items()},
                "drafts": found,
            }
        )
    )


if __name__ == "__main__":
    entry.run(main)
