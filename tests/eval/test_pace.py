"""Rounds of the size that pays: the rule by hand, and that what is counted of it is what decoding does."""

from dataclasses import replace

import numpy as np
import pytest

from eval.measure.harness import EvalTask, Harness
from eval.measure.prompts import Prompt
from eval.tuning.calibrate import Answer, count, fit
from eval.tuning.choose import COMPILED, Replays, calibrate, predict
from eval.tuning.costs import Costs
from eval.tuning.pace import _walk, fixed_point, gain, paced, places
from pipeline.basics.parse import from_json
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.calibration import Line
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Method, RoundInput
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.decoding.sources import Sources
from pipeline.decoding.worth import Worth
from pipeline.drafts import make
from pipeline.drafts.lookup.prompt_lookup import PromptLookupConfig
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from tests.pipeline.taught import NEVER, VARIANTS, greedy, prompt_of, taught

FLAT = Line(x=[0.0], y=[0.5])
RULE = Worth(token=2.0, verify={1: 10.0, 2: 10.2, 3: 10.4, 5: 12.0}, forwards=[0.5, 1.5], gains=[FLAT, FLAT])


def test_a_node_is_verified_where_its_chance_is_worth_more_than_it_costs():
    assert [RULE.price(nodes) for nodes in (1, 2, 3, 5)] == pytest.approx([0, 0.1, 0.2, 1.0])
    assert RULE.size([]) == (1, 0.0)
    assert RULE.size([0.05, 0.01]) == (1, 0.0)
    assert RULE.size([0.6, 0.05]) == (2, pytest.approx(0.5))
    assert RULE.size([0.6, 0.3, 0.3, 0.3]) == (3, pytest.approx(0.7))
    assert RULE.size([0.9, 0.9, 0.9, 0.9]) == (5, pytest.approx(2.6))
    assert RULE.size([0.9, 0.9, 0.9]) == (5, pytest.approx(1.7))  # a size that is not quite filled


def test_a_forward_is_made_where_what_it_adds_is_worth_more_than_it_costs():
    assert RULE.pays(0, 0.0) and not RULE.pays(1, 0.0) and not RULE.pays(2, 0.0)
    falling = replace(RULE, gains=[Line(x=[0.0, 2.0], y=[1.0, 0.0]), FLAT])
    assert falling.pays(0, 1.0) and not falling.pays(0, 1.6)


@pytest.mark.parametrize("wrong", [{"verify": {2: 1.0}}, {"gains": [FLAT]}, {"token": 0.0}])
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="worth needs"):
        replace(RULE, **wrong)


def test_a_rule_survives_json():
    import json

    assert from_json(Worth, json.loads(json.dumps(RULE.to_json()))) == RULE


def test_gains_are_counted_by_what_the_round_is_worth_without_them():
    without = np.concatenate([np.zeros(100), np.ones(100)])
    found = gain([np.stack([without, without + np.where(without > 0, 0.1, 0.7)])], 0)
    assert found(0.0) == pytest.approx(0.7) and found(1.0) == pytest.approx(0.1)
    rising = np.linspace(0, 1, 1200)  # all worth the same without: one point, the mean over all of them
    alike = gain([np.stack([np.zeros(1200), rising])], 0)
    assert alike.x == [0.0] and alike.y == pytest.approx([0.5])


# -- against decoding ------------------------------------------------------------------------------------------------

TREE = TreeConfig(depth=3, top_k=3, nodes=9, parallel=1)
SIZES = (1, 2, 3, 4, 6, 8, 12)


@pytest.fixture(scope="module")
def drafts(loaded_target, ends):
    prompt = prompt_of(3, 20) * 2
    text = prompt, greedy(loaded_target, prompt, 24)
    return {name: taught(loaded_target, ends, VARIANTS[name], *text, steps=60) for name in ("eagle", "jakiro")}


def costs_of(step, per_node=0.02):
    verify = {size: 1.0 + per_node * size for size in SIZES}
    return Costs(1.0, verify, [dict.fromkeys((1, 2, 3, 4, 6, 8, 10), step)], step, 0.01)


def along(target, sources, temperature=0.0):
    prompt, out, most = prompt_of(3, 20) * 2, [], max(sources.config.parallels(3))
    for seed in range(1 if temperature == 0 else 3):
        sampling = Sampling(40, NEVER, temperature=temperature, seed=seed)
        tokens = prompt + plain(target, prompt, sampling).tokens
        walk = replay.collect(
            sources.draft, target.states(tokens), tokens, len(prompt), replay.largest_tree(3, 3, "plain", most)
        )
        out.append((Answer(replay.Together(sources, walk, tokens, len(prompt)), temperature, seed), prompt, sampling))
    return out


@pytest.mark.parametrize(("name", "parallel"), [("eagle", 1), ("jakiro", 1), ("jakiro", 2)])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("step", [0.02, 0.2, 3.0])
def test_what_is_counted_is_what_decoding_does(loaded_target, drafts, name, parallel, beside, temperature, step):
    """Also where a round does without the draft, and its next forward has more states to take in."""
    others = {"prompt-lookup": make(PromptLookupConfig(), shapes_of(loaded_target.config))} if beside else {}
    alone, tree = Sources(drafts[name], others), replace(TREE, parallel=parallel)
    found, costs = along(loaded_target, alone, temperature), costs_of(step)
    known = [places(answer, alone, tree, list(SIZES)) for answer, _, _ in found]
    worth, _, _, _, _ = fixed_point(known, tree, costs, list(SIZES), costs.plain / 1.2)
    ruled = Sources(drafts[name], others, worth=worth)
    made = 0
    for one, (_, prompt, sampling) in zip(known, found, strict=True):
        price_S = np.array([worth.price(size) for size in SIZES])
        counts = Acceptance()
        _, forwards, nodes = _walk(one, (one.chances_KAS - price_S).max(-1), worth, costs, counts, (0.0, 0, 0))
        trees = []
        got = speculative(loaded_target, Method(ruled, tree), prompt, sampling, lambda *seen: trees.append(seen[1]))  # noqa: B023
        assert got.tokens == plain(loaded_target, prompt, sampling).tokens
        assert (got.acceptance, got.draft_forwards) == (counts, forwards)
        assert sum(len(one.tokens) for one in trees) <= nodes
        made += forwards
        text = prompt + got.tokens
        again = replay.counter(ruled, loaded_target.states(text), text, len(prompt), tree, temperature)(tree)
        assert again == counts
    if step != 0.2:  # between the two it depends
        assert made == 0 if step == 3.0 else made > 0


