"""Counts what the scores of sources are worth on the target's own answers, and how far that holds on other prompts.

A candidate counts as right where the target's text goes through it. Candidates of one source, at one depth and
temperature, are sorted by score into bins of at least `LEAST` nodes, most of which hold as many right ones: so there
are most points where chances are large. Their shares of right ones, made monotone, are a curve's points. Reliability is
counted crosswise: half of the prompts is predicted with curves from the other half.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import t as students_t

from pipeline.decoding.calibration import AcceptProbability, Calibration, Curve, levels
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Pool
from pipeline.decoding.replay import Together
from pipeline.decoding.sources import COPIED

LEAST, MOST = 50, 24  # nodes of a bin that makes a point of a curve; bins that all right ones would fill
SHOWN = 100  # nodes of a bin that reliability is shown for
GROUPS = 20  # of prompts, at most, that are left out in turn to see how far curves depend on them
CLOSE = 0.03  # a prediction this near to what was counted is called right
BINS = np.array([0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0001])  # of predicted chances

Level = tuple[str, str]  # source, level
Counted = dict[Level, tuple[np.ndarray, np.ndarray]]  # scores, and whether each candidate was right


@dataclass
class Answer:
    """One of the target's answers: what the sources propose along it, its temperature, whose prompt it answers, and
    whether it runs in circles.
    """

    text: Together
    temperature: float
    prompt: int
    circles: bool = False


def right(pool: Pool, following: list[int]) -> list[bool]:
    """Which candidates lie on the way of the text."""
    found = [True]
    for token, parent, depth in zip(pool.tokens, pool.parents, pool.depths(), strict=True):
        found.append(found[parent] and depth <= len(following) and token == following[depth - 1])
    return found[1:]


def count(text: Together, trees: list[TreeConfig]) -> Counted:
    """Every candidate once: of the draft in `trees`, of a level that several of these have in the first one, and of
    those beside it.
    """
    found: dict[Level, tuple[list[float], list[bool]]] = defaultdict(lambda: ([], []))
    named: dict[str, int] = {}
    for number, tree in enumerate(trees):
        for level in levels(tree):
            named.setdefault(level, number)
    for number, tree in enumerate(trees):
        wanted = [level if named[level] == number else None for level in levels(tree)]
        if any(wanted):
            for pool, following in zip(text.pools(tree), text.following, strict=True):
                _add(found, "draft", pool, following, wanted)
    for copied, following in zip(text.copied, text.following, strict=True):
        for name, pool in copied.items():
            _add(found, name, pool, following, levels(COPIED))
    return {key: (np.array(scores), np.array(hits)) for key, (scores, hits) in found.items()}


def _add(found: dict, source: str, pool: Pool, following: list[int], wanted: list[str | None]) -> None:
    """Where the text has ended nothing can be right or wrong: deeper candidates do not count."""
    for depth, score, hit in zip(pool.depths(), pool.scores, right(pool, following), strict=True):
        level = wanted[depth - 1]
        if level is not None and depth <= len(following):
            scores, hits = found[source, level]
            scores.append(score)
            hits.append(hit)


def curve(scores: np.ndarray, hits: np.ndarray) -> Curve | None:
    """None for too few candidates."""
    if len(scores) < LEAST:
        return None
    values, which = np.unique(-scores, return_inverse=True)  # best first
    nodes, right = np.bincount(which), np.bincount(which, hits)
    # Bins of whole scores, each closed as soon as it holds enough; what is left joins the last one.
    enough = max(1.0, right.sum() / MOST)
    place_of, place, filled, found, left = np.zeros(len(values), dtype=int), 0, 0, 0.0, len(scores)
    for number, (many, good) in enumerate(zip(nodes, right, strict=True)):
        place_of[number] = place
        filled, found, left = filled + many, found + good, left - many
        if filled >= LEAST and found >= enough and left >= LEAST:
            place, filled, found = place + 1, 0, 0.0
    bins = place - place_of[which]  # by rising score
    weight = np.bincount(bins)
    middle = np.bincount(bins, scores) / weight
    share = (np.bincount(bins, hits) + 0.5) / (weight + 1)
    rising = isotonic_regression(share, weights=weight).x
    points = sorted({round(float(x), 4): round(float(y), 4) for x, y in zip(middle, rising, strict=True)}.items())
    return Curve(x=[x for x, _ in points], y=[y for _, y in points])


Each = list[tuple[Answer, Counted]]


def fit(each: Each) -> Calibration:
    """The curves of these answers together."""
    curves: dict[float, dict[str, dict[str, Curve]]] = {}
    for temperature in sorted({answer.temperature for answer, _ in each}):
        parts: dict[Level, list] = defaultdict(list)
        for answer, counted in each:
            if answer.temperature == temperature:
                for level, both in counted.items():
                    parts[level].append(both)
        by_source: dict[str, dict[str, Curve]] = defaultdict(dict)
        for (source, level), pairs in parts.items():
            if found := curve(*map(np.concatenate, zip(*pairs, strict=True))):
                by_source[source][level] = found
        curves[temperature] = dict(by_source)
    return Calibration(curves=curves)


@dataclass
class Bin:
    """Candidates of one half of the prompts that were predicted about alike, from the other half."""

    temperature: float
    source: str
    nodes: int
    prompts: int
    predicted: float
    counted: float
    error: float  # half-width of the 95% interval of counted - predicted, over both halves' prompts

    @property
    def off(self) -> float:
        return abs(self.predicted - self.counted)


def said(bins: list[Bin]) -> list[str]:
    """How good the predictions are, for a user: a line a source and temperature."""
    out = []
    for source, temperature in sorted({(one.source, one.temperature) for one in bins}):
        mine = [one for one in bins if (one.source, one.temperature) == (source, temperature)]
        mean = np.average([one.off for one in mine], weights=[one.nodes for one in mine])
        far, most = [one for one in mine if one.off > CLOSE], max(one.off for one in mine)
        beyond = sum(one.off > one.error for one in far)
        out.append(
            f"{source}, T = {temperature:g}: off by {100 * mean:.2f} points on average, by at most {100 * most:.1f}; "
            f"{len(far)} of {len(mine)} bins with {SHOWN} candidates and more by over {100 * CLOSE:.0f} points, "
            f"{beyond} of these by more than their 95% interval over prompts"
        )
    return out


def deviation(predicted: np.ndarray, hits: np.ndarray, prompts: np.ndarray, refitted: np.ndarray) -> float:
    """Half-width of the 95% interval of mean(hits - predicted). Candidates of one prompt share its luck, so prompts are
    what was drawn: each is left out once (jackknife), and Student's t. So it is on both sides: `refitted` is
    mean(predicted) without each group of the prompts that the curves were counted from. Counting varies at least as
    that of independent candidates does; one prompt or group alone, on either side, tells nothing: 1.
    """
    _, which = np.unique(prompts, return_inverse=True)
    apart, nodes = np.bincount(which, hits - predicted), np.bincount(which)
    if (fewest := min(len(nodes), len(refitted))) == 1:
        return 1.0
    of_counting = _jackknife((apart.sum() - apart) / (nodes.sum() - nodes), apart.sum() / nodes.sum())
    independent = (predicted * (1 - predicted)).sum() / len(hits) ** 2
    variance = max(of_counting, independent) + _jackknife(refitted, predicted.mean())
    return min(1.0, float(students_t.ppf(0.975, fewest - 1) * variance**0.5))


def _jackknife(without: np.ndarray, whole: float) -> float:
    """The variance of `whole`, which is `without` if one of what was drawn is left out."""
    return (len(without) - 1) / len(without) * ((without - whole) ** 2).sum()


def reliability(each: Each, chance_of: Callable[[str], AcceptProbability]) -> list[Bin]:
    """Of all candidates, predicted from the other half of the prompts; the halves apart, since what one half has too
    much of, the other has too little of. ``chance_of(source)`` is its default.
    """
    halves = [[one for one in each if one[0].prompt % 2 == half] for half in (0, 1)]
    if not all(halves):
        return []  # there are no other prompts
    out = []
    for mine, others in (halves, halves[::-1]):
        drawn = sorted({answer.prompt for answer, _ in others})
        groups = [drawn[number::GROUPS] for number in range(min(GROUPS, len(drawn)))]
        fits = [fit(others), *(fit([one for one in others if one[0].prompt not in group]) for group in groups)]
        for temperature, source in sorted({(answer.temperature, key[0]) for answer, found in mine for key in found}):
            parts = []
            for answer, found in mine:
                if answer.temperature == temperature:
                    for (name, level), (scores, hits) in found.items():
                        if name == source:
                            predicted = _predicted(fits, temperature, source, level, scores, chance_of(source))
                            parts.append((predicted, hits, np.full(len(hits), answer.prompt)))
            predicted, hits, prompts = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
            bins = np.digitize(predicted[0], BINS)
            for number in np.unique(bins):
                here = bins == number
                if here.sum() >= SHOWN:
                    means = predicted[:, here].mean(axis=1)
                    error = deviation(predicted[0, here], hits[here], prompts[here], means[1:])
                    shown = int(here.sum()), len(np.unique(prompts[here])), float(means[0]), float(hits[here].mean())
                    out.append(Bin(temperature, source, *shown, error))
    return sorted(out, key=lambda one: (one.temperature, one.source))  # stable: the first half's bins come first


def _predicted(
    fits: list[Calibration], temperature: float, source: str, level: str, scores: np.ndarray, default: AcceptProbability
) -> np.ndarray:
    """Chances [a fit, a candidate]."""
    curves = [one.curves.get(temperature, {}).get(source, {}).get(level) for one in fits]
    depth = int(level.split("+")[0])
    uncounted = [default(depth, score) for score in scores.tolist()] if None in curves else []
    return np.stack([uncounted if one is None else np.interp(scores, one.x, one.y) for one in curves])


def draw(bins: list[Bin], path: Path) -> None:
    """Predicted against counted, with the 95% interval of their difference."""
    from matplotlib.figure import Figure

    temperatures = sorted({one.temperature for one in bins})
    figure = Figure(figsize=(5 * len(temperatures), 5), layout="constrained")
    for place, temperature in enumerate(temperatures, start=1):
        axes = figure.add_subplot(1, len(temperatures), place, aspect="equal")
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for source in sorted({one.source for one in bins}):
            mine = [one for one in bins if (one.temperature, one.source) == (temperature, source)]
            x, y, error = ([getattr(one, key) for one in mine] for key in ("predicted", "counted", "error"))
            axes.errorbar(x, y, error, marker="o", markersize=4, linestyle="none", capsize=2, label=source)
        axes.set(title=f"T = {temperature:g}", xlim=(0, 1), ylim=(0, 1), xlabel="predicted chance")
        axes.set_ylabel("share of candidates that were right")
        axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
