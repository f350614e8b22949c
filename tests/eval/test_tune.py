"""The tuner: its costs add up. (Its replay: tests/pipeline/test_replay.py.)"""

import numpy as np
import pytest

from eval.tuning.choose import predict
from eval.tuning.costs import Costs
from pipeline.decoding.replay import ABSENT, walk
from pipeline.drafts.jakiro import JakiroConfig


def test_the_least_predicted_time_wins():
    """With a verification that costs nothing more the largest tree does, with one that costs a lot the smallest."""

    def known(tree):
        return walk(np.array([[0 if level < 2 else ABSENT for level in range(tree.depth)]] * 30), tree.nodes)

    def best(per_node, step):
        sizes = {n: 1.0 + per_node * n * n for n in (1, 2, 3, 4, 8)}
        costs = Costs(1.0, sizes, dict.fromkeys((1, 2, 3, 4, 6, 8, 10), step), 0.1, 0.0)
        return predict([known], costs, JakiroConfig(), 3, costs.sizes, "plain")

    ranked = best(0.001, 0.01)
    assert (ranked[0].depth, ranked[0].nodes, ranked[0].parallel) == (
        2,
        3,
        2,
    )  # two levels, both from the first forward
    assert ranked == sorted(ranked, key=lambda one: -one.speedup)
    assert ranked[0].tau == 3 and ranked[0].speedup == pytest.approx(3 / (1.009 + 0.1))
    assert best(10.0, 0.01)[0].nodes == 2
