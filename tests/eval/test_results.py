"""Views of result rows: the table of several runs, differences on the same prompts, and verdicts by hand."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from eval import results
from eval.results import read, table
from eval.studies.differences import compared, differences
from pipeline.artifacts.reports import ROWS, Row, put_rows, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sealed_lines
from tests.kit import call, replace_once

# -- the table ---------------------------------------------------------------------------------------------------------


def two(
    benchmark: str, method: str, speedup: float | None, tau: float, run: str, temperature: float = 0.0
) -> list[Row]:
    bounds = speedup and [speedup - 0.1, speedup + 0.1]
    what = {"benchmark": benchmark, "temperature": temperature, "origin": {"run": run, "hardware": "one"}}
    speed = Row("decoded", method, "speedup", speedup, interval=bounds, **what)
    return [Row("decoded", method, "tau", tau, interval=[tau - 0.2, tau + 0.2], **what), speed]


def written(folder: Path, *rows: list[Row]) -> Path:
    put_rows(folder / "eval", [row for some in rows for row in some])
    return folder


def test_lines_are_runs_and_methods_and_means_are_over_their_benchmarks(tmp_path):
    first = two("a", "jakiro", 2.0, 3.0, "7b"), two("b", "jakiro", 4.5, 4.0, "7b"), two("a", "eagle", 1.5, 2.0, "7b")
    runs = [written(tmp_path / "7b", *first), written(tmp_path / "13b", two("a", "jakiro", 2.5, 3.5, "13b", 1.0))]
    lines = table(read(runs)).splitlines()
    heads = "| T | method | a: tau | a: speedup | b: tau | b: speedup | mean: tau | mean: speedup |"
    assert lines[0] == heads
    assert (
        lines[2] == "| 0 | eagle, 7b | 2.00 [1.80, 2.20] | 1.50 [1.40, 1.60]x | - | - | - | - |"
    )  # not all benchmarks
    jakiro = "| 0 | jakiro, 7b | 3.00 [2.80, 3.20] | 2.00 [1.90, 2.10]x | 4.00 [3.80, 4.20] | 4.50 [4.40, 4.60]x noise"
    assert lines[3] == f"{jakiro} | 3.50 | 3.00x |"  # of speed-ups the geometric mean
    assert lines[4].startswith("| 1 | jakiro, 13b | 3.50 [3.30, 3.70] | 2.50 [2.40, 2.60]x | ")
    alone = table(read(runs), ["speedup"]).splitlines()
    assert "2.00 [1.90, 2.10]x | 4.50 [4.40, 4.60]x noise |" in alone[3]  # more than its tau of 4, shown or not
    assert lines[-1].startswith("Measured on: 7b: one; 13b: one.")


def test_a_withheld_speed_withholds_the_mean(tmp_path):
    run = written(tmp_path / "7b", two("a", "jakiro", None, 3.0, "7b"), two("b", "jakiro", 3.0, 4.0, "7b"))
    assert "| withheld | 4.00 [3.80, 4.20] | 3.00 [2.90, 3.10]x | 3.50 | - |" in table(read([run]))


def test_other_instruments_and_settings_stand_in_the_same_table(tmp_path, capsys):
    rates = [
        Row("trained", "eagle", "tau", tau, setting={"learning_rate": rate}) for rate, tau in ((1, 2.5), (2, 2.75))
    ]
    run = written(tmp_path / "sweep", rates)
    call(results.main, str(run), "--plot", str(tmp_path / "plot.png"))
    said = capsys.readouterr().out
    assert "|  | eagle, learning_rate 1 | 2.50 |" in said and "|  | eagle, learning_rate 2 | 2.75 |" in said
    assert (tmp_path / "plot.png").stat().st_size > 5000
    with pytest.raises(PipelineError, match="no figure 'speed' was measured: there are tau"):
        call(results.main, str(run), "--figure", "speed")


def test_an_instrument_replaces_its_own_rows_only(tmp_path):
    put_rows(tmp_path, [Row("decoded", "a", "tau", 1.0), Row("decoded", "b", "tau", 1.0), Row("read", "a", "MB", 1.0)])
    put_rows(tmp_path, [Row("decoded", "a", "tau", 2.0)])
    assert [(row.method, row.value) for row in read_rows(tmp_path)] == [("b", 1.0), ("a", 1.0), ("a", 2.0)]
    put_rows(tmp_path, [Row("decoded", "a", "tau", 3.0)], whole=True)
    assert [(row.instrument, row.value) for row in read_rows(tmp_path)] == [("read", 1.0), ("decoded", 3.0)]


def test_instruments_that_finish_together_keep_each_others_rows(tmp_path):
    names = [f"draft-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: put_rows(tmp_path, [Row("predicted", name, "tau", 1.0)]), names))
    assert sorted(row.method for row in read_rows(tmp_path)) == sorted(names)


def test_a_row_of_another_version_is_refused(tmp_path):
    row = {"instrument": "decoded", "method": "a", "figure": "tau", "value": 2.0}
    without = {key: value for key, value in row.items() if key != "figure"}
    wrong = (without, "figure: Field required"), (row | {"value": "2.0"}, "value"), (row | {"counts": 3}, "counts")
    for other, said in wrong:
        (tmp_path / ROWS).write_text(sealed_lines([row, other]))
        with pytest.raises(PipelineError, match=rf"results.jsonl: line 2, {said}.*It is of another version. Remove"):
            read_rows(tmp_path)


@pytest.mark.parametrize(
    ("key", "said"), [("hash_but_seed", "under another recipe"), ("code_revision", "by other code")]
)
def test_seeds_of_another_recipe_or_code_are_not_pooled(tmp_path, key, said):
    for seed, known in enumerate(("a", "a", "b")):
        written(tmp_path / f"all/seed-{seed}", [Row("replayed", "x", "tau", 2.0, origin={"run": "all", key: known})])
    with pytest.raises(PipelineError, match=f"x .replayed. was measured {said} in seed-2 .b. than in seed-0 .a."):
        read([tmp_path / "all"])
    written(tmp_path / "all/seed-2", [Row("replayed", "x", "tau", 2.0, origin={"run": "all", key: "a"})])
    assert len(read([tmp_path / "all"])) == 3


def test_a_changed_row_a_run_without_rows_and_two_of_one_name_are_refused(tmp_path):
    run = written(tmp_path / "one/x", two("a", "jakiro", 2.0, 3.0, "x"))
    with pytest.raises(PipelineError, match="two runs are called 'x'"):
        read([run, tmp_path / "other/x"])
    with pytest.raises(PipelineError, match="measure the run first"):
        read([tmp_path / "none"])
    replace_once(run / "eval" / ROWS, '"value": 3.0', '"value": 9.0')
    with pytest.raises(PipelineError, match=r"results.jsonl: line 1 was changed or damaged .* are kept"):
        read([run])


# -- differences -------------------------------------------------------------------------------------------------------


def counted(method: str, counts: dict, answers: dict[str, str] | None = None, **more) -> Row:
    told = answers or dict.fromkeys(counts, "same")
    found = {q: list(pair) for q, pair in counts.items()}
    return Row("decoded", method, "tau", 1.0, "set", 0.0, counts=found, answers=told, **more)


def test_tau_is_pooled_over_the_prompts_that_both_have():
    found = compared({"a": (12, 6), "b": (30, 10), "only": (99, 1)}, {"a": (12, 4), "b": (30, 8)})
    assert found["prompts"] == 2
    assert found["tau"] == [42 / 16, 42 / 12] and found["difference"] == 42 / 12 - 42 / 16
    low, high = found["interval"]
    assert low == pytest.approx(30 / 8 - 3, abs=1e-3) and high == pytest.approx(12 / 4 - 2, abs=1e-3)
    with pytest.raises(PipelineError, match="no prompt with the same plain answer in common"):
        compared({"a": (1, 1)}, {"b": (1, 1)})


def test_two_runs_differ_on_prompts_with_the_same_plain_answer_only(tmp_path, capsys):
    counts = {str(number): (20 + number, 10) for number in range(10)}
    answers = dict.fromkeys([*counts, "10", "11"], "same")
    one = written(tmp_path / "one", [counted("x", counts | {"10": (99, 1), "11": (9, 3)}, answers)])
    other = written(tmp_path / "other", [counted("x", counts | {"11": (9, 1)}, answers | {"11": "another"})])
    call(results.main, str(one), str(other), "--against", "one", "--plot", str(tmp_path / "plot.png"))
    said = capsys.readouterr().out.splitlines()
    found = json.loads(said[-1])["results"]
    assert [(row["method"], row["against"]) for row in found] == [("x, other", "x, one")]
    assert found[0]["difference"] == 0 and found[0]["interval"] == [0, 0] and found[0]["tau"] == [2.45, 2.45]
    assert (found[0]["prompts"], found[0]["left_out"]) == (10, 2)  # one decoded once, one answered otherwise
    assert said[2].endswith("| +0.000 [+0.000, +0.000], 2 prompts left out |")
    with pytest.raises(PipelineError, match="--against nobody: nothing to compare among x, one"):
        call(results.main, str(one), str(other), "--against", "nobody")


def test_a_method_may_have_a_reference_of_its_own(tmp_path, capsys):
    counts = {"a": (30, 10), "b": (20, 10)}
    run = written(tmp_path / "run", [counted(name, counts) for name in ("dense", "wide", "deep")])
    call(results.main, str(run), "--against", "dense", "deep:wide")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["means"]
    assert [(one["method"], one["against"]) for one in found] == [("wide", "dense"), ("deep", "wide")]


# -- the verdict over benchmarks, temperatures and seeds ---------------------------------------------------------------

PLACES = [("code", 0.0), ("code", 1.0), ("chat", 0.0)]


def runs(gains, prompts=40, spread=0, rounds=100):
    """A seed for each gain: over each prompt's rounds the new method emits 100 x gain tokens more than the old one's
    150, give or take `spread`.
    """
    rng, found = np.random.default_rng(0), {}
    for seed, gain in enumerate(gains):
        found[seed] = {}
        for place in PLACES:
            half = rng.integers(-spread, spread + 1, prompts // 2)
            more = gain * rounds + np.concatenate([half, -half])  # so that the mean is the gain
            found[seed][place, "old"] = counted("old", {f"q{n}": (150, rounds) for n in range(prompts)})
            found[seed][place, "new"] = counted("new", {f"q{n}": (150 + int(m), rounds) for n, m in enumerate(more)})
    return found


def judged(by_seed):
    return differences(by_seed, {"new": "old"}, 0.02)[1][0]


@pytest.mark.parametrize(
    ("gains", "spread", "verdict"),
    [
        ((0.02, 0.02, 0.02), 0, "pays"),
        ((0.01, 0.01, 0.01), 0, "does not pay"),  # above 0 and sure of it, but not worth it
        ((-0.05, -0.05, -0.05), 0, "does not pay"),
        ((0.08, 0.03, -0.01), 0, "undecided"),  # one seed says no
        ((0.03, 0.03, 0.03), 100, "undecided"),  # the interval holds 0
        ((0.0, 0.0, 0.0), 100, "undecided"),  # and 0.02
    ],
)
def test_the_verdict_follows_mean_interval_and_seeds(gains, spread, verdict):
    found = judged(runs(gains, spread=spread))
    assert found["verdict"] == verdict
    assert found["difference"] == pytest.approx(np.mean(gains), abs=1e-4)
    assert found["difference_by_seed"] == pytest.approx(gains, abs=1e-4)
    if not spread:
        assert found["interval"] == pytest.approx([np.mean(gains)] * 2, abs=1e-4)


def test_benchmarks_weigh_alike_however_many_rounds_they_have():
    found = runs((0.1,))
    many = {q: (10 * tokens, 10 * rounds) for q, (tokens, rounds) in found[0][PLACES[2], "old"].counts.items()}
    for name in ("old", "new"):  # no gain where most rounds are
        found[0][PLACES[2], name] = counted(name, many)
    assert judged(found)["difference"] == pytest.approx(0.2 / 3, abs=1e-4)


def test_the_interval_is_that_of_a_mean_of_independent_benchmarks():
    """Against theory: the mean of three cells, two of them of the same prompts, of 40 uniform draws each."""
    found = judged(runs((0.0,), spread=60))
    half = (found["interval"][1] - found["interval"][0]) / 2
    one = np.sqrt((121**2 - 1) / 12 / 40) / 100  # of one cell's mean
    assert half == pytest.approx(1.96 * one / np.sqrt(3), rel=0.15)
