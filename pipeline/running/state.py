"""The state of a run's folder: the stages that are done, each with a line for the user, and a check for results of
other settings, made before a run or a training starts anything.

`train_hash` and `dump_hash` decide; messages name the keys that differ, with both values.
"""

from functools import partial
from typing import Any

from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import answers_hash, dump_differences, shard_request_file, target_differences
from pipeline.artifacts.provenance import RECIPE, describe_settings, public_recipe, read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_sealed
from pipeline.features.reasons import describe_reasons
from pipeline.features.shards import MANIFEST, Manifest, find_damage, find_prompts_damage
from pipeline.lm.model import identify_if_local, load_config
from pipeline.recipe.identity import dump_hash, train_hash, training_keys
from pipeline.recipe.recipe import Recipe

RESUME = "resume.json"  # of a resume state (train/engine/resume.py)


def features_state(recipe: Recipe) -> tuple[bool, str]:
    folder = recipe.paths.features
    if not (folder / MANIFEST).exists():
        return False, "no shard yet" if folder.exists() else "not started"
    manifest = Manifest.load(folder)
    if changed_settings := features_differences(recipe):
        return False, f"{folder} holds features of other settings: {changed_settings}"
    target = identify_if_local(recipe.target)
    if target and (differences := target_differences(target, manifest.spec)):
        return False, f"features of what the target was before: {'; '.join(differences)}"
    if target and manifest.answers_hash != answers_hash(recipe, manifest.spec.recipe, target):
        return False, "answers to calibration prompts have to be generated again"
    local_files = [] if recipe.features.store else manifest.permanent_files(recipe.features.keep)
    broken = [shard.name for shard in local_files if find_damage(folder, shard, digest=None)]
    if broken:
        return False, f"{len(broken)} of {len(manifest.files)} tables and shards missing or truncated"
    if not manifest.complete or find_prompts_damage(folder, manifest):
        return False, f"{len(manifest.shards)} shards finished, dump not complete"
    rejected = manifest.accounting.get("rejected") or {}
    rejected_text = f"; {sum(rejected.values())} rejected: {describe_reasons(rejected)}" if rejected else ""
    if recipe.features.keep == "window":
        return True, f"texts, validation and answers; training is fed with the rest{rejected_text}"
    if missing_rows := manifest.missing_rows("train"):
        return False, f"the states of {missing_rows} dialogues were not kept"
    return (
        True,
        f"{manifest.total('train', 'rows')} dialogues, {manifest.total('train', 'tokens'):,} tokens{rejected_text}",
    )


def train_state(recipe: Recipe) -> tuple[bool, str]:
    # A feeder that was killed left its request file.
    target = identify_if_local(recipe.target)
    parts, done = [], recipe.features.keep == "all" or not shard_request_file(recipe).exists()
    for name in recipe.trained:
        folder = recipe.paths.draft(name)
        if not (folder / checkpoint.CONFIG).exists():
            resume_state = _resume_state(recipe, name)
            progress = f"stopped after step {resume_state['step']}" if resume_state else "not trained"
            progress = "not fetched" if name in recipe.published else progress
            parts.append(f"{name}: {progress}")
            done = False
            continue
        saved = checkpoint.read_config(folder)
        state = saved.training_summary
        if changed_settings := training_differences(recipe, name):
            done, state = False, f"of other settings: {changed_settings}"
        elif target and (differences := target.differences(saved.target)):
            done, state = False, f"of what the target was before: {'; '.join(differences)}"
        elif checkpoint.is_plot_missing(folder):
            done, state = False, "its plot is missing"
        parts.append(f"{name}: {state}")
    return done, "; ".join(parts)


def _resume_state(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the contents of a draft's resume state; empty where there is none."""
    folder = recipe.paths.resume(name)
    remedy = f"Restore {folder}, or remove it to train this draft from the start"
    return read_sealed(folder / RESUME, remedy) if (folder / RESUME).exists() else {}


def require_same_settings(recipe: Recipe, drafts: list[str]) -> None:
    """Raise PipelineError where the run's features, or a checkpoint or resume state of these drafts, have other
    settings.
    """
    if changed_settings := features_differences(recipe):
        raise PipelineError(
            f"{recipe.paths.features}: features of other data or feature settings: {changed_settings}. Restore these "
            "settings, or give this run another output folder"
        )
    for name in drafts:
        if (recipe.paths.draft(name) / checkpoint.CONFIG).exists():
            checkpoint.require_settings(recipe, name)
        else:
            require_resumable(recipe, name)


def features_differences(recipe: Recipe) -> str:
    """Return the settings in which the run's features differ; empty where there are no features, or the recipe's."""
    folder = recipe.paths.features
    if not (folder / MANIFEST).exists():
        return ""
    spec, layers = Manifest.load(folder).spec, None
    if spec.recipe != dump_hash(recipe) and identify_if_local(recipe.target):
        layers = load_config(recipe.target).num_hidden_layers
    return dump_differences(recipe, spec, partial(read_recorded, folder), layers)


def training_differences(recipe: Recipe, name: str) -> str:
    """Return the settings in which a draft's checkpoint differs; empty where it has the recipe's."""
    folder = recipe.paths.draft(name)
    is_same = checkpoint.read_config(folder).train_hash == train_hash(recipe, name)
    return "" if is_same else describe_settings(read_recorded(folder), recipe, training_keys(recipe, name))


def require_resumable(recipe: Recipe, name: str) -> None:
    """Raise PipelineError where a draft's resume state has other settings."""
    folder, state = recipe.paths.resume(name), _resume_state(recipe, name)
    if state and state.get("train_hash") != train_hash(recipe, name):
        changed_settings = describe_settings(read_recorded(folder), recipe, training_keys(recipe, name))
        raise PipelineError(
            f"{folder} holds the resume state of a run with other settings: {changed_settings}. Use the recipe it was "
            "started with, or another output folder"
        )


def begin_resume_states(recipe: Recipe, name: str) -> None:
    """Write the recipe next to a draft's future resume states. Raise PipelineError where one has other settings."""
    require_resumable(recipe, name)
    folder = recipe.paths.resume(name)
    if not (folder / RESUME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(folder / RECIPE, public_recipe(recipe))
