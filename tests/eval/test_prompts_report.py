"""Prompts are whole or refused; figures are pooled counts, and no speed is told of a draft that loses something."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.measure import report
from eval.measure.gate import Gate
from eval.measure.harness import PLAIN, Record
from eval.measure.prompts import Prompt, load_prompts
from eval.tune import calibration_units
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.generate import Generation
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import Manifest
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


def load(source: str, recipe: Recipe, prompts: int | None = None) -> list[Prompt]:
    return load_prompts("bench", BenchmarkConfig(source=source, prompts=prompts), recipe)


def refusal(source: str, recipe: Recipe, prompts: int | None = None) -> str:
    with pytest.raises(PipelineError) as caught:
        load(source, recipe, prompts)
    return str(caught.value)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_read_in_order(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), prompt_line(1, turns=["one", "two"]))
    expected = [Prompt("q0", "code", ("turn 0",)), Prompt("q1", "code", ("one", "two"))]
    assert load(source, recipe) == expected
    assert load(source, recipe, 1) == expected[:1]
    assert load(source, recipe, 2) == expected


def test_a_benchmark_that_is_no_utf8_is_refused_with_what_to_do(tmp_path, recipe):
    (tmp_path / "b.jsonl").write_bytes(
        prompt_line(0, turns=["caf\xe9"]).encode() + '{"turns": ["café"]}'.encode("latin-1")
    )
    message = refusal(str(tmp_path / "b.jsonl"), recipe)
    assert "is not UTF-8 (byte " in message and "iconv -f LATIN1 -t UTF-8" in message


def test_a_byte_order_mark_before_the_first_prompt_is_read(tmp_path, recipe):
    (tmp_path / "b.jsonl").write_bytes(prompt_line(0).encode("utf-8-sig"))
    assert load(str(tmp_path / "b.jsonl"), recipe) == [Prompt("q0", "code", ("turn 0",))]


def test_what_is_no_file_on_this_machine_is_refused(tmp_path, recipe):
    assert f"{tmp_path} is no file" in refusal(str(tmp_path), recipe)
    message = refusal("https://alice:secret@host/b.jsonl", recipe)
    assert "https://host/b.jsonl is an address: expected a file" in message and "secret" not in message


def test_numbers_as_ids_become_texts_and_missing_ids_are_numbered(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0, question_id=81), json.dumps({"turns": ["x"]}))
    assert [prompt.question_id for prompt in load(source, recipe)] == ["81", "2"]


def test_held_out_prompts_are_those_of_the_dump(recipe):
    held_out(recipe, prompt_line(0))
    assert [prompt.question_id for prompt in load("heldout", recipe)] == ["q0"]


def held_out(recipe: Recipe, *lines: str) -> Path:
    path = Path(write_lines(recipe.features_dir / "heldout_prompts.jsonl", *lines))
    spec = FeatureSpec(8, "bfloat16", target="T", tokenizer="K", template="M", recipe="R")
    Manifest(spec, complete=True, prompts_sha256=sha256(path)).save(recipe.features_dir)
    return path


def test_a_changed_held_out_prompt_is_refused(recipe):
    path = held_out(recipe, prompt_line(0), prompt_line(1))
    replace_once(path, "turn 1", "turn 2")
    with pytest.raises(
        PipelineError, match=r"heldout_prompts.jsonl: its SHA-256 is not the manifest's.*Run the dump again"
    ):
        load("heldout", recipe)
    with pytest.raises(PipelineError, match=r"heldout_prompts.jsonl: its SHA-256 is not the manifest's"):
        calibration_units(recipe, 1)  # the tuner's


def test_held_out_prompts_need_a_dump_first(recipe):
    message = refusal("heldout", recipe)
    assert message.startswith("benchmark bench: ")
    assert "heldout_prompts.jsonl does not exist: dump the features first" in message


def test_a_missing_file_is_named(tmp_path, recipe):
    assert refusal(str(tmp_path / "no.jsonl"), recipe) == f"benchmark bench: {tmp_path / 'no.jsonl'} does not exist"


def test_a_line_that_is_not_json_is_refused(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), '{"turns": [')
    assert f"benchmark bench: {source}, line 2 is not JSON" in refusal(source, recipe)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "{}",
        '{"turns": "text"}',
        '{"turns": []}',
        '{"turns": [3]}',
        '{"turns": ["a", " "]}',
        '{"prompt": "a"}',
    ],
)
def test_a_malformed_prompt_is_refused_by_its_line(tmp_path, recipe, line):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), line)
    message = refusal(source, recipe)
    assert message == f"benchmark bench: {source}, line 2: expected {{question_id, category, turns: [text, ...]}}"


def test_blank_lines_are_counted_when_a_line_is_named(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", prompt_line(0), "", "{}")
    assert "line 3" in refusal(source, recipe)


def test_the_line_that_is_not_json_is_named(tmp_path, recipe):
    source = write_lines(tmp_path / "b.jsonl", *(prompt_line(number) for number in range(4)), "{")
    assert "line 5" in refusal(source, recipe)


@pytest.mark.parametrize(
    "separator",
    ["\u2028", "\u2029", "\x85", "\r\n", "\x0b"],
    ids=["U+2028", "U+2029", "U+0085", "CRLF", "VT"],
)
def test_a_prompt_may_hold_any_line_separator(tmp_path, recipe, separator):
    """The dump writes its held-out prompts unescaped, and real dialogues hold U+2028."""
    text = f"before{separator}after"
    line = json.dumps({"question_id": "q", "category": "c", "turns": [text]}, ensure_ascii=False)
    assert load(write_lines(tmp_path / "b.jsonl", line), recipe)[0].turns == (text,)


@pytest.mark.parametrize(("held", "wanted"), [(2, 3), (0, 1)])
def test_too_few_prompts_are_refused(tmp_path, recipe, held, wanted):
    source = write_lines(tmp_path / "b.jsonl", *(prompt_line(number) for number in range(held)))
    complaint = f"{source} holds {held} prompts, eval.benchmarks.bench.prompts asks for {wanted}"
    assert complaint in refusal(source, recipe, wanted)


def test_an_empty_benchmark_is_refused(tmp_path, recipe):
    assert "holds 0 prompts" in refusal(write_lines(tmp_path / "b.jsonl", ""), recipe)


# -- intervals -------------------------------------------------------------------------------------------------------


def mean(values, axis):
    return values.mean(axis)


def ratio(numerators, denominators, axis):
    return numerators.sum(axis) / denominators.sum(axis)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_fewer_than_two_prompts_have_no_interval(values):
    assert report.interval(mean, np.array(values)) is None


def test_the_interval_is_the_same_every_time_and_holds_the_statistic():
    sample = np.random.default_rng(1).normal(5, 1, 60)
    low, high = report.interval(mean, sample)
    assert [low, high] == report.interval(mean, sample)
    assert low < sample.mean() < high
    standard_error = sample.std(ddof=1) / math.sqrt(len(sample))
    assert abs((high - low) / (2 * 1.96 * standard_error) - 1) < 0.15


def test_the_interval_resamples_prompts_as_pairs():
    """Numerator and denominator of one prompt belong together: a constant ratio has no spread."""
    passes = np.arange(1.0, 30.0)
    assert report.interval(ratio, 3 * passes, passes) == [3.0, 3.0]


def test_equal_prompts_have_an_interval_of_no_width():
    assert report.interval(mean, np.full(5, 2.5)) == [2.5, 2.5]


# -- figures ---------------------------------------------------------------------------------------------------------


def generation(tokens: int, seconds: float, rounds: list[tuple[int, int]] = (), **more) -> Generation:
    """`rounds`: (accepted draft tokens, emitted tokens) of each verification pass."""
    acceptance = Acceptance()
    for accepted, emitted in rounds:
        acceptance.add_pass(accepted, emitted)
    return Generation(list(range(tokens)), seconds, acceptance=acceptance, **more)


def records(method: str, *by_prompt: list[Generation]) -> list[Record]:
    return [
        Record("bench", f"q{number}", 0, 0.0, method, repeat, answer)
        for number, answers in enumerate(by_prompt)
        for repeat, answer in enumerate(answers)
    ]


EVEN = [n / 50 + 0.01 for n in range(50)]
PASSED = Gate(0.0, checked=4, identical=4)
FAILED = Gate(0.0, checked=4, identical=2, near_ties=1)


@pytest.fixture
def drafted() -> list[Record]:
    """Two prompts of very different lengths, two repeats each: pooling and averaging do not agree."""
    short = [generation(5, 1.0, [(1, 2), (1, 2)], split={"draft": 0.25, "verify": 0.5}, untrimmed_tokens=5)] * 2
    long = [generation(21, 4.0, [(4, 5)] * 4, split={"draft": 1.0, "verify": 2.0}, untrimmed_tokens=22)] * 2
    return records("draft", short, long)


@pytest.fixture
def baseline() -> list[Record]:
    return records(PLAIN, [generation(5, 2.0), generation(5, 4.0)], [generation(21, 14.0), generation(21, 12.0)])


def test_tau_is_pooled_over_all_answers(drafted, baseline):
    figures = report._figures(drafted, baseline, PASSED)
    assert (figures["prompts"], figures["answers"]) == (2, 4)
    assert (figures["tokens"], figures["passes"]) == (2 * (4 + 20), 2 * (2 + 4))
    assert figures["tau"] == 4.0
    assert figures["tau_mean_over_prompts"] == 3.5
    assert figures["tau_legacy"] == round((5 / 1 + 22 / 3) / 2, 4)  # the mean over prompts
    assert figures["acceptance_by_depth"] == [1.0, round(8 / 12, 4), 1.0, 1.0]
    assert figures["tau_interval"] == [2.0, 5.0]


def test_speed_is_time_per_token_over_time_per_token(drafted, baseline):
    figures = report._figures(drafted, baseline, PASSED)
    plain, ours = 32 / 48, 10 / 48  # 4 + 4 + 20 + 20 tokens behind the first ones
    assert figures["speedup"] == round(plain / ours, 4)
    assert figures["plain_ms_per_token"] == round(1000 * plain, 3)
    assert figures["ms_per_token"] == round(1000 * ours, 3)
    assert figures["speedup_by_repeat"] == [round(16 / 5, 4), round(16 / 5, 4)]
    assert figures["time_shares"] == {"draft": 0.25, "verify": 0.5, "bookkeeping": 0.25}


def test_speed_does_not_reward_shorter_answers():
    """At T > 0 the two methods' answers differ in length: seconds alone would be no fair measure."""
    drafted, baseline = records("draft", [generation(11, 5.0, [(0, 10)])]), records(PLAIN, [generation(41, 20.0)])
    figures = report._figures(drafted, baseline, Gate(1.0, drawn=True, checked=1, rounds=1, places=EVEN))
    assert figures["speedup"] == 1.0
    assert figures["speedup_interval"] is None


