"""The trees of a recipe's methods, and whether its target can verify them: trees, or chains alone."""

from typing import TYPE_CHECKING, Any

from pipeline.basics.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.decoding.config import Method
    from pipeline.lm.config import TargetConfig
    from pipeline.recipe.recipe import Recipe

AUTO = "auto"  # as eval.tree: the default tree, or a chain for a target that verifies chains
CHAIN = {"siblings": "none"}


def take_auto_tree(tree: dict[str, Any]) -> bool:
    """Remove `eval.tree = "auto"` from a recipe's content. Return whether it was there."""
    section = tree.get("eval")
    if not isinstance(section, dict) or section.get("tree") != AUTO:
        return False
    del section["tree"]
    return True


def auto_tree(target: "TargetConfig") -> dict[str, Any]:
    """Return the settings that "auto" stands for. Raise PipelineError where the target's configuration is not
    available.
    """
    from pipeline.lm.model import load_tree_obstacle  # imports transformers, which reading a recipe does not need

    return CHAIN if load_tree_obstacle(target) else {}


def require_verifiable(recipe: "Recipe", methods: "dict[str, Method] | None" = None) -> None:
    """Raise PipelineError for a method of the recipe whose tree has siblings, if the target verifies chains alone."""
    from pipeline.lm.ability import READ_ALONE
    from pipeline.lm.model import load_config, load_tree_obstacle

    if (family := load_config(recipe.target).model_type) in READ_ALONE:
        raise PipelineError(
            f"{recipe.target.model} is a {family!r}, with which no draft tokens can be verified here. Dump and train "
            "for it (jakiro run RECIPE --until train), and measure the draft in an engine"
        )
    obstacle = load_tree_obstacle(recipe.target)
    if obstacle is None:
        return
    for name, config in recipe.draft.items():
        if config.runs_the_target:
            raise PipelineError(
                f"draft.{name} runs through the target's blocks under a tree's mask, but {recipe.target.model} has "
                f"{obstacle}. Remove that draft"
            )
    for name, method in (recipe.methods if methods is None else methods).items():
        if not method.is_chain:
            has_own = name in recipe.eval.methods and recipe.eval.methods[name].tree
            key, depth = f"eval.methods.{name}.tree" if has_own else "eval.tree", method.resolved_tree.depth
            raise PipelineError(
                f"{key}: the tree of {name} has siblings, but {recipe.target.model} verifies chains alone: it has "
                f'{obstacle}. Set {key} = {{ depth = {depth}, siblings = "none" }}'
                + ("" if has_own else ', or eval.tree = "auto"')
            )
