"""Attempts at a prompt whose worker failed; the pool of workers itself: tests/pipeline/test_workers.py."""

import pytest
import torch

from eval.measure.fleet import Attempts, make_crew
from eval.measure.harness import EvalTask
from eval.measure.prompts import BenchmarkPrompt
from pipeline.basics.errors import PipelineError
from pipeline.running.crew import WorkerFailure

A, B = (EvalTask("bench", BenchmarkPrompt(name, "", (name,)), 0.0) for name in "ab")


@pytest.mark.parametrize(
    "failure",
    [
        WorkerFailure((), "it died."),
        WorkerFailure((), "it died.", MemoryError("no room")),
        WorkerFailure((), "it died.", torch.OutOfMemoryError("no room")),
    ],
)
def test_a_prompt_on_which_three_workers_fail_ends_the_run_by_name(failure):
    attempts = Attempts()
    assert [attempts.retry(task, failure) for task in (A, B, A, B)] == [A, B, A, B]
    with pytest.raises(PipelineError, match=r"bench, prompt b: 3 workers failed, .* it died\. Finished"):
        attempts.retry(B, failure)


def test_an_exception_in_decoding_is_reported_and_not_tried_again():
    with pytest.raises(PipelineError, match=r"^benchmark bench, prompt a: ValueError: no such token$"):
        Attempts().retry(A, WorkerFailure((), "ValueError: no such token", ValueError("no such token")))


def test_no_more_workers_start_than_there_are_prompts(tiny_recipe):
    recipe = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update={"workers": 8})})
    assert make_crew(recipe, 3).workers == 3 and make_crew(recipe, 100).workers == 8
