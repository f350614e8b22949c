"""What is kept of a run: a changed figure is refused by whoever reads it, and no file elsewhere is named."""

import pytest

from eval import main as evaluation
from eval.measure.harness import EvalTask
from eval.measure.prompts import Prompt
from eval.measure.tasks import RECORDS, Job
from pipeline.artifacts.reports import (
    REPORT,
    ROWS,
    Row,
    digest_of,
    measured_rows,
    put_rows,
    read_report,
    read_tuned_trees,
    write_rows,
)
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from tests.kit import change_sealed, replace_once

FOUND = {
    "name": "run",
    "provenance": {"hardware": "one", "recipe_hash": "0"},
    "target": "T",
    "drafts": {},
    "rows": digest_of([]),
    "table": "| a |",
    "plots": {"tau_and_speed.png": "0" * 64},
    "samples": [],
    "settings": {"dtype": "float32"},
    "target_identity": {},
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "eval").mkdir()
    write_sealed(tmp_path / "eval" / REPORT, FOUND)
    return tmp_path / "eval" / REPORT


def test_a_report_comes_back(path):
    assert read_report(path) == FOUND


def test_a_changed_word_of_a_report_is_refused(path):
    replace_once(path, '"hardware": "one"', '"hardware": "a large GPU"')
    with pytest.raises(PipelineError, match=r"report.json was changed or damaged .*jakiro eval RECIPE again"):
        read_report(path)


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/secret.png", "..", "", "report.json", "a/b.png"])
def test_a_report_names_no_plot_elsewhere(path, name):
    change_sealed(path, lambda raw: raw.update(plots={name: "0" * 64}))
    with pytest.raises(PipelineError, match=r"report.json: '.*' is no name of a plot beside it"):
        read_report(path)


def test_a_report_without_its_parts_is_refused(path):
    change_sealed(path, lambda raw: raw.pop("rows"))
    with pytest.raises(PipelineError, match=r"report.json has no 'rows'"):
        read_report(path)


def test_rows_that_are_not_those_of_the_report_are_refused(path):
    """Lines that were removed or cut off are seen before, by whoever reads the table."""
    rows = [Row("decoded", "draft", "tau", 2.5), Row("decoded", "draft", "lossless", 0)]
    report = FOUND | {"rows": digest_of(rows)}
    put_rows(path.parent, [*rows, Row("served", "draft", "tau", 1.0)])
    assert measured_rows(path.parent, report) == rows
    lines = (path.parent / ROWS).read_text().splitlines(keepends=True)
    for left in ([], lines[:2], lines[:3], [lines[0], *lines[2:]]):
        (path.parent / ROWS).write_text("".join(left))
        with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged .*Remove the file"):
            measured_rows(path.parent, report)
        with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged"):
            put_rows(path.parent, [Row("served", "draft", "tau", 2.0)])  # the loss is not made lasting
    write_rows(path.parent, rows[:1])
    with pytest.raises(PipelineError, match=r"results.jsonl does not hold the rows that report.json was written with"):
        measured_rows(path.parent, report)


def test_a_changed_tuned_tree_is_refused(tiny_recipe):
    assert read_tuned_trees(tiny_recipe.paths.tuned) == {}
    tiny_recipe.paths.eval.mkdir(parents=True)
    tuned = {"jakiro": {"method": tiny_recipe.methods["jakiro"].to_json()}}
    write_sealed(tiny_recipe.paths.tuned, tuned)
    assert read_tuned_trees(tiny_recipe.paths.tuned) == tuned
    nodes = tiny_recipe.tree("jakiro").nodes
    replace_once(tiny_recipe.paths.tuned, f'"nodes": {nodes}', f'"nodes": {nodes + 1}')
    with pytest.raises(PipelineError, match=r"tuned.json was changed or damaged .*run jakiro tune RECIPE again"):
        read_tuned_trees(tiny_recipe.paths.tuned)


def test_files_of_a_version_before_are_refused_with_what_to_do(tiny_recipe, path):
    tiny_recipe.paths.eval.mkdir(parents=True, exist_ok=True)
    write_sealed(tiny_recipe.paths.tuned, {"jakiro": {"tree": {"nodes": 8}}})
    with pytest.raises(PipelineError, match=r"jakiro is no method of this version .*run jakiro tune"):
        read_tuned_trees(tiny_recipe.paths.tuned)
    change_sealed(path, lambda raw: raw["drafts"].update(old={"draft": "old", "tree": {"nodes": 8}}))
    with pytest.raises(PipelineError, match=r"old is no method of this version .*run jakiro eval"):
        read_report(path)


def test_a_damaged_table_is_told_before_anything_is_decoded(tiny_recipe):
    tiny_recipe.paths.eval.mkdir(parents=True, exist_ok=True)
    (tiny_recipe.paths.eval / ROWS).write_text("{}\n")
    job = Job(tiny_recipe, {}, {}, [EvalTask("bench", Prompt("one", "", ("hello",)), 0.0)], "key")
    with pytest.raises(PipelineError, match=r"results.jsonl was changed or damaged"):
        evaluation.measure(job)
    assert not (tiny_recipe.paths.eval / RECORDS).exists()
