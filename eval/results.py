"""Views of what was measured: a table of all methods of one or several runs, or their differences of tau.

    python -m eval.results RUN [RUN ...] [--figure tau speedup] [--instrument decoded] [--plot FILE]
    python -m eval.results RUN [RUN ...] --against NAME [METHOD:NAME ...] [--worth 0.02] [--plot FILE]

RUN is a run's folder or a folder of runs that differ in their seed (those of eval.studies.ablations). Every instrument
writes its rows into results.jsonl of a run's eval folder; figures are copied from there, never measured again. Shown
are those of evaluation, where it was made, or of the named instruments: decoded, replayed, predicted, trained, served,
pruned, read.

Without --against: a line for each temperature and method, a column for each benchmark and figure. A mean is given where
a line has every benchmark and no speed is withheld: of speed-ups the geometric one. Seeds are averaged. A speed-up is
noise where its interval holds 1, or it exceeds tau: of several seeds, in each.

With --against: tau of each method less that of NAME, a method or a RUN, on the same prompts; METHOD:NAME names another
reference for one method. Over all benchmarks and temperatures a method pays if the mean difference is at least --worth,
its interval excludes 0 and all seeds have its sign; it does not if the interval's upper end is below --worth; else the
runs do not decide. The last line is JSON.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from eval.measure import plots
from eval.measure.report import NOISE, USUAL, is_noise, said
from eval.studies.differences import Table, differences
from pipeline.artifacts.reports import ROWS, Row, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown


@dataclass(frozen=True)
class Found:
    """A row and the run that it was found in; `seed` names one of several runs in a folder."""

    run: str
    seed: str
    row: Row


def read(runs: list[Path]) -> list[Found]:
    """Raises PipelineError for a folder without rows, and for two of one name: rows are told apart by it."""
    names, out = [run.resolve().name for run in runs], []
    if len(set(names)) < len(names):
        raise PipelineError(f"two runs are called {max(names, key=names.count)!r}: rename one of the folders")
    for run, name in zip(runs, names, strict=True):
        tables = sorted(run.rglob(f"eval/{ROWS}"))
        if not tables:
            raise PipelineError(f"{run} holds no eval/{ROWS}: measure the run first (jakiro eval RECIPE)")
        found = [
            Found(name, table.parent.parent.relative_to(run).as_posix(), row)
            for table in tables
            for row in read_rows(table.parent)
        ]
        if len(of := {one.row.origin.get("run") for one in found}) > 1:
            raise PipelineError(f"{run} holds runs of several recipes ({', '.join(map(str, of))}): name each by itself")
        _require_one_origin(run, found)
        out += found
    return out


# Keys of rows' origins that seeds share, and what it means where they do not.
ORIGIN = {"hash_but_seed": "under another recipe", "code_revision": "by other code", "target": "on another target"}


def _require_one_origin(run: Path, found: list[Found]) -> None:
    """Raises PipelineError where seeds that would be pooled were measured under other recipes or by other code."""
    first: dict[str, Found] = {}
    for one in found:
        other = first.setdefault(json.dumps([one.row.instrument, one.row.method, one.row.setting]), one)
        for key, what in ORIGIN.items():
            mine, others = (had.row.origin.get(key) for had in (one, other))
            if one.seed != other.seed and mine != others:
                raise PipelineError(
                    f"{run}: {one.row.method} ({one.row.instrument}) was measured {what} in {one.seed} ({mine}) than "
                    f"in {other.seed} ({others}): measure one of them again, or move it away"
                )


def found_by(recipe: Recipe, rows: list[Row], seed: str = ".") -> list[Found]:
    """What was just measured, without what else lies in the run's folder."""
    return [Found(recipe.run_dir.resolve().name, seed, row) for row in rows]


