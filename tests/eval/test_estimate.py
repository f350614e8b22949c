"""The plan of evaluation, against numbers worked out by hand."""

import json

from eval.estimate import answers, memory_bytes
from pipeline.lm.model import parameter_count_of
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig


def evaluating(recipe: Recipe, **changes) -> Recipe:
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changes)})


def test_answers_of_all_methods_temperatures_and_turns(tiny_recipe, tmp_path):
    """Two drafts and plain decoding; 3 greedy and 2 sampled repeats at each of two temperatures; 2 + 3 questions."""
    path = tmp_path / "two-turns.jsonl"
    lines = [{"question_id": n, "category": "x", "turns": ["a"] * (1 + n)} for n in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    benchmarks = {"heldout": BenchmarkConfig(source="heldout", prompts=2), "mine": BenchmarkConfig(source=str(path))}
    changes = {"temperatures": [0.0, 0.7, 1.0], "repeats": 3, "sampled_repeats": 2, "benchmarks": benchmarks}
    assert answers(evaluating(tiny_recipe, **changes)) == (2 + 3) * (3 + 2 + 2) * 3


def test_memory_is_the_targets_and_more(tiny_recipe):
    """float32; packing keeps both forms of the weights for a while."""
    weights = 4 * parameter_count_of(tiny_recipe.target)
    plain = memory_bytes(tiny_recipe)
    cache = 2 * 2 * 2 * 8 * (160 + 8) * 4  # keys and values of 2 layers, 2 heads of 8
    assert weights + cache < plain < weights + cache + 1e6
    assert memory_bytes(evaluating(tiny_recipe, pack_linears=True)) == plain + weights
