"""The plan of training, against numbers worked out by hand."""

import pytest
import torch

from pipeline.drafts import build, parameter_count
from pipeline.drafts.layers import shapes_of
from pipeline.recipe import Recipe
from pipeline.target import load_config
from train.estimate import memory_bytes, ranks_of


def changed(recipe: Recipe, **train) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "bytes_a_parameter"),
    [
        ("float32", 0, 1, 4 + 4 + 8),
        ("float32", 0, 4, 4 + 4 + 8),
        ("bfloat16", 0, 4, 2 + 2 + 12),
        ("bfloat16", 1, 4, 2 + 2 + 3),
        ("bfloat16", 2, 4, 2 + 0.5 + 3),
        ("bfloat16", 3, 4, 0.5 + 0.5 + 3),
    ],
)
def test_memory_of_a_rank(tiny_recipe, dtype, stage, ranks, bytes_a_parameter):
    """d = 32, 260 tokens of which the draft knows 128, micro-batches of 4 x 160 tokens."""
    recipe, size = changed(tiny_recipe, dtype=dtype, zero_stage=stage), 4 if dtype == "float32" else 2
    with torch.device("meta"):
        draft = build(recipe.draft["jakiro"], shapes_of(load_config(recipe.target)))
    rest = (260 + 128) * 32 * size + 2**25 * 16 + 4 * 160 * 32 * 40 * size
    assert memory_bytes(recipe, draft, ranks) == parameter_count(draft) * bytes_a_parameter + rest


def test_ranks_are_the_recipes_else_the_machines(tiny_recipe, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert ranks_of(changed(tiny_recipe, ranks=2).train) == 2
    assert ranks_of(changed(tiny_recipe, ranks=None).train) == 8
