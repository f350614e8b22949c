"""The tasks of a run, the record of finished ones, and decoding the rest: in this process, or in Ray actors (fleet.py).

Guarantees: a finished task is one whole line of records.jsonl and is never decoded again under the same settings,
weights and code; a torn last line is dropped, a damaged one is dropped with a warning, lines of other settings do not
count; missing tasks are decoded, or the command ends with an error.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from eval.measure.harness import EvalTask, Harness, Outcome
from eval.measure.packed import pack
from eval.measure.prompts import load_prompts
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import measurement_versions
from pipeline.artifacts.published import download_published
from pipeline.artifacts.reports import method_of, read_tuned_trees
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import Journal, lock_folder
from pipeline.basics.progress import Progress
from pipeline.decoding.config import Method
from pipeline.decoding.contract import Source
from pipeline.drafts import make_untrained
from pipeline.drafts.native.files import read_head
from pipeline.drafts.native.mtp import Mtp
from pipeline.drafts.parts.layers import draft_shapes, mask_padding
from pipeline.drafts.prompt_lookup import corpus_hashes
from pipeline.drafts.small_model import SmallModel
from pipeline.lm.model import Target, fingerprint, identify, load_reader
from pipeline.recipe.checks import TUNED
from pipeline.recipe.identity import describe_differences, digest, run_hash
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.trees import require_verifiable

RECORDS = "records.jsonl"
# The recipe's keys that a tuned tree depends on (`tuning_conditions`).
RECIPE_KEYS = {"temperatures": "eval.temperatures", "processing": "eval.(top_k, top_p)"}
RECIPE_KEYS |= {"kernels": "eval.(dtype, pack_linears, compile)", "settings": "draft", "method": "eval.methods"}
Digests = dict[str, str | None]  # by draft (`digest_drafts`)


def digest_drafts(recipe: Recipe) -> Digests:
    """Return by draft the SHA-256 of the weights in its folder; the fingerprint of a third-party model; the digest of a
    corpus that the draft copies from; None for a draft that has only settings. Published drafts are fetched first.

    Raise PipelineError if a draft is missing, or was trained under other settings.
    """
    download_published(recipe)
    digests: Digests = {name: next(iter(corpus_hashes([config])), None) for name, config in recipe.draft.items()}
    digests |= {name: checkpoint.require_trained_under(recipe, name).weights_sha256 for name in recipe.trained}
    return digests | {name: fingerprint(small_model) for name, small_model in recipe.small_models.items()}


def load_methods(recipe: Recipe, tuned_alone: bool = False, digests: Digests | None = None) -> dict[str, Method]:
    """Return the recipe's methods, and for each the tree that eval/tune.py chose, if that is another one: next to it,
    or in its place if `tuned_alone`. `digests` are those of the recipe's drafts, if they are already computed.

    Raise PipelineError if the tree was tuned for other weights or settings, or if `tuned_alone` and nothing is tuned.
    """
    methods, as_written, digests = recipe.methods, methods_tuned_as_written(recipe), digests or digest_drafts(recipe)
    for name, tuned in read_tuned_trees(recipe.paths.tuned).items():
        if name in recipe.tunable:
            conditions = tuning_conditions(recipe, methods[name], digests)
            if (tuned_conditions := tuned.get("for")) != conditions:
                raise PipelineError(
                    f"{recipe.paths.tuned}: {name} was tuned for other weights or settings: "
                    f"{_format_tuning_differences(tuned_conditions or {}, conditions)}. Run eval/tune.py again, or "
                    "remove it"
                )
            if name not in as_written:
                methods[name + TUNED] = method_of(tuned)
    if not tuned_alone:
        return methods
    tuned_methods = {name: method for name, method in methods.items() if name + TUNED not in methods}
    if len(tuned_methods) == len(methods) and not as_written:
        raise PipelineError(f"{recipe.paths.tuned}: nothing is tuned: run eval/tune.py first, or leave out --tuned")
    return tuned_methods


def methods_tuned_as_written(recipe: Recipe) -> list[str]:
    """Return the methods for which eval/tune.py chose the recipe's own tree: they are measured once."""
    tuned, methods = read_tuned_trees(recipe.paths.tuned), recipe.methods
    chosen = {name: method_of(facts) for name, facts in tuned.items() if name in methods}
    return [name for name, method in chosen.items() if method == methods[name]]


def tuning_conditions(recipe: Recipe, method: Method, digests: Digests) -> dict[str, Any]:
    """Return everything that the choice of a tuned tree depends on."""
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


def _format_tuning_differences(tuned_conditions: dict[str, Any], conditions: dict[str, Any]) -> str:
    """Return how the conditions that a tree was tuned for differ from the current ones, by the recipe's keys."""
    tuned_digests = tuned_conditions.get("digests", {})
    weights = [
        f"other weights of {name}" for name, sha in conditions["digests"].items() if tuned_digests.get(name) != sha
    ]
    tuned_values, values = (
        {RECIPE_KEYS.get(key, key): value for key, value in each.items()} for each in (tuned_conditions, conditions)
    )
    return ", ".join(filter(None, [*weights, describe_differences(tuned_values, values, values.keys() - {"digests"})]))


