"""Choose the dynamic tree that is fastest on this machine, predict its speed, and measure it.

python eval/tune.py RECIPE [--method NAME]

Counted: tau of every tree along the target's own answers to calibration prompts (held-out dialogues that no benchmark
of the recipe uses, at all of its temperatures). At every place the draft grows one large tree. Every smaller tree is a
selection of its candidates, so its acceptance there is counted exactly, not estimated (decoding/replay.py). Timed:
rounds of about a dozen trees, in turns with plain decoding; the time of a round of any other tree is interpolated. The
tree with the largest ratio of tau to round time wins. The choice and its measurement are written to eval/tuned.json of
the run: eval/main.py measures it next to the recipe's tree and releases the faster one.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import nnls

from eval.measure.harness import EAGER, PLAIN, DecodedPrompt, EvalTask, Harness, pool_outcomes
from eval.measure.prompts import load_prompts
from eval.measure.tasks import digest_drafts, evaluation_lock, make_harness, tuning_conditions
from pipeline.artifacts.provenance import provenance
from pipeline.artifacts.reports import ResultRow, make_origin, read_tuned_trees, replace_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Generation
from pipeline.decoding.sources import Sources
from pipeline.lm.ability import Shape
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import HELDOUT, BenchmarkConfig
from pipeline.recipe.trees import require_verifiable
from pipeline.running import entry

TOP_K = (1, 2, 3, 4, 6, 8, 10)
NODE_COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
TIMED_NODES = (2, 4, 8, 16, 32, 64, 128)  # nodes of the trees whose rounds are timed
TIMED_PROMPTS, TIMED_TOKENS = 4, 64  # prompts whose answers are timed, and tokens of each

Rounds = dict[TreeConfig, float]  # time of a round, in steps of plain decoding


@dataclass(frozen=True)
class Prediction:
    """The expected tau and speed-up of a tree."""

    tree: TreeConfig
    tau: float
    speedup: float  # over plain decoding

    def __str__(self) -> str:
        return f"{describe_tree(self.tree)}: tau {self.tau:.2f}, {self.speedup:.2f}x"


def describe_tree(tree: TreeConfig) -> str:
    levels = f", last {tree.parallel} levels from one forward" if tree.forwards < tree.depth else ""
    return f"depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes{levels}"


def list_trees(method: LoadedMethod, depth: int, nodes: int, verifies: Shape = "tree") -> list[TreeConfig]:
    """Return all trees that the method's draft can grow, of at most `depth` levels and `nodes` nodes: chains alone for
    a method without siblings, or a target that verifies nothing else.
    """
    config, trees = method.draft.config, []
    shape: dict[str, Any] = {"candidates": method.tree.candidates}
    chains = verifies == "chain" or method.tree.siblings == "none"
    if method.tree.siblings == "none" or (chains and isinstance(method.draft, Sources)):
        shape["siblings"] = "none"
    for top_k, levels in product((1,) if chains else TOP_K, range(1, depth + 1)):
        for size in range(levels + 1, nodes + 1) if chains else NODE_COUNTS:
            for parallel in config.parallel_choices(levels) if levels < size <= nodes else ():
                tree = TreeConfig(depth=levels, top_k=top_k, nodes=size, parallel=parallel, **shape)
                if size <= config.max_nodes(tree):
                    trees.append(tree)
    return trees


def select_trees_to_time(trees: list[TreeConfig]) -> list[TreeConfig]:
    """Return about a dozen of the trees: for each of some sizes one with the fewest draft forwards; then the deepest
    ones, narrow and wide, level by level and with several levels from one forward.
    """
    sizes = {*TIMED_NODES, max(tree.nodes for tree in trees)}
    series: dict[int, list[TreeConfig]] = {}
    deep: dict[tuple[int, bool], list[TreeConfig]] = {}
    for tree in trees:
        if tree.nodes in sizes:
            series.setdefault(tree.nodes, []).append(tree)
            if tree.top_k in (min(TOP_K), max(TOP_K)):
                deep.setdefault((tree.top_k, tree.forwards < tree.depth), []).append(tree)
    shallow = [min(group, key=lambda tree: (tree.forwards, tree.depth, -tree.top_k)) for group in series.values()]
    deepest = [max(group, key=lambda tree: (tree.depth, -tree.nodes)) for group in deep.values()]
    return list(dict.fromkeys([*shallow, *deepest]))


def fit_round_time(rounds: Rounds) -> Callable[[TreeConfig], float]:
    """Return a function that predicts the time of a round of any tree: interpolated between the numbers of nodes that
    were timed, and linear in the draft's further forwards, in the nodes that these have, and in the further levels of
    the last one. No coefficient is negative; relative errors are minimised (least squares).
    """
    sizes = sorted({tree.nodes for tree in rounds})

    def features(tree: TreeConfig) -> list[float]:
        further = tree.forwards - 1
        nodes = [float(np.interp(tree.nodes, sizes, weights)) for weights in np.eye(len(sizes))]
        return [*nodes, further, further * tree.top_k, tree.depth - tree.forwards]

    relative = np.array([features(tree) for tree in rounds]) / np.array([*rounds.values()])[:, None]
    costs, _ = nnls(relative, np.ones(len(rounds)))
    return lambda tree: float(np.dot(features(tree), costs))


def predict(trees: list[TreeConfig], counters: list[replay.Counter], rounds: Rounds) -> list[Prediction]:
    """Return every tree's prediction, fastest first."""
    predictions, round_time = [], fit_round_time(rounds)
    for tree in trees:
        counts = Acceptance()
        for counter in counters:
            counts.merge(counter(tree))
        predictions.append(Prediction(tree, counts.tau, counts.tau / round_time(tree)))
    return sorted(predictions, key=lambda prediction: -prediction.speedup)


