"""The tuner: its replay counts what decoding then does, and its costs add up."""

import pytest

from eval import replay
from eval.costs import Costs
from eval.tune import predict
from pipeline.decoding.generate import Sampling, plain, speculative
from tests.pipeline.taught import NEVER, VARIANTS, greedy, prompt_of, shaped, taught


@pytest.fixture(scope="module")
def text(loaded_target):
    prompt = prompt_of(3)
    return prompt, greedy(loaded_target, prompt, 48)


@pytest.mark.parametrize("temperature", [0.0, 0.2])
@pytest.mark.parametrize("name", ["eagle", "jakiro", "three-branches", "reduced"])
def test_the_replay_counts_what_decoding_does(loaded_target, ends, text, name, temperature):
    """Tokens and rounds of every tree, from one large tree a place: not an estimate."""
    draft = taught(loaded_target, ends, VARIANTS[name], *text, steps=60)
    prompt, sampling = text[0], Sampling(40, NEVER, temperature=temperature, seed=2)
    answer = plain(loaded_target, prompt, sampling).tokens
    walk = replay.collect(loaded_target, draft, prompt, answer, 4, 24)
    horizons, taus = draft.config.horizons, set()
    for top_k, depth, nodes, parallel in [
        (1, 3, 4, 1),
        (4, 1, 5, 1),
        (3, 2, 6, 1),
        (3, 3, 9, 1),
        (4, 4, 16, 1),
        (2, 3, 6, 2),
        (4, 4, 14, 2),
        (3, 3, 9, 3),
    ]:
        if parallel <= horizons:
            draft.config = shaped(draft.config, top_k=top_k, depth=depth, nodes=nodes, parallel=parallel)
            got = speculative(loaded_target, draft, prompt, sampling).acceptance
            assert replay.walk(walk.ranks(top_k, depth, parallel), nodes) == (got.tokens, got.passes)
            taus.add(got.tau)
    assert len(taus) > 2 and max(taus) > 1.1


def test_a_walk_by_hand():
    """Ranks of the target's own tokens among the candidates, at five places."""
    ranks = [[0, 3], [5, 5], [1, 2], [0, 0], [9, 9]]
    assert replay.walk(ranks, 5) == (
        5,
        2,
    )  # ranks below 4: two of place 0, then place 3: two, of which one is beyond the end
    assert replay.walk(ranks, 3) == (5, 3)  # below 2: one of place 0, one of place 2, none of place 4
    assert replay.walk(ranks, 1) == (5, 5)


def test_the_least_predicted_time_wins():
    """With a verification that costs nothing more the largest tree does, with one that costs a lot the smallest."""

    class Known:
        def ranks(self, top_k, depth, parallel):
            return [[0 if level < 2 else replay.ABSENT for level in range(depth)] for _ in range(30)]

    def best(per_node, step):
        sizes = {n: 1.0 + per_node * n * n for n in (1, 2, 3, 4, 8)}
        costs = Costs(1.0, sizes, dict.fromkeys((1, 2, 3, 4, 6, 8, 10), step), 0.1, 0.0)
        return predict([Known()], costs, 2, 3, costs.sizes)

    ranked = best(0.001, 0.01)
    assert (ranked[0].depth, ranked[0].nodes, ranked[0].parallel) == (
        2,
        3,
        2,
    )  # two levels, both from the first forward
    assert ranked == sorted(ranked, key=lambda one: -one.speedup)
    assert ranked[0].tau == 3 and ranked[0].speedup == pytest.approx(3 / (1.009 + 0.1))
    assert best(10.0, 0.01)[0].nodes == 2
