"""Views of result rows: the table of several runs, differences on the same prompts, learning rates."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from eval import results
from eval.results import compare_taus, format_table, read_runs
from pipeline.artifacts import checkpoint
from pipeline.artifacts.reports import ROWS, ResultRow, read_rows, replace_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import format_sealed_lines
from pipeline.drafts import build
from pipeline.drafts.parts.layers import draft_shapes
from tests.kit import call, replace_once

# -- the table ---------------------------------------------------------------------------------------------------------


def two(
    benchmark: str, method: str, speedup: float | None, tau: float, run: str, temperature: float = 0.0
) -> list[ResultRow]:
    bounds = speedup and [speedup - 0.1, speedup + 0.1]
    place = {"benchmark": benchmark, "temperature": temperature, "origin": {"run": run, "hardware": "one"}}
    speed = ResultRow("decoded", method, "speedup", speedup, interval=bounds, **place)
    return [ResultRow("decoded", method, "tau", tau, interval=[tau - 0.2, tau + 0.2], **place), speed]


def written(folder: Path, *rows: list[ResultRow]) -> Path:
    replace_rows(folder / "eval", [row for group in rows for row in group])
    return folder


def test_lines_are_runs_and_methods_and_means_are_over_their_benchmarks(tmp_path):
    first = two("a", "jakiro", 2.0, 3.0, "7b"), two("b", "jakiro", 4.5, 4.0, "7b"), two("a", "eagle", 1.5, 2.0, "7b")
    runs = [written(tmp_path / "7b", *first), written(tmp_path / "13b", two("a", "jakiro", 2.5, 3.5, "13b", 1.0))]
    lines = format_table(read_runs(runs)).splitlines()
    heads = "| T | method | a: tau | a: speedup | b: tau | b: speedup | mean: tau | mean: speedup |"
    assert lines[0] == heads
    assert (
        lines[2] == "| 0 | eagle, 7b | 2.00 [1.80, 2.20] | 1.50 [1.40, 1.60]x | - | - | - | - |"
    )  # not all benchmarks
    jakiro = "| 0 | jakiro, 7b | 3.00 [2.80, 3.20] | 2.00 [1.90, 2.10]x | 4.00 [3.80, 4.20] | 4.50 [4.40, 4.60]x noise"
    assert lines[3] == f"{jakiro} | 3.50 | 3.00x |"  # of speed-ups the geometric mean
    assert lines[4].startswith("| 1 | jakiro, 13b | 3.50 [3.30, 3.70] | 2.50 [2.40, 2.60]x | ")
    alone = format_table(read_runs(runs), ["speedup"]).splitlines()
    assert "2.00 [1.90, 2.10]x | 4.50 [4.40, 4.60]x noise |" in alone[3]  # more than its tau of 4, shown or not
    assert lines[-1].startswith("Measured on: 7b: one; 13b: one.")


def test_a_withheld_speed_withholds_the_mean(tmp_path):
    run = written(tmp_path / "7b", two("a", "jakiro", None, 3.0, "7b"), two("b", "jakiro", 3.0, 4.0, "7b"))
    assert "| withheld | 4.00 [3.80, 4.20] | 3.00 [2.90, 3.10]x | 3.50 | - |" in format_table(read_runs([run]))


def test_other_instruments_and_settings_stand_in_the_same_table(tmp_path, capsys):
    levels = [
        ResultRow("served", "server", "tau", tau, setting={"at once": size}) for size, tau in ((1, 2.5), (2, 2.75))
    ]
    run = written(tmp_path / "run", levels)
    call(results.main, str(run), "--plot", str(tmp_path / "plot.png"))
    printed = capsys.readouterr().out
    assert "|  | server, at once 1 | 2.50 |" in printed and "|  | server, at once 2 | 2.75 |" in printed
    assert (tmp_path / "plot.png").stat().st_size > 5000
    with pytest.raises(PipelineError, match="no figure 'speed' was measured: there are tau"):
        call(results.main, str(run), "--figure", "speed")


def test_an_instrument_replaces_its_own_rows_only(tmp_path):
    replace_rows(
        tmp_path,
        [
            ResultRow("decoded", "a", "tau", 1.0),
            ResultRow("decoded", "b", "tau", 1.0),
            ResultRow("served", "a", "tau", 1.0),
        ],
    )
    replace_rows(tmp_path, [ResultRow("decoded", "a", "tau", 2.0)])
    assert [(row.method, row.value) for row in read_rows(tmp_path)] == [("b", 1.0), ("a", 1.0), ("a", 2.0)]
    replace_rows(tmp_path, [ResultRow("decoded", "a", "tau", 3.0)], all_methods=True)
    assert [(row.instrument, row.value) for row in read_rows(tmp_path)] == [("served", 1.0), ("decoded", 3.0)]


def test_instruments_that_finish_together_keep_each_others_rows(tmp_path):
    names = [f"draft-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: replace_rows(tmp_path, [ResultRow("predicted", name, "tau", 1.0)]), names))
    assert sorted(row.method for row in read_rows(tmp_path)) == sorted(names)


def test_a_row_of_another_version_is_refused(tmp_path):
    row = {"instrument": "decoded", "method": "a", "figure": "tau", "value": 2.0}
    without = {key: value for key, value in row.items() if key != "figure"}
    wrong = (without, "figure: Field required"), (row | {"value": "2.0"}, "value"), (row | {"counts": 3}, "counts")
    for changed_row, message in wrong:
        (tmp_path / ROWS).write_text(format_sealed_lines([row, changed_row]))
        with pytest.raises(PipelineError, match=rf"results.jsonl: line 2, {message}.*It is of another version. Remove"):
            read_rows(tmp_path)


def test_a_changed_row_a_run_without_rows_and_two_of_one_name_are_refused(tmp_path):
    run = written(tmp_path / "one/x", two("a", "jakiro", 2.0, 3.0, "x"))
    with pytest.raises(PipelineError, match="two runs are called 'x'"):
        read_runs([run, tmp_path / "other/x"])
    with pytest.raises(PipelineError, match="measure the run first"):
        read_runs([tmp_path / "none"])
    replace_once(run / "eval" / ROWS, '"value": 3.0', '"value": 9.0')
    with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged .* are kept"):
        read_runs([run])


# -- differences -------------------------------------------------------------------------------------------------------


def counted(method: str, counts: dict, benchmark: str = "set", temperature: float = 0.0, **more) -> ResultRow:
    answers = more.pop("answers", dict.fromkeys(counts, "same"))
    pairs = {q: list(pair) for q, pair in counts.items()}
    fields = {"counts": pairs, "answers": answers, "origin": {"run": more.pop("run", "run")}}
    return ResultRow("decoded", method, "tau", 1.0, benchmark, temperature, **fields)


def test_tau_is_pooled_over_the_prompts_that_both_have():
    old_row = counted("old", {"a": (12, 6), "b": (30, 10), "only": (99, 1)})
    [comparison] = compare_taus([old_row, counted("new", {"a": (12, 4), "b": (30, 8)})], "old")
    assert (comparison["method"], comparison["against"]) == ("new", "old")
    [cell] = comparison["cells"].values()
    assert cell["left_out"] == 1 and cell["difference"] == comparison["difference"] == 42 / 12 - 42 / 16
    assert cell["interval"] == pytest.approx([30 / 8 - 3, 12 / 4 - 2], abs=1e-3)
    with pytest.raises(PipelineError, match="new and old have no prompt with the same plain answer in common"):
        compare_taus([old_row, counted("new", {"c": (1, 1)})], "old")
    with pytest.raises(PipelineError, match="--against nobody: nothing to compare among old; new"):
        compare_taus([old_row, counted("new", {"a": (12, 4)})], "nobody")


def test_two_runs_differ_on_prompts_with_the_same_plain_answer_only(tmp_path, capsys):
    counts = {str(number): (20 + number, 10) for number in range(10)}
    answers = dict.fromkeys([*counts, "10", "11"], "same")
    first_run = written(tmp_path / "one", [counted("x", counts | {"10": (99, 1), "11": (9, 3)}, answers=answers)])
    answers |= {"11": "another"}
    second_run = written(tmp_path / "other", [counted("x", counts | {"11": (9, 1)}, answers=answers)])
    call(results.main, str(first_run), str(second_run), "--against", "one")
    lines = capsys.readouterr().out.splitlines()
    mean = "| x, other | x, one | +0.000 [+0.000, +0.000] |"
    assert lines[2:] == [f"{mean} +0.000 [+0.000, +0.000], 2 prompts left out |"]  # decoded once; answered otherwise


def test_benchmarks_weigh_alike_however_many_rounds_they_have():
    rows = []
    for number, (benchmark, temperature) in enumerate([("code", 0.0), ("code", 1.0), ("chat", 0.0)]):
        rounds = 10 ** (number + 1)
        old, new = (dict.fromkeys("abc", (tau * rounds, rounds)) for tau in (1.5, 1.6 if number < 2 else 1.5))
        rows += [counted("old", old, benchmark, temperature), counted("new", new, benchmark, temperature)]
    [comparison] = compare_taus(rows, "old")
    assert comparison["difference"] == pytest.approx(0.2 / 3) and comparison["interval"] == pytest.approx([0.2 / 3] * 2)


def test_the_interval_is_that_of_a_mean_of_independent_benchmarks():
    """The interval is compared with theory: the mean of three cells, two of them of the same prompts, of 40 uniform
    draws each.
    """
    rng, rows = np.random.default_rng(0), []
    for benchmark, temperature in [("code", 0.0), ("code", 1.0), ("chat", 0.0)]:
        half = rng.integers(-60, 61, 20)
        new = {f"q{n}": (150 + int(more), 100) for n, more in enumerate(np.concatenate([half, -half]))}
        old = counted("old", dict.fromkeys(new, (150, 100)), benchmark, temperature)
        rows += [old, counted("new", new, benchmark, temperature)]
    [comparison] = compare_taus(rows, "old")
    low, high = comparison["interval"]
    each = np.sqrt((121**2 - 1) / 12 / 40) / 100  # of one cell's mean
    assert (high - low) / 2 == pytest.approx(1.96 * each / np.sqrt(3), rel=0.15)


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_the_best_rate_of_equal_trainings_is_marked(tmp_path, tiny_recipe, loaded_target, embed_head, capsys):
    eagle = tiny_recipe.draft["eagle"]
    draft = build(eagle, draft_shapes(loaded_target.config))
    draft.bind(embed_head)
    train = tiny_recipe.train.model_copy(update={"learning_rate": 1e-3, "learning_rates": {"fast": 2e-3}})
    recipe = tiny_recipe.model_copy(update={"draft": {"eagle": eagle, "fast": eagle}, "train": train})
    slower = recipe.model_copy(update={"train": train.model_copy(update={"learning_rate": 5e-4})})
    longer = recipe.model_copy(update={"train": train.model_copy(update={"epochs": 9})})
    trainings = ((recipe, "eagle", 1.5), (recipe, "fast", 1.4), (slower, "eagle", 1.25), (longer, "eagle", 2.0))
    for number, (of, name, tau) in enumerate(trainings):
        training = {"validation": {"estimated_tau": tau, "next_agreement": 0.5}}
        checkpoint.save(tmp_path / f"{number}/drafts/{name}", draft, draft.state_dict(), of, name, training)
    call(results.main, *(str(tmp_path / str(number)) for number in range(4)), "--learning-rates")
    lines = [line.split(" | ", 1)[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [
        "eagle | 0.001 **best** | 1.500 | 0.500 | - |",
        "fast | 0.002 | 1.400 | 0.500 | - |",
        "eagle | 0.0005 | 1.250 | 0.500 | - |",
        "eagle | 0.001 | 2.000 | 0.500 | - |",  # of more epochs
    ]
    with pytest.raises(PipelineError, match="no draft that was trained there"):
        call(results.main, str(tmp_path), "--learning-rates")
