"""A source's size against the requirements of its recipe: reported before the first forward, with every number."""

import json
import re
from pathlib import Path

import pytest

from infra.plan.__main__ import make_plan
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from preprocess.dump.driver import dump
from preprocess.sources.sizes import require_sizes, summarize_source
from tests.kit import dump_here, recipe_tree, write_sharegpt


@pytest.fixture
def recipe(tiny_target, tmp_path):
    """Make a recipe of so many dialogues, of two exchanges each; keys by section."""

    def make_recipe(count: int, **sections: dict) -> Recipe:
        tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json", count), tmp_path / "run")
        for section, keys in sections.items():
            tree[section] |= keys
        return Recipe.model_validate(tree)

    return make_recipe


def test_too_few_held_out_dialogues_are_told_with_every_number_before_a_dump(recipe):
    keys = {"heldout_fraction": 0.02, "heldout_prompts": 100, "calibration_prompts": 16}
    recipe_of_150 = recipe(150, data=keys, train={"keep": "best"})
    held = summarize_source(recipe_of_150, 1000).held_out
    message = (
        f"its 150 dialogues hold out {held}, which give {held} prompts (data.heldout_fraction=0.02), but the recipe "
        "requires at least 101: validation takes up to 8 (data.validation_dialogues), and their questions are 100 + 16 "
        "prompts (data.heldout_prompts, data.calibration_prompts), of which eval asks 2. "
    )
    with pytest.raises(PipelineError, match=re.escape(message)):
        require_sizes(recipe_of_150)
    for start in (dump, lambda wrong: make_plan(wrong, {})):
        with pytest.raises(PipelineError, match="requires at least 101"):
            start(recipe_of_150)
    assert not list(recipe_of_150.paths.run.rglob("*.arrow"))


@pytest.mark.parametrize(
    ("count", "prompts", "advice", "taken"),
    [
        (60, 10, r"Set data\.heldout_fraction=0\.22", {"heldout_fraction": 0.22, "heldout_prompts": 10}),
        (60, 30, r"Set data\.heldout_fraction=0\.3, and", {"heldout_fraction": 0.3, "heldout_prompts": 14}),
        (8, 30, "Give more data$", None),  # whatever the fraction
    ],
)
def test_the_advice_holds(recipe, count, prompts, advice, taken):
    data_settings = {"heldout_fraction": 0.01 if taken else 0.2, "heldout_prompts": prompts}
    with pytest.raises(PipelineError, match=advice):
        require_sizes(recipe(count, data=data_settings, train={"keep": "best"}))
    if taken:
        require_sizes(recipe(count, data=taken, train={"keep": "best"}))


def test_a_look_ends_where_it_knows_enough(recipe):
    look = summarize_source(recipe(400), 5)
    assert look.held_out >= 5 and not look.is_complete and look.dialogues < 400
    full_look = summarize_source(recipe(100), 1000)
    assert full_look.is_complete and full_look.dialogues == 100 and 5 < full_look.held_out < 40


def test_a_warm_up_that_outlasts_the_run_is_refused_before_the_dump(recipe):
    """60 dialogues, at least 40 of them to train on, 8 a step, two epochs: 10 to 14 steps."""
    steps = summarize_source(recipe(60), 1000).train // 8 * 2
    require_sizes(recipe(60, train={"warmup_steps": steps - 1}))
    late = recipe(60, train={"warmup_steps": steps})
    with pytest.raises(PipelineError, match=f"warmup_steps={steps}, but the run has {steps} steps"):
        dump_here(late)
    assert not list(late.paths.run.rglob("*.arrow"))
    require_sizes(recipe(60, train={"warmup_steps": steps, "schedule": "constant"}))
    with pytest.raises(PipelineError, match="7 training dialogues do not fill one global batch of 8"):
        require_sizes(recipe(60, data={"max_dialogues": 7}))


def test_a_warm_up_is_compared_with_an_estimate_where_tokens_end_the_data(recipe):
    look = summarize_source(recipe(400), 5)
    assert not look.is_complete
    few = recipe(400, data={"max_tokens": 2000}, train={"warmup_steps": 50})
    with pytest.raises(PipelineError, match="warmup_steps=50, but the run has about"):
        require_sizes(few)
    require_sizes(recipe(400, data={"max_tokens": 2000}, train={"warmup_steps": 2}))


def test_a_source_without_a_usable_dialogue_is_the_dumps_to_refuse(recipe, tmp_path):
    empty = recipe(60)
    (tmp_path / "data.json").write_text(json.dumps([{"id": "a", "conversations": []}]))
    require_sizes(empty)


def shared_questions(path: Path, questions: int, answers: int) -> None:
    """Write dialogues in which so many questions have so many answers each."""
    records = [
        {
            "id": f"{question}-{answer}",
            "conversations": [
                {"from": "human", "value": f"question {question}"},
                {"from": "gpt", "value": f"answer {question}.{answer}"},
            ],
        }
        for question in range(questions)
        for answer in range(answers)
    ]
    path.write_text(json.dumps(records))


def test_each_question_is_one_prompt(recipe, tmp_path):
    few = recipe(60, data={"heldout_fraction": 0.2, "heldout_prompts": 10}, train={"keep": "best"})
    shared_questions(tmp_path / "data.json", 20, 50)
    look = summarize_source(few, 10**6)
    assert look.dialogues == 1000 and len(look.groups) == 20 and look.held_out == 50 * look.prompts
    with pytest.raises(PipelineError, match=r"1000 dialogues with 20 first questions .* data\.group='id'"):
        require_sizes(few)
    require_sizes(few.model_copy(update={"data": few.data.model_copy(update={"group": "id"})}))


def test_one_question_of_all_is_not_mended_by_a_fraction(recipe, tmp_path):
    one_question = recipe(60, data={"heldout_fraction": 0.1})
    shared_questions(tmp_path / "data.json", 1, 100)
    message = r"with 1 first questions .* Give data with more questions; or set data.group"
    with pytest.raises(PipelineError, match=message):
        require_sizes(one_question)


def test_the_rows_of_a_run_are_its_sequences(recipe):
    """Windows: more rows than dialogues, and more steps."""
    late = recipe(60, train={"warmup_steps": summarize_source(recipe(60), 1000).train // 8 * 2})
    with pytest.raises(PipelineError, match="warmup_steps"):
        require_sizes(late)
    require_sizes(late.model_copy(update={"data": late.data.model_copy(update={"long": "windows", "max_length": 60})}))


def test_texts_ask_nothing_and_the_advice_says_so(recipe, tmp_path):
    texts = recipe(60)
    records = [{"id": str(number), "text": f"once upon a time {number}"} for number in range(40)]
    (tmp_path / "data.json").write_text(json.dumps(records))
    with pytest.raises(PipelineError, match=r"give 0 prompts .* Texts and tokens hold no question"):
        require_sizes(texts)
