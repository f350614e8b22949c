"""Which keys of a recipe differ from those of the recipe that lies beside an artifact.

A hash decides whether the settings of two are the same; the keys are named for the message. The recipe beside an
artifact may be a stranger's: its values are shown as JSON, cut and through `public_text`, and none becomes a setting.
"""

import json
from collections.abc import Iterable
from typing import Any

from pipeline.basics.public import public_text
from pipeline.drafts import settings_from
from pipeline.features.schema import FP8
from pipeline.recipe.recipe import Recipe, in_order

MOST, LONGEST, DEEPEST = 8, 120, 8  # keys that a message names; characters of a value; sections in sections
ABSENT = "absent"
ANSWERS_KEYS = ["data.calibration_prompts", "features.answer_tokens"]  # that `Recipe.answers_hash` adds
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
    return ["data.answers", *answered, *_keys(recipe.dump_settings)]


def training_keys(recipe: Recipe, draft: str) -> list[str]:
    """Return the keys that one draft's weights depend on."""
    if draft in recipe.published:
        return [f"published.{draft}", f"draft.{draft}"]
    own = ["seed", f"draft.{draft}", "features.dump", f"train.learning_rates.{draft}"]
    settings = recipe.training_settings(draft)
    keys = [*dump_keys(recipe), *own, *_keys({"train": settings["train"]}), f"published.{draft}"]
    if not recipe.is_watched(draft):
        return keys
    method = recipe.eval.methods.get(draft)
    tree = [f"eval.methods.{draft}.tree"] + ([] if method and method.tree else ["eval.tree"])
    return [*keys, *ANSWERS_KEYS, *tree]


def release_keys(recipe: Recipe) -> list[str]:
    """Return the keys that a release depends on."""
    return ["draft", "published", *_keys(recipe.settings)]


def regenerate_keys(recipe: Recipe) -> list[str]:
    """Return the keys that the target's own answers depend on."""
    return _keys(recipe.regenerate_settings)


def layers_of(tree: Tree) -> list[int | str]:
    """Return the auxiliary layers that a recipe of somebody's wants, as `Recipe.wanted_layers`. Raises KeyError,
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
