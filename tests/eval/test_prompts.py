"""Prompts of a file or of the dump are complete, or are refused with the line and what to do."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eval.measure.prompts import BenchmarkPrompt, load_prompts
from eval.tune import calibration_tasks
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import Manifest
from pipeline.lm.chat import prompt_ids
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig
from tests.kit import recipe_tree, replace_once


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return Recipe.model_validate(recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "run"))


def prompt_line(number: int, **changes) -> str:
    return json.dumps({"question_id": f"q{number}", "category": "code", "turns": [f"turn {number}"]} | changes)


def write_lines(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def load(source: str, recipe: Recipe, prompts: int | None = None) -> list[BenchmarkPrompt]:
    return load_prompts("bench", BenchmarkConfig(source=source, prompts=prompts), recipe)


def refusal(source: str, recipe: Recipe, prompts: int | None = None) -> str:
    with pytest.raises(PipelineError) as caught:
        load(source, recipe, prompts)
    return str(caught.value)


def test_prompts_are_read_in_order(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), prompt_line(1, turns=["one", "two"]))
    expected = [BenchmarkPrompt("q0", "code", ("turn 0",)), BenchmarkPrompt("q1", "code", ("one", "two"))]
    assert load(source, recipe) == load(source, recipe, 2) == expected
    assert load(source, recipe, 1) == expected[:1]
    numbered = write_lines(tmp_path / "n.jsonl", prompt_line(0, question_id=81), json.dumps({"turns": ["x"]}))
    assert [prompt.question_id for prompt in load(numbered, recipe)] == ["81", "2"]


def test_a_file_is_utf8_with_or_without_a_byte_order_mark(tmp_path, recipe):
    (tmp_path / "b.jsonl").write_bytes(prompt_line(0).encode("utf-8-sig"))
    assert load(str(tmp_path / "b.jsonl"), recipe) == [BenchmarkPrompt("q0", "code", ("turn 0",))]
    (tmp_path / "b.jsonl").write_bytes('{"turns": ["café"]}'.encode("latin-1"))
    message = refusal(str(tmp_path / "b.jsonl"), recipe)
    assert "is not UTF-8 (byte " in message and "iconv -f LATIN1 -t UTF-8" in message


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\r\n"], ids=["U+2028", "U+0085", "CRLF"])
def test_a_prompt_may_hold_any_line_separator(tmp_path, recipe, separator):
    """The dump writes its held-out prompts unescaped, and real dialogues hold U+2028."""
    text = f"before{separator}after"
    line = json.dumps({"question_id": "q", "category": "c", "turns": [text]}, ensure_ascii=False)
    assert load(write_lines(tmp_path / "b.jsonl", line), recipe)[0].turns == (text,)


def held_out(recipe: Recipe, *lines: str) -> Path:
    path = Path(write_lines(recipe.paths.features / "heldout_prompts.jsonl", *lines))
    spec = FeatureSpec(8, "bfloat16", target="T", tokenizer="K", template="M", recipe="R")
    Manifest(spec, complete=True, prompts_sha256=sha256(path)).save(recipe.paths.features)
    return path


def test_held_out_prompts_are_those_of_the_dump_and_unchanged(recipe):
    assert "heldout_prompts.jsonl does not exist: dump the features first" in refusal("heldout", recipe)
    path = held_out(recipe, prompt_line(0), prompt_line(1))
    assert [prompt.question_id for prompt in load("heldout", recipe)] == ["q0", "q1"]
    replace_once(path, "turn 1", "turn 2")
    changed = r"heldout_prompts.jsonl: its SHA-256 is not the manifest's.*Run the dump again"
    with pytest.raises(PipelineError, match=changed):
        load("heldout", recipe)
    with pytest.raises(PipelineError, match=changed):
        calibration_tasks(recipe, 1)  # the tuner's


def with_contexts(recipe: Recipe, *tokens: int) -> Recipe:
    tree = recipe.model_dump()
    tree["eval"]["max_new_tokens"] = 8
    tree["eval"]["benchmarks"] |= {f"heldout-{n}": {"source": f"heldout:{n}", "prompts": 2} for n in tokens}
    return Recipe.model_validate(tree)


def test_a_context_is_filled_with_whole_exchanges_of_other_dialogues(tiny_recipe):
    """A token a byte: a turn takes its letters and 3 for its markers, and the answer's opening 1."""
    exchanges = [("a" * 17, "b" * 17), ("c" * 50, "d" * 44), ("e" * 17, "f" * 7)]
    lines = [prompt_line(n, turns=["?" * 9], exchanges=[exchanges[n], ("never" * 40, "here")]) for n in range(3)]
    held_out(tiny_recipe, *lines, prompt_line(3, turns=["?" * 40], exchanges=[("x", "y")]))
    recipe = with_contexts(tiny_recipe, 60, 121)
    filled = {
        name: {prompt.question_id: prompt.before for prompt in load_prompts(name, config, recipe)}
        for name, config in recipe.eval.benchmarks.items()
    }
    first, second, third = exchanges
    # 13 for the question; 40, 100 and 30 for the exchanges, 8 for the last dialogue's, whose question is too long
    assert filled == {
        "heldout": {"q0": (), "q1": ()},
        "heldout-60": {"q0": (third, ("x", "y")), "q1": (third, ("x", "y"))},
        "heldout-121": {"q0": (second, ("x", "y")), "q1": (third, ("x", "y"), first)},
    }


