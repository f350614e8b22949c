"""Whether what a run's folder holds was made under other settings: asked before a run or a training starts anything.

`train_hash` and `dump_hash` decide; messages name the keys that differ, with both values.
"""

from functools import partial

from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import dump_differences
from pipeline.artifacts.provenance import RECIPE, public_recipe, recorded, settings_said
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_sealed
from pipeline.features.shards import MANIFEST, Manifest
from pipeline.lm.model import identify_if_here, load_config
from pipeline.recipe.differences import training_keys
from pipeline.recipe.identity import dump_hash, train_hash
from pipeline.recipe.recipe import Recipe

RESUME = "resume.json"  # of a resume state (train/engine/resume.py)


def require_same_settings(recipe: Recipe, drafts: list[str]) -> None:
    """Raise PipelineError where the run's features, a checkpoint or a resume state of these drafts are of others."""
    if said := features_differences(recipe):
        raise PipelineError(
            f"{recipe.paths.features}: features of other data or feature settings: {said}. Take these back, or give "
            "this run another output folder"
        )
    for name in drafts:
        if (recipe.paths.draft(name) / checkpoint.CONFIG).exists():
            checkpoint.require_settings(recipe, name)
        else:
            require_resumable(recipe, name)


def features_differences(recipe: Recipe) -> str:
    """Return the settings that the run's features have otherwise; empty where there are none, or the recipe's."""
    folder = recipe.paths.features
    if not (folder / MANIFEST).exists():
        return ""
    got, layers = Manifest.load(folder).spec, None
    if got.recipe != dump_hash(recipe) and identify_if_here(recipe.target):
        layers = load_config(recipe.target).num_hidden_layers
    return dump_differences(recipe, got, partial(recorded, folder), layers)


def training_differences(recipe: Recipe, name: str) -> str:
    """Return the settings that a draft's checkpoint has otherwise; empty where it has the recipe's."""
    folder = recipe.paths.draft(name)
    same = checkpoint.read_config(folder).train_hash == train_hash(recipe, name)
    return "" if same else settings_said(recorded(folder), recipe, training_keys(recipe, name))


def require_resumable(recipe: Recipe, name: str) -> None:
    """Raise PipelineError where a draft's resume state is of other settings."""
    folder = recipe.paths.resume(name)
    if not (folder / RESUME).exists():
        return
    state = read_sealed(folder / RESUME, f"Restore {folder}, or remove it to train this draft from the start")
    if state.get("train_hash") != train_hash(recipe, name):
        said = settings_said(recorded(folder), recipe, training_keys(recipe, name))
        raise PipelineError(
            f"{folder} holds the resume state of a run with other settings: {said}. Use the recipe it was started "
            "with, or another output folder"
        )


def begin_resume_states(recipe: Recipe, name: str) -> None:
    """Write the recipe beside a draft's resume states to come. Raise PipelineError where one of others is there."""
    require_resumable(recipe, name)
    folder = recipe.paths.resume(name)
    if not (folder / RESUME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(folder / RECIPE, public_recipe(recipe))