def test_an_answer_that_ended_with_its_first_token_counts_for_no_pass(baseline):
    drafted = records("draft", [generation(1, 0.1)] * 2, [generation(21, 4.0, [(4, 5)] * 4)] * 2)
    figures = report._figures(drafted, baseline, PASSED)
    assert (figures["tau"], figures["tau_mean_over_prompts"], figures["answers"]) == (5.0, 5.0, 4)


@pytest.mark.parametrize(
    "gate",
    [
        FAILED,
        Gate(0.0),
        Gate(1.0),
        Gate(1.0, checked=4, identical=4),
        Gate(1.0, drawn=True, checked=4, rounds=2, places=[0.1] * 40),
        Gate(1.0, checked=4, identical=3, rounds=2),
        Gate(1.0, checked=4, identical=4, rounds=2, largest_drift=0.1),
    ],
    ids=[
        "answers differ",
        "nothing compared",
        "nothing decoded",
        "no round",
        "places are not uniform",
        "sampled answers differ",
        "drift",
    ],
)
def test_no_speed_is_given_where_the_gate_failed(drafted, baseline, gate):
    figures = report._figures(drafted, baseline, gate)
    assert figures["gate"]["passed"] is False
    assert figures["speedup"] is None
    assert not {"speedup_interval", "speedup_by_repeat", "plain_ms_per_token", "ms_per_token"} & set(figures)
    assert figures["tau"] == 4.0