def test_a_context_is_filled_as_if_one_exchange_were_added_at_a_time_in_few_renderings(tiny_recipe, monkeypatch):
    random = np.random.default_rng(0)
    dialogues = [
        [["a" * n for n in pair] for pair in random.integers(1, 30, (random.integers(1, 4), 2))] for _ in range(30)
    ]
    held_out(tiny_recipe, *(prompt_line(n, turns=["?" * 9], exchanges=dialogues[n]) for n in range(30)))
    recipe, rendered = with_contexts(tiny_recipe, 900), []

    def counted(tokenizer, messages):
        ids = prompt_ids(tokenizer, messages)
        rendered.append(len(ids))
        return ids

    monkeypatch.setattr("eval.measure.prompts.prompt_ids", counted)
    filled = load_prompts("long", recipe.eval.benchmarks["heldout-900"], recipe)
    assert sum(tokens > 500 for tokens in rendered) <= 4 * len(filled)
    for place, prompt in enumerate(filled):
        before, now = [], 13
        for number in [*range(place + 1, 30), *range(place)]:
            for question, answer in dialogues[number]:
                if now + len(question + answer) + 6 > 900:
                    break
                before, now = [*before, (question, answer)], now + len(question + answer) + 6
        assert list(prompt.before) == before and len(before) > 20


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (1017, "1017 tokens and eval.max_new_tokens=8 exceed the target's 1024 positions: measure a shorter"),
        (40, "the held-out dialogues fill 14 of 40 tokens: raise data.heldout_prompts"),
        (27, "each question takes more than half of 27 tokens"),
    ],
)
def test_a_context_that_cannot_be_filled_or_read_is_refused(tiny_recipe, tokens, message):
    held_out(tiny_recipe, *(prompt_line(n, turns=["?" * 10], exchanges=[]) for n in range(2)))
    recipe = with_contexts(tiny_recipe, tokens)
    with pytest.raises(PipelineError, match=re.escape(message)):
        load_prompts("long", recipe.eval.benchmarks[f"heldout-{tokens}"], recipe)


def test_contexts_are_of_held_out_dialogues_that_are_dumped_with_their_answers(tiny_recipe):
    for exchanges in ({}, *({"exchanges": forged} for forged in (7, "ab", [["q"]], [["q", 7]], [["q", "a", "b"]]))):
        held_out(tiny_recipe, prompt_line(0), prompt_line(1, **exchanges))
        assert "has no answers: remove it, and dump again" in refusal("heldout:60", tiny_recipe)


def test_what_is_no_file_on_this_machine_is_refused(tmp_path, recipe):
    assert f"{tmp_path} is no file" in refusal(str(tmp_path), recipe)
    assert refusal(str(tmp_path / "no.jsonl"), recipe) == f"benchmark bench: {tmp_path / 'no.jsonl'} does not exist"
    message = refusal("https://host/b.jsonl", recipe)
    assert "https://host/b.jsonl is an address: expected a file" in message


@pytest.mark.parametrize("line", ["[]", "{}", '{"turns": "text"}', '{"turns": []}', '{"turns": ["a", " "]}'])
def test_a_malformed_prompt_is_refused_by_its_line(tmp_path, recipe, line):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), "", line)  # blank lines count
    message = refusal(source, recipe)
    assert message == f"benchmark bench: {source}, line 3: expected {{question_id, category, turns: [text, ...]}}"


def test_a_line_that_is_not_json_is_refused(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), '{"turns": [')
    assert f"benchmark bench: {source}, line 2 is not JSON" in refusal(source, recipe)


@pytest.mark.parametrize(("held", "required"), [(2, 3), (0, 1)])
def test_too_few_prompts_are_refused(tmp_path, recipe, held, required):
    source = write_lines(tmp_path / "b.jsonl", *(prompt_line(number) for number in range(held)))
    complaint = f"{source} holds {held} prompts, eval.benchmarks.bench.prompts asks for {required}"
    assert complaint in refusal(source, recipe, required)
    if not held:
        assert "holds 0 prompts" in refusal(source, recipe)
