"""Chooses the dynamic tree that is fastest on this machine, predicts its speed, and measures it.

python eval/tune.py RECIPE [--method NAME]

Measured: the target's time for verifying n tokens, a draft forward's for w nodes, and what a round costs beside them.
Replayed: the target's own answers to calibration prompts (held-out dialogues that no benchmark of the recipe uses, at
all of its temperatures). At every place the draft grows one large tree; every smaller one is a selection of its
candidates, so how far each would have been accepted there is counted, not estimated (pipeline/decoding/replay.py).
Least predicted time a token wins. Where others stand beside a draft, what their scores are worth is counted on the
same answers first, and calibration-NAME.png shows how far that holds on other prompts. What was chosen is written to
eval/tuned.json of the run: eval/main.py measures it beside the recipe's tree and releases it. The last line is JSON.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from eval.measure.harness import PLAIN, Harness, Unit, pooled
from eval.measure.prompts import HELDOUT, load_prompts
from eval.measure.units import make_harness, methods_of, read_tuned, tuned_for
from eval.tuning.calibrate import Answer, Bin, draw, fit, reliability
from eval.tuning.costs import Costs, measure_costs
from pipeline.artifacts.provenance import provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.calibration import Calibration
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Method, Settled
from pipeline.decoding.sources import Sources
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
    counters: list[replay.Counter], costs: Costs, settled: Settled, depth: int, sizes: list[int], candidates: str
) -> list[Prediction]:
    """Every tree's prediction, fastest first. In units of plain decoding: the machine's own speed drifts while it is
    measured.
    """
    out = []
    for tree in shapes(settled, depth, candidates):
        for nodes in [n for n in sizes if tree.depth < n <= settled.most(tree)]:
            sized, counts = replace(tree, nodes=nodes), Acceptance()
            for counted in counters:
                counts.merge(counted(sized))
            seconds = costs.round(tree.depth, tree.top_k, nodes, sized.parallel) / counts.tau
            shape = (tree.depth, tree.top_k, nodes, sized.parallel)
            out.append(Prediction(*shape, counts.tau, costs.plain / seconds))
    return sorted(out, key=lambda one: -one.speedup)


def shapes(settled: Settled, depth: int, candidates: str) -> Iterator[TreeConfig]:
    """All that are considered, but for the number of nodes: that is the least here."""
    for top_k in TOP_K:
        for levels in range(1, depth + 1):
            for parallel in sorted(settled.parallels(levels)):
                yield TreeConfig(depth=levels, top_k=top_k, nodes=levels + 1, parallel=parallel, candidates=candidates)


def largest(method: Method, depth: int) -> TreeConfig:
    """The largest tree that is considered of its draft."""
    most = max(method.draft.config.parallels(depth))
    return replay.largest_tree(depth, max(TOP_K), method.tree.candidates, most)


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


@dataclass
class Text:
    """One of the target's own answers, of two tokens and more."""

    prompt: list[int]
    answer: list[int]
    temperature: float
    number: int  # of the prompt


def answered(harness: Harness, units: list[Unit]) -> list[Text]:
    """Raises PipelineError when there are none."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(unit.prompt for unit in units))}
    found = [
        Text(*pair, unit.temperature, numbers[unit.prompt]) for unit in units for pair in harness.plain_answers(unit)
    ]
    if not found:
        raise PipelineError("no calibration prompt has room for an answer of two tokens: lower eval.max_new_tokens")
    return found


@dataclass
class Replays:
    """What one method's trees count along the answers; of several sources also what each proposes there."""

    counters: list[replay.Counter]
    answers: list[Answer]


def replayed(harness: Harness, texts: list[Text], depth: int) -> dict[str, Replays]:
    """By method. The target, and each draft, goes along an answer once for all of them."""
    methods = harness.methods
    out = {name: Replays([], []) for name in methods}
    with Progress("replay", len(texts), "answers") as progress:
        for text in texts:
            tokens, begin = text.prompt + text.answer, len(text.prompt)
            states = harness.states(tokens, [method.draft for method in methods.values()])
            walks: dict[tuple, replay.Walk] = {}
            for name, method in methods.items():
                draft, tree = method.draft, largest(method, depth)
                alone = draft.draft if isinstance(draft, Sources) else draft
                if not alone.stepwise:
                    out[name].counters.append(replay.counter(draft, states, tokens, begin, tree))
                    continue
                if (key := (alone.name, tree)) not in walks:
                    walks[key] = replay.collect(alone, states, tokens, begin, tree)
                if isinstance(draft, Sources):
                    together = replay.Together(draft, walks[key], tokens, begin)
                    out[name].answers.append(Answer(together, text.temperature, text.number))
                else:
                    out[name].counters.append(walks[key].counter())
            progress.advance(1)
    return out


