"""Figures are pooled counts with intervals over prompts, and no speed is reported for a draft that is not lossless."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from eval.measure import report
from eval.measure.gate import Gate
from eval.measure.harness import EAGER, PLAIN, Record
from pipeline.artifacts.reports import ResultRow
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.generate import Generation

# -- intervals -------------------------------------------------------------------------------------------------------


def mean(values, axis):
    return values.mean(axis)


def ratio(numerators, denominators, axis):
    return numerators.sum(axis) / denominators.sum(axis)


def test_the_interval_is_the_same_every_time_and_holds_the_statistic():
    sample = np.random.default_rng(1).normal(5, 1, 60)
    low, high = report.bootstrap_interval(mean, sample)
    assert [low, high] == report.bootstrap_interval(mean, sample)
    assert low < sample.mean() < high
    standard_error = sample.std(ddof=1) / math.sqrt(len(sample))
    assert abs((high - low) / (2 * 1.96 * standard_error) - 1) < 0.15
    assert (
        report.bootstrap_interval(mean, np.array([])) is None
        and report.bootstrap_interval(mean, np.array([1.0])) is None
    )


def test_the_interval_resamples_prompts_as_pairs():
    """Numerator and denominator of one prompt belong together: a constant ratio has no spread."""
    passes = np.arange(1.0, 30.0)
    assert report.bootstrap_interval(ratio, 3 * passes, passes) == [3.0, 3.0]


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


def rows(drafted, baseline, gate) -> list[ResultRow]:
    return report.build_rows([*drafted, *baseline], {("bench", "draft", 0.0): gate}, {"draft": {"run": "r"}})


def values(*measured) -> dict:
    """Return the values by figure."""
    return {row.figure: row.value for row in rows(*measured)}


def test_tau_is_pooled_over_all_answers(drafted, baseline):
    figure_rows = rows(drafted, baseline, PASSED)
    assert {(row.benchmark, row.temperature, row.method, row.origin["run"]) for row in figure_rows} == {
        ("bench", 0.0, "draft", "r")
    }
    tau = figure_rows[0]
    assert (tau.figure, tau.value, tau.interval) == ("tau", 4.0, [2.0, 5.0])
    assert (tau.details["prompts"], tau.details["answers"]) == (2, 4)
    assert (tau.details["tokens"], tau.details["passes"]) == (2 * (4 + 20), 2 * (2 + 4))
    figures = values(drafted, baseline, PASSED)
    assert figures["tau_legacy"] == round((5 / 1 + 22 / 3) / 2, 4)  # the mean over prompts
    assert [figures[f"accepted at depth {n}"] for n in range(1, 5)] == [1.0, round(8 / 12, 4), 1.0, 1.0]
    json.dumps([asdict(row) for row in figure_rows], allow_nan=False)


def test_speed_is_time_per_token_over_time_per_token(drafted, baseline):
    figures = values(drafted, baseline, PASSED)
    plain, drafted_time = 32 / 48, 10 / 48  # 4 + 4 + 20 + 20 tokens behind the first ones
    assert figures["speedup"] == round(plain / drafted_time, 4)
    assert figures["plain_ms_per_token"] == round(1000 * plain, 3)
    assert figures["ms_per_token"] == round(1000 * drafted_time, 3)


@pytest.mark.parametrize("eager_s", [1.0, 9.0])
def test_with_a_compiled_target_the_faster_plain_decoding_counts(drafted, baseline, eager_s):
    eager = [replace(r, method=EAGER, generation=replace(r.generation, seconds=eager_s)) for r in baseline]
    figures = {row.figure: row for row in rows(drafted, [*baseline, *eager], PASSED)}
    compiled_ms, eager_ms = round(1000 * 32 / 48, 3), round(1000 * 4 * eager_s / 48, 3)
    assert figures["plain_ms_per_token"].details == {"compiled": compiled_ms, "eager": eager_ms}
    assert figures["plain_ms_per_token"].value == min(compiled_ms, eager_ms)
    assert figures["speedup"].value == round(min(32, 4 * eager_s) / 10, 4)
    assert f"| 208.3, {compiled_ms:.1f} compiled, {eager_ms:.1f} eager |" in report.format_table(list(figures.values()))


def test_speed_does_not_reward_shorter_answers():
    """The two methods' answers differ in length at T > 0: seconds alone would be no fair measure."""
    drafted, baseline = records("draft", [generation(11, 5.0, [(0, 10)])]), records(PLAIN, [generation(41, 20.0)])
    figure_rows = rows(drafted, baseline, Gate(1.0, drawn=True, checked=1, rounds=1, places=EVEN))
    assert [(row.value, row.interval) for row in figure_rows if row.figure == "speedup"] == [(1.0, None)]


