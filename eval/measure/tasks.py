"""Which units a run has, which of them are finished, and doing the rest: here, or in Ray actors (fleet.py).

Guarantees: a finished unit is one whole line of records.jsonl and is never decoded again under the same settings,
weights and code; a torn last line is dropped, a damaged one is dropped and told, lines of other settings do not count;
what is missing is done, or the command ends with an error.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eval.measure.harness import EvalTask, Harness, Outcome
from eval.measure.packed import pack
from eval.measure.prompts import load_prompts
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import code_of
from pipeline.artifacts.published import fetch
from pipeline.artifacts.reports import read_tuned_trees
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, read_sealed_lines, sealed_line, write_text
from pipeline.basics.parse import from_json
from pipeline.basics.progress import Progress
from pipeline.decoding.calibration import Calibration
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Draft, Method, Source
from pipeline.decoding.sources import Agreement, Sources
from pipeline.drafts import make_untrained
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.small_model import SmallModel
from pipeline.lm.chat import template_fingerprint
from pipeline.lm.model import Target, fingerprint, load_reader, load_tokenizer
from pipeline.recipe.recipe import Recipe, digest

RECORDS = "records.jsonl"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """A method: a draft of the recipe, the weights that are in its folder now, the tree it is measured with, and what
    stands beside it.
    """

    draft: str
    weights_sha256: str | None  # None: it has none; of somebody's model its fingerprint
    tree: TreeConfig
    beside: tuple[str, ...] = ()  # drafts that read nothing but the text
    agreement: Agreement = "either"
    corpora: tuple[str, ...] = ()  # SHA-256 of the texts that are copied from, but for the one that is decoded
    calibration: Calibration | None = None  # of their scores; None: the sources' defaults


def untuned(recipe: Recipe) -> dict[str, Measured]:
    """Every draft as a method of its own name, and those of ``eval.methods``; published drafts are fetched first.

    Raises PipelineError where a draft is missing, or was trained under other settings.
    """
    fetch(recipe)
    weights: dict[str, str | None] = dict.fromkeys(recipe.draft)
    weights |= {name: checkpoint.require_trained_under(recipe, name).weights_sha256 for name in recipe.trained}
    weights |= {name: fingerprint(asked) for name, asked in recipe.small_models.items()}
    found = {}
    for name, draft in recipe.methods.items():
        given = recipe.method(name)
        together = tuple(given.beside), given.agreement, recipe.corpora(draft, *given.beside)
        found[name] = Measured(draft, weights[draft], recipe.tree(name), *together)
    return found


def methods_of(recipe: Recipe, tuned_alone: bool = False) -> dict[str, Measured]:
    """`untuned`, and each with what eval/tune.py chose, if it has: beside it, or in its place if `tuned_alone`.

    Raises PipelineError where that was for other weights or settings, or where nothing is tuned that shall stand alone.
    """
    found = untuned(recipe)
    for name, tuned in read_tuned(recipe).items():
        if name in recipe.tunable:
            if not fits(recipe, found[name], tuned):
                raise PipelineError(
                    f"{recipe.tuned_file}: {name} was tuned for other weights or settings: run eval/tune.py again, or "
                    "remove it"
                )
            counted = tuned["calibration"]
            found[f"{name}-tuned"] = replace(
                found[name],
                tree=from_json(TreeConfig, tuned["tree"]),
                calibration=None if counted is None else from_json(Calibration, counted),
            )
    if not tuned_alone:
        return found
    alone = {name: method for name, method in found.items() if f"{name}-tuned" not in found}
    if len(alone) == len(found):
        raise PipelineError(f"{recipe.tuned_file}: nothing is tuned: run eval/tune.py first, or leave out --tuned")
    return alone


def tuned_for(recipe: Recipe, method: Measured) -> dict[str, Any]:
    """What a tuned tree, its calibration and its rule depend on."""
    config = recipe.eval
    beside = {name: recipe.draft[name].public().to_json() for name in method.beside}
    own = None if method.weights_sha256 else recipe.draft[method.draft].public().to_json()
    return {
        "weights_sha256": method.weights_sha256,
        "candidates": method.tree.candidates,
        "temperatures": config.temperatures,
        "processing": [config.top_k, config.top_p, config.repetition_penalty],
        "kernels": [config.dtype, config.pack_linears, config.compile],
        "draft": own,
        "beside": beside,
        "agreement": method.agreement,
        "corpora": list(method.corpora),
    }


def fits(recipe: Recipe, method: Measured, tuned: dict[str, Any]) -> bool:
    """Whether what eval/tune.py found out is of these weights and settings."""
    return tuned.get("for") == tuned_for(recipe, method)


def read_tuned(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By method, what eval/tune.py found out; empty when it never ran."""
    return read_tuned_trees(recipe.tuned_file)


