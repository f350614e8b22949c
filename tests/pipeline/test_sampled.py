"""Sampled decoding: the target's own distribution, by enumeration, and its processing as transformers mean it."""

import pytest
import torch

from pipeline.decoding import generate
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from tests.pipeline.exact import drawn_error, every_outcome
from tests.pipeline.taught import NEVER, VARIANTS, grown, logits_after, make_draft


def joint_of_two(target, prompt, sampling):
    """The exact distribution of the first two tokens of plain sampling."""
    first = sampling.probabilities(logits_after(target, prompt)[-1:])[0].double()
    out = {}
    for token in first.nonzero()[:, 0].tolist():
        second = sampling.probabilities(logits_after(target, [*prompt, token])[-1:])[0].double()
        for after in second.nonzero()[:, 0].tolist():
            out[token, after] = (first[token] * second[after]).item()
    return out


class Enumerated:
    """A sampler whose numbers are every possible choice in turn."""

    def __init__(self, script):
        self._script, self.accept, self.draw_rows = script, script.accept, script.draw_rows

    def choose(self, p_NV, places):
        return torch.tensor([self._script.choose(row) for row in p_NV.tolist()])


ENUMERATED = {
    "dynamic": ("jakiro", {"depth": 2, "top_k": 5, "nodes": 12, "parallel": 2}),
    "drawn": ("eagle", {"paths": [[0], [1], [0, 0]], "siblings": "drawn"}),
    "drawn from a block": ("dflash", {"paths": [[0], [0, 0]], "siblings": "drawn"}),
    "drawn from left to right": ("dspark, reduced", {"paths": [[0], [0, 0]], "siblings": "drawn"}),
    "drawn by expert": (
        "jakiro",
        {"paths": [[0], [1]], "siblings": "drawn", "candidates": "decoupled", "parallel": 1},
    ),
}


@pytest.mark.parametrize("method", ["plain", *ENUMERATED])
def test_the_first_two_sampled_tokens_have_exactly_the_targets_distribution(
    loaded_target, text, taught_drafts, monkeypatch, method
):
    """Enumerate complete answers, over every draw, decision and choice in turn."""
    prompt, accepted = text[0], 0.0
    sampling = Sampling(2, NEVER, temperature=1.0, top_k=3)
    expected = joint_of_two(loaded_target, prompt, sampling)
    draft, tree = ENUMERATED.get(method, ENUMERATED["dynamic"])
    taught_method = grown(taught_drafts[draft], **tree)

    def answer(script):
        monkeypatch.setattr(generate, "Sampler", lambda seed: Enumerated(script))
        if method == "plain":
            return decode_plain(loaded_target, prompt, sampling)
        return decode_speculative(loaded_target, taught_method, prompt, sampling)

    joint = dict.fromkeys(expected, 0.0)
    for got, weight in every_outcome(answer):
        joint[tuple(got.tokens)] += weight
        accepted += weight * (len(got.acceptance.accepted) > 1)
    assert joint == pytest.approx(expected, abs=1e-5)
    assert method == "plain" or 0.01 < accepted < 0.99  # both ways of emitting the second token take part


def wrong_rule(flaw):
    def rule(tree, p_NV, randomness):
        p_V = p_NV[0].double()
        for child in tree.children()[0]:
            token = tree.tokens[child]
            accepted = flaw == "always accepts"
            if accepted or randomness.accept(min(1.0, (p_V[token] / tree.proposals[child][token]).item())):
                return [child], int(randomness.draw_rows(p_NV[child][None])[0])
            p_V = p_V.index_fill(0, torch.tensor([token]), 0.0)
            p_V = p_V / p_V.sum()
        return [], int(randomness.draw_rows(p_V[None])[0])

    return rule


def test_the_rule_for_drawn_candidates_gives_real_rounds_the_targets_distribution(loaded_target, embed_head):
    """Enumerated on the heaviest tokens of each round; a wrong rule is seen there."""
    draft, rounds = make_draft(loaded_target, embed_head, VARIANTS["eagle"]), []
    method, sampling = grown(draft, paths="eagle-1", siblings="drawn"), Sampling(4, NEVER, temperature=1.0, seed=1)
    decode_speculative(loaded_target, method, [65, 66, 67], sampling, lambda *seen: rounds.append(seen))
    drawn = [(tree, sampling.probabilities(logits_NV)[0]) for _, tree, logits_NV in rounds]
    assert drawn and all(drawn_error(tree, p_V) < 1e-12 for tree, p_V in drawn)
    for flaw in ("always accepts", "conditions on the token only"):
        assert all(drawn_error(tree, p_V, wrong_rule(flaw)) > 1e-6 for tree, p_V in drawn), flaw


@pytest.mark.parametrize(
    ("name", "tree", "processing"),
    [
        ("eagle", {"depth": 3, "top_k": 4, "nodes": 14}, {"top_k": 1}),
        ("jakiro", {"depth": 3, "top_k": 4, "nodes": 14, "parallel": 2}, {"top_k": 3}),
        ("eagle", {"paths": "eagle-1", "siblings": "drawn"}, {"top_p": 0.3}),
        (
            "jakiro",
            {"paths": "eagle-1", "siblings": "drawn", "candidates": "decoupled", "parallel": 2},
            {"top_k": 5, "top_p": 0.6, "temperature": 1.5},
        ),
    ],
)
def test_no_token_outside_the_processed_support_is_emitted(loaded_target, text, taught_drafts, name, tree, processing):
    prompt, emitted = text[0], 0
    draft = grown(taught_drafts[name], **tree)
    for seed in range(5):
        sampling = Sampling(24, NEVER, **{"temperature": 1.0, **processing}, seed=seed)
        got = decode_speculative(loaded_target, draft, prompt, sampling).tokens
        p_TV = sampling.probabilities(logits_after(loaded_target, [*prompt, *got[:-1]])[len(prompt) - 1 :])
        assert (p_TV[range(len(got)), got] > 0).all()
        emitted += len(got)
    assert emitted == 5 * 24


def test_sampled_answers_are_a_function_of_the_seed(loaded_target, text, taught_drafts):
    def decode(seed):
        sampling = Sampling(16, NEVER, temperature=1.0, seed=seed)
        return decode_speculative(loaded_target, grown(taught_drafts["eagle"]), text[0], sampling).tokens

    assert decode(1) == decode(1)
    assert decode(1) != decode(2)


def test_processing_matches_transformers_meaning_of_top_k_and_top_p():
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    assert Sampling(1, NEVER, temperature=1.0, top_k=2).probabilities(logits)[0].tolist() == pytest.approx(
        [5 / 7, 2 / 7, 0, 0, 0]
    )
    assert Sampling(1, NEVER, temperature=1.0, top_p=0.6).probabilities(logits)[0].tolist() == pytest.approx(
        [5 / 7, 2 / 7, 0, 0, 0]
    )
    squared = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]) ** 2
    assert torch.allclose(Sampling(1, NEVER, temperature=0.5).probabilities(logits)[0], squared / squared.sum())
    assert Sampling(1, NEVER, temperature=1.0).probabilities(logits.bfloat16()).dtype == torch.float32
