"""The verdict over benchmarks, temperatures and seeds: by hand, at its edges."""

import numpy as np
import pytest

from eval.studies.ablations import overall, result
from eval.studies.slope import rows, slope, table
from pipeline.basics.errors import PipelineError
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


# -- two amounts of training ------------------------------------------------------------------------------------------


def found_with(differences, taus):
    """What the ablations write of one pair, whose new method has `taus` and these differences by seed."""
    cell = {"benchmark": "code", "temperature": 0.0, "against": "old", "seeds": [0, 1, 2], "prompts": 40}
    cell |= {"nodes": 6, "draft_forwards": 3}
    by_method = {"old": [1.0, 1.0, 1.0], "new": taus}
    mean = {"method": "new", "against": "old", "difference": sum(differences) / 3, "interval": [0.0, 0.1]}
    return {
        "results": [{**cell, "method": name, "tau_by_seed": by_seed} for name, by_seed in by_method.items()],
        "means": [mean | {"difference_by_seed": differences, "verdict": "undecided"}],
    }


def test_the_slope_between_two_amounts_by_hand():
    """The gains of three seeds are 1, 2 and 3 hundredths for each factor e: their mean's deviation is 0.01 / sqrt(3),
    and Student's t of two degrees of freedom 4.303.
    """
    smaller = found_with([0.0, 0.01, -0.01], [1.1, 1.2, 1.3])
    larger = found_with([0.01, 0.03, 0.02], [1.4, 1.5, 1.6])
    old, new = rows(smaller, larger, np.e)
    half = 4.303 * 0.01 / 3**0.5
    assert new["slope"] == pytest.approx(0.02) and new["interval"] == pytest.approx(
        [0.02 - half, 0.02 + half], abs=1e-5
    )
    assert new["tau"] == [[1.1, 1.2, 1.3], [1.4, 1.5, 1.6]] and old["tau"] == [[1.0] * 3] * 2 and "slope" not in old
    said = table([old, new])
    assert "1.400, 1.500, 1.600 | 1.500 | +0.020 [+0.000, +0.100] (+0.010, +0.030, +0.020)" in said
    assert "+0.020 [-0.005, +0.045]" in said
    assert slope([0.0], [0.02], np.e) == (pytest.approx(0.02), None)


def test_amounts_that_were_measured_otherwise_have_no_slope():
    smaller, larger = found_with([0.0] * 3, [1.0] * 3), found_with([0.0] * 3, [1.0] * 3)
    larger["results"][1]["prompts"] = 39
    with pytest.raises(PipelineError, match="prompts differs"):
        rows(smaller, larger, 4)


def test_another_file_than_the_ablations_is_refused():
    with pytest.raises(PipelineError, match=r"expected two ablations.json"):
        rows({"results": []}, found_with([0.0] * 3, [1.0] * 3), 4)
