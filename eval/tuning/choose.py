"""Chooses one method's tree from what its parts cost and what its candidates count, and measures it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from eval.measure.harness import PLAIN, EvalTask, Harness, pooled
from eval.tuning.calibrate import Answer, count, fit
from eval.tuning.costs import Costs
from pipeline.artifacts.provenance import provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.calibration import Calibration
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import TreeSupport
from pipeline.decoding.method import LoadedMethod
from pipeline.decoding.sources import Sources
from pipeline.recipe.recipe import Recipe

Say = Callable[[str], None]  # prints what was found, line by line
TOP_K = (1, 2, 3, 4, 6, 8, 10)


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to do."""

    tree: TreeConfig
    tau: float
    speedup: float  # over plain decoding

    def said(self) -> str:
        tree = self.tree
        return (
            f"depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes, last {tree.parallel} level(s) from one "
            f"forward: tau {self.tau:.2f}, {self.speedup:.2f}x"
        )


def predict(
    counters: list[replay.Counter], costs: Costs, settled: TreeSupport, depth: int, sizes: list[int], candidates: str
) -> list[Prediction]:
    """Every tree's prediction, fastest first. In units of plain decoding: the machine's own speed drifts while it is
    measured.
    """
    out = []
    for tree in shapes(settled, depth, candidates):
        for nodes in [n for n in sizes if tree.depth < n <= settled.most(tree)]:
            whole, counts = replace(tree, nodes=nodes), Acceptance()
            for counted in counters:
                counts.merge(counted(whole))
            out.append(Prediction(whole, counts.tau, costs.plain * counts.tau / costs.round(whole)))
    return sorted(out, key=lambda one: -one.speedup)


def shapes(settled: TreeSupport, depth: int, candidates: str) -> Iterator[TreeConfig]:
    """All that are considered, but for the number of nodes: that is the least here."""
    for top_k in TOP_K:
        for levels in range(1, depth + 1):
            for parallel in sorted(settled.parallels(levels)):
                yield TreeConfig(depth=levels, top_k=top_k, nodes=levels + 1, parallel=parallel, candidates=candidates)


def largest(method: LoadedMethod, depth: int) -> TreeConfig:
    """The largest tree that is considered of its draft."""
    choices = {levels: found for levels in range(1, depth + 1) if (found := method.draft.config.parallels(levels))}
    most = max(max(found) for found in choices.values())
    return replay.largest_tree(max(choices), max(TOP_K), method.tree.candidates, most)


@dataclass
class Replays:
    """What one method's trees count along the answers; of several sources also what each proposes there."""

    counters: list[replay.Counter]
    answers: list[Answer]


def calibrate(sources: Sources, found: Replays, depth: int, candidates: str) -> Calibration:
    """What the sources' scores are worth; puts the method's counters in place."""
    trees = [tree for tree in shapes(sources.config, depth, candidates) if tree.top_k == max(TOP_K)]
    trees.sort(key=lambda tree: (tree.parallel, tree.depth))  # a level is counted in the shallowest that has it
    own = {(one.prompt, place if one.temperature else None): one for place, one in enumerate(found.answers)}
    each = [(answer, count(answer.text, trees)) for answer in own.values()]  # greedy repeats do not differ
    calibration = fit(each)
    fitted = sources.tuned(calibration)
    found.counters = [answer.text.counter(fitted, answer.temperature) for answer in found.answers]
    return calibration


def measure(
    recipe: Recipe, harness: Harness, methods: dict[str, LoadedMethod], tasks: list[EvalTask]
) -> dict[str, dict[str, float | None]]:
    """Of plain decoding and of each draft, taking turns: milliseconds a token, speed-up and tau over all tasks. Raises
    PipelineError where the losslessness gate fails.
    """
    trial = Harness(recipe, harness.target, methods)
    found = []
    with Progress("measure", len(tasks), "prompts") as progress:
        for task in tasks:
            found.append((task.benchmark, trial.decode(task)))
            progress.advance(1)
    records, gates, _ = pooled(found)
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


def choose(
    name: str, given: LoadedMethod, found: Replays, costs: Costs, depth: int, say: Say
) -> tuple[LoadedMethod, Prediction, Calibration | None]:
    """What is expected to be fastest."""
    draft, candidates, calibration = given.draft, given.tree.candidates, None
    if isinstance(draft, Sources):
        calibration = calibrate(draft, found, depth, candidates)
        draft = draft.tuned(calibration)
    ranked = predict(found.counters, costs, draft.config, depth, costs.sizes, candidates)
    say(f"{name}, fastest trees by prediction:")
    for one in ranked[:5]:
        say(f"  {one.said()}")
    return LoadedMethod(draft, ranked[0].tree), ranked[0], calibration


def tune(
    recipe: Recipe,
    harness: Harness,
    name: str,
    tasks: list[EvalTask],
    found: Replays,
    costs: Costs,
    depth: int,
    say: Say,
) -> dict:
    """Chooses, measures and describes one method's tree."""
    given = harness.methods[name]
    say(costs.said())
    method, best, calibration = choose(name, given, found, costs, depth, say)
    is_written = calibration is None and method.tree == given.tree
    took = measure(recipe, harness, {"given": given} if is_written else {"tuned": method, "given": given}, tasks)
    plainly, tuned, givens = took[PLAIN], took["given" if is_written else "tuned"], took["given"]
    if is_written:
        say(f"{name}: that is the recipe's tree, so it is measured once")
    predicted = plainly["ms_per_token"] / best.speedup  # with the machine as fast as it was just now
    ratio = predicted / tuned["ms_per_token"]
    say(
        f"{name}: predicted {best.speedup:.2f}x at tau {best.tau:.2f}, measured {tuned['speedup']:.2f}x at "
        f"{tuned['tau']:.2f} ({tuned['ms_per_token']:.1f} ms a token, predicted / measured time {ratio:.3f}); the "
        f"recipe's tree {givens['speedup']:.2f}x at {givens['tau']:.2f}"
    )
    return {
        "method": replace(recipe.methods[name], tree=best.tree, calibration=calibration).to_json(),
        "predicted": {"speedup": round(best.speedup, 4), "tau": round(best.tau, 4)},
        "measured": tuned,
        "recipes_tree": givens,
        "plain_ms_per_token": plainly["ms_per_token"],
        "predicted_over_measured": round(ratio, 4),
        "temperatures": recipe.eval.temperatures,
        "prompts": len({task.prompt for task in tasks}),
        "hardware": provenance(recipe)["hardware"],
        "costs": asdict(costs),
    }