@dataclass(frozen=True)
class Job:
    """What is to be measured. `key` identifies everything that a figure depends on but the hardware, which each outcome
    names itself: the code, settings, weights, trees, the prompts' and the template's text, the target, and how many
    share the machine.
    """

    recipe: Recipe
    methods: dict[str, Measured]
    units: list[EvalTask]
    key: str


def job_of(recipe: Recipe, tuned_alone: bool = False) -> Job:
    methods, units = methods_of(recipe, tuned_alone), units_of(recipe)
    found = {
        "code": code_of("eval.measure.tasks"),
        "recipe": recipe.hash,
        "methods": {name: method_facts(method) for name, method in methods.items()},
        "prompts": [[unit.benchmark, asdict(unit.prompt)] for unit in units],
        "template": template_fingerprint(load_tokenizer(recipe.target)),
        "target": fingerprint(recipe.target),
        "workers": [recipe.eval.workers, recipe.eval.gpus_per_worker],
    }
    return Job(recipe, methods, units, digest(found))


def method_facts(method: Measured) -> dict[str, Any]:
    return asdict(method)


def units_of(recipe: Recipe) -> list[EvalTask]:
    config = recipe.eval
    prompts = {name: load_prompts(name, benchmark, recipe) for name, benchmark in config.benchmarks.items()}
    # a prompt's temperatures together: they share its forward
    return [
        EvalTask(name, prompt, t) for name, found in prompts.items() for prompt in found for t in config.temperatures
    ]


def make_harness(recipe: Recipe, methods: dict[str, Measured]) -> Harness:
    """Loads the target and every draft, in evaluation's dtype and with its kernels."""
    target = Target(recipe.target, recipe.eval.dtype)
    drafts = load_drafts(recipe, target, sorted({name for m in methods.values() for name in (m.draft, *m.beside)}))
    if recipe.eval.pack_linears:
        pack(target, drafts)
    if recipe.eval.compile:
        target.compile()
    made = {name: Method(_source(m, drafts), m.tree) for name, m in methods.items()}
    for name, method in methods.items():
        read = [getattr(drafts[one], "corpus_sha256", None) for one in (method.draft, *method.beside)]
        if tuple(filter(None, read)) != method.corpora:
            raise PipelineError(f"{name}: its corpus changed while it was read: run the command again")
    return Harness(recipe, target, made)


def _source(method: Measured, drafts: dict[str, Source]) -> Draft:
    draft = drafts[method.draft]
    if not method.beside:
        return draft
    others = {name: drafts[name] for name in method.beside}
    return Sources(draft, others, method.calibration, method.agreement)


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
        draft = checkpoint.load(recipe.draft_dir(name), target_fingerprint).to(target.device, target.dtype)
        draft.bind(embed_head)
        draft.prepare()
        drafts[name] = draft
    return drafts


class Finished:
    """records.jsonl: one line a finished unit; those of other settings stay where they are."""

    def __init__(self, folder: Path, key: str):
        self._path, self._key = folder / RECORDS, key
        self.outcomes: dict[tuple[str, str, float], Outcome] = {}
        whole, damaged = read_sealed_lines(self._path)
        for found in whole:
            if found["key"] == key:
                self.outcomes[tuple(found["unit"])] = Outcome.from_json(found["outcome"])
        if damaged:
            numbers = ", ".join(map(str, damaged))
            log.warning("%s: damaged and removed, what they measured is measured again: lines %s", self._path, numbers)
        kept = "".join(map(sealed_line, whole))
        if not self._path.exists() or self._path.read_bytes() != kept.encode():
            write_text(self._path, kept)

    def add(self, unit: EvalTask, outcome: Outcome) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(sealed_line({"key": self._key, "unit": unit.name, "outcome": outcome.to_json()}))
        self.outcomes[unit.name] = outcome


def decode_all(job: Job, fleet=None) -> list[tuple[str, Outcome]]:
    """Every unit's outcome, with its benchmark, in the recipe's order; what is finished already is not decoded again.

    `fleet(recipe, methods, units)` yields (unit, outcome) as they come; without one they are decoded in this process.
    """
    with exclusive(job.recipe.eval_dir, "evaluation"):
        finished = Finished(job.recipe.eval_dir, job.key)
        missing = [unit for unit in job.units if unit.name not in finished.outcomes]
        if missing:
            done = (fleet or _here)(job.recipe, job.methods, missing)
            with Progress("decode", len(job.units), "prompts", len(job.units) - len(missing)) as progress:
                for unit, outcome in done:
                    finished.add(unit, outcome)
                    progress.advance(1, benchmark=unit.benchmark, T=unit.temperature)
    return [(unit.benchmark, finished.outcomes[unit.name]) for unit in job.units]


def _here(
    recipe: Recipe, methods: dict[str, Measured], units: Iterable[EvalTask]
) -> Iterator[tuple[EvalTask, Outcome]]:
    harness = make_harness(recipe, methods)
    for unit in units:
        yield unit, harness.decode(unit)
