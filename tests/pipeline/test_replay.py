"""The replay counts what decoding then does: not an estimate."""

from dataclasses import replace

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from tests.pipeline.taught import NEVER, VARIANTS, grown, make_draft, taught


@pytest.fixture(scope="module")
def half_taught(loaded_target, embed_head, text):
    """Return drafts that know some of the text, by the name of their variant."""

    class TaughtWeights(dict):
        def __missing__(self, name):
            steps = 60 if "eagle3" not in name else 120
            self[name] = taught(loaded_target, embed_head, VARIANTS[name], *text, steps=steps)
            return self[name]

    return TaughtWeights()


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *[("eagle", 0.1), ("jakiro", 0.0), ("reduced", 0.0), ("eagle3, 3.1's norms", 0.0)],
        *[("jakiro on eagle-3", 0.1), ("gumiho", 0.0), ("medusa", 0.1), ("hydra++", 0.0), ("small-llama", 0.0)],
        *[("skipper", 0.1), ("dflash", 0.0), ("dflash, reduced", 0.0), ("dspark, reduced", 0.0), ("p-eagle", 0.0)],
    ],
)
def test_the_replay_counts_what_decoding_does(loaded_target, text, half_taught, name, temperature):
    """Tokens and rounds of every tree, from one large tree a place: not an estimate."""
    draft = half_taught[name]
    prompt, sampling = text[0], Sampling(24, NEVER, temperature=temperature, seed=0)
    answer = decode_plain(loaded_target, prompt, sampling).tokens
    tokens = prompt + answer
    states, taus, choices = (
        loaded_target.states(tokens[:-2], draft.needs.auxiliary),
        set(),
        draft.config.parallel_choices,
    )
    deepest = 6 if name == "gumiho" else 4
    most = max(parallel for depth in range(1, deepest + 1) for parallel in choices(depth))
    largest = TreeConfig(depth=deepest, top_k=24, nodes=deepest + 1, parallel=most)
    walk = replay.record_replay(draft, states, tokens, len(prompt), largest)
    for top_k, depth, nodes in [(1, 3, 4), (4, 1, 5), (3, 2, 6), (3, 3, 9), (4, 4, 16), (2, 3, 6), (2, deepest, 12)]:
        for parallel in choices(depth):
            method = grown(draft, top_k=top_k, depth=depth, nodes=nodes, parallel=parallel)
            got = decode_speculative(loaded_target, method, prompt, sampling).acceptance
            assert replay.count_rounds(walk.ranks(replace(method.tree, nodes=depth + 1)), nodes) == got
            taus.add(got.tau)
    assert len(taus) > 2 and max(taus) > 1.1


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("eagle", {"paths": "eagle-1"}),
        ("jakiro", {"paths": "eagle-1", "parallel": 2}),
        ("jakiro", {"depth": 4, "top_k": 4, "nodes": 20, "candidates": "decoupled", "parallel": 1}),
        ("eagle3, reduced", {"depth": 4, "top_k": 3, "nodes": 9}),
        ("sparse on eagle-3", {"depth": 4, "top_k": 4, "nodes": 20, "candidates": "decoupled"}),
        ("gumiho", {"depth": 7, "top_k": 4, "nodes": 30}),
        ("p-eagle", {"depth": 4, "top_k": 4, "nodes": 20}),
        ("medusa", {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}),
        ("hydra++", {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]}),
    ],
)
def test_what_is_counted_without_the_target_is_what_decoding_counts(loaded_target, text, half_taught, name, tree):
    method = grown(half_taught[name], **tree)
    prompt, count = text[0], 24
    want = decode_speculative(loaded_target, method, prompt, Sampling(count, NEVER))
    tokens = prompt + want.tokens
    states = loaded_target.states(tokens[:-1], method.draft.needs.auxiliary)
    got = replay.replay_decoding(method, states, tokens, len(prompt))
    assert got == want.acceptance and got.tau > 1.1
    assert replay.count_acceptance(method, states, tokens, len(prompt)) == got


@pytest.mark.parametrize("tree", [{"depth": 3, "top_k": 3, "nodes": 6}, {"depth": 2, "top_k": 5, "nodes": 4}])
def test_equal_scores_are_counted_in_the_order_in_which_trees_are_grown(
    loaded_target, text, half_taught, tree, monkeypatch
):
    """Below float32 many candidates score alike, and the last node of a tree is one of several."""
    method = grown(half_taught["eagle"], **tree)
    sharp = method.draft.logits
    monkeypatch.setattr(method.draft, "logits", lambda hidden: (sharp(hidden) / 4).round())
    tokens = text[0] + text[1]
    states = loaded_target.states(tokens[:-1], method.draft.needs.auxiliary)
    want = replay.replay_decoding(method, states, tokens, len(text[0]))
    assert replay.count_acceptance(method, states, tokens, len(text[0])) == want and want.tau > 1


@pytest.mark.parametrize("tree", [{"depth": 2, "top_k": 2, "nodes": 4}, {"paths": "eagle-1"}])
def test_an_answer_of_one_token_has_no_round(loaded_target, text, half_taught, tree):
    method = grown(half_taught["eagle"], **tree)
    tokens = text[0] + text[1][:1]
    assert replay.count_acceptance(method, loaded_target.states(tokens), tokens, len(text[0])) == Acceptance()


def test_a_walk_by_hand():
    """Ranks of the target's own tokens among the candidates, at five places."""
    ranks = torch.tensor([[0, 3], [5, 5], [1, 2], [0, 0], [9, 9]])
    # Ranks below 4: two of place 0, then place 3: two, of which one is beyond the end.
    assert replay.count_rounds(ranks, 5) == Acceptance(5, 2, [2, 2, 2])
    # Below 2: one of place 0, one of place 2, none of place 4.
    assert replay.count_rounds(ranks, 3) == Acceptance(5, 3, [3, 2])
    assert replay.count_rounds(ranks, 1) == Acceptance(5, 5, [5])


def test_a_draft_whose_logits_are_not_finite_is_refused_by_name(embed_head, loaded_target, text):
    draft = make_draft(loaded_target, embed_head, VARIANTS["eagle"])
    draft.name = "broken"
    with torch.no_grad():
        draft.fc.weight.fill_(float("nan"))
    tokens = text[0] + text[1][:9]
    tree = TreeConfig(depth=2, top_k=3, nodes=3, parallel=1)
    with pytest.raises(PipelineError, match="draft 'broken': its logits are not finite"):
        replay.record_replay(draft, loaded_target.states(tokens), tokens, len(text[0]), tree)
