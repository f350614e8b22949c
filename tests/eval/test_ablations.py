"""The verdict over benchmarks, temperatures and seeds: by hand, at its edges."""

import numpy as np
import pytest

from eval.studies.ablations import overall, result
from pipeline.decoding.config import TreeConfig

PLACES = [("code", 0.0), ("code", 1.0), ("chat", 0.0)]


def runs(gains, prompts=40, spread=0, rounds=100):
    """A seed for each gain: over each prompt's rounds the new method emits 100 x gain tokens more than the old one's
    150, give or take `spread`.
    """
    rng, found = np.random.default_rng(0), {}
    for seed, gain in enumerate(gains):
        found[seed] = {}
        for place in PLACES:
            half = rng.integers(-spread, spread + 1, prompts // 2)
            more = gain * rounds + np.concatenate([half, -half])  # so that the mean is the gain
            found[seed][*place, "old"] = {f"q{n}": (150, rounds) for n in range(prompts)}
            found[seed][*place, "new"] = {f"q{n}": (150 + int(m), rounds) for n, m in enumerate(more)}
    return found


class Grown:
    tree = TreeConfig(depth=1, top_k=1, nodes=2, parallel=1)


def judged(by_seed):
    methods, against = {"old": Grown, "new": Grown}, {"old": "old", "new": "old"}
    return overall([result((*place, "new"), by_seed, against, methods) for place in PLACES], by_seed, 0.02)


@pytest.mark.parametrize(
    ("gains", "spread", "verdict"),
    [
        ((0.02, 0.02, 0.02), 0, "pays"),
        ((0.01, 0.01, 0.01), 0, "does not pay"),  # above 0 and sure of it, but not worth it
        ((-0.05, -0.05, -0.05), 0, "does not pay"),
        ((0.08, 0.03, -0.01), 0, "undecided"),  # one seed says no
        ((0.03, 0.03, 0.03), 100, "undecided"),  # the interval holds 0
        ((0.0, 0.0, 0.0), 100, "undecided"),  # and 0.02
    ],
)
def test_the_verdict_follows_mean_interval_and_seeds(gains, spread, verdict):
    found = judged(runs(gains, spread=spread))
    assert found["verdict"] == verdict
    assert found["difference"] == pytest.approx(np.mean(gains), abs=1e-4)
    assert found["difference_by_seed"] == pytest.approx(gains, abs=1e-4)
    if not spread:
        assert found["interval"] == pytest.approx([np.mean(gains)] * 2, abs=1e-4)


def test_benchmarks_weigh_alike_however_many_rounds_they_have():
    found = runs((0.1,))
    for key in (*PLACES[2], "old"), (*PLACES[2], "new"):
        found[0][key] = {q: (10 * tokens, 10 * rounds) for q, (tokens, rounds) in found[0][key].items()}
    found[0][*PLACES[2], "new"] = found[0][*PLACES[2], "old"]  # no gain where most rounds are
    assert judged(found)["difference"] == pytest.approx(0.2 / 3, abs=1e-4)


def test_the_interval_is_that_of_a_mean_of_independent_benchmarks():
    """Against theory: the mean of three cells, two of them of the same prompts, of 40 uniform draws each."""
    found = judged(runs((0.0,), spread=60))
    half = (found["interval"][1] - found["interval"][0]) / 2
    one = np.sqrt((121**2 - 1) / 12 / 40) / 100  # of one cell's mean
    assert half == pytest.approx(1.96 * one / np.sqrt(3), rel=0.15)
