"""Rounds of fixed shapes: the trees of eager rounds, one compilation, and few operators outside of it."""

import logging
from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from infra.check.rounds import PATH, Operators, accept_path
from pipeline.decoding import generate
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import RoundInput, call_untimed
from pipeline.decoding.fixed import NEW_INPUTS, FixedRounds
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.decoding.grow import best_pool
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from tests.kit import save_tiny_target
from tests.pipeline.taught import NEVER, ONE_LAYER, VARIANTS, grown, make_draft, prompt_of, states_for

TREE = {"depth": 4, "top_k": 4, "nodes": 20}


def decode(target, method, prompt, tokens=24):
    """Return the answer, and the tokens and parents of each round's tree."""
    trees = []
    answer = decode_speculative(
        target, method, prompt, Sampling(tokens, NEVER), lambda _, tree, __: trees.append((tree.tokens, tree.parents))
    )
    return answer, trees


@pytest.mark.parametrize("name", ONE_LAYER)
def test_trees_are_those_of_eager_rounds(loaded_target, embed_head, name):
    for spec in (TREE, {"depth": 5, "top_k": 3, "nodes": 16}):
        method = grown(make_draft(loaded_target, embed_head, VARIANTS[name]), **spec)
        want, trees = decode(loaded_target, method, prompt_of(1))
        method.draft.compile_rounds(backend=None)
        got, fixed_trees = decode(loaded_target, method, prompt_of(1))
        assert fixed_trees == trees and got.acceptance == want.acceptance
        assert got.tokens == want.tokens and got.draft_forwards == want.draft_forwards


def test_accepted_paths_and_decoupled_candidates(loaded_target, text, taught_drafts, monkeypatch):
    prompt = text[0]
    for candidates in ("plain", "decoupled"):
        for name in ("eagle", "jakiro") if candidates == "plain" else ("jakiro",):
            method = grown(taught_drafts[name], **TREE, candidates=candidates)
            want, trees = decode(loaded_target, method, prompt)
            monkeypatch.setattr(method.draft, "rounds", FixedRounds(method.draft, None))
            got, fixed_trees = decode(loaded_target, method, prompt)
            monkeypatch.setattr(method.draft, "rounds", None)
            assert fixed_trees == trees and got.tokens == want.tokens and want.acceptance.tau > 1.5


def test_more_new_inputs_than_one_run_takes(loaded_target, embed_head):
    draft = make_draft(loaded_target, embed_head, VARIANTS["jakiro"])
    tree = draft.config.resolve(TreeConfig(**TREE))
    tokens, states_TSD = prompt_of(2, 20 + 2 * NEW_INPUTS), states_for(draft, 19 + 2 * NEW_INPUTS)
    states_TSD = states_TSD if isinstance(states_TSD, torch.Tensor) else states_TSD.select(draft.needs)
    parts = [RoundInput(tokens[:9], states_TSD[:8]), RoundInput(tokens, states_TSD[8:])]
    eager, fixed, rounds = draft.open(), draft.open(), FixedRounds(draft, None)
    for part in parts:
        want = best_pool(draft, eager, part, tree, 19)
        with torch.inference_mode():
            got = rounds.pool(fixed, part, tree, 19, call_untimed)
        assert (got.tokens, got.parents) == (want.tokens, want.parents)
        assert got.scores == pytest.approx(want.scores, abs=1e-5)


@pytest.mark.parametrize("name", ["eagle3", "four-experts"])
def test_a_round_is_compiled_once(loaded_target, embed_head, name, caplog):
    method = grown(make_draft(loaded_target, embed_head, VARIANTS[name]), **TREE)
    want, trees = decode(loaded_target, method, prompt_of(3))
    counter = CompileCounter()
    method.draft.compile_rounds(backend=counter)
    with caplog.at_level(logging.WARNING):
        got, fixed_trees = decode(loaded_target, method, prompt_of(3))
        decode(loaded_target, method, prompt_of(4))
    assert fixed_trees == trees and got.tokens == want.tokens
    assert counter.frame_count == 1 and "stay eager" not in caplog.text


def test_a_round_that_cannot_be_compiled_stays_eager(loaded_target, embed_head, caplog):
    def fail(*_):
        raise RuntimeError("no compiler")

    method = grown(make_draft(loaded_target, embed_head, VARIANTS["eagle"]), **TREE)
    want, _ = decode(loaded_target, method, prompt_of(3))
    method.draft.compile_rounds(backend=fail)
    got, _ = decode(loaded_target, method, prompt_of(3))
    assert got.tokens == want.tokens and caplog.text.count("stay eager") == 1


def test_few_operators_are_left_outside_of_a_round(taught_drafts, text, loaded_target, tmp_path, monkeypatch):
    """Moving the accepted keys and values costs the same operators, however many layers the target has."""
    monkeypatch.setattr(generate, "_accept", accept_path)
    draft = taught_drafts["jakiro"]
    method = grown(draft, depth=6, top_k=10, nodes=60)
    counts: dict[int, Counter] = {}
    for layers in (2, 8):
        target = Target(TargetConfig(model=str(save_tiny_target(tmp_path / str(layers), layers=layers))), "float32")
        target.compile(backend=None)
        rounds = FixedRounds(draft, None)
        monkeypatch.setattr(draft, "rounds", rounds)
        sampling = Sampling(36, NEVER)
        decode_speculative(target, method, text[0], sampling)  # allocates the caches
        with Operators(target) as operators:
            find_round = rounds._find_round
            monkeypatch.setattr(rounds, "_find_round", lambda *key, f=find_round: operators.count_as_target(f(*key)))
            answer = decode_speculative(target, method, text[0], sampling)
        assert answer.acceptance.passes == 36 / (PATH + 1)
        counts[layers] = operators.counts["round"]
    monkeypatch.setattr(draft, "rounds", None)
    with Operators(loaded_target) as operators:
        decode_speculative(loaded_target, method, text[0], sampling)
    print("operators outside of target and round, by layers:", counts, "eager:", operators.counts)
    assert counts[2] == counts[8] <= 150 * answer.acceptance.passes < operators.counts["round"]