@pytest.mark.parametrize(
    "gate",
    [
        PASSED,
        Gate(0.0, checked=4, identical=3, near_ties=1),
        Gate(1.0, drawn=True, checked=4, rounds=2, places=EVEN),
        Gate(1.0, checked=4, identical=4, rounds=2),
    ],
    ids=["identical", "near tie", "within rounding", "identical with the same numbers"],
)
def test_a_speed_is_given_where_the_gate_passed(drafted, baseline, gate):
    assert report._figures(drafted, baseline, gate)["speedup"] == 3.2


def results_of(drafted, baseline, gate) -> list[dict]:
    return report.results([*drafted, *baseline], {("bench", "draft", 0.0): gate})


def test_results_have_one_entry_a_draft_and_none_for_plain_decoding(drafted, baseline):
    entries = results_of(drafted, baseline, PASSED)
    assert [(e["benchmark"], e["temperature"], e["draft"], e["speedup"]) for e in entries] == [
        ("bench", 0.0, "draft", 3.2)
    ]
    assert report.lossless(entries)
    json.dumps(entries, allow_nan=False)


def test_the_table_shows_speed_and_proof(drafted, baseline):
    line = report.table(results_of(drafted, baseline, PASSED)).splitlines()[-1]
    assert line.startswith("| bench | 0 | draft | 2 | 4.00 [2.00, 5.00] | 3.20 [")
    assert "]x | 208.3, 666.7 | 4 of 4 identical | " in line
    assert line.endswith("| 6.17 |")


