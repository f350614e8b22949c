"""Which tasks a run has, which of them are finished, and doing the rest: here, or in Ray actors (fleet.py).

Guarantees: a finished task is one whole line of records.jsonl and is never decoded again under the same settings,
weights and code; a torn last line is dropped, a damaged one is dropped and told, lines of other settings do not count;
what is missing is done, or the command ends with an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval.measure.harness import EvalTask, Harness, Outcome
from eval.measure.packed import pack
from eval.measure.prompts import load_prompts
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import measured_by
from pipeline.artifacts.published import fetch
from pipeline.artifacts.reports import method_of, read_tuned_trees
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import Journal, exclusive
from pipeline.basics.progress import Progress
from pipeline.decoding.config import Method
from pipeline.decoding.contract import Source
from pipeline.drafts import make_untrained
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.prompt_lookup import corpora_of
from pipeline.drafts.small_model import SmallModel
from pipeline.lm.model import Target, fingerprint, identify, load_reader
from pipeline.recipe.checks import TUNED
from pipeline.recipe.identity import differences, digest, run_hash
from pipeline.recipe.recipe import Recipe

RECORDS = "records.jsonl"
# The recipe's keys of what a tuned tree depends on (`tuned_for`).
KEYS = {"temperatures": "eval.temperatures", "processing": "eval.(top_k, top_p)"}
KEYS |= {"kernels": "eval.(dtype, pack_linears, compile)", "settings": "draft", "method": "eval.methods"}
Digests = dict[str, str | None]  # by draft (`digests_of`)


def digests_of(recipe: Recipe) -> Digests:
    """By draft the SHA-256 of its weights, which are in its folder now; of somebody's model its fingerprint; of what
    copies from a corpus that one's; None where there is nothing but settings. Published drafts are fetched first.

    Raises PipelineError where a draft is missing, or was trained under other settings.
    """
    fetch(recipe)
    found: Digests = {name: next(iter(corpora_of([config])), None) for name, config in recipe.draft.items()}
    found |= {name: checkpoint.require_trained_under(recipe, name).weights_sha256 for name in recipe.trained}
    return found | {name: fingerprint(asked) for name, asked in recipe.small_models.items()}


def methods_of(recipe: Recipe, tuned_alone: bool = False, digests: Digests | None = None) -> dict[str, Method]:
    """The recipe's, and each with what eval/tune.py chose, if that is another: beside it, or in its place if
    `tuned_alone`.
    `digests`: of the recipe's drafts, if they are known.

    Raises PipelineError where that was for other weights or settings, or where nothing is tuned that shall stand alone.
    """
    found, written, digests = recipe.methods, tuned_as_written(recipe), digests or digests_of(recipe)
    for name, tuned in read_tuned_trees(recipe.paths.tuned).items():
        if name in recipe.tunable:
            wanted = tuned_for(recipe, found[name], digests)
            if (made := tuned.get("for")) != wanted:
                raise PipelineError(
                    f"{recipe.paths.tuned}: {name} was tuned for other weights or settings: "
                    f"{_tuned_differences(made or {}, wanted)}. Run eval/tune.py again, or remove it"
                )
            if name not in written:
                found[name + TUNED] = method_of(tuned)
    if not tuned_alone:
        return found
    alone = {name: method for name, method in found.items() if name + TUNED not in found}
    if len(alone) == len(found) and not written:
        raise PipelineError(f"{recipe.paths.tuned}: nothing is tuned: run eval/tune.py first, or leave out --tuned")
    return alone


def tuned_as_written(recipe: Recipe) -> list[str]:
    """Return the methods for which eval/tune.py chose what the recipe says: they are measured once."""
    tuned, methods = read_tuned_trees(recipe.paths.tuned), recipe.methods
    chosen = {name: method_of(facts) for name, facts in tuned.items() if name in methods}
    return [name for name, method in chosen.items() if method == methods[name]]


def tuned_for(recipe: Recipe, method: Method, digests: Digests) -> dict[str, Any]:
    """What a tuned tree depends on."""
    config, drafts = recipe.eval, {name: recipe.draft[name] for name in method.sources}
    return {
        "digests": {name: digests[name] for name in drafts},
        "settings": {name: draft.public().to_json() for name, draft in drafts.items() if not draft.trained},
        "method": replace(method, tree=None).to_json(),
        "candidates": method.resolved_tree.candidates,
        "temperatures": config.temperatures,
        "processing": [config.top_k, config.top_p],
        "kernels": [config.dtype, config.pack_linears, config.compile],
        "target": asdict(identify(recipe.target)),
    }


def _tuned_differences(made: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return what a tree was tuned for otherwise, by the recipe's keys."""
    known = made.get("digests", {})
    weights = [f"other weights of {name}" for name, sha in wanted["digests"].items() if known.get(name) != sha]
    there, here = ({KEYS.get(key, key): value for key, value in one.items()} for one in (made, wanted))
    return ", ".join(filter(None, [*weights, differences(there, here, here.keys() - {"digests"})]))


