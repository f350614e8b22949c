"""What the tuner counts of scores: curves that rise and are near what was counted."""

from types import SimpleNamespace

import numpy as np
import pytest

from eval.tuning.calibrate import LEAST, Answer, count, curve, fit, right
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
        Answer(Scripted(0, 300), temperature, "q"),
    )
    answer.text.counter = lambda sources, temperature: None
    sources = SimpleNamespace(
        config=JakiroConfig(), draft=alone, secondary={"prompt-lookup": alone}, tuned=lambda calibration: None
    )
    once_and_twice = [[answer], [answer, answer]]
    found = [calibrate(sources, Replays([], some), 2, "plain") for some in once_and_twice]
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


def test_curves_are_near_the_chances_that_candidates_were_drawn_with():
    texts = [Scripted(seed, 100) for seed in range(60)]
    known = fit([(Answer(text, 0.0, ""), count(text, TREES)) for text in texts]).curves[0.0]
    assert set(known) == {"draft", "prompt-lookup"}
    assert known["draft"]["1"](float(np.log(0.5))) == pytest.approx(0.5, abs=0.12)