def test_a_draft_that_was_left_out_takes_in_what_it_missed(loaded_target, drafts):
    """Where prompt lookup found something the draft is not asked; what it proposes later is what it would have proposed
    had it been asked every time.
    """
    others = {"prompt-lookup": make(PromptLookupConfig(shortest=2), shapes_of(loaded_target.config))}
    asks = Line(x=[0.0, 0.01], y=[9.0, -9.0])
    rule = Worth(token=1.0, verify=dict.fromkeys(range(1, 9), 1.0), forwards=[0.1], gains=[asks])
    draft, tree = drafts["eagle"], TreeConfig(depth=1, top_k=3, nodes=4, parallel=1)
    ruled = Sources(draft, others, worth=rule)
    text = [*range(40, 60), *range(45, 55), 200, 201, *range(50, 58), 203, 204, 205]
    states, state, fed, asked = loaded_target.states(text).of(draft.needs), ruled.open(), 0, []
    for end in (20, 22, 24, 29, 31, 34, 38, 40, 42):
        found = ruled.propose(state, RoundInput(text[: end + 1], states[fed:end]), tree, None)
        fed = end
        asked.append(not state.waiting)
        if asked[-1]:
            fresh = draft.pool(draft.open(), RoundInput(text[: end + 1], states[:end]), tree, 3)
            assert found.tokens[1:] == fresh.tokens
    assert asked.count(True) > 2 and any(a and not b for a, b in zip(asked[1:], asked, strict=False))


def test_the_rule_is_no_slower_than_any_of_the_trees_that_it_stops_along(loaded_target, drafts):
    """At the same costs and chances that are right: counted ones."""
    sources = Sources(drafts["eagle"], {})
    answers = [answer for answer, _, _ in along(loaded_target, sources)]
    counted, costs = sources.tuned(fit([(answer, count(answer.text, [TREE])) for answer in answers])), costs_of(0.05)
    found = paced(answers, counted, [TREE, replace(TREE, top_k=1, nodes=4)], costs)
    assert found.worth.token == pytest.approx(costs.plain / found.speedup, rel=1e-2)
    fixed = predict([one.text.counter(counted, 0.0) for one in answers], costs, sources.config, 3, costs.sizes, "plain")
    along_them = [one.speedup for one in fixed if one.tree.parallel == 1 and one.tree.top_k in (1, 3)]
    assert len(along_them) > 5 and found.speedup > 0.97 * max(along_them) > 1


@pytest.mark.parametrize(("temperature", "once"), [(0.0, True), (0.3, False)])
def test_greedy_repeats_are_counted_once(loaded_target, drafts, temperature, once):
    sources = Sources(drafts["eagle"], {})
    answers = [replace(answer, prompt=0) for answer, _, _ in along(loaded_target, sources, temperature)]
    found = [
        calibrate("x", sources, Replays([], some), 3, "plain", print)[0] for some in (answers, [*answers, *answers])
    ]
    assert (found[0] == found[1]) == once


def test_a_compiled_targets_rounds_have_a_few_sizes_each_compiled_before_an_answer(
    tiny_target, drafts, tiny_recipe, monkeypatch
):
    compiled = Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")
    compiled.compile(backend="eager")
    others = {"prompt-lookup": make(PromptLookupConfig(), shapes_of(compiled.config))}
    few = Costs(1.0, {size: 1.0 + 0.02 * size for size in (1, 2, 4, 6, 8)}, {}, 0.02, 0.01).only(COMPILED)
    ends = Line(x=[0.0, 0.5], y=[1.0, 0.0])
    rule = Worth(token=1.0, verify=few.verify, forwards=[0.02], gains=[ends])
    assert list(rule.verify) == [1, 4, 8]
    method = Method(Sources(drafts["eagle"], others, worth=rule), TREE)
    settings = tiny_recipe.eval.model_copy(update={"max_new_tokens": 24, "warmups": 1, "compile": True})
    made = Harness(tiny_recipe.model_copy(update={"eval": settings}), compiled, {"sized": method})
    compiled_widths, prompt = list[int](), Prompt("one", "", ("one two three one two three one two",))
    once = compiled._compiled
    compiled._compiled = lambda **given: compiled_widths.append(given["input_ids"].shape[1]) or once(**given)
    told = []
    made._compile_widths(method, made.with_histories(prompt)[0], lambda: told.append(1))
    assert compiled_widths == [1] * 3 + [4] * 3 + [8] * 3 and len(told) == 9
    monkeypatch.setattr(made, "_compile_widths", lambda *given: compiled_widths.append(given[0]))
    compiled_widths.clear()
    made._warm_up(made.with_histories(prompt)[0], lambda: None)
    assert compiled_widths[-1] is method
    compiled_widths.clear()
    outcome = made.decode(EvalTask("bench", prompt, 0.0))
    assert outcome.gates["sized"].passed and outcome.gates["sized"].identical == 1
    assert set(compiled_widths) <= {1, 4, 8}
