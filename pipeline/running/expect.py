"""What a run will do and about how long it takes, said before it starts. Nothing is measured for it.

How much is known from the recipe, and from the dump once there is one. How long is known from the last time that a
stage ran undisturbed with the same settings: each leaves its seconds in speeds.json of the cache folder
($JAKIRO_CACHE). Before the first time on a machine those of infra/speeds.json are quoted, with the hardware that they
were measured on.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pipeline.artifacts.provenance import ROOT, hardware
from pipeline.artifacts.reports import read_tuned_trees
from pipeline.basics.display import duration
from pipeline.basics.embedded import cache_dir
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json
from pipeline.basics.public import public_name
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.shards import MANIFEST, Manifest
from pipeline.lm.model import load_config
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig

SHIPPED = ROOT / "infra/speeds.json"
KEPT = 100  # entries of speeds.json
_UNKNOWN = "time unknown"
_KEYS = {"stage", "settings", "hardware", "work", "seconds", "date"}  # of an entry of speeds.json


@dataclass(frozen=True)
class Expected:
    """Of one stage."""

    what: str  # for the user
    work: float | None  # tokens that it goes through; None: not known yet
    settings: dict[str, Any]  # what the seconds of one of them depend on, hardware apart


@dataclass(frozen=True)
class Dumped:
    """What there is to train on."""

    dialogues: int
    tokens: int


def steps_of(config: TrainConfig, rows: float, tokens: float) -> int:
    """Optimiser steps of all epochs; packed rows are taken as full."""
    whole = tokens / config.pack_tokens if config.pack_tokens else rows
    return int(whole // config.global_batch) * config.epochs


def dumped(recipe: Recipe) -> Dumped | None:
    """Of the recipe's finished dump, where it lies on this machine."""
    if not (recipe.features_dir / MANIFEST).exists():
        return None
    manifest = Manifest.load(recipe.features_dir)
    if not manifest.complete or manifest.spec.recipe != recipe.dump_hash:
        return None
    return Dumped(manifest.total("train", "rows"), manifest.total("train", "tokens"))


def of_preprocess(recipe: Recipe) -> Expected:
    data, config = recipe.data, recipe.features
    limits = [f"about {data.max_tokens:,} tokens"] if data.max_tokens else []
    limits += [f"up to {data.max_dialogues:,} dialogues"] if data.max_dialogues else []
    settings = {
        "target": public_name(recipe.target.model),
        "dtype": recipe.target.dtype,
        "max_length": data.max_length,
        "workers": config.workers,
        "batch_tokens": config.batch_tokens,
    }
    return Expected(" and ".join(limits) or "every dialogue of the source", data.max_tokens, settings)


def of_train(recipe: Recipe) -> Expected:
    config, found = recipe.train, dumped(recipe)
    parameters = parameters_of(recipe)
    sizes = ", ".join(f"{name} ({count:,} parameters)" for name, count in parameters.items())
    tokens = found.tokens if found else recipe.data.max_tokens
    settings = {
        "target": public_name(recipe.target.model),
        "drafts": parameters,
        "vocabularies": {name: recipe.draft[name].vocabulary for name in recipe.to_train},
        "dtype": config.dtype,
        "max_length": recipe.data.max_length,
        "micro_batch": config.micro_batch,
        "global_batch": config.global_batch,
        "ranks": config.ranks,
    }
    each = "each " if len(parameters) > 1 else ""
    return Expected(f"{sizes}; {each}{steps_said(recipe, found)}", tokens and tokens * config.epochs, settings)


def steps_said(recipe: Recipe, found: Dumped | None) -> str:
    """Exactly what they will be once dialogues that are not packed are dumped."""
    config, data = recipe.train, recipe.data
    if found:
        steps = steps_of(config, found.dialogues, found.tokens)
        return f"about {steps:,} steps" if config.pack_tokens else f"{steps:,} steps"
    if data.max_dialogues and not data.max_tokens and not config.pack_tokens:
        return f"up to {steps_of(config, data.max_dialogues, 0):,} steps"
    if data.max_tokens:
        steps = steps_of(config, data.max_tokens / data.max_length, data.max_tokens)
        return f"about {steps:,} steps" + ("" if config.pack_tokens else ", more where dialogues are shorter")
    return f"{config.epochs} epochs of what is dumped"


def parameters_of(recipe: Recipe) -> dict[str, int]:
    """By draft; counted without allocating them."""
    shapes = shapes_of(load_config(recipe.target))
    with torch.device("meta"):
        return {name: parameter_count(build(recipe.draft[name], shapes)) for name in recipe.to_train}


