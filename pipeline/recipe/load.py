"""Reading a recipe, with overrides; an error message names the wrong key and the nearest valid one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.drafts import DRAFTS
from pipeline.recipe.dtypes import resolve_dtypes
from pipeline.recipe.read import apply_overrides, explain, read_tree, recipe_file, refusal
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.trees import auto_tree, take_auto_tree


def load_recipe(path: str | Path, overrides: list[str] | None = None, begin: bool = False) -> Recipe:
    """Read a recipe and apply ``section.key=value`` overrides (values in TOML syntax, bare words are strings).

    `path`: a file, or a name in `shipped()`. `begin`: the run starts, and keeps the resolved dtype of "auto".
    """
    path = recipe_file(path)
    return resolve_dtypes(recipe_from(read_tree(path), path, overrides or []), begin)


def recipe_from(tree: dict[str, Any], path: Path, overrides: list[str]) -> Recipe:
    """Return the recipe of a file's content. Raises PipelineError that names the file."""
    tree = apply_overrides(tree, path, overrides)
    is_auto = take_auto_tree(tree)
    recipe = _validate(tree, path)
    if is_auto and (settings := auto_tree(recipe.target)):
        tree["eval"]["tree"] = settings
        recipe = _validate(tree, path)
    return recipe


def _validate(tree: dict[str, Any], path: Path) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise refusal(path, [_explain(item) for item in error.errors()]) from None


def add_recipe_arguments(parser) -> None:
    """Add the arguments that the commands on a recipe share."""
    parser.add_argument("recipe", help="a TOML file; or the name of a recipe that comes with the project: demo, ...")
    add_override_argument(parser)


def add_override_argument(parser) -> None:
    parser.add_argument(
        "--set", dest="overrides", metavar="section.key=value", action="append", default=[], help="override one key"
    )


def override_arguments(overrides: Iterable[str]) -> list[str]:
    """Return the overrides as a user types them."""
    return [part for override in overrides for part in ("--set", override)]


def _explain(error: Any) -> str:
    if not error["type"].startswith("union_tag"):
        return explain(error, Recipe, {kind: draft_kind.config for kind, draft_kind in DRAFTS.items()})
    where = ".".join(str(part) for part in error["loc"])
    settings = error["input"] if isinstance(error["input"], dict) else {}
    got = ", ".join(f"{key}={settings[key]!r}" for key in ("kind", "frame") if key in settings)
    kinds = [" with frame = ".join(map(repr, key.split(" on "))) for key in DRAFTS]
    return f"{where}: {got or 'no key kind'}: expected {', '.join(kinds)}"
