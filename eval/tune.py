"""Chooses the dynamic tree that is fastest on this machine, predicts its speed, and measures it.

python eval/tune.py RECIPE [--method NAME]

Measured: the target's time for verifying n tokens, a draft forward's for w nodes, and what a round costs beside them.
Replayed: the target's own answers to tuning prompts (held-out dialogues that no benchmark of the recipe uses, at
all of its temperatures). At every place the draft grows one large tree; every smaller one is a selection of its
candidates, so how far each would have been accepted there is counted, not estimated (pipeline/decoding/replay.py).
Least predicted time a token wins. Where a draft has secondary sources, what all scores are worth is counted on the
same answers first. What was chosen, and what was measured, is written to eval/tuned.json of the run: eval/main.py
measures it beside the recipe's tree and releases the faster one.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

from dataclasses import replace

import numpy as np

from eval.measure.harness import Answered, EvalTask, Harness
from eval.measure.prompts import load_prompts
from eval.measure.tasks import digests_of, evaluation_lock, make_harness, tuned_for
from eval.tuning.calibrate import Answer
from eval.tuning.choose import Replays, largest, tune
from eval.tuning.costs import measure_costs
from pipeline.artifacts.reports import Row, origin_of, put_rows, read_tuned_trees
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.decoding.sources import Sources
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import HELDOUT, BenchmarkConfig
from pipeline.running import entry


def calibration_tasks(recipe: Recipe, count: int) -> list[EvalTask]:
    """First turns of the last held-out dialogues, which no benchmark uses. Raises PipelineError when there are none."""
    used = max([b.prompts or recipe.data.heldout_prompts for b in recipe.eval.benchmarks.values() if b.held_out] or [0])
    found = load_prompts("calibration", BenchmarkConfig(source=HELDOUT), recipe)[used:][-count:]
    if not found:
        raise PipelineError(
            f"no held-out prompts are left to calibrate with: data.heldout_prompts={recipe.data.heldout_prompts}, of "
            f"which the benchmarks use {used}. Let them use fewer (eval.benchmarks.NAME.prompts)"
        )
    firsts = [replace(prompt, turns=prompt.turns[:1]) for prompt in found]
    return [EvalTask("calibration", prompt, t) for t in recipe.eval.temperatures for prompt in firsts]


def replayed(harness: Harness, texts: list[Answered], depth: int) -> dict[str, Replays]:
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
                    hybrid = replay.HybridText(draft, walks[key], tokens, begin)
                    out[name].answers.append(Answer(hybrid, text.task.temperature, text.task.prompt.question_id))
                else:
                    out[name].counters.append(walks[key].counter())
            progress.advance(1)
    return out


def tune_methods(recipe: Recipe, names: list[str], prompts: int, depth: int, most_nodes: int) -> Path:
    """Writes what was chosen for each method, as it comes; returns the file."""
    methods, digests = recipe.methods, digests_of(recipe)
    own = {name: methods[name] for name in names}
    harness, tasks = make_harness(recipe, own), calibration_tasks(recipe, prompts)
    path, known = recipe.tuned_file, {}
    for name, one in read_tuned_trees(path).items():
        if name in methods and one.get("for") == tuned_for(recipe, methods[name], digests):
            known[name] = one
    path.unlink(missing_ok=True)  # what is tuned now may have been tuned for other weights
    texts, found = harness.answered(tasks), {}
    if not texts:
        raise PipelineError("no calibration prompt has room for an answer of two tokens: lower eval.max_new_tokens")
    context = int(np.median([len(text.prompt) for text in texts]))
    samplings = [harness.sampling(t, "costs") for t in recipe.eval.temperatures]
    costs = measure_costs(harness.target, harness.methods, context, most_nodes, samplings, texts[0].prompt)
    for name, replays in replayed(harness, texts, depth).items():
        found[name] = tune(recipe, harness, name, tasks, replays, costs[name], depth, print)
        found[name]["for"] = tuned_for(recipe, methods[name], digests)
        write_sealed(path, known | found)
        origin = origin_of(recipe, methods[name].draft)
        predicted = [Row("predicted", f"{name}-tuned", *one, origin=origin) for one in found[name]["predicted"].items()]
        put_rows(recipe.eval_dir, predicted)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--method", help="only this one: a draft, or a method with secondary sources")
    parser.add_argument("--prompts", type=int, default=10, help="for calibration")
    parser.add_argument("--depth", type=int, default=6, help="deepest tree that is considered")
    parser.add_argument("--max-nodes", type=int, default=64, help="largest tree that is considered")
    parser.add_argument("--repeats", type=int, default=2, help="of the measurement at the end")
    arguments = parser.parse_args()
    if arguments.max_nodes < 2 or arguments.depth < 1 or arguments.prompts < 1:
        parser.error("--max-nodes must be at least 2, --depth and --prompts at least 1")
    repeats = [f"eval.{key}={arguments.repeats}" for key in ("repeats", "sampled_repeats")]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *repeats], begin=True)
    names = [arguments.method] if arguments.method else recipe.tunable
    if unknown := set(names) - set(recipe.tunable):
        parser.error(f"--method {unknown.pop()}: the recipe has {', '.join(recipe.tunable)}")
    with evaluation_lock(recipe):
        path = tune_methods(recipe, names, arguments.prompts, arguments.depth, arguments.max_nodes)
    print(f"{path} is written: the next run measures what it holds beside the recipe's trees")


if __name__ == "__main__":
    entry.run(main)
