"""The settings that each result of a run depends on, by section; their hashes, which travel with artifacts; and the
keys in which two recipes differ.

A section declares which of its keys change which result (`Affects`); this file defines which sections a stage reads.
Hashes decide whether the settings of two recipes are the same; the keys are only for messages. The recipe next to an
artifact may be a stranger's: its values are shown as JSON, cut and through `public_text`, and none becomes a setting.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.basics.fingerprint import cached_sha256
from pipeline.basics.public import ON_HUB, public_text
from pipeline.basics.section import Section
from pipeline.decoding.config import Method
from pipeline.drafts import load_settings
from pipeline.features.schema import FP8
from pipeline.recipe.recipe import Recipe

Settings = dict[str, Any]  # keyed by section
MARK = "content:"
SUFFIXES = {".safetensors", ".bin", ".pt", ".ckpt"}


def digest(value: Any) -> str:
    """Return sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# -- the target's own answers ------------------------------------------------------------------------------------------


def _engine(recipe: Recipe) -> Settings:
    """Return the engine of the target's own answers if it is not transformers: its random numbers differ."""
    return {"engine": recipe.target.engine} if recipe.target.engine != "transformers" else {}


def regenerate_settings(recipe: Recipe) -> Settings:
    """Return the settings that the answers of preprocess/regenerate.py depend on."""
    sections = {"data": recipe.data, "regenerate": recipe.regenerate}
    settings = {name: section.settings_affecting("regenerated") for name, section in sections.items()}
    return {"target": recipe.target.identity() | _engine(recipe), **settings, "seed": recipe.seed}


def regenerate_hash(recipe: Recipe) -> str:
    return digest(regenerate_settings(recipe))


# -- the dump ----------------------------------------------------------------------------------------------------------


def sort_layers(layers: Iterable[int | str]) -> list[int | str]:
    """Return the auxiliary layers without duplicates, numbers first."""
    return sorted(set(layers), key=lambda layer: (isinstance(layer, str), layer))


def required_layers(recipe: Recipe) -> list[int | str]:
    """Return the auxiliary layers that the recipe names or, by default, those that its drafts need: numbers, or words
    for them.
    """
    if recipe.features.auxiliary_layers is not None:
        return list(recipe.features.auxiliary_layers)
    return sort_layers(layer for config in recipe.dumped_for for layer in config.auxiliary)


def dump_settings(recipe: Recipe) -> Settings:
    """Return the settings that the feature shards depend on. Workers, folders and batch sizes are not among them: they
    change rounding at most, and a dump whose batches were too large can continue with smaller ones.
    """
    features = recipe.features.settings_affecting("dump")
    features["auxiliary_layers"] = required_layers(recipe)  # the target's fingerprint determines the number of a word
    features["stored_dtype"] = recipe.stored_dtype
    settings = {
        "target": recipe.target.identity(),
        "data": recipe.data.settings_affecting("dump"),
        "features": features,
    }
    if recipe.data.answers == "source":
        return settings
    settings["data"]["answers"] = recipe.data.answers
    return (
        settings | _engine(recipe) | {"regenerate": recipe.regenerate.settings_affecting("dump"), "seed": recipe.seed}
    )


def dump_hash(recipe: Recipe) -> str:
    return recipe.features.dump or digest(dump_settings(recipe))


def dump_hash_with(recipe: Recipe, layers: list[int | str]) -> str:
    """Return the hash of this recipe's dump if it had these auxiliary layers."""
    settings = dump_settings(recipe)
    return digest(settings | {"features": settings["features"] | {"auxiliary_layers": layers}})


def calibration_hash(recipe: Recipe, dump: str) -> str:
    """Return the hash of everything that the target's answers to calibration prompts depend on, for a dump with the
    hash `dump`. They can be generated again without the rest of the dump.
    """
    return digest([dump, recipe.data.calibration_prompts, recipe.features.answer_tokens])


# -- training ----------------------------------------------------------------------------------------------------------


