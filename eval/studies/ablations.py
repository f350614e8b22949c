"""Every method of a recipe at equal training, over several seeds: tau, and its difference to another's.

    python -m eval.studies.ablations RECIPE [--seeds 3] [--against METHOD [METHOD:OTHER ...]]

Dumps once, trains every draft of the recipe once a seed (what is done is not done again), lets the target answer the
benchmarks' prompts once, and replays those answers with each method's tree (pipeline/decoding/replay.py: the tokens and
rounds of decoding, counted without verifying). The rows go to results.jsonl of each seed's run, OUTPUT/seed-N, and the
differences to ablations.png: ``python -m eval.results OUTPUT --instrument replayed --against METHOD`` shows them again.
"""

import argparse

from eval import results
from eval.measure import report
from eval.measure.harness import Answered, Harness
from eval.measure.tasks import make_harness, methods_of, tasks_of
from eval.studies.differences import Counts
from pipeline.artifacts.reports import Row, origin_of, put_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from pipeline.running.stages import train_variant


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
                counted = replay.counter(draft, states, tokens, begin, largest)
                for name in names:
                    found = counted(methods[name].tree)
                    counts = out.setdefault((one.task.benchmark, one.task.temperature, name), {})
                    had = counts.get(one.task.prompt.question_id, (0, 0))
                    counts[one.task.prompt.question_id] = had[0] + found.tokens, had[1] + found.passes
            progress.advance(1)
    return out


def rows(recipe: Recipe, harness: Harness, answers: list[Answered]) -> list[Row]:
    """tau of every method in each benchmark and temperature."""
    told: dict[tuple[str, float], dict[str, list[list[int]]]] = {}
    for one in answers:
        by_prompt = told.setdefault((one.task.benchmark, one.task.temperature), {})
        by_prompt.setdefault(one.task.prompt.question_id, []).append(one.answer)
    origins = {name: origin_of(recipe, method.draft) for name, method in recipe.methods.items()}
    out = []
    for (benchmark, temperature, name), counts in replayed(harness, answers).items():
        tokens, passes = (sum(pair[which] for pair in counts.values()) for which in (0, 1))
        digests = {q: report.digest(told[benchmark, temperature][q]) for q in counts}
        where = {"benchmark": benchmark, "temperature": temperature, "origin": origins[name.removesuffix("-tuned")]}
        found = {q: list(pair) for q, pair in counts.items()}
        out.append(Row("replayed", name, "tau", round(tokens / passes, 4), counts=found, answers=digests, **where))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--against", nargs="+", default=["dense"], help="what the others are compared with")
    parser.add_argument("--worth", type=float, default=0.02, help="of tau: less than this does not pay")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    named = [name for one in arguments.against for name in one.split(":")]
    if odd := [name for name in named if name not in recipe.methods]:
        parser.error(f"--against: {odd[0]!r} is none of the recipe's {', '.join(recipe.methods)}")
    runs: list[Recipe] = []
    for seed in range(arguments.seeds):
        source = runs[0] if runs else None
        runs.append(train_variant(arguments, [f"seed={seed}"], f"seed-{seed}", source))
    answers: list[Answered] = []
    found: list[results.Found] = []  # of these seeds alone: earlier studies left others in the folder
    for run in runs:
        methods = methods_of(run)
        if static := [name for name, method in methods.items() if method.resolved_tree.paths is not None]:
            raise PipelineError(f"method {static[0]} has a static tree: only dynamic ones are selections of another")
        harness = make_harness(run, methods)
        answers = answers or harness.answered(tasks_of(run))
        measured = rows(run, harness, answers)
        put_rows(run.eval_dir, measured, whole=True)
        found += results.found_by(recipe, measured, run.run_dir.name)
    results.compare(found, arguments.against, arguments.worth, recipe.run_dir / "ablations.png")


if __name__ == "__main__":
    entry.run(main, keeps=True)