def name_all(found: list[Found]) -> list[dict[str, str]]:
    """What tells each row's measurement from the others': its method, and of run, instrument, hardware and settings
    what is not the same in all.
    """
    facts = []
    for one in found:
        fact = {"method": one.row.method, "run": one.run, "instrument": one.row.instrument}
        fact |= {"hardware": str(one.row.origin.get("hardware", ""))}
        facts.append(fact | {key: f"{key} {value}" for key, value in one.row.setting.items()})
    differ = {key for fact in facts for key in fact if len({other.get(key) for other in facts}) > 1}
    return [{key: value for key, value in fact.items() if key in differ | {"method"}} for fact in facts]


def chosen(found: list[Found], instruments: list[str] | None) -> list[Found]:
    """The rows of these instruments; by default of evaluation, or all where it was not made."""
    known = {one.row.instrument for one in found}
    wanted = set(instruments or {"decoded"} & known or known)
    if unknown := wanted - known:
        raise PipelineError(f"--instrument {unknown.pop()!r}: the runs have rows of {', '.join(sorted(known))}")
    return [one for one in found if one.row.instrument in wanted]


def table(found: list[Found], figures: list[str] | None = None) -> str:
    """Markdown. `figures`: by default tau and speed-up, or all that there are."""
    known = list(dict.fromkeys(one.row.figure for one in found))
    figures = figures or [name for name in USUAL if name in known] or known
    if missing := [name for name in figures if name not in known]:
        raise PipelineError(f"no figure {missing[0]!r} was measured: there are {', '.join(known)}")
    taus = {_place(one): one.row for one in found if one.row.figure == "tau"}
    noise = {id(one.row) for one in found if one.row.figure == "speedup" and is_noise(one.row, taus.get(_place(one)))}
    found = [one for one in found if one.row.figure in figures]
    lines: dict[tuple[float, str], dict[tuple[str, str], list[Row]]] = {}
    for name, one in zip(name_all(found), found, strict=True):
        temperature = -1.0 if one.row.temperature is None else one.row.temperature
        line = lines.setdefault((temperature, ", ".join(name.values())), {})
        line.setdefault((one.row.benchmark, one.row.figure), []).append(one.row)
    columns = list(dict.fromkeys((one.row.benchmark, figure) for one in found for figure in figures))
    columns = [column for column in columns if any(column in line for line in lines.values())]
    several = [figure for figure in figures if sum(column[1] == figure for column in columns) > 1]
    heads = ["T", "method", *(f"{where}: {figure}" if where else figure for where, figure in columns)]
    rows = []
    for (temperature, name), line in sorted(lines.items(), key=lambda one: one[0]):
        values = {column: _over_seeds(line[column]) for column in columns if column in line}
        cells = [
            said(column[1], *values[column]) + NOISE * all(id(row) in noise for row in line[column])
            if column in values
            else "-"
            for column in columns
        ]
        means = [
            _mean(figure, [values.get(column, (None,))[0] for column in columns if column[1] == figure])
            for figure in several
        ]
        rows.append(["" if temperature < 0 else f"{temperature:g}", name, *cells, *means])
    where = "; ".join(dict.fromkeys(f"{one.run}: {one.row.origin.get('hardware', 'unknown')}" for one in found))
    note = f"Measured on: {where}. Speeds of different hardware are not to be compared."
    return f"{markdown.table([*heads, *(f'mean: {figure}' for figure in several)], rows)}\n\n{note}"


def _place(one: Found) -> tuple:
    """Return what the figures of one measurement share."""
    row = one.row
    where = json.dumps([row.setting, row.origin], sort_keys=True)
    return one.run, one.seed, row.instrument, row.method, row.benchmark, row.temperature, where


def _over_seeds(rows: list[Row]) -> tuple[float | None, list[float] | None]:
    if len(rows) == 1:
        return rows[0].value, rows[0].interval
    values = [row.value for row in rows if row.value is not None]
    return (fmean(values) if len(values) == len(rows) else None), None


def _mean(figure: str, values: list[float | None]) -> str:
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return "-"
    return said(figure, geometric_mean(given) if figure == "speedup" else fmean(given))


