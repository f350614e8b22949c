"""Reading a recipe's file. An error message names the wrong key and the nearest valid one; drafts are not checked here.

Imports no torch, so `jakiro` refuses a typo at once.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, SEAL, verify_seal
from pipeline.basics.public import require_no_credential
from pipeline.basics.section import Section
from pipeline.basics.settings import Settings
from pipeline.recipe.sections import Outline
from pipeline.recipe.trees import take_auto_tree

RECIPES = ROOT / "infra/recipes"  # the recipes that come with the project

_NAME_RULE = "a name is letters, digits, '.', '_' and '-', beginning with a letter or digit"


def read_tree(path: Path) -> dict[str, Any]:
    """Return the content of a recipe's file. Raises PipelineError if it cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"recipe {path} cannot be parsed: byte {error.start} is not UTF-8 ({error.reason}). Save it as UTF-8 "
            f"(iconv -f LATIN1 -t UTF-8)"
        ) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PipelineError(f"recipe {path} cannot be parsed: {error}") from None
    if not isinstance(tree, dict):
        raise PipelineError(f"recipe {path} is a JSON {type(tree).__name__}, expected an object with sections")
    return tree


def apply_overrides(tree: dict[str, Any], path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return a file's content with its overrides applied. Raises PipelineError for a broken seal or a credential."""
    if SEAL in tree:  # the resolved recipe next to an artifact
        tree = verify_seal(
            tree, f"recipe {path}", f"Give the recipe itself; or, if you changed it on purpose, remove its {SEAL!r}"
        )
    for override in overrides:
        require_no_credential(override, f"--set {override.partition('=')[0].partition(':')[0]}")
        _apply(tree, override)
    _require_no_credentials(tree, "")
    return tree


def require_sound(path: str | Path, overrides: list[str]) -> None:
    """Raise PipelineError for errors in a recipe's file, without reading the settings of its drafts."""
    path = recipe_file(path)
    tree = apply_overrides(read_tree(path), path, overrides)
    take_auto_tree(tree)
    try:
        Outline.model_validate(tree)
    except ValidationError as error:
        raise refusal(path, [explain(item, Outline, {}) for item in error.errors()]) from None


def refusal(path: Path, lines: list[str]) -> PipelineError:
    return PipelineError(f"recipe {path}:\n" + "\n".join(f"  {line}" for line in lines))


def recipe_file(path: str | Path) -> Path:
    """Return the file that a path or a recipe's name stands for. Raises PipelineError if there is none."""
    path = Path(path)
    if not path.is_file() and str(path) in shipped_recipes():
        return RECIPES / f"{path}.toml"
    if path.is_dir():
        raise PipelineError(f"recipe {path} is a folder: expected a TOML file, or a resolved recipe.json")
    if not path.exists():
        near = difflib.get_close_matches(str(path).removesuffix(".toml"), shipped_recipes(), 1)
        names = f"did you mean {near[0]}?" if near else f"some come with the project: {', '.join(shipped_recipes())}"
        raise PipelineError(f"recipe {path} does not exist; {names}")
    return path


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with the project: demo, ..."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def _require_no_credentials(value: Any, where: str) -> None:
    """Raise PipelineError for a credential in any text of a recipe, before a message can show that text."""
    if isinstance(value, str):
        require_no_credential(value, where)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        require_no_credential(str(key), where or "the recipe")
        _require_no_credentials(inner, f"{where}.{key}".lstrip("."))


def _apply(tree: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise PipelineError(f"--set {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise PipelineError(f"--set {override!r}: {parent} is a value, not a section")
    tree[last] = value


def explain(error: Any, recipe: type[Section], kinds: Mapping[str, type]) -> str:
    """Return pydantic's error as a message for the user. `recipe`: the recipe's class; `kinds`: settings by kind."""
    location = error["loc"]
    shown = location[:2] + location[3:] if location[:1] == ("draft",) else location  # without the tag of the union
    where = ".".join(str(part) for part in shown)
    if error["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
        reason = (
            _NAME_RULE if error["type"] == "string_pattern_mismatch" else error["msg"].removeprefix("Value error, ")
        )
        return f"{where or 'recipe'}: {reason}{got}"
    valid_keys = _fields_at(location[:-1], recipe, kinds)
    near = difflib.get_close_matches(str(location[-1]), valid_keys, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid_keys)}"
    return f"{where}: unknown key {location[-1]!r}; {hint}"


def _fields_at(location: tuple, recipe: type[Section], kinds: Mapping[str, type]) -> list[str]:
    """Return the field names of the section that a pydantic error location points into."""
    section: Any = recipe
    parts = list(location)
    while parts:
        annotation = _annotations(section)[parts.pop(0)]
        if typing.get_origin(annotation) is dict and parts:
            parts.pop(0)  # the name in a table of sections
        inner = _sections_in(annotation)
        section = inner[0] if len(inner) == 1 else kinds[parts.pop(0)]
    return sorted(_annotations(section))


def _annotations(section: Any) -> dict[str, Any]:
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _sections_in(annotation: Any) -> list[Any]:
    plain_class = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    if plain_class and issubclass(annotation, BaseModel | Settings):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]