def of_eval(recipe: Recipe) -> Expected:
    config, data = recipe.eval, recipe.data
    methods = ["plain decoding", *recipe.methods]
    methods += [f"{name}-tuned" for name in tuned_methods(recipe)]
    repeats = sum(config.sampled_repeats if t > 0 else config.repeats for t in config.temperatures)
    counts = {
        name: benchmark.prompts or (data.heldout_prompts if benchmark.source == "heldout" else None)
        for name, benchmark in config.benchmarks.items()
    }
    answers = sum(count or 0 for count in counts.values()) * repeats * len(methods)
    unknown = [name for name, count in counts.items() if count is None]
    words = [f"{answers:,} answers"] if answers else []
    words += [f"those to all prompts of {', '.join(unknown)}"] if unknown else []
    what = f"{' and '.join(words)}, of up to {config.max_new_tokens} tokens, by {', '.join(methods)}"
    settings = {
        "target": public_name(recipe.target.model),
        "dtype": config.dtype,
        "packed": config.pack_linears,
        "compiled": config.compile,
        "workers": config.workers,
        "max_new_tokens": config.max_new_tokens,
        "methods": methods,
    }
    return Expected(what, None if unknown else answers * config.max_new_tokens, settings)


def tuned_methods(recipe: Recipe) -> list[str]:
    return sorted(read_tuned_trees(recipe.tuned_file))


STAGES: dict[str, Callable[[Recipe], Expected]] = {"preprocess": of_preprocess, "train": of_train, "eval": of_eval}


def announcement(recipe: Recipe, stages: list[str]) -> list[str]:
    """Lines about the stages that are still to do; none where all are done."""
    if not stages:
        return []
    lines = [f"{recipe.name} ({recipe.hash}), in {recipe.run_dir}/"]
    lines += [f"  {stage:<10}  {stage_said(recipe, stage)}" for stage in stages]
    if any(line.endswith(_UNKNOWN) for line in lines):
        lines.append("  times are known once a stage has run here; `python -m pipeline plan RECIPE` estimates them now")
    return lines


def stage_said(recipe: Recipe, stage: str) -> str:
    """What the stage will do, and about how long it takes."""
    expected = STAGES[stage](recipe)
    here = hardware(recipe.target.device)
    for file, where in ((speeds_file(), "here"), (SHIPPED, None)):
        for entry in read_speeds(file):
            fits = (entry["stage"], entry["settings"]) == (stage, expected.settings)
            if expected.work and fits and (where is None or entry["hardware"] == here):
                seconds = entry["seconds"] * expected.work / entry["work"]
                on = where or f"on {entry['hardware']}"
                return f"{expected.what}; about {duration(seconds)}, as measured {on}, {entry['date']}"
    return f"{expected.what}; {_UNKNOWN}"


def speeds_file() -> Path:
    return cache_dir() / "speeds.json"


def read_speeds(path: Path) -> list[dict[str, Any]]:
    """Newest first; what cannot be read is left out: a run does without it."""
    with suppress(PipelineError, OSError):
        found = read_json(path).get("stages")
        return [entry for entry in found if _is_entry(entry)] if isinstance(found, list) else []
    return []


def _is_entry(entry: Any) -> bool:
    """Whether it is what `remember` writes: a file that people can reach may hold anything."""
    if not isinstance(entry, dict) or not entry.keys() >= _KEYS:
        return False
    numbers = [entry[key] for key in ("work", "seconds")]
    return all(isinstance(entry[key], str) for key in ("stage", "hardware", "date")) and all(
        isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")
        for number in numbers
    )


def is_untouched(recipe: Recipe, stage: str) -> bool:
    """Whether nothing of the stage was done before, so that its time will be all of its work's."""
    folder = {"preprocess": recipe.features_dir, "train": recipe.run_dir / "drafts", "eval": recipe.eval_dir}[stage]
    return not folder.exists()


def remember(recipe: Recipe, stage: str, seconds: float) -> None:
    """Notes how long a stage took from nothing to its end, unless a run of more than twice the work was noted: a small
    run is mostly start. A cache that cannot be written costs nothing but the note.
    """
    expected = STAGES[stage](recipe)
    if not expected.work:
        return
    same = {"stage": stage, "settings": expected.settings, "hardware": hardware(recipe.target.device)}
    known = read_speeds(speeds_file())
    others = [entry for entry in known if {key: entry[key] for key in same} != same]
    if any(entry["work"] > 2 * expected.work for entry in known if entry not in others):
        return
    mine = {**same, "work": expected.work, "seconds": round(seconds, 1), "date": date.today().isoformat()}
    with suppress(PipelineError, OSError):
        write_json(speeds_file(), {"stages": [mine, *others][:KEPT]})
