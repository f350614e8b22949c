"""Views of measured rows: a table of all methods of one or several runs, their differences, their learning rates.

    python -m eval.results RUN [RUN ...] [--figure tau speedup] [--instrument decoded] [--plot FILE]
    python -m eval.results RUN [RUN ...] --against NAME
    python -m eval.results RUN [RUN ...] --learning-rates

RUN is a run's folder. Every instrument writes its rows into results.jsonl of a run's eval folder; figures are copied
from there, never measured again. Shown are those of evaluation, if the run was evaluated, or of the named instruments:
decoded, predicted, served, pruned.

The table has a line for each temperature and method, a column for each benchmark and figure. A mean is given if a line
has every benchmark and no speed is withheld: of speed-ups the geometric one. A speed-up is noise if its interval holds
1, or if it exceeds tau.

With --against: tau of each method less that of NAME, a method of the same run, or less that of the same method in the
run NAME, on prompts to which the target's own answers are the same. The intervals, 95% by bootstrap over prompts, do
not include the variance between trainings: runs of several seeds show that. Speeds of two processes are not compared.

With --learning-rates: the validation figures of each trained draft. Among trainings that differ only in the rate the
best one is marked: by tau, or by cross-entropy if the dump has no calibration prompts.
"""

import argparse
import json
import math
import zlib
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from eval.measure import plots
from eval.measure.report import MAIN_FIGURES, NOISE, bootstrap_interval, format_figure, is_noise
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.reports import ROWS, ResultRow, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed
from pipeline.running import entry, markdown


def read_runs(runs: list[Path]) -> list[ResultRow]:
    """Return the rows of these folders; a row's run is the folder's name. Raise PipelineError for a folder without
    rows, and for two folders of one name, since rows are distinguished by it.
    """
    names, rows_of_runs = [run.resolve().name for run in runs], []
    if len(set(names)) < len(names):
        raise PipelineError(f"two runs are called {max(names, key=names.count)!r}: rename one of the folders")
    for run, name in zip(runs, names, strict=True):
        rows = read_rows(run / "eval")
        if not rows:
            raise PipelineError(f"{run} holds no eval/{ROWS}: measure the run first (jakiro eval RECIPE)")
        rows_of_runs += [replace(row, origin=row.origin | {"run": name}) for row in rows]
    return rows_of_runs


def select_instruments(rows: list[ResultRow], instruments: list[str] | None) -> list[ResultRow]:
    """Return the rows of these instruments; by default those of evaluation, or all if nothing was evaluated."""
    available = {row.instrument for row in rows}
    selected = set(instruments or {"decoded"} & available or available)
    if unknown := selected - available:
        raise PipelineError(f"--instrument {unknown.pop()!r}: the runs have rows of {', '.join(sorted(available))}")
    return [row for row in rows if row.instrument in selected]


Facts = tuple[tuple[str, str], ...]  # a measurement's method, and what else identifies it


def identify_measurements(rows: list[ResultRow]) -> list[Facts]:
    """Return what distinguishes each row's measurement from the others: its method, and those of run, instrument and
    settings that differ between rows.
    """
    facts: list[dict[str, str]] = []
    for row in rows:
        names = {"method": row.method, "run": row.origin["run"], "instrument": row.instrument}
        facts.append(names | {key: f"{key} {value}" for key, value in row.setting.items()})
    differing = {key for names in facts for key in names if len({second.get(key) for second in facts}) > 1}
    return [tuple((key, value) for key, value in names.items() if key in differing | {"method"}) for names in facts]


def format_facts(facts: Facts) -> str:
    return ", ".join(dict(facts).values())


# -- the table ---------------------------------------------------------------------------------------------------------