def evaluation_lock(recipe: Recipe) -> AbstractContextManager[None]:
    """Holds what a run measures for one command, from its first look at weights and trees to its last figure. Raises
    PipelineError where another one has it.
    """
    return exclusive(recipe.paths.eval, "evaluation or tuning")


@dataclass(frozen=True)
class Job:
    """What is to be measured. `key` identifies everything that a figure depends on but the hardware, which each outcome
    names itself: the code, settings, weights, trees, the prompts' text, the target with its tokenizer, template and
    stop tokens, and how many share the machine.
    """

    recipe: Recipe
    methods: dict[str, Method]
    digests: Digests
    tasks: list[EvalTask]
    key: str


def job_of(recipe: Recipe, tuned_alone: bool = False) -> Job:
    digests = digests_of(recipe)
    methods, tasks = methods_of(recipe, tuned_alone, digests), tasks_of(recipe)
    found = {
        "code": measured_by(),
        "recipe": run_hash(recipe),
        "methods": {name: method.to_json() for name, method in methods.items()},
        "digests": digests,
        "prompts": [[task.benchmark, asdict(task.prompt)] for task in tasks],
        "target": asdict(identify(recipe.target)),
        "workers": [recipe.eval.workers, recipe.eval.gpus_per_worker],
    }
    return Job(recipe, methods, digests, tasks, digest(found))


def tasks_of(recipe: Recipe) -> list[EvalTask]:
    config = recipe.eval
    prompts = {name: load_prompts(name, benchmark, recipe) for name, benchmark in config.benchmarks.items()}
    # a prompt's temperatures together: they share its forward
    return [
        EvalTask(name, prompt, t) for name, found in prompts.items() for prompt in found for t in config.temperatures
    ]


def make_harness(recipe: Recipe, methods: dict[str, Method]) -> Harness:
    """Loads the target and every draft, in evaluation's dtype and with its kernels."""
    target = Target(recipe.target, recipe.eval.dtype)
    drafts = load_drafts(recipe, target, sorted({name for method in methods.values() for name in method.sources}))
    if recipe.eval.pack_linears:
        pack(target, drafts)
    if recipe.eval.compile:
        target.compile()
    return Harness(recipe, target, {name: method.load(drafts) for name, method in methods.items()})


def load_drafts(recipe: Recipe, target: Target, names: list[str]) -> dict[str, Source]:
    """Drafts of the recipe, bound to the target, in evaluation's dtype."""
    target_fingerprint = fingerprint(recipe.target)
    embed_head = target.embed_head(target_fingerprint)
    drafts: dict[str, Source] = {}
    for name in names:
        config = recipe.draft[name]
        if not config.trained:
            drafts[name] = draft = make_untrained(config, shapes_of(target.config), lambda: target.tokenizer)
            draft.name = name
            if isinstance(draft, SmallModel):
                draft.read_by(*load_reader(recipe.small_models[name], target.device, target.dtype), target.tokenizer)
            continue
        draft = checkpoint.load(recipe.paths.draft(name), target_fingerprint).to(target.device, target.dtype)
        draft.bind(embed_head)
        draft.prepare()
        drafts[name] = draft
    return drafts


def decode_all(job: Job, fleet=None) -> list[tuple[str, Outcome]]:
    """Every task's outcome, with its benchmark, in the recipe's order; what is finished already is not decoded again.

    `fleet(recipe, methods, tasks)` yields (task, outcome) as they come; without one they are decoded in this process.
    The caller holds the run's evaluation (`evaluation_lock`).
    """
    finished = Journal(job.recipe.paths.eval / RECORDS, job.key)
    missing = [task for task in job.tasks if task.name not in finished]
    if missing:
        done = (fleet or _here)(job.recipe, job.methods, missing)
        with Progress("decode", len(job.tasks), "prompts", len(job.tasks) - len(missing)) as progress:
            for task, outcome in done:
                finished.add(task.name, outcome.to_json())
                progress.advance(1, benchmark=task.benchmark, T=task.temperature)
    return [(task.benchmark, Outcome.from_json(finished[task.name])) for task in job.tasks]


def _here(recipe: Recipe, methods: dict[str, Method], tasks: Iterable[EvalTask]) -> Iterator[tuple[EvalTask, Outcome]]:
    harness = make_harness(recipe, methods)
    for task in tasks:
        yield task, harness.decode(task)
