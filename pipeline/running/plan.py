"""What a run will do, told before it starts: counted from the recipe and, once there is one, from its dump.

`python -m pipeline plan RECIPE` tells how long it takes and how much it needs.
"""

import torch

from pipeline.artifacts.reports import read_tuned_trees
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.shards import MANIFEST, Manifest
from pipeline.lm.model import load_config
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import EvalConfig, TrainConfig


def steps_of(config: TrainConfig, rows: float, tokens: float) -> int:
    """Optimiser steps of all epochs; packed rows are taken as full."""
    whole = tokens / config.pack_tokens if config.pack_tokens else rows
    return int(whole // config.global_batch) * config.epochs


def answers_a_prompt(config: EvalConfig) -> int:
    """By one method, at all temperatures."""
    return sum(config.sampled_repeats if t > 0 else config.repeats for t in config.temperatures)


def parameters_of(recipe: Recipe) -> dict[str, int]:
    """By draft that is trained; counted without allocating them."""
    shapes = shapes_of(load_config(recipe.target))
    with torch.device("meta"):
        return {name: parameter_count(build(recipe.draft[name], shapes)) for name in recipe.to_train}


def announcement(recipe: Recipe, stages: list[str]) -> list[str]:
    """Lines about the stages that are still to do; none where all are done."""
    lines = [f"  {stage:<10}  {stage_said(recipe, stage)}" for stage in stages]
    return [f"{recipe.name} ({recipe.hash}), in {recipe.run_dir}/", *lines] if lines else []


def stage_said(recipe: Recipe, stage: str) -> str:
    """What the stage ("preprocess", "train" or "eval") will do."""
    return {"preprocess": _dump_said, "train": _training_said, "eval": _evaluation_said}[stage](recipe)


def _dump_said(recipe: Recipe) -> str:
    data = recipe.data
    limits = [f"about {data.max_tokens:,} tokens"] if data.max_tokens else []
    limits += [f"up to {data.max_dialogues:,} dialogues"] if data.max_dialogues else []
    return " and ".join(limits) or "every dialogue of the source"


def _training_said(recipe: Recipe) -> str:
    parameters = parameters_of(recipe)
    sizes = ", ".join(f"{name} ({count:,} parameters)" for name, count in parameters.items())
    return f"{sizes}; {'each ' if len(parameters) > 1 else ''}{_steps_said(recipe)}"


def _steps_said(recipe: Recipe) -> str:
    """Exactly what they will be, once dialogues that are not packed are dumped."""
    config, data = recipe.train, recipe.data
    if found := _dumped(recipe):
        return f"{'about ' if config.pack_tokens else ''}{steps_of(config, *found):,} steps"
    if data.max_dialogues and not data.max_tokens and not config.pack_tokens:
        return f"up to {steps_of(config, data.max_dialogues, 0):,} steps"
    if data.max_tokens:
        steps = steps_of(config, data.max_tokens / data.max_length, data.max_tokens)
        return f"about {steps:,} steps" + ("" if config.pack_tokens else ", more where dialogues are shorter")
    return f"{config.epochs} epochs of what is dumped"


def _dumped(recipe: Recipe) -> tuple[int, int] | None:
    """Dialogues and tokens to train on, of the recipe's finished dump where it lies on this machine."""
    if not (recipe.features_dir / MANIFEST).exists():
        return None
    manifest = Manifest.load(recipe.features_dir)
    if not manifest.complete or manifest.spec.recipe != recipe.dump_hash:
        return None
    return manifest.total("train", "rows"), manifest.total("train", "tokens")


def _evaluation_said(recipe: Recipe) -> str:
    config = recipe.eval
    methods = ["plain decoding", *recipe.methods]
    methods += [f"{name}-tuned" for name in sorted(read_tuned_trees(recipe.tuned_file))]
    counts = {
        name: benchmark.prompts or (recipe.data.heldout_prompts if benchmark.source == "heldout" else None)
        for name, benchmark in config.benchmarks.items()
    }
    answers = sum(count or 0 for count in counts.values()) * answers_a_prompt(config) * len(methods)
    unknown = [name for name, count in counts.items() if count is None]
    words = [f"{answers:,} answers"] if answers else []
    words += [f"those to all prompts of {', '.join(unknown)}"] if unknown else []
    return f"{' and '.join(words)}, of up to {config.max_new_tokens} tokens, by {', '.join(methods)}"
