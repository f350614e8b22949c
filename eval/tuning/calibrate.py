"""Counts what the scores of sources are worth on the target's own answers.

A candidate counts as right where the target's text goes through it. Candidates of one source, at one depth and
temperature, are sorted by score into bins of at least `LEAST` nodes, most of which hold as many right ones: so there
are most points where chances are large. Their shares of right ones, made monotone, are a curve's points.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from pipeline.decoding.calibration import Calibration, Curve, levels
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Pool
from pipeline.decoding.replay import HybridText
from pipeline.decoding.sources import COPIED

LEAST, MOST = 50, 24  # nodes of a bin that makes a point of a curve; bins that all right ones would fill

Level = tuple[str, str]  # source, level
Counted = dict[Level, tuple[np.ndarray, np.ndarray]]  # scores, and whether each candidate was right


@dataclass
class Answer:
    """One of the target's answers: what the sources propose along it, its temperature, and whose prompt it answers."""

    text: HybridText
    temperature: float
    prompt: str  # its question_id


def right(pool: Pool, following: list[int]) -> list[bool]:
    """Which candidates lie on the way of the text."""
    found = [True]
    for token, parent, depth in zip(pool.tokens, pool.parents, pool.depths(), strict=True):
        found.append(found[parent] and depth <= len(following) and token == following[depth - 1])
    return found[1:]


def count(text: HybridText, trees: list[TreeConfig]) -> Counted:
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