def calibrate(
    name: str, sources: Sources, found: Replays, depth: int, candidates: str
) -> tuple[Calibration, list[Bin]]:
    """What the sources' scores are worth; puts the method's counters in place."""
    trees = [tree for tree in shapes(sources.config, depth, candidates) if tree.top_k == max(TOP_K)]
    trees.sort(key=lambda tree: (tree.parallel, -tree.depth))  # a level that several have is counted in the deepest
    calibration = fit(found.answers, trees)
    chances = {"draft": sources.draft.chance} | {key: source.chance for key, source in sources.beside.items()}
    bins = reliability(found.answers, trees, chances.__getitem__)
    fitted = sources.calibrated(calibration)
    found.counters = [answer.text.counter(fitted, answer.temperature) for answer in found.answers]
    if bins:
        worst = max(bins, key=lambda one: abs(one.predicted - one.counted))
        off = sum(one.nodes * abs(one.predicted - one.counted) for one in bins) / sum(one.nodes for one in bins)
        print(
            f"{name}: chances on other prompts are off by {100 * off:.1f} points on average and by at most "
            f"{100 * abs(worst.predicted - worst.counted):.1f} ({worst.source}, T = {worst.temperature:g}: predicted "
            f"{worst.predicted:.2f}, counted {worst.counted:.2f} of {worst.nodes} candidates)"
        )
    return calibration, bins


def tune(
    recipe: Recipe, harness: Harness, name: str, units: list[Unit], found: Replays, costs: Costs, depth: int
) -> dict:
    """Chooses, measures and describes one method's tree."""
    given = harness.methods[name]
    draft, calibration, bins = given.draft, None, []
    if isinstance(draft, Sources):
        calibration, bins = calibrate(name, draft, found, depth, given.tree.candidates)
        draft = draft.calibrated(calibration)
    print(costs.said())
    ranked = predict(found.counters, costs, draft.config, depth, costs.sizes, given.tree.candidates)
    print("fastest trees by prediction:")
    for one in ranked[:5]:
        print(
            f"  depth {one.depth}, top-k {one.top_k}, {one.nodes} nodes, last {one.parallel} level(s) from one "
            f"forward: tau {one.tau:.2f}, {one.speedup:.2f}x"
        )
    best, tree = ranked[0], tree_of(given.tree, ranked[0])
    took = measure(recipe, harness, {"tuned": Method(draft, tree), "given": given}, units)
    plainly, tuned, givens = (took[method] for method in (PLAIN, "tuned", "given"))
    predicted = plainly["ms_per_token"] / best.speedup  # with the machine as fast as it was just now
    ratio = predicted / tuned["ms_per_token"]
    print(
        f"{name}: predicted {best.speedup:.2f}x at tau {best.tau:.2f}, measured {tuned['speedup']:.2f}x at "
        f"{tuned['tau']:.2f} ({tuned['ms_per_token']:.1f} ms a token, predicted / measured time {ratio:.3f}); the "
        f"recipe's tree {givens['speedup']:.2f}x at {givens['tau']:.2f}"
    )
    return {
        "tree": tree.to_json(),
        "calibration": None if calibration is None else calibration.to_json(),
        "reliability": [asdict(one) for one in bins],
        "predicted": {"speedup": round(best.speedup, 4), "tau": round(best.tau, 4)},
        "measured": tuned,
        "recipes_tree": givens,
        "plain_ms_per_token": plainly["ms_per_token"],
        "predicted_over_measured": round(ratio, 4),
        "for": tuned_for(recipe, methods_of(recipe)[name]),
        "temperatures": recipe.eval.temperatures,
        "prompts": len({unit.prompt for unit in units}),
        "hardware": provenance(recipe)["hardware"],
        "costs": asdict(costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--method", help="only this one: a draft of the recipe, or a method with others beside it")
    parser.add_argument("--prompts", type=int, default=10, help="for calibration")
    parser.add_argument("--depth", type=int, default=6, help="deepest tree that is considered")
    parser.add_argument("--max-nodes", type=int, default=64, help="largest tree that is considered")
    parser.add_argument("--repeats", type=int, default=2, help="of the measurement at the end")
    arguments = parser.parse_args()
    if arguments.max_nodes < 2 or arguments.depth < 1 or arguments.prompts < 1:
        parser.error("--max-nodes must be at least 2, --depth and --prompts at least 1")
    repeats = [f"eval.{key}={arguments.repeats}" for key in ("repeats", "sampled_repeats")]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *repeats])
    names = [arguments.method] if arguments.method else recipe.tunable
    if unknown := set(names) - set(recipe.tunable):
        parser.error(f"--method {unknown.pop()}: the recipe has {', '.join(recipe.tunable)}")
    path = recipe.tuned_file
    known = read_tuned(recipe)
    path.unlink(missing_ok=True)  # what is tuned now may have been tuned for other weights
    own = {name: method for name, method in methods_of(recipe).items() if name in names}
    harness, units = make_harness(recipe, own), calibration_units(recipe, arguments.prompts)
    texts, found = answered(harness, units), {}
    context = int(np.median([len(text.prompt) for text in texts]))
    samplings = [harness.sampling(t, "costs") for t in recipe.eval.temperatures]
    costs = measure_costs(harness.target, harness.methods, context, arguments.max_nodes, samplings, texts[0].prompt)
    for name, replays in replayed(harness, texts, arguments.depth).items():
        found[name] = tune(recipe, harness, name, units, replays, costs[name], arguments.depth)
        write_sealed(path, known | found)
        if bins := [Bin(**raw) for raw in found[name]["reliability"]]:
            draw(bins, recipe.eval_dir / f"calibration-{name}.png")
    print(
        json.dumps(
            {
                "predicted_over_measured": {n: one["predicted_over_measured"] for n, one in found.items()},
                "methods": {n: {k: v for k, v in one.items() if k != "calibration"} for n, one in found.items()},
            }
        )
    )


if __name__ == "__main__":
    entry.run(main)