def describe_start(start: str) -> str:
    """Return the start as hashes and artifacts name it: a folder by its weights and shapes, not by its path.

    Raises PipelineError if there is no such folder.
    """
    if ON_HUB.fullmatch(start) or start.startswith(MARK):
        return start
    folder = start_folder(start)
    config = read_json(folder / "config.json")
    sums = [cached_sha256(path) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    content = json.dumps([config.get("shapes", config), sums], sort_keys=True)
    return MARK + hashlib.sha256(content.encode()).hexdigest()[:16]


def start_folder(start: str) -> Path:
    """Return the folder of a start. Raises PipelineError if it is not a draft's folder."""
    folder = Path(start).expanduser()
    if start.startswith(MARK) or not (folder / "config.json").is_file():
        raise PipelineError(
            f"draft.NAME.start={start!r}: expected a draft's folder, with its config.json and weights, or "
            "OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits"
        )
    return folder


def draft_settings(recipe: Recipe, draft: str) -> Settings:
    """Return a draft's settings for hashes and artifacts, with its start by content. Raises PipelineError if the start
    is missing.
    """
    config = recipe.draft[draft].public()
    return config.to_json() | ({"start": describe_start(config.start)} if config.start else {})


def is_watched(recipe: Recipe, draft: str) -> bool:
    """Return whether the estimated tau decides which weights of a draft are kept."""
    return recipe.training(draft).keep == "best" or recipe.training(draft).patience is not None


def train_settings(recipe: Recipe, draft: str) -> Settings:
    """Return the settings that one draft's weights depend on, without its own settings, the features and the seed. The
    split of a global batch, schedules of I/O and monitoring are not among them. Its decoding tree and validation steps
    are only if the estimated tau decides which weights are kept.
    """
    settings = recipe.training(draft).settings_affecting("weights")
    if not is_watched(recipe, draft):
        return {"train": {key: value for key, value in settings.items() if key != "validate_every"}}
    tree = recipe.eval.methods.get(draft, Method()).tree or recipe.eval.tree
    return {"train": settings, "tree": tree.to_json()}


def train_hash(recipe: Recipe, draft: str) -> str:
    """Return the hash of everything that one draft's weights depend on; for a published draft, of its settings and its
    address.
    """
    if draft in recipe.published:
        return digest({"published": recipe.published[draft], "draft": recipe.draft[draft].to_json()})
    dump = dump_hash(recipe)
    dump = calibration_hash(recipe, dump) if is_watched(recipe, draft) else dump
    settings = {"tree": None, **train_settings(recipe, draft)}
    return digest({"dump": dump, "seed": recipe.seed, "draft": draft_settings(recipe, draft), **settings})


# -- figures -----------------------------------------------------------------------------------------------------------


def run_settings(recipe: Recipe) -> Settings:
    """Return the settings that the figures of a run depend on."""
    sections = {key: getattr(recipe, key) for key in type(recipe).model_fields}
    settings = {
        key: value.settings_affecting("figures") for key, value in sections.items() if isinstance(value, Section)
    }
    drafts = {name: draft_settings(recipe, name) for name in recipe.draft}
    return recipe.settings_affecting("figures") | settings | {"draft": drafts}


def run_hash(recipe: Recipe) -> str:
    return digest(run_settings(recipe))


MOST, LONGEST, DEEPEST = 8, 120, 8  # in a message: the most keys, characters of a value, and levels of sections
ABSENT = "absent"
ANSWERS_KEYS = ["data.calibration_prompts", "features.answer_tokens"]  # the keys that `calibration_hash` adds
Tree = dict[str, Any]  # a resolved recipe as JSON


def describe_differences(recorded: Tree, current: Tree, keys: Iterable[str]) -> str:
    """Return the keys that differ, with both values: "data.heldout_fraction: 0.02 -> 0.2". Empty if none differs.

    `keys`: "section.key", or a prefix of such keys.
    """
    begins, recorded, current = tuple(keys), _leaves(_fill_defaults(recorded)), _leaves(_fill_defaults(current))
    compared = [
        key for key in {**current, **recorded} if any(key == begin or key.startswith(f"{begin}.") for begin in begins)
    ]
    lines = [f"{_cut(key)}: {_cut(recorded.get(key, ABSENT))} -> {_cut(current.get(key, ABSENT))}" for key in compared]
    lines = [line for line, key in zip(lines, compared, strict=True) if recorded.get(key) != current.get(key)]
    rest = [f"and {len(lines) - MOST} more keys"] if len(lines) > MOST else []
    return public_text(", ".join([*lines[:MOST], *rest]))


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
    draft_keys = ["seed", f"draft.{draft}", "features.dump", f"train.learning_rates.{draft}"]
    settings = train_settings(recipe, draft)
    keys = [*dump_keys(recipe), *draft_keys, *_keys({"train": settings["train"]}), f"published.{draft}"]
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


def read_layers(tree: Tree) -> list[int | str]:
    """Return the auxiliary layers of somebody else's resolved recipe, as `required_layers` does. Raises KeyError,
    TypeError or ValueError if it is not such a recipe.
    """
    if (layers := tree["features"]["auxiliary_layers"]) is None:
        drafts = [load_settings(config) for name, config in tree["draft"].items() if name not in tree["published"]]
        return sort_layers(layer for config in drafts for layer in config.auxiliary)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise TypeError(f"features.auxiliary_layers={layers!r}")
    return list(layers)


def _fill_defaults(tree: Tree) -> Tree:
    """Return the recipe with the defaults of [features] that follow from its drafts."""
    try:
        layers, features = read_layers(tree), tree["features"]
        default = FP8 if layers else "bfloat16"
        features_keys = {"auxiliary_layers": layers, "stored_dtype": features.get("stored_dtype") or default}
        return tree | {"features": features | features_keys}
    except (AttributeError, KeyError, TypeError, ValueError):  # a recipe of another version
        return tree


def _leaves(value: Any, begin: str = "", depth: int = 0) -> dict[str, str]:
    """Return, by dotted key, the JSON of each value that is not an object or is nested DEEPEST levels deep."""
    if not isinstance(value, dict) or depth == DEEPEST:
        return {begin: json.dumps(value)}
    leaves: dict[str, str] = {}
    for name, inner in value.items():
        leaves |= _leaves(inner, f"{begin}.{name}" if begin else name, depth + 1)
    return leaves


def _keys(settings: Tree) -> list[str]:
    """Return the dotted keys of settings by section."""
    sections = {section: keys for section, keys in settings.items() if isinstance(keys, dict)}
    return [*(f"{section}.{key}" for section, keys in sections.items() for key in keys), *settings.keys() - sections]


def _cut(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
