"""The recipe's keywords and the pinned date: wherever a template is rendered, in every fingerprint, and never from the
clock.
"""

import json
from datetime import date, datetime
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as chat_templates

from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import RECIPE, public_recipe, write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import require_same
from pipeline.lm.chat import prompt_ids, render, template_fingerprint
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_tokenizer
from pipeline.lm.template import apply_settings, template_settings
from pipeline.recipe.identity import calibration_hash, dump_hash, regenerate_hash, run_hash, train_hash
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from tests.kit import recipe_tree, write_recipe, write_sharegpt
from tests.pipeline.test_chat import tokenizer_with
from tests.templates import GPT_OSS, LLAMA_3_2, QWEN_3, QWEN_3_THINKING, SMOLLM_3, tokenizer_with_settings, unsettled

QUESTION = [{"role": "user", "content": "Which day is it?"}]


def render_question(tokenizer) -> str:
    return render(tokenizer, QUESTION, True)


@pytest.fixture
def later(monkeypatch):
    """transformers' clock, moved to another century."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2101, 1, 2, 3, 4, 5)

    monkeypatch.setattr(chat_templates, "datetime", Later)


# -- the date --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "today"),
    [
        (LLAMA_3_2, "Today Date: 26 Jul 2024\n"),
        (SMOLLM_3, "Today Date: 26 July 2024\n"),
        (GPT_OSS, "date: 2024-07-26\n"),
    ],
    ids=["llama-3.2", "smollm3", "gpt-oss"],
)
def test_rendering_ids_and_fingerprint_do_not_read_the_clock(template, today, request):
    before = tokenizer_with_settings(template)
    ids, mark = prompt_ids(before, QUESTION), template_fingerprint(before)
    request.getfixturevalue("later")
    assert "2101" in render_question(unsettled(template))  # as it was
    tokenizer = tokenizer_with_settings(template)
    assert today in render_question(tokenizer) and "2101" not in render_question(tokenizer)
    assert (prompt_ids(tokenizer, QUESTION), template_fingerprint(tokenizer)) == (ids, mark)


def test_the_recipe_may_set_the_date():
    tokenizer = tokenizer_with_settings(SMOLLM_3, template_date=date(2025, 7, 8))
    assert "Today Date: 08 July 2025\n" in render_question(tokenizer)
    assert template_fingerprint(tokenizer) != template_fingerprint(tokenizer_with_settings(SMOLLM_3))
    assert "1 Jan 2000" in render_question(tokenizer_with_settings(LLAMA_3_2, date_string="1 Jan 2000"))


def test_every_way_to_write_a_date_is_strftimes():
    written = "%a %A %b %B %d %-d %e %F %j %m %-m %y %Y|%H:%M:%S %I %p|%%d|%u %U %V %w"
    tokenizer = tokenizer_with("{{ strftime_now('" + written + "') }}")
    apply_settings(tokenizer, TargetConfig(model="m", template_date=date(2031, 2, 3)))
    assert render_question(tokenizer) == datetime(2031, 2, 3).strftime(written)


@pytest.mark.parametrize(
    "begin", ["", "\n", "  ", "\n  {% if true %}x{% endif %}\n", "  {%- if true %}x{% endif %}", "{# c #}\n "]
)
def test_nothing_else_of_a_template_changes(begin):
    plain, with_keyword = (tokenizer_with(begin + "{{ word }}{{ strftime_now('%Y') }}\n") for _ in range(2))
    apply_settings(with_keyword, TargetConfig(model="m", template_keywords={"word": "w"}))
    once = plain.apply_chat_template(QUESTION, tokenize=False, word="w")
    assert render_question(with_keyword) == once.replace(str(datetime.now().year), "2024")


def test_a_template_without_date_and_keywords_stays_as_it_is():
    tokenizer = tokenizer_with_settings(QWEN_3)
    assert tokenizer.chat_template == QWEN_3


# -- keywords --------------------------------------------------------------------------------------------------------


def test_keywords_are_the_templates():
    assert render_question(tokenizer_with_settings(QWEN_3)).endswith("assistant\n")
    assert render_question(tokenizer_with_settings(QWEN_3, enable_thinking=False)).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )
    assert "Reasoning: high\n" in render_question(tokenizer_with_settings(GPT_OSS, reasoning_effort="high"))
    assert render_question(tokenizer_with_settings(GPT_OSS, model_identity="You are I.")).startswith(
        "<|start|>system<|message|>You are I.\n"
    )


@pytest.mark.parametrize(
    "value",
    ["%} {{ x }} {# 'é\"😀\\\n", True, False, 3, -2.5, 1e-7, ["a", 1, True], []],
    ids=lambda value: repr(value)[:6],
)
def test_any_value_arrives_as_it_is(value):
    tokenizer = tokenizer_with("{{ word | tojson }}")
    apply_settings(tokenizer, TargetConfig(model="m", template_keywords={"word": value}))
    assert json.loads(render_question(tokenizer)) == value and type(json.loads(render_question(tokenizer))) is type(
        value
    )


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "strftime_now", "bos_token"])
def test_a_keyword_that_the_template_does_not_know_is_refused_with_those_it_knows(name):
    message = (
        rf"target.template_keywords.{name}: the chat template of some/model has no such keyword; "
        r"it has enable_thinking, python_tools, xml_tools$"
    )
    with pytest.raises(PipelineError, match=message):
        tokenizer_with_settings(SMOLLM_3, **{name: "x"})
    with pytest.raises(PipelineError, match=r"it has date_string$"):
        tokenizer_with_settings(LLAMA_3_2, **{name: "x"})


def test_of_several_templates_the_one_without_tools_is_taken():
    tokenizer = unsettled(QWEN_3)
    tokenizer.chat_template = {"default": QWEN_3, "tool_use": GPT_OSS}
    apply_settings(tokenizer, TargetConfig(model="m", template_keywords={"enable_thinking": False}))
    assert render_question(tokenizer) == render_question(tokenizer_with_settings(QWEN_3, enable_thinking=False))
    tokenizer.chat_template = {"rag": QWEN_3, "tool_use": GPT_OSS}
    with pytest.raises(PipelineError, match="no default specified"):
        apply_settings(tokenizer, TargetConfig(model="m"))


def test_a_file_that_is_no_template_is_refused():
    with pytest.raises(PipelineError, match=r"the chat template of m is no Jinja template: .*, line 2"):
        apply_settings(tokenizer_with("a\n{% for %}"), TargetConfig(model="m"))


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], None, float("inf")], ids=str)
def test_what_toml_or_a_template_cannot_take_is_refused(value):
    with pytest.raises(ValueError, match="template_keywords"):
        TargetConfig(model="m", template_keywords={"word": value})


@pytest.mark.parametrize(
    ("template", "keywords", "message"),
    [
        (LLAMA_3_2, {}, "date 2024-07-26"),
        (LLAMA_3_2, {"date_string": "1 Jan 2000"}, 'date_string = "1 Jan 2000"'),
        (QWEN_3, {"enable_thinking": True}, "thinking on, enable_thinking = true"),
        (QWEN_3, {"enable_thinking": False}, "thinking off, enable_thinking = false"),
        (QWEN_3_THINKING, {}, "thinking on"),
        (SMOLLM_3, {"enable_thinking": False}, "thinking off, date 2024-07-26, enable_thinking = false"),
        (GPT_OSS, {"reasoning_effort": "low"}, 'thinking on, date 2024-07-26, reasoning_effort = "low"'),
    ],
)
def test_what_is_said_of_a_template(template, keywords, message):
    config = TargetConfig(model="m", template_keywords=keywords)
    assert template_settings(tokenizer_with_settings(template, **keywords), config) == message


# -- the recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture
def thoughtful(tiny_target, tmp_path) -> Path:
    """A recipe file on the tiny target, whose template thinks and prints the date."""
    (tmp_path / "own.jinja").write_text(SMOLLM_3)
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json", 4), tmp_path / "run")
    tree["target"] |= {"chat_template": str(tmp_path / "own.jinja"), "template_keywords": {"enable_thinking": True}}
    return write_recipe(tree, tmp_path / "recipe")


def hashes(recipe: Recipe) -> list[str]:
    return [
        run_hash(recipe),
        dump_hash(recipe),
        calibration_hash(recipe, dump_hash(recipe)),
        regenerate_hash(recipe),
        train_hash(recipe, "eagle"),
    ]


@pytest.mark.parametrize(
    "change", ["target.template_keywords.enable_thinking=false", "target.template_date=2024-07-27"]
)
def test_keywords_and_date_are_part_of_every_hash_and_of_the_features_origin(thoughtful, change):
    thinking_recipe, changed_recipe = load_recipe(thoughtful), load_recipe(thoughtful, [change])
    assert not set(hashes(thinking_recipe)) & set(hashes(changed_recipe))
    assert hashes(thinking_recipe) == hashes(load_recipe(thoughtful, ["target.template_date=2024-07-26"]))
    specs = [feature_spec(recipe) for recipe in (thinking_recipe, changed_recipe)]
    assert specs[0].template != specs[1].template
    with pytest.raises(PipelineError) as caught:
        require_same(*specs, "features")
    before, after = (spec.template_settings for spec in specs)
    assert f"other settings of the chat template (template_settings is {before!r}, this run expects {after!r})" in str(
        caught.value
    )
    assert ("enable_thinking = false" in after) == ("enable_thinking" in change) and "date 2024-07-2" in after


def test_the_tokenizer_of_a_recipe_is_settled(thoughtful):
    recipe = load_recipe(
        thoughtful, ["target.template_keywords.enable_thinking=false", "target.template_date=2025-01-02"]
    )
    assert "Today Date: 02 January 2025\nReasoning Mode: /no_think" in render_question(load_tokenizer(recipe.target))
    with pytest.raises(PipelineError, match=r"template_keywords\.enable_thought"):
        load_tokenizer(load_recipe(thoughtful, ["target.template_keywords.enable_thought=false"]).target)


def test_keywords_travel_unchanged_with_the_recipe_beside_an_artifact(thoughtful, tmp_path):
    """Some look like paths, which are cut elsewhere."""
    recipe = load_recipe(
        thoughtful, ["target.template_keywords.xml_tools=/think", "target.template_keywords.python_tools=[1, 'a']"]
    )
    write_provenance(tmp_path, recipe)
    again = load_recipe(tmp_path / RECIPE)
    assert again.target.template_keywords == recipe.target.template_keywords == {
        "enable_thinking": True, "xml_tools": "/think", "python_tools": [1, "a"]
    }  # fmt: skip
    assert again.target.template_date == date(2024, 7, 26)
    assert public_recipe(recipe)["target"]["template_date"] == "2024-07-26"
