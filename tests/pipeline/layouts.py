"""Settings of drafts that others released, and what an import of one leaves."""

import torch
from safetensors.torch import load_file

from pipeline.recipe.recipe import Recipe

EAGLE, EAGLE_3 = {"kind": "eagle"}, {"kind": "eagle3"}
P_EAGLE = {"kind": "p-eagle", "layers": 2, "depths": 3, "mask_token": 258}
DFLASH = {"kind": "dflash", "layers": 2, "block": 4, "auxiliary_layers": [1, 2], "mask_token": 258}
BLOCKS = {  # without shapes; positions see their whole block, unlike speculators' default
    **{"block_size": 4, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 258, "num_hidden_layers": 2},
    **{"layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "sliding_window_non_causal": True},
}


def with_settings(recipe: Recipe, settings: dict, **changes) -> Recipe:
    """Return a recipe whose one draft, `theirs`, has these settings."""
    tree = recipe.model_dump(mode="json") | {"draft": {"theirs": settings}} | changes
    tree["publish"]["draft"] = "theirs"
    return Recipe.model_validate(tree)


def assert_imported(recipe: Recipe, expected: dict[str, torch.Tensor]) -> None:
    """Check that the imported weights equal the original ones to the bit."""
    weights = load_file(recipe.paths.draft("theirs") / "model.safetensors")
    assert weights.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in weights.items())
