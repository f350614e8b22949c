"""The settings that each result of a run depends on: by section, their hashes, which travel with artifacts, and the
keys that differ.

A section says which of its keys change which result (`Affects`); this file says which sections a stage reads. A hash
decides whether the settings of two recipes are the same, and the keys are named for the message. The recipe next to an
artifact may be a stranger's: its values are shown as JSON, cut and through `public_text`, and none becomes a setting.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.basics.public import public_text
from pipeline.basics.section import Section
from pipeline.decoding.config import Method
from pipeline.drafts import settings_from
from pipeline.features.schema import FP8
from pipeline.lm.fingerprint import known_sha256
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import ON_HUB

Settings = dict[str, Any]  # by section
MARK = "content:"
SUFFIXES = {".safetensors", ".bin", ".pt", ".ckpt"}


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- the target's own answers ------------------------------------------------------------------------------------------


def _engine(recipe: Recipe) -> Settings:
    """The engine of the target's own answers, whose random numbers are others."""
    return {"engine": recipe.target.engine} if recipe.target.engine != "transformers" else {}


def regenerate_settings(recipe: Recipe) -> Settings:
    """What the answers of preprocess/regenerate.py depend on."""
    sections = {"data": recipe.data, "regenerate": recipe.regenerate}
    settings = {name: section.affecting("regenerated") for name, section in sections.items()}
    return {"target": recipe.target.identity() | _engine(recipe), **settings, "seed": recipe.seed}


def regenerate_hash(recipe: Recipe) -> str:
    return digest(regenerate_settings(recipe))


# -- the dump ----------------------------------------------------------------------------------------------------------


def in_order(layers: Iterable[int | str]) -> list[int | str]:
    """Auxiliary layers once each, numbers first."""
    return sorted(set(layers), key=lambda layer: (isinstance(layer, str), layer))


def wanted_layers(recipe: Recipe) -> list[int | str]:
    """The auxiliary layers as the recipe names them or, unless it does, its drafts do: numbers, or words for them."""
    if recipe.features.auxiliary_layers is not None:
        return list(recipe.features.auxiliary_layers)
    return in_order(layer for config in recipe.dumped_for for layer in config.auxiliary)


def dump_settings(recipe: Recipe) -> Settings:
    """What the feature shards depend on. Who wrote them, where, and in which batches is not part of it: that changes
    rounding at most, and a dump whose batches were too large goes on with smaller ones.
    """
    features = recipe.features.affecting("dump")
    features["auxiliary_layers"] = wanted_layers(recipe)  # which of a target's a word is, its fingerprint says
    features["stored_dtype"] = recipe.stored_dtype
    settings = {"target": recipe.target.identity(), "data": recipe.data.affecting("dump"), "features": features}
    if recipe.data.answers == "source":
        return settings
    settings["data"]["answers"] = recipe.data.answers
    return settings | _engine(recipe) | {"regenerate": recipe.regenerate.affecting("dump"), "seed": recipe.seed}


def dump_hash(recipe: Recipe) -> str:
    return recipe.features.dump or digest(dump_settings(recipe))


def dump_hash_with(recipe: Recipe, layers: list[int | str]) -> str:
    """The hash of this recipe's dump, had it these auxiliary layers."""
    settings = dump_settings(recipe)
    return digest(settings | {"features": settings["features"] | {"auxiliary_layers": layers}})


def calibration_hash(recipe: Recipe, dump: str) -> str:
    """What the target's answers to calibration prompts depend on, in the dump of this hash: they can be given anew
    without the rest of it.
    """
    return digest([dump, recipe.data.calibration_prompts, recipe.features.answer_tokens])


# -- training ----------------------------------------------------------------------------------------------------------


