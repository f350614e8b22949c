"""What the tuner counts of scores: curves that rise, and a reliability that tells right from wrong ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from eval.tuning.calibrate import (
    LEAST,
    SHOWN,
    Answer,
    Bin,
    count,
    curve,
    fit,
    reliability,
    right,
    said,
)
from eval.tuning.choose import Replays, calibrate
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Pool
from pipeline.drafts.jakiro import JakiroConfig

TREES = [
    TreeConfig(depth=2, top_k=2, nodes=3, parallel=1),
    TreeConfig(depth=1, top_k=2, nodes=2, parallel=1),
    TreeConfig(depth=2, top_k=2, nodes=3, parallel=2),
]


def test_right_is_what_the_text_goes_through():
    pool = Pool([5, 6, 6, 7], [0, 1, 0, 3], [0.0] * 4)
    assert right(pool, [5, 6, 9]) == [True, True, False, False]
    assert right(pool, [6, 7]) == [False, False, True, True]
    assert right(pool, [5]) == [True, False, False, False]


class Scripted:
    """Places at which a draft's and prompt lookup's first candidate are right with known chances."""

    def __init__(self, seed, places, honest=True):
        drawn = np.random.default_rng(seed)
        self.following, self.copied, self._pools = [], [], []
        for _ in range(places):
            chance, length = drawn.random(), int(drawn.integers(1, 9))
            hit, copied = drawn.random() < (chance if honest else 0.2), drawn.random() < length / 10
            self.following.append([1 if hit else 2 if copied else 3, 4])
            self._pools.append(Pool([1, 4], [0, 1], [float(np.log(chance)), float(np.log(chance * 0.9))]))
            self.copied.append({"prompt-lookup": Pool([2 if not hit else 3], [0], [float(length)])})

    def pools(self, tree):
        deep = tree.depth
        return (Pool(pool.tokens[:deep], pool.parents[:deep], pool.scores[:deep]) for pool in self._pools)


@pytest.mark.parametrize(("temperature", "once"), [(0.0, True), (0.3, False)])
def test_greedy_repeats_are_counted_once(temperature, once):
    alone, answer = (
        SimpleNamespace(accept_probability=lambda depth, score: 0.5),
        Answer(Scripted(0, 300), temperature, 0),
    )
    answer.text.counter = lambda sources, temperature: None
    sources = SimpleNamespace(
        config=JakiroConfig(), draft=alone, secondary={"prompt-lookup": alone}, tuned=lambda calibration: None
    )
    once_and_twice = [[answer], [answer, answer]]
    found = [calibrate("x", sources, Replays([], some), 2, "plain", print)[0] for some in once_and_twice]
    assert found[0].curves and (found[0] == found[1]) == once


def test_each_level_is_counted_once_and_nothing_behind_the_texts_end():
    found = count(Scripted(0, 30), TREES)
    assert {key: len(scores) for key, (scores, _) in found.items()} == {
        ("draft", "1"): 30,
        ("draft", "2"): 30,
        ("draft", "2+1"): 30,
        ("prompt-lookup", "1"): 30,
    }
    text = Scripted(0, 2)
    text.following = [[1], []]
    assert [hits.tolist() for key, (_, hits) in count(text, TREES).items() if key[0] == "draft"] == [[True]]


def test_a_curve_rises_and_is_near_what_was_counted():
    drawn = np.random.default_rng(0)
    scores = drawn.random(4000)
    found = curve(scores, drawn.random(4000) < scores**2)
    assert all(a <= b for a, b in zip(found.y, found.y[1:], strict=False))
    assert found(0.2) == pytest.approx(0.04, abs=0.05) and found(0.9) == pytest.approx(0.81, abs=0.08)


def test_few_candidates_make_no_curve_and_a_bin_is_never_smaller():
    assert curve(np.arange(LEAST - 1.0), np.ones(LEAST - 1, dtype=bool)) is None
    assert len(curve(np.arange(LEAST + 10.0), np.ones(LEAST + 10, dtype=bool)).x) == 1
    whole = curve(np.repeat([1.0, 2.0, 3.0], [LEAST, 5, LEAST]), np.arange(2 * LEAST + 5) % 2 > 0)
    assert whole.x[-1] == 3.0 and len(whole.x) == 2
    assert len(curve(np.arange(9.0 * LEAST), np.zeros(9 * LEAST, dtype=bool)).x) == 1  # nothing to tell them apart by


def test_a_curve_has_its_points_where_chances_are_large():
    """Among many that are hardly ever right, the few that often are do not drown."""
    drawn = np.random.default_rng(3)
    chances = np.concatenate([np.full(20_000, 0.001), np.linspace(0.05, 0.95, 600)])
    found = curve(chances, drawn.random(len(chances)) < chances)
    assert found(0.9) == pytest.approx(0.9, abs=0.08) and found(0.5) == pytest.approx(0.5, abs=0.12)
    assert found(0.001) < 0.01


def each(seeds, places=100, honest=lambda seed: True):
    """Counted answers, a prompt a seed."""
    texts = [Scripted(seed, places, honest(seed)) for seed in seeds]
    return [(Answer(text, 0.0, number), count(text, TREES)) for number, text in enumerate(texts)]


def never(source):
    return lambda depth, score: 0.0


def often(source):
    return lambda depth, score: 0.9


def test_reliable_scores_are_shown_to_be_and_defaults_that_lie_too():
    fitted = reliability(each(range(60)), never)
    assert all(one.nodes >= SHOWN and one.off < 0.065 for one in fitted)
    assert {one.source for one in fitted} == {"draft", "prompt-lookup"}
    known = fit(each(range(60))).curves[0.0]
    assert known["draft"]["1"](float(np.log(0.5))) == pytest.approx(0.5, abs=0.12)
    assert reliability(each(range(2), 15), often) == []  # too few for a curve: the default predicts
    assert reliability(each(range(1)), often) == []  # no other prompts
    lied = reliability(each([90, 91], LEAST - 1, lambda seed: False), often)
    draft = [one for one in lied if one.source == "draft"]
    assert draft and all(one.predicted == pytest.approx(0.9) and one.counted < 0.7 for one in draft)


def test_halves_that_differ_are_seen_to():
    """Where one half's prompts are right more often, each half is predicted wrongly: the two do not cancel out."""
    found = reliability(each(range(60), honest=lambda seed: seed % 2), never)
    draft = [one for one in found if one.source == "draft"]
    signs = {one.predicted > one.counted for one in draft if one.off > 0.1}
    assert signs == {True, False}


def test_what_is_said_counts_bins_that_are_off():
    bins = [Bin(0.0, "draft", 300, 0.30, 0.31), Bin(1.0, "prompt-lookup", 100, 0.5, 0.54)]
    bins.append(Bin(0.0, "draft", 100, 0.5, 0.6))
    assert said(bins) == [
        "draft, T = 0: off by 3.25 points on average, by at most 10.0, over 2 bins with 100 candidates and more",
        "prompt-lookup, T = 1: off by 4.00 points on average, by at most 4.0, over 1 bins with 100 candidates and more",
    ]
