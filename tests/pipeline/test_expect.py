"""What a run says before it starts, against numbers worked out by hand."""

import json
from datetime import date

import pytest

from pipeline.artifacts.provenance import hardware
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.model import load_config
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig
from pipeline.running import expect
from tests.kit import ROOT, dump_here


@pytest.fixture(autouse=True)
def own_speeds(tmp_path, monkeypatch):
    monkeypatch.setattr(expect, "cache_dir", lambda: tmp_path / "cache")


def changed(recipe: Recipe, section: str, **keys) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def test_drafts_are_named_with_the_parameters_that_they_have(tiny_recipe):
    shapes, said = shapes_of(load_config(tiny_recipe.target)), expect.stage_said(tiny_recipe, "train")
    for name, config in tiny_recipe.draft.items():
        assert f"{name} ({parameter_count(build(config, shapes)):,} parameters)" in said


def test_steps_are_about_so_many_before_the_dump_and_exact_after_it(tiny_recipe):
    """Global batches of 8, two epochs."""
    assert "each 2 epochs of what is dumped" in expect.stage_said(tiny_recipe, "train")
    by_dialogues = changed(tiny_recipe, "data", max_dialogues=85)
    assert "each up to 20 steps" in expect.stage_said(by_dialogues, "train")
    by_tokens = changed(tiny_recipe, "data", max_tokens=160 * 33)
    assert "each about 8 steps, more where dialogues are shorter" in expect.stage_said(by_tokens, "train")
    rows = dump_here(tiny_recipe).total("train", "rows")
    assert f"each {rows // 8 * 2} steps;" in expect.stage_said(tiny_recipe, "train")
    packed = changed(tiny_recipe, "train", pack_tokens=200)
    assert "each about " in expect.stage_said(packed, "train")


def test_a_dump_of_other_settings_says_nothing_of_the_steps(tiny_recipe):
    dump_here(tiny_recipe)
    other = changed(tiny_recipe, "data", min_length=2)
    assert "2 epochs of what is dumped" in expect.stage_said(other, "train")


def test_answers_of_all_methods_repeats_and_temperatures(tiny_recipe):
    """Two drafts and plain decoding, 2 prompts, 1 greedy and 3 sampled repeats."""
    assert "24 answers, of up to 8 tokens, by plain decoding, eagle, jakiro" in expect.stage_said(tiny_recipe, "eval")
    whole = {**tiny_recipe.eval.benchmarks, "mine": BenchmarkConfig(source="mine.jsonl")}
    said = expect.stage_said(changed(tiny_recipe, "eval", benchmarks=whole), "eval")
    assert "24 answers and those to all prompts of mine" in said


def test_seconds_are_told_only_once_a_stage_has_run_here_and_grow_with_the_work(tiny_recipe):
    assert expect.stage_said(tiny_recipe, "eval").endswith("; time unknown")
    assert "`python -m pipeline plan RECIPE`" in expect.announcement(tiny_recipe, ["eval"])[-1]
    expect.remember(tiny_recipe, "eval", 30)
    today = date.today().isoformat()
    assert expect.stage_said(tiny_recipe, "eval").endswith(f"; about 30 s, as measured here, {today}")
    assert "plan" not in expect.announcement(tiny_recipe, ["eval"])[-1]
    twice = changed(tiny_recipe, "eval", repeats=5)  # 5 + 3 answers where there were 1 + 3
    assert expect.stage_said(twice, "eval").endswith(f"; about 60 s, as measured here, {today}")
    assert expect.stage_said(changed(tiny_recipe, "eval", dtype="bfloat16"), "eval").endswith("; time unknown")
    expect.remember(tiny_recipe, "eval", 50)
    assert "about 50 s" in expect.stage_said(tiny_recipe, "eval")
    assert len(expect.read_speeds(expect.speeds_file())) == 1


def test_a_small_run_does_not_replace_what_a_large_one_took(tiny_recipe):
    """Most of it is start, so it would tell too much for the large one."""
    expect.remember(changed(tiny_recipe, "eval", repeats=13), "eval", 120)  # 13 + 3 answers where there are 1 + 3
    expect.remember(tiny_recipe, "eval", 100)
    assert "about 30 s" in expect.stage_said(tiny_recipe, "eval")
    expect.remember(changed(tiny_recipe, "eval", repeats=29), "eval", 480)
    assert "about 60 s" in expect.stage_said(tiny_recipe, "eval")


def test_what_another_machine_measured_is_not_called_measured_here(tiny_recipe):
    expect.remember(tiny_recipe, "eval", 30)
    [entry] = expect.read_speeds(expect.speeds_file())
    assert entry["hardware"] == hardware("cpu")
    expect.speeds_file().write_text(json.dumps({"stages": [entry | {"hardware": "64 cores"}]}))
    assert expect.stage_said(tiny_recipe, "eval").endswith("; time unknown")


@pytest.mark.parametrize("text", ["", "no JSON", "[1, 2]", '[{"stage": "eval"}]', "{}"])
def test_a_damaged_note_is_as_good_as_none(tiny_recipe, text):
    expect.speeds_file().parent.mkdir()
    expect.speeds_file().write_text(text)
    assert expect.stage_said(tiny_recipe, "eval").endswith("; time unknown")
    expect.remember(tiny_recipe, "eval", 30)
    assert "about 30 s" in expect.stage_said(tiny_recipe, "eval")


@pytest.mark.parametrize(
    "change", [{"work": 0}, {"seconds": float("nan")}, {"work": "3"}, {"seconds": True}, {"date": 3}, {"stage": None}]
)
def test_an_entry_that_nobody_measured_is_left_out(tmp_path, change):
    entry = {"stage": "eval", "settings": {}, "hardware": "x", "work": 1, "seconds": 2.0, "date": "2026-01-01"}
    (tmp_path / "speeds.json").write_text(json.dumps({"stages": [entry | change, entry]}))
    assert expect.read_speeds(tmp_path / "speeds.json") == [entry]


def test_a_cache_that_cannot_be_written_ends_no_run(tiny_recipe, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    expect.remember(tiny_recipe, "eval", 30)
    assert expect.stage_said(tiny_recipe, "eval").endswith("; time unknown")


@pytest.mark.real
def test_the_demo_is_announced_with_the_times_of_the_machine_that_measured_them(tmp_path):
    recipe = load_recipe(ROOT / "infra/recipes/demo.toml", [f"output={tmp_path / 'run'}"])
    shipped = expect.read_speeds(expect.SHIPPED)
    for stage, entry in zip(expect.STAGES, shipped, strict=True):
        expected = expect.STAGES[stage](recipe)
        assert (entry["stage"], entry["settings"], entry["work"]) == (stage, expected.settings, expected.work)
        assert f"as measured on {entry['hardware']}, {entry['date']}" in expect.stage_said(recipe, stage)
