"""Two runs' records side by side."""

import json
import sys
from pathlib import Path

import pytest

from eval.studies.compare import compared, read_counts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sealed_line
from tests.kit import replace_once, run_warm


def write_records(run: Path, answers: list[tuple[str, str, int, int]]) -> Path:
    """`answers`: (method, question, tokens, passes)"""
    (run / "eval").mkdir(parents=True)
    lines = []
    for method, question, tokens, passes in answers:
        generation = {"tokens": [tokens], "acceptance": {"tokens": tokens, "passes": passes}}
        place = {"benchmark": "set", "question_id": question, "temperature": 0.0, "method": method, "repeat": 0}
        lines.append({"key": "k", "outcome": {"records": [place | {"generation": generation}]}})
    (run / "eval/records.jsonl").write_text("".join(map(sealed_line, lines)))
    return run


def test_tau_is_pooled_over_the_prompts_that_both_runs_have(tmp_path):
    one = write_records(
        tmp_path / "one",
        [("plain", "a", 0, 0), ("x", "a", 10, 5), ("x", "a", 2, 1), ("x", "b", 30, 10), ("x", "only", 99, 1)],
    )
    other = write_records(tmp_path / "other", [("x", "a", 12, 4), ("x", "b", 30, 8)])
    cell = ("set", 0.0, "x")
    counts, _ = read_counts(one)
    assert counts.keys() == {cell}
    found = compared(counts[cell], read_counts(other)[0][cell])
    assert found["prompts"] == 2
    assert found["tau"] == [42 / 16, 42 / 12] and found["difference"] == 42 / 12 - 42 / 16
    low, high = found["interval"]
    assert low == pytest.approx(30 / 8 - 3, abs=1e-3) and high == pytest.approx(12 / 4 - 2, abs=1e-3)


def test_equal_runs_differ_by_nothing(tmp_path):
    answers = [("x", str(number), 20 + number, 10) for number in range(10)]
    plain = [("plain", str(number), 7, 0) for number in range(12)]
    one = write_records(tmp_path / "one", [*plain, *answers, ("x", "10", 99, 1), ("x", "11", 9, 3)])
    other = write_records(tmp_path / "other", [*plain[:-1], ("plain", "11", 8, 0), *answers, ("x", "11", 9, 1)])
    done = run_warm([sys.executable, "-m", "eval.studies.compare", str(one), str(other)])
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures[0]["difference"] == 0 and figures[0]["interval"] == [0, 0]
    assert "10 prompts (2 left out)  tau 2.450 -> 2.450" in done.stdout  # one decoded once, one answered otherwise


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = write_records(tmp_path / "one", [("x", "a", 1, 1)])
    other = write_records(tmp_path / "other", [("x", "b", 1, 1)])
    cell = ("set", 0.0, "x")
    with pytest.raises(PipelineError, match="no prompt with the same plain answer in common"):
        compared(read_counts(one)[0][cell], read_counts(other)[0][cell])
    with pytest.raises(PipelineError, match="evaluate the run first"):
        read_counts(tmp_path / "none")


def test_a_changed_count_is_refused_and_a_torn_last_line_is_not_there(tmp_path):
    run = write_records(tmp_path / "one", [("x", "a", 10, 5), ("x", "b", 20, 4)])
    records = run / "eval/records.jsonl"
    with records.open("a") as file:
        file.write('{"key": "k", "outc')
    assert read_counts(run)[0]["set", 0.0, "x"] == {"a": (10, 5), "b": (20, 4)}
    replace_once(records, '"tokens": 20', '"tokens": 90')
    with pytest.raises(
        PipelineError, match=r"records.jsonl: line 2 was changed or damaged .*eval/main.py RECIPE again"
    ):
        read_counts(run)