def test_an_answer_that_ended_with_its_first_token_counts_for_no_pass(baseline):
    drafted = records("draft", [generation(1, 0.1)] * 2, [generation(21, 4.0, [(4, 5)] * 4)] * 2)
    tau = rows(drafted, baseline, PASSED)[0]
    assert (tau.value, tau.details["answers"], tau.counts["q0"]) == (5.0, 4, [0, 0])


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
    figure_rows, figures = rows(drafted, baseline, gate), values(drafted, baseline, gate)
    assert figures["lossless"] == 0 and not report.is_lossless(figure_rows)
    assert figures["speedup"] is None and not [figure for figure in figures if "ms" in figure]
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
    figure_rows = rows(drafted, baseline, gate)
    assert values(drafted, baseline, gate)["speedup"] == 3.2 and report.is_lossless(figure_rows)


def test_rows_have_the_counts_of_tau_and_know_the_plain_answers(drafted, baseline):
    tau = rows(drafted, baseline, PASSED)[0]
    assert tau.counts == {"q0": [8, 4], "q1": [40, 8]} and tau.value == 48 / 12
    answers = [replace(record, generation=replace(record.generation, tokens=[7, 7])) for record in baseline[:2]]
    changed_row = rows(drafted, [*answers, *baseline[2:]], PASSED)[0]
    assert changed_row.answers["q0"] != tau.answers["q0"] and changed_row.answers["q1"] == tau.answers["q1"]


def test_the_table_shows_speed_and_proof(drafted, baseline):
    passed = rows(drafted, baseline, PASSED)
    line = report.format_table(passed).splitlines()[-1]
    assert line.startswith("| bench | 0 | draft | 2 | 4.00 [2.00, 5.00] | 3.20 [")
    assert "]x | 208.3, 666.7 | 4 of 4 identical | " in line
    assert line.endswith("| 6.17 |")
    failed = [replace(row, method="other") for row in rows(drafted, baseline, FAILED)]
    line = report.format_table([*passed, *failed]).splitlines()[-1]
    assert "| withheld | withheld | NO: 2 of 4 identical, 1 near ties |" in line
    assert not report.is_lossless([*passed, *failed])  # one failed gate is enough


def test_a_speed_up_that_proves_nothing_is_marked_as_noise(drafted, baseline):
    figure_rows = rows(drafted, baseline, PASSED)
    for value, bounds, noise in (
        (1.36, [0.69, 2.38], True),  # its interval holds 1
        (0.9, [0.8, 1.0], True),
        (0.9, [0.8, 0.95], False),  # it is slower
        (1.36, [1.2, 1.5], False),
        (4.01, [3.9, 4.1], True),  # tau is 4
        (4.0, [3.9, 4.1], False),
        (1.36, None, True),  # of one prompt
        (None, None, False),
    ):
        changed = [
            replace(row, value=value, interval=bounds) if row.figure == "speedup" else row for row in figure_rows
        ]
        for table in (report.format_table, report.format_summary):
            assert ("x noise " in table(changed).splitlines()[-1]) == noise, (value, bounds)
        assert ("x noise |" in report.format_headline(report.group_by_place(changed))) == noise
        assert report.has_noise(report.group_by_place(changed).values()) == noise


def test_the_summary_fits_a_terminal_and_loses_no_letter(drafted, baseline):
    names = ("jakiro-with-prompt-lookup-and-more-tuned", "x" * 90)
    wide = {"benchmark": "natural-questions-2048", "interval": [11.111, 22.222]}
    figure_rows = rows(drafted, baseline, PASSED)
    table = report.format_summary([replace(row, method=name, **wide) for name in names for row in figure_rows])
    lines = table.splitlines()
    assert {len(line) for line in lines} == {100}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    joined = ["".join(column) for column in zip(*cells[2:], strict=True)]
    assert joined[2] == "".join(names) and joined[0] == 2 * "natural-questions-2048"
    narrow = report.format_summary(figure_rows).splitlines()
    assert len(narrow) == 3 and narrow[2].startswith("| bench     | 0 | draft  | 4.00 [2.00, 5.00] | 3.20 [")


def test_answers_in_circles_are_counted_and_the_others_have_figures_of_their_own(drafted, baseline):
    """The same answers on both sides, by plain decoding's."""
    circle = replace(generation(41, 40.0), tokens=[1, 2] * 20 + [1])
    copied = replace(generation(41, 10.0, [(9, 10)] * 4), tokens=circle.tokens)
    more, less = records("draft", *[[copied]] * 3)[2:], records(PLAIN, *[[circle]] * 3)[2:]
    figure_rows, alone = rows([*drafted, *more], [*baseline, *less], PASSED), rows(drafted, baseline, PASSED)
    tau = figure_rows[0]
    assert (tau.details["answers"], tau.details["answers_in_circles"], tau.value > 4) == (5, 1, True)
    assert [(row.figure, row.value, row.interval) for row in figure_rows if "circles" in row.figure] == [
        (f"{row.figure} without circles", row.value, row.interval) for row in alone if row.figure in ("tau", "speedup")
    ]
    assert alone[0].details["answers_in_circles"] == 0
    assert not [row for row in alone if "circles" in row.figure]
    lines = report.format_table(figure_rows).splitlines()
    assert lines[0].endswith("| answers in circles; without them |")
    assert lines[-1].endswith("| 1 of 5; tau 4.00, 3.20x |")
