"""Views of what was measured: a table of all methods of one or several runs, their differences, their learning rates.

    python -m eval.results RUN [RUN ...] [--figure tau speedup] [--instrument decoded] [--plot FILE]
    python -m eval.results RUN [RUN ...] --against NAME
    python -m eval.results RUN [RUN ...] --learning-rates

RUN is a run's folder. Every instrument writes its rows into results.jsonl of a run's eval folder; figures are copied
from there, never measured again. Shown are those of evaluation, where it was made, or of the named instruments:
decoded, predicted, served, pruned.

The table has a line for each temperature and method, a column for each benchmark and figure. A mean is given where a
line has every benchmark and no speed is withheld: of speed-ups the geometric one. A speed-up is noise where its
interval holds 1, or it exceeds tau.

With --against: tau of each method less that of NAME, a method of the same run, or less that of the same method in the
run NAME, on prompts to which the target's own answers are the same. The intervals, 95% by bootstrap over prompts, do
not hold the variance of the trainings: runs of several seeds show that. Speeds of two processes are not compared.

With --learning-rates: what the validation of each trained draft measured. Of trainings that differ in nothing but the
rate the best is marked: by tau, or by cross-entropy where the dump holds no calibration prompts.
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
from eval.measure.report import NOISE, USUAL, interval, is_noise, said
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.reports import ROWS, Row, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed
from pipeline.running import entry, markdown


def read(runs: list[Path]) -> list[Row]:
    """The rows of these folders; as a row's run the folder's name. Raises PipelineError for a folder without rows, and
    for two of one name: rows are told apart by it.
    """
    names, out = [run.resolve().name for run in runs], []
    if len(set(names)) < len(names):
        raise PipelineError(f"two runs are called {max(names, key=names.count)!r}: rename one of the folders")
    for run, name in zip(runs, names, strict=True):
        rows = read_rows(run / "eval")
        if not rows:
            raise PipelineError(f"{run} holds no eval/{ROWS}: measure the run first (jakiro eval RECIPE)")
        out += [replace(row, origin=row.origin | {"run": name}) for row in rows]
    return out


def chosen(rows: list[Row], instruments: list[str] | None) -> list[Row]:
    """The rows of these instruments; by default of evaluation, or all where it was not made."""
    known = {row.instrument for row in rows}
    wanted = set(instruments or {"decoded"} & known or known)
    if unknown := wanted - known:
        raise PipelineError(f"--instrument {unknown.pop()!r}: the runs have rows of {', '.join(sorted(known))}")
    return [row for row in rows if row.instrument in wanted]


Facts = tuple[tuple[str, str], ...]  # a measurement's method, and what else names it


def facts_of(rows: list[Row]) -> list[Facts]:
    """What tells each row's measurement from the others': its method, and of run, instrument and settings what is not
    the same in all.
    """
    facts: list[dict[str, str]] = []
    for row in rows:
        names = {"method": row.method, "run": row.origin["run"], "instrument": row.instrument}
        facts.append(names | {key: f"{key} {value}" for key, value in row.setting.items()})
    differ = {key for names in facts for key in names if len({other.get(key) for other in facts}) > 1}
    return [tuple((key, value) for key, value in names.items() if key in differ | {"method"}) for names in facts]


def named(facts: Facts) -> str:
    return ", ".join(dict(facts).values())


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: list[Row], figures: list[str] | None = None) -> str:
    """Markdown. `figures`: by default tau and speed-up, or all that there are."""
    known = list(dict.fromkeys(row.figure for row in rows))
    figures = figures or [name for name in USUAL if name in known] or known
    if missing := [name for name in figures if name not in known]:
        raise PipelineError(f"no figure {missing[0]!r} was measured: there are {', '.join(known)}")
    taus = {_place(row): row for row in rows if row.figure == "tau"}
    rows = [row for row in rows if row.figure in figures]
    lines: dict[tuple[float, str], dict[tuple[str, str], Row]] = {}
    for facts, row in zip(facts_of(rows), rows, strict=True):
        temperature = -1.0 if row.temperature is None else row.temperature
        lines.setdefault((temperature, named(facts)), {})[row.benchmark, row.figure] = row
    columns = list(dict.fromkeys((row.benchmark, figure) for row in rows for figure in figures))
    columns = [column for column in columns if any(column in line for line in lines.values())]
    several = [figure for figure in figures if sum(column[1] == figure for column in columns) > 1]
    heads = ["T", "method", *(f"{where}: {figure}" if where else figure for where, figure in columns)]
    cells = []
    for (temperature, name), line in sorted(lines.items(), key=lambda item: item[0]):
        shown = [_cell(line[column], taus) if column in line else "-" for column in columns]
        means = [_mean(figure, [line.get(column) for column in columns if column[1] == figure]) for figure in several]
        cells.append(["" if temperature < 0 else f"{temperature:g}", name, *shown, *means])
    where = "; ".join(dict.fromkeys(f"{row.origin['run']}: {row.origin.get('hardware', 'unknown')}" for row in rows))
    note = f"Measured on: {where}. Speeds of different hardware are not to be compared."
    return f"{markdown.table([*heads, *(f'mean: {figure}' for figure in several)], cells)}\n\n{note}"


def _place(row: Row) -> tuple:
    """What the figures of one measurement share."""
    where = json.dumps([row.setting, row.origin], sort_keys=True)
    return row.instrument, row.method, row.benchmark, row.temperature, where


def _cell(row: Row, taus: dict[tuple, Row]) -> str:
    noise = row.figure == "speedup" and is_noise(row, taus.get(_place(row)))
    return said(row.figure, row.value, row.interval) + NOISE * noise


def _mean(figure: str, rows: list[Row | None]) -> str:
    values = [row.value for row in rows if row and row.value is not None]
    if len(values) < len(rows):
        return "-"
    return said(figure, geometric_mean(values) if figure == "speedup" else fmean(values))


# -- differences -------------------------------------------------------------------------------------------------------

Cell = tuple[str, float]  # benchmark, temperature


def differences(rows: list[Row], against: str) -> list[dict[str, Any]]:
    """What is compared with what, the mean of its differences over benchmarks and temperatures, which weigh alike, and
    each of them. `against` stands in place of a measurement's method, or of its run.
    """
    tables: dict[Facts, dict[Cell, Row]] = {}
    rows = [row for row in rows if row.figure == "tau" and row.counts]
    for facts, row in zip(facts_of(rows), rows, strict=True):
        tables.setdefault(facts, {})[row.benchmark, row.temperature or 0.0] = row
    out = []
    for facts in tables:
        others = [tuple((dict(facts) | {key: against}).items()) for key in ("method", "run") if key in dict(facts)]
        for other in others:
            if other in tables and other != facts:
                names = {"method": named(facts), "against": named(other)}
                out.append(names | _compared(tables[other], tables[facts], " and ".join(names.values())))
    if not out:
        known = "; ".join(map(named, tables)) or "no rows"
        raise PipelineError(f"--against {against}: nothing to compare among {known}")
    return out


def _compared(theirs: dict[Cell, Row], mine: dict[Cell, Row], who: str) -> dict[str, Any]:
    cells = {cell: counts_of(theirs[cell], mine[cell]) for cell in mine if cell in theirs}
    if not cells or not all(counts.size for counts in cells.values()):
        raise PipelineError(f"{who} have no prompt with the same plain answer in common: give both the same [eval]")
    draws = [_difference(*counts[:, _drawn(cell[0], counts.shape[1])]) for cell, counts in cells.items()]
    out: dict[Cell, dict[str, Any]] = {}
    for cell, counts in cells.items():
        left = len(theirs[cell].counts.keys() | mine[cell].counts.keys()) - counts.shape[1]
        difference = float(_difference(*counts))
        out[cell] = {"difference": difference, "interval": interval(_difference, *counts), "left_out": left}
    mean = fmean(each["difference"] for each in out.values())
    return {"difference": mean, "interval": np.quantile(np.mean(draws, axis=0), [0.025, 0.975]), "cells": out}


def counts_of(theirs: Row, mine: Row) -> np.ndarray:
    """(4, prompts): tokens that verification passes emitted and these passes, theirs and mine, of each prompt to which
    the target's own answers are the same.
    """
    same = [q for q in theirs.counts if q in mine.counts and theirs.answers.get(q) == mine.answers.get(q)]
    same = [q for q in same if theirs.counts[q][1] and mine.counts[q][1]]
    return np.array([[*theirs.counts[q], *mine.counts[q]] for q in same], float).T


def _drawn(benchmark: str, prompts: int) -> np.ndarray:
    """(2000, prompts): prompts of bootstrap samples. They are the same for all temperatures of a benchmark."""
    rng = np.random.default_rng(zlib.crc32(benchmark.encode()))
    return rng.integers(prompts, size=(2000, prompts))


def _difference(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> np.ndarray:
    return c.sum(axis) / d.sum(axis) - a.sum(axis) / b.sum(axis)


def differences_table(results: list[dict[str, Any]]) -> str:
    """Markdown, a line for each pair: the mean difference, then one by one."""
    cells = list(dict.fromkeys(cell for result in results for cell in result["cells"]))
    heads = ["method", "against", "mean difference", *(f"{name}, T = {t:g}" for name, t in cells)]
    lines = []
    for result in results:
        each = [_difference_said(result["cells"][cell]) if cell in result["cells"] else "-" for cell in cells]
        lines.append([result["method"], result["against"], _difference_said(result), *each])
    return markdown.table(heads, lines)


def _difference_said(result: dict[str, Any]) -> str:
    bounds = "" if result["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*result["interval"])
    left = f", {result['left_out']} prompts left out" if result.get("left_out") else ""
    return f"{result['difference']:+.3f}{bounds}{left}"


# -- learning rates ----------------------------------------------------------------------------------------------------

VALIDATED = {"estimated_tau": "tau", "next_agreement": "top-1", "next_classification": "cross-entropy"}
RATES = dict.fromkeys(("learning_rate", "learning_rates"))


def learning_rates(runs: list[Path]) -> str:
    """Markdown: each trained draft's rate and validation, the best rate of equal trainings first."""
    alike: dict[str, list[tuple[str, float, Path, dict[str, float]]]] = {}
    for path in [path for run in runs for path in sorted(run.glob(f"drafts/*/{checkpoint.CONFIG}"))]:
        folder, saved = path.parent, checkpoint.read_config(path.parent)
        if (validation := saved.training.get("validation")) is None:
            continue  # it was trained elsewhere
        recipe = read_sealed(folder / RECIPE, checkpoint.UNREADABLE)
        train = recipe["train"]
        same = [recipe[section] for section in ("seed", "target", "data", "features")]
        same += [train | RATES, saved.config.to_json(), saved.tree.to_json()]
        rate = train["learning_rates"].get(folder.name, train["learning_rate"])
        alike.setdefault(json.dumps(same), []).append((folder.name, rate, folder.parents[1], validation))
    if not alike:
        raise PipelineError("the runs hold no draft that was trained there: jakiro run RECIPE --until train")
    lines = []
    for trainings in alike.values():
        trainings.sort(key=lambda training: _worth(training[3]), reverse=True)
        for number, (name, rate, run, validation) in enumerate(trainings):
            mark = " **best**" if number == 0 and len(trainings) > 1 else ""
            figures = [f"{validation[key]:.3f}" if key in validation else "-" for key in VALIDATED]
            lines.append([run, name, f"{rate:g}{mark}", *figures])
    return markdown.table(["run", "draft", "learning rate", *VALIDATED.values()], lines)


def _worth(validation: dict[str, float]) -> float:
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
        print(learning_rates(arguments.runs))
        return
    rows = chosen(read(arguments.runs), arguments.instrument)
    if arguments.against:
        print(differences_table(differences(rows, arguments.against)))
        return
    print(table(rows, arguments.figure))
    if arguments.plot:
        by_name = [(named(facts), row) for facts, row in zip(facts_of(rows), rows, strict=True)]
        print(f"plot: {plots.draw_rows(by_name, arguments.figure or USUAL, arguments.plot)}")


if __name__ == "__main__":
    entry.run(main)