def test_answers_in_circles_are_counted_and_the_others_have_figures_of_their_own(drafted, baseline):
    """The same answers on both sides, by plain decoding's."""
    circle = replace(generation(41, 40.0), tokens=[1, 2] * 20 + [1])
    copied = replace(generation(41, 10.0, [(9, 10)] * 4), tokens=circle.tokens)
    more, less = records("draft", *[[copied]] * 3)[2:], records(PLAIN, *[[circle]] * 3)[2:]
    (entry,) = results_of([*drafted, *more], [*baseline, *less], PASSED)
    (alone,) = results_of(drafted, baseline, PASSED)
    assert (entry["answers"], entry["answers_in_circles"], entry["tau"] > 4) == (5, 1, True)
    keys = ("tau", "tau_interval", "speedup", "speedup_interval")
    assert entry["without_circles"] == {key: alone[key] for key in keys}
    assert alone["answers_in_circles"] == 0 and alone["without_circles"] is None
    lines = report.table([entry]).splitlines()
    assert lines[0].endswith("| answers in circles; without them |")
    assert lines[-1].endswith("| 1 of 5; tau 4.00, 3.20x |")


def test_the_table_withholds_speed_and_says_no_where_the_gate_failed(drafted, baseline):
    entries = results_of(drafted, baseline, FAILED)
    line = report.table(entries).splitlines()[-1]
    assert "| withheld | withheld | NO: 2 of 4 identical, 1 near ties |" in line
    assert not report.lossless(entries)


def test_one_failed_gate_is_enough_to_call_the_report_lossy(drafted, baseline):
    entries = results_of(drafted, baseline, PASSED) + results_of(drafted, baseline, FAILED)
    assert not report.lossless(entries)