def marked(start: str) -> str:
    """The start as hashes and artifacts name it: a folder by its weights and shapes, wherever it lies.

    Raises PipelineError where there is no such folder.
    """
    if ON_HUB.fullmatch(start) or start.startswith(MARK):
        return start
    folder = start_folder(start)
    config = read_json(folder / "config.json")
    sums = [known_sha256(path) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    content = json.dumps([config.get("shapes", config), sums], sort_keys=True)
    return MARK + hashlib.sha256(content.encode()).hexdigest()[:16]


def start_folder(start: str) -> Path:
    """Raises PipelineError for what is no folder of a draft."""
    folder = Path(start).expanduser()
    if start.startswith(MARK) or not (folder / "config.json").is_file():
        raise PipelineError(
            f"draft.NAME.start={start!r}: expected a draft's folder, with its config.json and weights, or "
            "OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits"
        )
    return folder


def draft_settings(recipe: Recipe, draft: str) -> Settings:
    """A draft's settings for hashes and artifacts: its start by content. Raises PipelineError where that is missing."""
    config = recipe.draft[draft].public()
    return config.to_json() | ({"start": marked(config.start)} if config.start else {})


def is_watched(recipe: Recipe, draft: str) -> bool:
    """Whether the estimated tau decides which weights of a draft are kept."""
    return recipe.training(draft).keep == "best" or recipe.training(draft).patience is not None


def train_settings(recipe: Recipe, draft: str) -> Settings:
    """What one draft's weights depend on, beside its own settings, the features and the seed. Who shares a global batch
    and how, schedules of I/O and what only watches are not part of it, nor its decoding tree and when it is validated,
    unless the estimated tau decides which weights are kept.
    """
    settings = recipe.training(draft).affecting("weights")
    if not is_watched(recipe, draft):
        return {"train": {key: value for key, value in settings.items() if key != "validate_every"}}
    tree = recipe.eval.methods.get(draft, Method()).tree or recipe.eval.tree
    return {"train": settings, "tree": tree.to_json()}


def train_hash(recipe: Recipe, draft: str) -> str:
    """What one draft's weights depend on. Of a published draft: what it is, and where it is from."""
    if draft in recipe.published:
        return digest({"published": recipe.published[draft], "draft": recipe.draft[draft].to_json()})
    dump = dump_hash(recipe)
    dump = calibration_hash(recipe, dump) if is_watched(recipe, draft) else dump
    settings = {"tree": None, **train_settings(recipe, draft)}
    return digest({"dump": dump, "seed": recipe.seed, "draft": draft_settings(recipe, draft), **settings})


# -- figures -----------------------------------------------------------------------------------------------------------


def run_settings(recipe: Recipe) -> Settings:
    """What the figures of a run depend on."""
    sections = {key: getattr(recipe, key) for key in type(recipe).model_fields}
    settings = {key: value.affecting("figures") for key, value in sections.items() if isinstance(value, Section)}
    drafts = {name: draft_settings(recipe, name) for name in recipe.draft}
    return recipe.affecting("figures") | settings | {"draft": drafts}


def run_hash(recipe: Recipe) -> str:
    return digest(run_settings(recipe))


MOST, LONGEST, DEEPEST = 8, 120, 8  # keys that a message names; characters of a value; sections in sections
ABSENT = "absent"
ANSWERS_KEYS = ["data.calibration_prompts", "features.answer_tokens"]  # that `calibration_hash` adds
Tree = dict[str, Any]  # a resolved recipe as JSON


def differences(there: Tree, here: Tree, keys: Iterable[str]) -> str:
    """Return the keys that differ, with the value there and here: "data.heldout_fraction: 0.02 -> 0.2". Empty where
    none does.

    `keys`: "section.key", or what such keys begin with.
    """
    begins, there, here = tuple(keys), _leaves(_filled(there)), _leaves(_filled(here))
    counts = [key for key in {**here, **there} if any(key == begin or key.startswith(f"{begin}.") for begin in begins)]
    lines = [f"{_cut(key)}: {_cut(there.get(key, ABSENT))} -> {_cut(here.get(key, ABSENT))}" for key in counts]
    lines = [line for line, key in zip(lines, counts, strict=True) if there.get(key) != here.get(key)]
    more = [f"and {len(lines) - MOST} more keys"] if len(lines) > MOST else []
    return public_text(", ".join([*lines[:MOST], *more]))


def dump_keys(recipe: Recipe) -> list[str]:
    """Return the keys that feature shards depend on."""
    if recipe.features.dump:
        return ["features.dump"]
    answered = ["target.engine"] if recipe.data.answers == "target" else []
    return ["data.answers", *answered, *_keys(dump_settings(recipe))]


def training_keys(recipe: Recipe, draft: str) -> list[str]:
    """Return the keys that one draft's weights depend on."""
    if draft in recipe.published:
        return [f"published.{draft}", f"draft.{draft}"]
    own = ["seed", f"draft.{draft}", "features.dump", f"train.learning_rates.{draft}"]
    settings = train_settings(recipe, draft)
    keys = [*dump_keys(recipe), *own, *_keys({"train": settings["train"]}), f"published.{draft}"]
    if not is_watched(recipe, draft):
        return keys
    method = recipe.eval.methods.get(draft)
    tree = [f"eval.methods.{draft}.tree"] + ([] if method and method.tree else ["eval.tree"])
    return [*keys, *ANSWERS_KEYS, *tree]


def release_keys(recipe: Recipe) -> list[str]:
    """Return the keys that a release depends on."""
    return ["draft", "published", *_keys(run_settings(recipe))]


def regenerate_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the target's own answers depend on."""
    return _keys(regenerate_settings(recipe))


def layers_of(tree: Tree) -> list[int | str]:
    """Return the auxiliary layers that a recipe of somebody's wants, as `wanted_layers`. Raises KeyError,
    TypeError or ValueError for what is no such recipe.
    """
    if (layers := tree["features"]["auxiliary_layers"]) is None:
        drafts = [settings_from(config) for name, config in tree["draft"].items() if name not in tree["published"]]
        return in_order(layer for config in drafts for layer in config.auxiliary)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise TypeError(f"features.auxiliary_layers={layers!r}")
    return list(layers)


def _filled(tree: Tree) -> Tree:
    """The recipe with the defaults of its features that follow from its drafts."""
    try:
        layers, features = layers_of(tree), tree["features"]
        default = FP8 if layers else "bfloat16"
        known = {"auxiliary_layers": layers, "stored_dtype": features.get("stored_dtype") or default}
        return tree | {"features": features | known}
    except (AttributeError, KeyError, TypeError, ValueError):  # of another version
        return tree


def _leaves(value: Any, begin: str = "", depth: int = 0) -> dict[str, str]:
    """By dotted key the JSON of each value that is no object, or is deep in others."""
    if not isinstance(value, dict) or depth == DEEPEST:
        return {begin: json.dumps(value)}
    found: dict[str, str] = {}
    for name, inner in value.items():
        found |= _leaves(inner, f"{begin}.{name}" if begin else name, depth + 1)
    return found


def _keys(settings: Tree) -> list[str]:
    """The keys of settings, which are by section."""
    sections = {section: keys for section, keys in settings.items() if isinstance(keys, dict)}
    return [*(f"{section}.{key}" for section, keys in sections.items() for key in keys), *settings.keys() - sections]


def _cut(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
