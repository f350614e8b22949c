"""The files kept of a run: every reader refuses a changed figure, and no file elsewhere is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eval import main as evaluation
from eval.measure.harness import EvalTask
from eval.measure.prompts import BenchmarkPrompt
from eval.measure.tasks import RECORDS, EvalJob
from pipeline.artifacts.reports import (
    REPORT,
    ROWS,
    ResultRow,
    digest_rows,
    measured_rows,
    read_report,
    read_tuned_trees,
    replace_rows,
    write_rows,
)
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from tests.kit import change_sealed, replace_once

REPORT_FIELDS = {
    "name": "run",
    "provenance": {"hardware": "one", "recipe_hash": "0"},
    "target": "T",
    "drafts": {},
    "rows": digest_rows([]),
    "table": "| a |",
    "plots": {"tau_and_speed.png": "0" * 64},
    "samples": [],
    "settings": {"dtype": "float32"},
    "target_identity": {},
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "eval").mkdir()
    write_sealed(tmp_path / "eval" / REPORT, REPORT_FIELDS)
    return tmp_path / "eval" / REPORT


def sealed(**values) -> Callable[[Path], None]:
    return lambda path: change_sealed(path, lambda raw: raw.update(values))


OLD = {"old": {"draft": "old", "tree": {"nodes": 8}}}  # as a version before wrote it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: replace_once(path, '"hardware": "one"', '"hardware": "a large GPU"'),
            " was changed or damaged .*jakiro eval RECIPE again",
        ),
        (lambda path: change_sealed(path, lambda raw: raw.pop("rows")), " has no 'rows'"),
        (sealed(drafts=OLD), ": old is not a method of this version .*run jakiro eval"),
        *(
            (sealed(plots={name: "0" * 64}), ": '.*' is not the name of a plot in its folder")
            for name in ("../../secret.png", "/etc/secret.png", "..", "", "report.json", "a/b.png")
        ),
    ],
)
def test_what_is_no_report_is_refused(path, change, message):
    assert read_report(path) == REPORT_FIELDS
    change(path)
    with pytest.raises(PipelineError, match=f"report.json{message}"):
        read_report(path)


def test_rows_that_are_not_those_of_the_report_are_refused(path):
    """Every reader of the table notices lines that were removed or cut off."""
    rows = [ResultRow("decoded", "draft", "tau", 2.5), ResultRow("decoded", "draft", "lossless", 0)]
    report = REPORT_FIELDS | {"rows": digest_rows(rows)}
    replace_rows(path.parent, [*rows, ResultRow("served", "draft", "tau", 1.0)])
    assert measured_rows(path.parent, report) == rows
    lines = (path.parent / ROWS).read_text().splitlines(keepends=True)
    for left in ([], lines[:2], lines[:3], [lines[0], *lines[2:]]):
        (path.parent / ROWS).write_text("".join(left))
        with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged .*Remove the file"):
            measured_rows(path.parent, report)
        with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged"):
            replace_rows(path.parent, [ResultRow("served", "draft", "tau", 2.0)])  # the loss is not made lasting
    write_rows(path.parent, rows[:1])
    with pytest.raises(PipelineError, match=r"results.jsonl does not hold the rows that report.json was written with"):
        measured_rows(path.parent, report)


def test_a_tuned_tree_that_was_changed_or_is_of_a_version_before_is_refused(tiny_recipe):
    path, tuned = tiny_recipe.paths.tuned, {"jakiro": {"method": tiny_recipe.methods["jakiro"].to_json()}}
    assert read_tuned_trees(path) == {}
    write_sealed(path, tuned)
    assert read_tuned_trees(path) == tuned
    nodes = tiny_recipe.tree("jakiro").nodes
    replace_once(path, f'"nodes": {nodes}', f'"nodes": {nodes + 1}')
    with pytest.raises(PipelineError, match=r"tuned.json was changed or damaged .*run jakiro tune RECIPE again"):
        read_tuned_trees(path)
    write_sealed(path, OLD)
    with pytest.raises(PipelineError, match=r"old is not a method of this version .*run jakiro tune"):
        read_tuned_trees(path)


def test_a_damaged_table_is_told_before_anything_is_decoded(tiny_recipe):
    tiny_recipe.paths.eval.mkdir(parents=True, exist_ok=True)
    (tiny_recipe.paths.eval / ROWS).write_text("{}\n")
    job = EvalJob(tiny_recipe, {}, {}, [EvalTask("bench", BenchmarkPrompt("one", "", ("hello",)), 0.0)], "key")
    with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged"):
        evaluation.measure(job)
    assert not (tiny_recipe.paths.eval / RECORDS).exists()
