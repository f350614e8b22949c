"""Differences of tau between methods or runs on the same prompts: one by one, and over all benchmarks.

Prompts are paired by id; only those count to which the target's own answers are the same on both sides (so it is the
same prompt, length and target). Intervals are 95% bootstrap intervals over prompts; they do not hold the variance of
the trainings, so the difference by seed stands beside them. Speeds of two processes are not compared.
"""

from typing import Any

import numpy as np

from eval.measure.report import interval
from pipeline.artifacts.reports import Row
from pipeline.basics.errors import PipelineError

Counts = dict[str, tuple[int, int]]  # by prompt: tokens that verification passes emitted, and the passes
Cell = tuple[str, float]  # benchmark, temperature
Table = dict[str, dict[tuple[Cell, str], Row]]  # by seed: the rows of tau by cell and by the name of what was measured


def compared(one: Counts, other: Counts) -> dict[str, Any]:
    """Both tau over the common prompts, and the second's less the first's with its interval."""
    common = sorted(key for key in one.keys() & other.keys() if one[key][1] and other[key][1])
    if not common:
        raise PipelineError(
            "the two have no prompt with the same plain answer in common: give both the same target and [eval]"
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


def differences(table: Table, references: dict[str, str], worth: float) -> tuple[list[dict], list[dict]]:
    """``(one result a cell and name, one mean a name)``, of each name against its reference. `worth`: the smallest mean
    difference of tau that pays. Raises PipelineError where nothing is in common.
    """
    results, means = [], []
    for name, against in references.items():
        cells = list(dict.fromkeys(cell for rows in table.values() for cell, who in rows if who == name))
        pairs = [(cell, _pairs(table, cell, name, against)) for cell in cells]
        pairs = [(cell, found) for cell, found in pairs if found]
        if not pairs:
            raise PipelineError(f"{name} and {against} have no benchmark and temperature in common")
        if {len(found) for _, found in pairs} != {len(pairs[0][1])}:
            raise PipelineError(f"{name} and {against} do not have all benchmarks and temperatures with every seed")
        mine = [_result(cell, found, name, against) for cell, found in pairs]
        results += mine
        means.append(_mean(mine, [(cell[0], list(found.values())) for cell, found in pairs], worth))
    return results, means


def _pairs(table: Table, cell: Cell, name: str, against: str) -> dict[str, tuple[Counts, Counts, int]]:
    """By seed: the counts of the reference and of this, of prompts with the same answers; how many either has."""
    out = {}
    for seed, rows in table.items():
        if (cell, name) in rows and (cell, against) in rows:
            theirs, mine = rows[cell, against], rows[cell, name]
            same = {q for q in theirs.counts if theirs.answers.get(q) == mine.answers.get(q)} & mine.counts.keys()
            pair = [{q: (int(n), int(d)) for q, (n, d) in row.counts.items() if q in same} for row in (theirs, mine)]
            out[seed] = (*pair, len(theirs.counts.keys() | mine.counts.keys()))
    return out


def summed(by_seed: list[Counts]) -> Counts:
    """Over seeds, for prompts that all of them have."""
    common = set.intersection(*(set(counts) for counts in by_seed))
    return {key: tuple(int(x) for x in np.sum([counts[key] for counts in by_seed], axis=0)) for key in sorted(common)}


def _result(cell: Cell, pairs: dict[str, tuple[Counts, Counts, int]], name: str, against: str) -> dict[str, Any]:
    theirs, mine = ([pair[which] for pair in pairs.values()] for which in (0, 1))
    pooled = compared(summed(theirs), summed(mine))
    return {
        "benchmark": cell[0],
        "temperature": cell[1],
        "method": name,
        "against": against,
        "prompts": pooled["prompts"],
        "left_out": max(pair[2] for pair in pairs.values()) - pooled["prompts"],
        "seeds": list(pairs),
        "tau": pooled["tau"],
        "tau_by_seed": [round(sum(n for n, _ in one.values()) / sum(d for _, d in one.values()), 4) for one in mine],
        "difference": pooled["difference"],
        "interval": pooled["interval"],
        "difference_by_seed": [compared(a, b)["difference"] for a, b in zip(theirs, mine, strict=True)],
    }


def _mean(mine: list[dict], pairs: list[tuple[str, list[tuple[Counts, Counts, int]]]], worth: float) -> dict[str, Any]:
    """Results of one name together: benchmarks and temperatures weigh alike. The mean difference, that of each seed, a
    95% bootstrap interval over prompts (a benchmark's are drawn once for all its temperatures), and a verdict.
    """
    rng, drawn, draws = np.random.default_rng(0), {}, []
    for benchmark, by_seed in pairs:
        theirs, ours = (summed([pair[which] for pair in by_seed]) for which in (0, 1))
        prompts = sorted(key for key in theirs.keys() & ours.keys() if theirs[key][1] and ours[key][1])
        a, b, c, d = (np.array([of[key][which] for key in prompts]) for of in (theirs, ours) for which in (0, 1))
        if (benchmark, len(prompts)) not in drawn:
            drawn[benchmark, len(prompts)] = rng.integers(len(prompts), size=(2000, len(prompts)))
        index = drawn[benchmark, len(prompts)]
        draws.append(c[index].sum(1) / d[index].sum(1) - a[index].sum(1) / b[index].sum(1))
    low, high = np.quantile(np.mean(draws, axis=0), [0.025, 0.975])
    mean = np.mean([one["difference"] for one in mine])
    each = np.mean([one["difference_by_seed"] for one in mine], axis=0)
    pays = mean >= worth and low > 0 and (np.sign(each) == np.sign(mean)).all()
    return {
        "method": mine[0]["method"],
        "against": mine[0]["against"],
        "tau": round(float(np.mean([one["tau"][1] for one in mine])), 4),
        "difference": round(float(mean), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "difference_by_seed": [round(float(one), 4) for one in each],
        "verdict": "pays" if pays else "does not pay" if high < worth else "undecided",
    }
