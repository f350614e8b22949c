"""Two amounts of training side by side: what eval.studies.ablations found at each, run by run, and the slope between.

    python -m eval.studies.slope SMALLER/ablations.json LARGER/ablations.json --times 4

tau of a run is the mean over benchmarks and temperatures. The slope is the difference's gain for each factor e of data,
(D_larger - D_smaller) / log(times), by seed, with a 95% interval over seeds (Student's t); prompts are taken as given.
The last line is JSON.
"""

import argparse
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as students_t

from eval.studies.ablations import bracketed
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.running import entry, markdown


def slope(smaller: list[float], larger: list[float], times: float) -> tuple[float, list[float] | None]:
    """The mean over seeds, and its interval, which one seed does not have."""
    each = (np.array(larger) - np.array(smaller)) / log(times)
    if len(each) < 2:
        return float(each.mean()), None
    half = float(students_t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / len(each) ** 0.5)
    return float(each.mean()), [float(each.mean()) - half, float(each.mean()) + half]


def taus(found: dict[str, Any], method: str) -> list[float]:
    """By seed."""
    cells = [one["tau_by_seed"] for one in found["results"] if one["method"] == method]
    return [round(float(tau), 4) for tau in np.mean(cells, axis=0)]


def rows(smaller: dict[str, Any], larger: dict[str, Any], times: float) -> list[dict[str, Any]]:
    """One for each method of both. Raises PipelineError where they do not have the same cells, trees and seeds."""
    if any("results" not in found or "means" not in found for found in (smaller, larger)):
        raise PipelineError("expected two ablations.json, as eval.studies.ablations writes them")
    for what in ("benchmark", "temperature", "method", "against", "nodes", "draft_forwards", "seeds", "prompts"):
        one, other = ([result[what] for result in found["results"]] for found in (smaller, larger))
        if one != other:
            raise PipelineError(f"the two do not fit each other: {what} differs. Measure both with the same settings")
    out = []
    means = [{mean["method"]: mean for mean in found["means"]} for found in (smaller, larger)]
    for method in dict.fromkeys(result["method"] for result in larger["results"]):
        row: dict[str, Any] = {"method": method, "tau": [taus(found, method) for found in (smaller, larger)]}
        if method in means[1]:
            pair = [found[method] for found in means]
            row |= {"against": pair[1]["against"], "means": pair}
            row["slope"], row["interval"] = slope(*(mean["difference_by_seed"] for mean in pair), times)
        out.append(row)
    return out


def table(found: list[dict[str, Any]]) -> str:
    """Two lines a method, the smaller amount first."""
    lines = []
    for row in found:
        for place, amount in enumerate(("smaller", "larger")):
            by_seed = row["tau"][place]
            line = [row["method"] if not place else "", amount, _listed(by_seed, ""), f"{np.mean(by_seed):.3f}"]
            if "means" not in row:
                lines.append([*line, "", "", ""])
                continue
            mean = row["means"][place]
            by_seed = _listed(mean["difference_by_seed"])
            line += [f"{mean['difference']:+.3f}{bracketed(mean['interval'])} ({by_seed})", mean["verdict"]]
            lines.append([*line, f"{row['slope']:+.3f}{bracketed(row['interval'])}" if place else ""])
    head = ["method", "amount", "tau by seed", "tau", "difference (by seed)", "verdict", "slope for each factor e"]
    return markdown.table(head, lines)


def _listed(values: list[float], sign: str = "+") -> str:
    return ", ".join(f"{value:{sign}.3f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smaller", type=Path)
    parser.add_argument("larger", type=Path)
    parser.add_argument("--times", type=float, required=True, help="the larger amount's tokens over the smaller's")
    arguments = parser.parse_args()
    if not arguments.times > 1:
        parser.error(f"--times {arguments.times:g}: expected more than 1")
    found = rows(read_json(arguments.smaller), read_json(arguments.larger), arguments.times)
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    entry.run(main)
