"""What becomes of a prompt whose worker was lost; the pool of workers itself: tests/pipeline/test_workers.py."""

import pytest

from eval.measure.fleet import Attempts, crew_of
from eval.measure.harness import EvalTask
from eval.measure.prompts import Prompt
from pipeline.basics.errors import PipelineError

A, B = (EvalTask("bench", Prompt(name, "", (name,)), 0.0) for name in "ab")


def test_a_prompt_that_is_lost_thrice_ends_the_run_by_name():
    attempts = Attempts()
    assert [attempts.retry(task, (), "it died.") for task in (A, B, A, B)] == [A, B, A, B]
    with pytest.raises(PipelineError, match=r"bench, prompt b: 3 workers were lost, .* it died\. Finished"):
        attempts.retry(B, (), "it died.")


def test_no_more_workers_start_than_there_are_prompts(tiny_recipe):
    recipe = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update={"workers": 8})})
    assert crew_of(recipe, 3).workers == 3 and crew_of(recipe, 100).workers == 8
