"""The losslessness gate of the benchmark: it passes what is exact and fails what is not."""

import math

import pytest
import torch

from eval.bench import EXACT, PLAIN, Bench, Gate
from eval.prompts import Prompt
from pipeline.decoding import accept, generate
from pipeline.decoding.generate import Sampling
from pipeline.decoding.tree import build_tree
from pipeline.drafts import build
from pipeline.drafts.layers import shapes_of
from pipeline.errors import PipelineError

PROMPTS = [Prompt("one", "", ("What is the question?", "And then?")), Prompt("two", "", ("Why? Because of that?",))]


@pytest.fixture
def drafts(loaded_target, ends, tiny_recipe):
    made = {}
    for name, config in tiny_recipe.draft.items():
        draft = build(config, shapes_of(loaded_target.config))
        draft.initialise(0)
        if config.vocabulary:
            draft.set_vocabulary(torch.arange(config.vocabulary))
        draft.bind(ends)
        made[name] = draft.eval().requires_grad_(False)
    return made


def bench_of(recipe, loaded_target, drafts, **changes) -> Bench:
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"gate_rounds": 6, **changes})})
    return Bench(recipe, loaded_target, drafts)


def test_exact_decoding_passes_at_every_temperature(tiny_recipe, loaded_target, drafts):
    bench = bench_of(tiny_recipe, loaded_target, drafts, repeats=2)
    bench.run({"bench": PROMPTS})
    assert set(bench.gates) == {("bench", draft, t) for draft in drafts for t in (0.0, 1.0)}
    for (_, _, temperature), gate in bench.gates.items():
        assert gate.passed
        if temperature == 0:
            assert gate.identical == gate.checked == 3  # turns, however often decoded
        else:
            assert gate.checked == 6 and gate.largest_error <= EXACT and 0 < gate.largest_drift < 1e-5
    answers = {(r.question_id, r.turn, r.method) for r in bench.records}
    assert len(answers) == 3 * 3 and {method for *_, method in answers} == {PLAIN, *drafts}
    assert bench.left_out == {"bench": 0}


def shifted_positions(target, tree, cache, past):
    """The tree's nodes one position too far."""
    prefix = torch.ones(len(tree.tokens), past, dtype=torch.bool)
    positions = torch.tensor(tree.depths) + past + 1
    hidden_ND = target.forward(tree.tokens_N, cache, positions, torch.cat([prefix, tree.ancestors_NN], dim=1))
    return hidden_ND, target.head(hidden_ND)


def everything_seen(target, tree, cache, past):
    """Every node sees every other one, siblings and descendants included."""
    seen = torch.ones(len(tree.tokens), past + len(tree.tokens), dtype=torch.bool)
    hidden_ND = target.forward(tree.tokens_N, cache, torch.tensor(tree.depths) + past, seen)
    return hidden_ND, target.head(hidden_ND)


@pytest.mark.parametrize("verify", [shifted_positions, everything_seen])
def test_a_wrong_tree_forward_fails_the_gate_above_temperature_0(
    tiny_recipe, loaded_target, drafts, monkeypatch, verify
):
    monkeypatch.setattr(generate, "_verify", verify)
    bench = bench_of(tiny_recipe, loaded_target, drafts, temperatures=[1.0])
    bench.run({"bench": PROMPTS})
    assert not any(gate.passed for gate in bench.gates.values())
    assert all(gate.largest_error <= EXACT for gate in bench.gates.values())  # the rule was right: drift tells


def test_a_wrong_acceptance_rule_fails_the_gate_above_temperature_0(tiny_recipe, loaded_target, drafts, monkeypatch):
    def takes_the_first(tree, p_NV, chance):
        child = tree.children()[0][0]
        return ([child], 0) if chance.accept(1.0) else ([], chance.draw(p_NV[0]))

    monkeypatch.setattr(accept, "accept_sampled", takes_the_first)
    bench = bench_of(tiny_recipe, loaded_target, drafts, temperatures=[1.0])
    bench.run({"bench": PROMPTS})
    assert not any(gate.passed for gate in bench.gates.values())
    assert all(gate.largest_error > EXACT for gate in bench.gates.values())


def test_probabilities_that_are_no_numbers_fail_the_gate(tiny_recipe, loaded_target, drafts):
    bench, gate = bench_of(tiny_recipe, loaded_target, drafts), Gate(1.0, drift_allowed=1.0)
    tree = build_tree(1, [2, 3], [0, 1], torch.device("cpu"))
    bench._examine(gate, Sampling(8, frozenset(), 1.0), [5, 6, 1], tree, torch.full((3, 260), math.nan))
    assert gate.largest_error == gate.largest_drift == math.inf and not gate.passed


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(tiny_recipe, loaded_target, drafts):
    limit = loaded_target.config.max_position_embeddings
    long = Prompt("long", "", ("word " * limit,))
    bench = bench_of(tiny_recipe, loaded_target, drafts, temperatures=[0.0])
    bench.run({"bench": [long, PROMPTS[1]]})
    assert bench.left_out == {"bench": 1}
    assert {record.question_id for record in bench.records} == {"two"}
    with pytest.raises(PipelineError, match="none of its 1 prompts fits"):
        bench.run({"bench": [long]})