def evaluation_lock(recipe: Recipe) -> AbstractContextManager[None]:
    """Lock the evaluation of a run for one command, from its first read of weights and trees to its last figure. Raise
    PipelineError if another command holds it.
    """
    return lock_folder(recipe.paths.eval, "evaluation or tuning")


@dataclass(frozen=True)
class EvalJob:
    """The methods, drafts and tasks to measure. `key` identifies everything that a figure depends on except the
    hardware, which each outcome names itself: the code, settings, weights, trees, the prompts' text, the target with
    its tokenizer, template and stop tokens, and how many workers share the machine.
    """

    recipe: Recipe
    methods: dict[str, Method]
    digests: Digests
    tasks: list[EvalTask]
    key: str


def make_job(recipe: Recipe, tuned_alone: bool = False) -> EvalJob:
    digests = digest_drafts(recipe)
    methods, tasks = load_methods(recipe, tuned_alone, digests), load_tasks(recipe)
    require_verifiable(recipe, methods)
    dependencies = {
        "code": measurement_versions(),
        "recipe": run_hash(recipe),
        "methods": {name: method.to_json() for name, method in methods.items()},
        "digests": digests,
        "prompts": [[task.benchmark, asdict(task.prompt)] for task in tasks],
        "target": asdict(identify(recipe.target)),
        "workers": [recipe.eval.workers, recipe.eval.gpus_per_worker],
    }
    return EvalJob(recipe, methods, digests, tasks, digest(dependencies))


def load_tasks(recipe: Recipe) -> list[EvalTask]:
    config = recipe.eval
    prompts = {name: load_prompts(name, benchmark, recipe) for name, benchmark in config.benchmarks.items()}
    # all temperatures of a prompt together: they share its prefill
    return [
        EvalTask(name, prompt, t)
        for name, benchmark_prompts in prompts.items()
        for prompt in benchmark_prompts
        for t in config.temperatures
    ]


def make_harness(recipe: Recipe, methods: dict[str, Method]) -> Harness:
    """Load the target and every draft, in the evaluation's dtype and with its kernels."""
    target = Target(recipe.target, recipe.eval.dtype)
    drafts = load_drafts(recipe, target, sorted({name for method in methods.values() for name in method.sources}))
    if recipe.eval.pack_linears:
        pack(target, drafts)
    if recipe.eval.compile:
        target.compile()
        for draft in drafts.values():
            draft.compile_rounds()
    return Harness(recipe, target, {name: method.load(drafts) for name, method in methods.items()})


def load_drafts(recipe: Recipe, target: Target, names: list[str]) -> dict[str, Source]:
    """Load drafts of the recipe, bound to the target, in the evaluation's dtype."""
    target_fingerprint = fingerprint(recipe.target)
    embed_head = target.embed_head(target_fingerprint)
    drafts: dict[str, Source] = {}
    for name in names:
        config = recipe.draft[name]
        if not config.trained:
            shapes = mask_padding(draft_shapes(target.config), target.tokenizer)
            drafts[name] = draft = make_untrained(config, shapes, lambda: target.tokenizer)
            draft.name = name
            if isinstance(draft, Mtp):
                read_head(draft, recipe.target)
                draft.to(target.device, target.dtype).eval().requires_grad_(False).bind(embed_head)
            if isinstance(draft, SmallModel):
                draft.attach_model(
                    *load_reader(recipe.small_models[name], target.device, target.dtype), target.tokenizer
                )
            continue
        draft = checkpoint.load(recipe.paths.draft(name), target_fingerprint).to(target.device, target.dtype)
        draft.bind(embed_head)
        draft.prepare()
        drafts[name] = draft
    return drafts


def decode_all(job: EvalJob, fleet=None) -> list[tuple[str, Outcome]]:
    """Return every task's outcome, with its benchmark, in the recipe's order; finished tasks are not decoded again.

    `fleet(recipe, methods, tasks)` yields (task, outcome) in any order; without it tasks are decoded in this process.
    The caller holds `evaluation_lock`.
    """
    finished = Journal(job.recipe.paths.eval / RECORDS, job.key)
    missing = [task for task in job.tasks if task.name not in finished]
    if missing:
        outcomes = (fleet or _decode_locally)(job.recipe, job.methods, missing)
        with Progress("decode", len(job.tasks), "prompts", len(job.tasks) - len(missing)) as progress:
            for task, outcome in outcomes:
                finished.add(task.name, outcome.to_json())
                progress.advance(1, benchmark=task.benchmark, T=task.temperature)
    return [(task.benchmark, Outcome.from_json(finished[task.name])) for task in job.tasks]


def _decode_locally(
    recipe: Recipe, methods: dict[str, Method], tasks: Iterable[EvalTask]
) -> Iterator[tuple[EvalTask, Outcome]]:
    harness = make_harness(recipe, methods)
    for task in tasks:
        yield task, harness.decode(task)