# -- differences -------------------------------------------------------------------------------------------------------


def taus(found: list[Found]) -> tuple[Table, dict[str, dict[str, str]]]:
    """The rows of tau that have counts, by seed, cell and name; and what each name consists of."""
    counted = [one for one in found if one.row.figure == "tau" and one.row.counts]
    out: Table = {}
    known = {}
    for facts, one in zip(name_all(counted), counted, strict=True):
        name = ", ".join(facts.values())
        known[name] = facts
        out.setdefault(one.seed, {})[(one.row.benchmark, one.row.temperature or 0.0), name] = one.row
    return out, known


def referred(known: dict[str, dict[str, str]], against: list[str]) -> dict[str, str]:
    """By name, the one that it is compared with: NAME in place of its method, or else of its run."""
    general = [one for one in against if ":" not in one]
    own = dict(one.split(":", 1) for one in against if ":" in one)
    names = {tuple(facts.items()): name for name, facts in known.items()}
    out = {}
    for name, facts in known.items():
        for other in [own[facts["method"]]] if facts["method"] in own else general:
            for key in ("method", "run"):
                reference = names.get(tuple((facts | {key: other} if key in facts else {}).items()))
                if reference and reference != name:
                    out[name] = reference
    if not out:
        raise PipelineError(f"--against {' '.join(against)}: nothing to compare among {', '.join(known) or 'no rows'}")
    return out


def difference_said(one: dict[str, Any]) -> str:
    bounds = "" if one["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*one["interval"])
    return f"{one['difference']:+.3f}{bounds}"


def differences_table(results: list[dict[str, Any]], means: list[dict[str, Any]]) -> str:
    """Markdown, a line a method: the mean difference (that of each seed) and the verdict, then one by one."""
    cells = list(dict.fromkeys((one["benchmark"], one["temperature"]) for one in results))
    heads = ["method", "against", "mean tau", "mean difference (by seed)", "verdict"]
    rows = []
    for mean in means:
        mine = {(one["benchmark"], one["temperature"]): one for one in results if one["method"] == mean["method"]}
        by_seed = ", ".join(f"{one:+.3f}" for one in mean["difference_by_seed"])
        row = [mean["method"], mean["against"], f"{mean['tau']:.3f}"]
        row += [f"{difference_said(mean)} ({by_seed})", mean["verdict"]]
        for cell in cells:
            one = mine.get(cell)
            left = f", {one['left_out']} prompts left out" if one and one["left_out"] else ""
            row.append(f"{difference_said(one)}{left}" if one else "-")
        rows.append(row)
    return markdown.table([*heads, *(f"{name}, T = {t:g}" for name, t in cells)], rows)


def compare(found: list[Found], against: list[str], worth: float, plot: Path | None) -> None:
    """Prints the differences, and draws them."""
    counted, known = taus(found)
    results, means = differences(counted, referred(known, against), worth)
    print(differences_table(results, means))
    if plot:
        print(f"plot: {plots.draw_differences(results, plot)}")
    print(json.dumps({"worth": worth, "means": means, "results": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, for instance runs/demo")
    parser.add_argument("--figure", nargs="+", help="the columns; default: tau and speedup")
    parser.add_argument("--instrument", nargs="+", help="default: decoded, or all where there is none")
    parser.add_argument("--against", nargs="+", metavar="NAME", help="a method or a run, or METHOD:NAME")
    parser.add_argument("--worth", type=float, default=0.02, help="of tau: less than this does not pay")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = chosen(read(arguments.runs), arguments.instrument)
    if arguments.against:
        compare(found, arguments.against, arguments.worth, arguments.plot)
        return
    print(table(found, arguments.figure))
    if arguments.plot:
        named = [(", ".join(name.values()), one.row) for name, one in zip(name_all(found), found, strict=True)]
        print(f"plot: {plots.draw_rows(named, arguments.figure or USUAL, arguments.plot)}")


if __name__ == "__main__":
    entry.run(main)