def format_table(rows: list[ResultRow], figures: list[str] | None = None) -> str:
    """Return the rows as a Markdown table. `figures` are by default tau and speed-up, or all if there are neither."""
    available = list(dict.fromkeys(row.figure for row in rows))
    figures = figures or [name for name in MAIN_FIGURES if name in available] or available
    if missing := [name for name in figures if name not in available]:
        raise PipelineError(f"no figure {missing[0]!r} was measured: there are {', '.join(available)}")
    taus = {_measurement_key(row): row for row in rows if row.figure == "tau"}
    rows = [row for row in rows if row.figure in figures]
    lines: dict[tuple[float, str], dict[tuple[str, str], ResultRow]] = {}
    for facts, row in zip(identify_measurements(rows), rows, strict=True):
        temperature = -1.0 if row.temperature is None else row.temperature
        lines.setdefault((temperature, format_facts(facts)), {})[row.benchmark, row.figure] = row
    columns = list(dict.fromkeys((row.benchmark, figure) for row in rows for figure in figures))
    columns = [column for column in columns if any(column in line for line in lines.values())]
    repeated = [figure for figure in figures if sum(column[1] == figure for column in columns) > 1]
    heads = ["T", "method", *(f"{place}: {figure}" if place else figure for place, figure in columns)]
    cells = []
    for (temperature, name), line in sorted(lines.items(), key=lambda item: item[0]):
        shown = [_format_cell(line[column], taus) if column in line else "-" for column in columns]
        means = [
            _format_mean(figure, [line.get(column) for column in columns if column[1] == figure]) for figure in repeated
        ]
        cells.append(["" if temperature < 0 else f"{temperature:g}", name, *shown, *means])
    place = "; ".join(dict.fromkeys(f"{row.origin['run']}: {row.origin.get('hardware', 'unknown')}" for row in rows))
    note = f"Measured on: {place}. Speeds of different hardware are not to be compared."
    return f"{markdown.format_table([*heads, *(f'mean: {figure}' for figure in repeated)], cells)}\n\n{note}"


def _measurement_key(row: ResultRow) -> tuple:
    """Return what the figures of one measurement have in common."""
    where = json.dumps([row.setting, row.origin], sort_keys=True)
    return row.instrument, row.method, row.benchmark, row.temperature, where


def _format_cell(row: ResultRow, taus: dict[tuple, ResultRow]) -> str:
    noise = row.figure == "speedup" and is_noise(row, taus.get(_measurement_key(row)))
    return format_figure(row.figure, row.value, row.interval) + NOISE * noise


def _format_mean(figure: str, rows: list[ResultRow | None]) -> str:
    values = [row.value for row in rows if row and row.value is not None]
    if len(values) < len(rows):
        return "-"
    return format_figure(figure, geometric_mean(values) if figure == "speedup" else fmean(values))


# -- differences -------------------------------------------------------------------------------------------------------

Cell = tuple[str, float]  # benchmark, temperature


def compare_taus(rows: list[ResultRow], against: str) -> list[dict[str, Any]]:
    """Return for each pair of measurements their names, the mean of their differences over benchmarks and temperatures
    with equal weights, and each difference. `against` replaces a measurement's method, or its run.
    """
    tables: dict[Facts, dict[Cell, ResultRow]] = {}
    rows = [row for row in rows if row.figure == "tau" and row.counts]
    for facts, row in zip(identify_measurements(rows), rows, strict=True):
        tables.setdefault(facts, {})[row.benchmark, row.temperature or 0.0] = row
    comparisons = []
    for facts in tables:
        candidates = [tuple((dict(facts) | {key: against}).items()) for key in ("method", "run") if key in dict(facts)]
        for reference in candidates:
            if reference in tables and reference != facts:
                names = {"method": format_facts(facts), "against": format_facts(reference)}
                comparisons.append(
                    names | _compare_pair(tables[reference], tables[facts], " and ".join(names.values()))
                )
    if not comparisons:
        measured = "; ".join(map(format_facts, tables)) or "no rows"
        raise PipelineError(f"--against {against}: nothing to compare among {measured}")
    return comparisons


def _compare_pair(
    reference_rows: dict[Cell, ResultRow], compared_rows: dict[Cell, ResultRow], pair_name: str
) -> dict[str, Any]:
    cells = {
        cell: pair_counts(reference_rows[cell], compared_rows[cell]) for cell in compared_rows if cell in reference_rows
    }
    if not cells or not all(counts.size for counts in cells.values()):
        raise PipelineError(
            f"{pair_name} have no prompt with the same plain answer in common: give both the same [eval]"
        )
    draws = [_difference(*counts[:, _bootstrap_prompts(cell[0], counts.shape[1])]) for cell, counts in cells.items()]
    results: dict[Cell, dict[str, Any]] = {}
    for cell, counts in cells.items():
        left_out = len(reference_rows[cell].counts.keys() | compared_rows[cell].counts.keys()) - counts.shape[1]
        difference = float(_difference(*counts))
        results[cell] = {
            "difference": difference,
            "interval": bootstrap_interval(_difference, *counts),
            "left_out": left_out,
        }
    mean = fmean(each["difference"] for each in results.values())
    return {"difference": mean, "interval": np.quantile(np.mean(draws, axis=0), [0.025, 0.975]), "cells": results}


def pair_counts(reference: ResultRow, compared: ResultRow) -> np.ndarray:
    """Return (4, prompts): tokens that verification passes emitted and these passes, of the reference and of the
    compared row, for each prompt to which the target's own answers are the same.
    """
    shared = [
        q for q in reference.counts if q in compared.counts and reference.answers.get(q) == compared.answers.get(q)
    ]
    shared = [q for q in shared if reference.counts[q][1] and compared.counts[q][1]]
    return np.array([[*reference.counts[q], *compared.counts[q]] for q in shared], float).T