# -- decoding --------------------------------------------------------------------------------------------------------


def calibration_tasks(recipe: Recipe, count: int) -> list[EvalTask]:
    """Return the first turns of the last held-out dialogues, which no benchmark uses. Raise PipelineError if there are
    none.
    """
    used = max([b.prompts or recipe.data.heldout_prompts for b in recipe.eval.benchmarks.values() if b.held_out] or [0])
    prompts = load_prompts("calibration", BenchmarkConfig(source=HELDOUT), recipe)[used:][-count:]
    if not prompts:
        raise PipelineError(
            f"no held-out prompts are left to calibrate with: data.heldout_prompts={recipe.data.heldout_prompts}, of "
            f"which the benchmarks use {used}. Let them use fewer (eval.benchmarks.NAME.prompts)"
        )
    firsts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    return [EvalTask("calibration", prompt, t) for t in recipe.eval.temperatures for prompt in firsts]


def replay_answers(
    harness: Harness, texts: list[DecodedPrompt], trees: dict[str, list[TreeConfig]]
) -> dict[str, list[replay.Counter]]:
    """Return by method a counter of its trees' acceptance for each answer. The target runs over an answer once for all
    methods.
    """
    largest = {}
    for name, method in harness.methods.items():
        keys = ("depth", "top_k", "parallel")
        deepest, widest, levels = (max(getattr(tree, key) for tree in trees[name]) for key in keys)
        largest[name] = replay.largest_tree(deepest, widest, method.tree.candidates, levels)
    counters: dict[str, list[replay.Counter]] = {name: [] for name in largest}
    with Progress("replay", len(texts), "answers") as progress:
        for text in texts:
            tokens = text.prompt + text.answer
            states = harness.states(tokens, [method.draft for method in harness.methods.values()])
            for name, tree in largest.items():
                draft = harness.methods[name].draft
                counters[name].append(replay.make_counter(draft, states, tokens, len(text.prompt), tree))
            progress.advance(1)
    return counters


def decode_in_turns(
    recipe: Recipe, harness: Harness, methods: dict[str, LoadedMethod], tasks: list[EvalTask], title: str
) -> tuple[dict[str, list[Generation]], bool]:
    """Return the answers of plain decoding, of eager plain decoding where the target is compiled, and of each method;
    and whether the losslessness gate passed.
    """
    trial, outcomes = Harness(recipe, harness.target, methods), []
    with Progress(title, len(tasks), "prompts") as progress:
        for task in tasks:
            outcomes.append((task.benchmark, trial.decode(task)))
            progress.advance(1)
    records, gates, _ = pool_outcomes(outcomes)
    answers: dict[str, list[Generation]] = {}
    for record in records:
        answers.setdefault(record.method, []).append(record.generation)
    return answers, all(gate.passed for gate in gates.values())


def time_rounds(
    recipe: Recipe, harness: Harness, method: LoadedMethod, trees: list[TreeConfig], tasks: list[EvalTask]
) -> Rounds:
    """Time a round of each tree: the median over answers. The machine's speed drifts, so each answer is compared with
    plain decoding's next to it.
    """
    config = recipe.eval
    limit = {"max_new_tokens": min(config.max_new_tokens, TIMED_TOKENS)}
    short_recipe = recipe.model_copy(update={"eval": config.model_copy(update=limit)})
    prompts = list(dict.fromkeys(task.prompt for task in tasks))[:TIMED_PROMPTS]
    short_tasks = [task for task in tasks if task.prompt in prompts]
    methods = {describe_tree(tree): LoadedMethod(method.draft, tree) for tree in trees}
    # the gate is checked for the tree that wins
    answers, _ = decode_in_turns(short_recipe, harness, methods, short_tasks, "time rounds")
    steps = [generation.seconds / (len(generation.tokens) - 1) for generation in answers[PLAIN]]
    rounds: Rounds = {}
    for tree in trees:
        pairs = zip(answers[describe_tree(tree)], steps, strict=True)
        rounds[tree] = statistics.median(
            generation.seconds / generation.acceptance.passes / step for generation, step in pairs
        )
        print(f"  {describe_tree(tree)}: a round takes {rounds[tree]:.2f} steps of plain decoding")
    return rounds


