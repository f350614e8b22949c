"""Two runs' drafts on the same prompts: the difference of their tau, with an interval over prompts.

    python -m eval.studies.compare RUN RUN [--draft NAME]

Reads eval/records.jsonl of both runs. Prompts are paired by id; only those count that both runs decoded and to which
the target's plain answers are the same in both (so it is the same prompt, length and target). Interval: 95% bootstrap
over pairs. Speeds of two processes are not compared. The last line is JSON.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from eval.measure.harness import PLAIN
from eval.measure.report import interval
from pipeline.artifacts.reports import REPORT
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed_lines
from pipeline.running import entry

Cell = tuple[str, float, str]  # benchmark, temperature, draft


Counts = dict[str, tuple[int, int]]  # by question: tokens emitted by verification passes, and the passes


def read_counts(run: Path) -> tuple[dict[Cell, Counts], dict[tuple, list[list[int]]]]:
    """``(counts by cell, plain answers by (benchmark, temperature, question))``"""
    path = run / "eval" / "records.jsonl"
    lines, damaged = read_sealed_lines(path)
    if damaged:
        raise PipelineError(
            f"{path}: line {damaged[0]} was changed or damaged after it was written. Remove {run / 'eval' / REPORT} "
            "and run python eval/main.py RECIPE again: it measures again what damaged lines held, and keeps the others"
        )
    if not lines:
        raise PipelineError(f"{path} holds no records: evaluate the run first (python eval/main.py RECIPE)")
    counts: dict[Cell, Counts] = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    answers: dict[tuple, list[list[int]]] = defaultdict(list)
    newest = [line for line in lines if line["key"] == lines[-1]["key"]]  # there may be lines of other settings before
    for line in newest:
        for record in line["outcome"]["records"]:
            place = record["benchmark"], record["temperature"], record["question_id"]
            if record["method"] == PLAIN:
                if record["repeat"] == 0:
                    answers[place].append(record["generation"]["tokens"])
                continue
            found = record["generation"]["acceptance"]
            cell = record["benchmark"], record["temperature"], record["method"]
            tokens, passes = counts[cell][record["question_id"]]
            counts[cell][record["question_id"]] = (tokens + found["tokens"], passes + found["passes"])
    return counts, answers


def compared(one: Counts, other: Counts) -> dict:
    """Both tau over the common prompts, and the second's less the first's with its interval."""
    common = sorted(key for key in one.keys() & other.keys() if one[key][1] and other[key][1])
    if not common:
        raise PipelineError(
            "the two runs have no prompt with the same plain answer in common: give both the same [eval]"
        )
    a, b, c, d = (np.array([run[key][place] for key in common], float) for run in (one, other) for place in (0, 1))

    def difference(a, b, c, d, axis):
        return c.sum(axis) / d.sum(axis) - a.sum(axis) / b.sum(axis)

    return {
        "prompts": len(common),
        "tau": [round(a.sum() / b.sum(), 4), round(c.sum() / d.sum(), 4)],
        "difference": round(float(difference(a, b, c, d, 0)), 4),
        "interval": interval(difference, a, b, c, d),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder, for instance runs/demo")
    parser.add_argument("--draft", help="only this one")
    arguments = parser.parse_args()
    (one, said), (other, said_too) = (read_counts(run) for run in arguments.runs)
    cells = sorted(cell for cell in one.keys() & other.keys() if arguments.draft in (None, cell[2]))
    if not cells:
        raise PipelineError("the two runs have no benchmark, temperature and draft in common")
    found = []
    for benchmark, temperature, draft in cells:
        cell = benchmark, temperature, draft
        same = {q for q in one[cell] if said[benchmark, temperature, q] == said_too[benchmark, temperature, q]}
        result = compared({q: one[cell][q] for q in same}, other[cell])
        result["left_out"] = len(one[cell].keys() | other[cell].keys()) - result["prompts"]
        found.append({"benchmark": benchmark, "temperature": temperature, "draft": draft, **result})
        between = "-" if result["interval"] is None else "[{:+.3f}, {:+.3f}]".format(*result["interval"])
        print(
            f"{benchmark:<12} T={temperature:g} {draft:<10} {result['prompts']:>4} prompts ({result['left_out']} left "
            f"out)  tau {result['tau'][0]:.3f} -> {result['tau'][1]:.3f}  difference {result['difference']:+.3f} "
            f"{between}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    entry.run(main)