def _bootstrap_prompts(benchmark: str, prompts: int) -> np.ndarray:
    """Return (2000, prompts): prompts of bootstrap samples, the same for all temperatures of a benchmark."""
    rng = np.random.default_rng(zlib.crc32(benchmark.encode()))
    return rng.integers(prompts, size=(2000, prompts))


def _difference(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> np.ndarray:
    return c.sum(axis) / d.sum(axis) - a.sum(axis) / b.sum(axis)


def format_differences(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each pair: the mean difference, then one by one."""
    cells = list(dict.fromkeys(cell for result in results for cell in result["cells"]))
    heads = ["method", "against", "mean difference", *(f"{name}, T = {t:g}" for name, t in cells)]
    lines = []
    for result in results:
        differences = [_format_difference(result["cells"][cell]) if cell in result["cells"] else "-" for cell in cells]
        lines.append([result["method"], result["against"], _format_difference(result), *differences])
    return markdown.format_table(heads, lines)


def _format_difference(result: dict[str, Any]) -> str:
    bounds = "" if result["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*result["interval"])
    left_out = f", {result['left_out']} prompts left out" if result.get("left_out") else ""
    return f"{result['difference']:+.3f}{bounds}{left_out}"


# -- learning rates ----------------------------------------------------------------------------------------------------

VALIDATION_COLUMNS = {"estimated_tau": "tau", "next_agreement": "top-1", "next_classification": "cross-entropy"}
RATE_KEYS = dict.fromkeys(("learning_rate", "learning_rates"))


def format_learning_rates(runs: list[Path]) -> str:
    """Return a Markdown table of each trained draft's rate and validation, the best rate of equal trainings first."""
    groups: dict[str, list[tuple[str, float, Path, dict[str, float]]]] = {}
    for path in [path for run in runs for path in sorted(run.glob(f"drafts/*/{checkpoint.CONFIG}"))]:
        folder, saved = path.parent, checkpoint.read_config(path.parent)
        if (validation := saved.training.get("validation")) is None:
            continue  # not trained in this run
        recipe = read_sealed(folder / RECIPE, checkpoint.UNREADABLE)
        train = recipe["train"]
        group_key = [recipe[section] for section in ("seed", "target", "data", "features")]
        group_key += [train | RATE_KEYS, saved.config.to_json(), saved.tree.to_json()]
        rate = train["learning_rates"].get(folder.name, train["learning_rate"])
        groups.setdefault(json.dumps(group_key), []).append((folder.name, rate, folder.parents[1], validation))
    if not groups:
        raise PipelineError("the runs hold no draft that was trained there: jakiro run RECIPE --until train")
    lines = []
    for trainings in groups.values():
        trainings.sort(key=lambda training: _quality(training[3]), reverse=True)
        for number, (name, rate, run, validation) in enumerate(trainings):
            mark = " **best**" if number == 0 and len(trainings) > 1 else ""
            figures = [f"{validation[key]:.3f}" if key in validation else "-" for key in VALIDATION_COLUMNS]
            lines.append([run, name, f"{rate:g}{mark}", *figures])
    return markdown.format_table(["run", "draft", "learning rate", *VALIDATION_COLUMNS.values()], lines)


def _quality(validation: dict[str, float]) -> float:
    return validation.get("estimated_tau", -validation.get("next_classification", math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, for instance runs/demo")
    parser.add_argument("--figure", nargs="+", help="the columns; default: tau and speedup")
    parser.add_argument("--instrument", nargs="+", help="default: decoded, or all where there is none")
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--against", metavar="NAME", help="differences of tau to a method, or to a run")
    views.add_argument("--learning-rates", action="store_true", help="what each training's validation measured")
    views.add_argument("--plot", type=Path, metavar="FILE", help="the table as a picture")
    arguments = parser.parse_args()
    if arguments.learning_rates:
        print(format_learning_rates(arguments.runs))
        return
    rows = select_instruments(read_runs(arguments.runs), arguments.instrument)
    if arguments.against:
        print(format_differences(compare_taus(rows, arguments.against)))
        return
    print(format_table(rows, arguments.figure))
    if arguments.plot:
        named_rows = [(format_facts(facts), row) for facts, row in zip(identify_measurements(rows), rows, strict=True)]
        print(f"plot: {plots.draw_rows(named_rows, arguments.figure or MAIN_FIGURES, arguments.plot)}")


if __name__ == "__main__":
    entry.run(main)
