"""The paper's Table 1 over one or several runs: targets x methods x benchmarks, speed-up and tau, and their mean.

    python -m eval.studies.table RUN [RUN ...] --out FOLDER

Reads eval/report.json of each run and writes table.json, table.md and table.png. A figure is copied, never recomputed;
a mean is given where the row has every benchmark of the table and no speed was withheld by the losslessness gate.
"""

import argparse
from pathlib import Path
from typing import Any

from eval.measure import plots
from eval.measure.report import speed_said, tau_said
from pipeline.artifacts.reports import REPORT, read_report
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json, write_text
from pipeline.running import entry
from pipeline.running.markdown import table as markdown_of


def rows_of(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a target, method and temperature: its cells by benchmark, and the means over them."""
    rows: dict[tuple[str, float, str], dict[str, Any]] = {}
    for report in reports:
        for entry_ in report["results"]:
            place = report["name"], entry_["temperature"], entry_["draft"]
            row = rows.setdefault(
                place, dict(zip(("run", "temperature", "method"), place, strict=True)) | {"cells": {}}
            )
            row |= {"target": report["target"], "hardware": report["provenance"]["hardware"]}
            row["cells"][entry_["benchmark"]] = {
                key: entry_.get(key) for key in ("speedup", "speedup_interval", "tau", "tau_interval", "tau_legacy")
            }
    wanted = {name for row in rows.values() for name in row["cells"]}
    for row in rows.values():
        for key in ("speedup", "tau", "tau_legacy"):
            values = [row["cells"].get(name, {}).get(key) for name in sorted(wanted)]
            row[f"mean_{key}"] = None if None in values else round(sum(values) / len(values), 4)
    return sorted(rows.values(), key=lambda row: (row["temperature"], row["run"], row["method"]))


def _legacy(tau: float | None) -> str:
    return "-" if tau is None else f"{tau:.2f}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """As in the paper: a line a target and method, a pair of columns a benchmark; legacy tau in brackets behind
    ours.
    """
    benchmarks = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    head = ["T", "run", "target", "method"]
    head += [f"{name}: {what}" for name in (*benchmarks, "mean") for what in ("speed-up", "tau (legacy count)")]
    lines = []
    for row in rows:
        cells = [f"{row['temperature']:g}", row["run"], row["target"], row["method"]]
        for name in benchmarks:
            cell = row["cells"].get(name)
            if cell is None:
                cells += ["-", "-"]
                continue
            cells.append(speed_said(cell))
            cells.append(f"{tau_said(cell)} ({_legacy(cell['tau_legacy'])})")
        cells.append("-" if row["mean_speedup"] is None else f"{row['mean_speedup']:.2f}x")
        cells.append("-" if row["mean_tau"] is None else f"{row['mean_tau']:.2f} ({_legacy(row['mean_tau_legacy'])})")
        lines.append(cells)
    where = dict.fromkeys(f"{row['run']}: {row['hardware']}" for row in rows)
    return "\n".join(
        [
            markdown_of(head, lines),
            "",
            "Measured on: " + "; ".join(where) + ". Speeds of different hardware are not to be compared.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, for instance runs/demo")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    reports = [read_report(run / "eval" / REPORT) for run in arguments.runs]
    names = [report["name"] for report in reports]
    if len(set(names)) < len(names):
        raise PipelineError(
            f"two runs are called {max(names, key=names.count)!r}: a row is found by its run's name; rename one"
        )
    rows = rows_of(reports)
    write_json(arguments.out / "table.json", rows)
    write_text(arguments.out / "table.md", markdown(rows) + "\n")
    plots.draw_table(rows, arguments.out / "table.png")
    print(markdown(rows))


if __name__ == "__main__":
    entry.run(main)