def measure_method(recipe: Recipe, harness: Harness, method: LoadedMethod, tasks: list[EvalTask]) -> dict[str, float]:
    """Return milliseconds a token, tau, and the speed-up over the faster plain decoding; all decoded in turns. Raise
    PipelineError if the losslessness gate fails.
    """
    answers, lossless = decode_in_turns(recipe, harness, {"tuned": method}, tasks, "measure")
    if not lossless:
        raise PipelineError(
            f"the losslessness gate failed for {describe_tree(method.tree)}: there is no speed to report"
        )
    ms_per_token, counts = {}, Acceptance()
    for name, generations in answers.items():
        tokens = sum(len(generation.tokens) - 1 for generation in generations)
        ms_per_token[name] = 1e3 * sum(generation.seconds for generation in generations) / tokens
    for generation in answers["tuned"]:
        counts.merge(generation.acceptance)
    figures = {
        "ms_per_token": ms_per_token["tuned"],
        "tau": counts.tau,
        "speedup": min(ms_per_token[name] for name in (PLAIN, EAGER) if name in ms_per_token) / ms_per_token["tuned"],
    }
    return {name: round(value, 4) for name, value in figures.items()}


def tune_method(
    recipe: Recipe,
    harness: Harness,
    name: str,
    tasks: list[EvalTask],
    trees: list[TreeConfig],
    counters: list[replay.Counter],
) -> dict:
    """Choose, measure and describe one method's tree."""
    method = harness.methods[name]
    print(f"{name}:")
    predictions = predict(trees, counters, time_rounds(recipe, harness, method, select_trees_to_time(trees), tasks))
    print(f"{name}, fastest trees by prediction:")
    for prediction in predictions[:5]:
        print(f"  {prediction}")
    best = predictions[0]
    figures = measure_method(recipe, harness, LoadedMethod(method.draft, best.tree), tasks)
    ratio = figures["speedup"] / best.speedup
    print(
        f"{name}: predicted {best.speedup:.2f}x at tau {best.tau:.2f}, measured {figures['speedup']:.2f}x at "
        f"{figures['tau']:.2f} ({figures['ms_per_token']:.1f} ms a token, predicted / measured time {ratio:.3f})"
    )
    return {
        "method": replace(recipe.methods[name], tree=best.tree).to_json(),
        "predicted": {"speedup": round(best.speedup, 4), "tau": round(best.tau, 4)},
        "measured": figures,
        "predicted_over_measured": round(ratio, 4),  # times
        "prompts": len({task.prompt for task in tasks}),
        "hardware": provenance(recipe)["hardware"],
    }


def tune_methods(recipe: Recipe, names: list[str], prompts: int, depth: int, nodes: int) -> Path:
    """Write the tree that was chosen for each method, one after the other; return the file."""
    methods, digests = recipe.methods, digest_drafts(recipe)
    require_verifiable(recipe)
    harness = make_harness(recipe, {name: methods[name] for name in names})
    path, tuned = recipe.paths.tuned, {}
    for name, facts in read_tuned_trees(path).items():
        if name in methods and facts.get("for") == tuning_conditions(recipe, methods[name], digests):
            tuned[name] = facts
    path.unlink(missing_ok=True)  # the old file may be tuned for other weights
    texts = harness.decode_plainly(calibration_tasks(recipe, prompts))
    if not texts:
        raise PipelineError("no calibration prompt has room for an answer of two tokens: lower eval.max_new_tokens")
    tasks = [text.task for text in texts]
    verifies = harness.target.verifies
    trees = {name: list_trees(method, depth, nodes, verifies) for name, method in harness.methods.items()}
    for name, counters in replay_answers(harness, texts, trees).items():
        facts = tune_method(recipe, harness, name, tasks, trees[name], counters)
        tuned[name] = facts | {"for": tuning_conditions(recipe, methods[name], digests)}
        write_sealed(path, tuned)
        origin = make_origin(recipe, methods[name].draft)
        figures = facts["predicted"].items()
        replace_rows(
            recipe.paths.eval, [ResultRow("predicted", f"{name}-tuned", *figure, origin=origin) for figure in figures]
        )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--method", help="only this one: a draft, or a method with secondary sources")
    parser.add_argument("--prompts", type=int, default=10, help="for calibration")
    parser.add_argument("--depth", type=int, default=6, help="deepest tree that is considered")
    parser.add_argument("--max-nodes", type=int, default=64, help="largest tree that is considered")
    arguments = parser.parse_args()
    if arguments.max_nodes < 2 or arguments.depth < 1 or arguments.prompts < 1:
        parser.error("--max-nodes must be at least 2, --depth and --prompts at least 1")
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, "eval.repeats=1"], begin=True)
    names = [arguments.method] if arguments.method else recipe.tunable
    if unknown := set(names) - set(recipe.tunable):
        parser.error(f"--method {unknown.pop()}: the recipe has {', '.join(recipe.tunable)}")
    with evaluation_lock(recipe):
        path = tune_methods(recipe, names, arguments.prompts, arguments.depth, arguments.max_nodes)
    print(f"{path} is written: the next run measures the trees in it next to the recipe's trees")


if __name__ == "__main__":
    entry.run(main)
