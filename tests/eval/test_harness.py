"""The harness: its losslessness gate passes what is exact and fails what is not; tasks are finished one by one."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from eval.measure import harness, tasks
from eval.measure.gate import MAX_DRIFT_RATIO, MIN_P_VALUE, Gate
from eval.measure.harness import EAGER, PLAIN, EvalTask, Harness, Outcome, pool_outcomes
from eval.measure.prompts import BenchmarkPrompt
from pipeline.basics.errors import PipelineError
from pipeline.decoding import accept, generate
from pipeline.decoding import grow as tree_module
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling
from pipeline.decoding.tree import build_tree
from pipeline.drafts import build
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.lm.chat import prompt_ids
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.lm.states import EmbeddingAndHead
from tests.pipeline.taught import VARIANTS, make_draft, prompt_of
from tests.templates import GPT_OSS, QWEN_3, tokenizer_with_settings

PROMPTS = [
    BenchmarkPrompt("one", "", ("What is the question?", "And then?")),
    BenchmarkPrompt("two", "", ("Why? Because of that?",)),
]
DRAWN = TreeConfig(paths="eagle-1", siblings="drawn")


@pytest.fixture
def drafts(loaded_target, embed_head, tiny_recipe):
    made = {}
    for name, config in tiny_recipe.draft.items():
        draft = build(config, draft_shapes(loaded_target.config))
        draft.initialise(0)
        if config.vocabulary:
            draft.set_vocabulary(torch.arange(config.vocabulary))
        draft.bind(embed_head)
        made[name] = LoadedMethod(draft.eval().requires_grad_(False), tiny_recipe.tree(name))
    made["drawn"] = LoadedMethod(made["eagle"].draft, DRAWN)
    return made


def harness_of(recipe, loaded_target, drafts, **changes) -> Harness:
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changes)})
    return Harness(recipe, loaded_target, drafts)


def measured(made: Harness, prompts=PROMPTS, temperatures=(0.0, 1.0)):
    outcomes = [("bench", made.decode(EvalTask("bench", prompt, t))) for t in temperatures for prompt in prompts]
    return pool_outcomes(outcomes)


@pytest.mark.parametrize(
    ("template", "answer_text"),
    [
        (QWEN_3, "<think>\nhm\n</think>\n\nwell"),
        (GPT_OSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>well"),
    ],
    ids=["qwen3", "gpt-oss"],
)
def test_a_later_turn_is_asked_as_the_target_is_asked_it(
    tiny_recipe, loaded_target, drafts, monkeypatch, template, answer_text
):
    """The turn comes after the target's own answer, as its template renders it in a history: without the reasoning."""
    target, tokenizer = copy.copy(loaded_target), tokenizer_with_settings(template)
    target.tokenizer = tokenizer
    answer = [*tokenizer(answer_text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(harness, "decode_plain", lambda *_: SimpleNamespace(tokens=answer))
    _, second = harness_of(tiny_recipe, target, drafts).encode_turns(BenchmarkPrompt("one", "", ("Q1?", "Q2?")))
    history = [("user", "Q1?"), ("assistant", "well"), ("user", "Q2?")]
    assert second == prompt_ids(tokenizer, [{"role": role, "content": text} for role, text in history])


def test_exact_decoding_passes_at_every_temperature(tiny_recipe, loaded_target, drafts):
    records, gates, left_out = measured(harness_of(tiny_recipe, loaded_target, drafts, repeats=2))
    assert set(gates) == {("bench", draft, t) for draft in drafts for t in (0.0, 1.0)}
    for (_, method, temperature), gate in gates.items():
        assert gate.passed and gate.checked == 3  # turns, however often decoded
        if temperature > 0:
            assert gate.rounds == 3 * 2 and 0 < gate.largest_drift < 1e-4 and gate.drift_ratio < MAX_DRIFT_RATIO
        if temperature == 0 or method != "drawn":
            assert gate.identical == 3  # above temperature 0, too: the same random numbers
        else:
            assert gate.drawn and gate.fit > 1e-3 and len(gate.places) == 3 * 2 * 8
    answers = {(r.question_id, r.turn, r.method) for r in records}
    assert len(answers) == 3 * 4 and {method for *_, method in answers} == {PLAIN, *drafts}
    assert left_out == {"bench": 0}


def test_a_compiled_targets_plain_decoding_is_timed_eagerly_too(tiny_recipe, tiny_target, drafts):
    target = Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")
    target.compile(backend="eager")
    forward, compiled = target.forward, []
    target.forward = lambda *inputs, **more: compiled.append(target.compiled) or forward(*inputs, **more)
    made = harness_of(tiny_recipe, target, {"drawn": drafts["drawn"]}, repeats=1)
    records, gates, _ = measured(made, PROMPTS[:1], [0.0])
    assert [record.method for record in records[:3]] == [PLAIN, EAGER, "drawn"]
    assert records[0].generation.tokens == records[1].generation.tokens
    assert set(compiled) == {True, False} and target.compiled and all(gate.passed for gate in gates.values())


def test_methods_take_turns_in_starting_and_are_reported_in_the_recipes_order(
    tiny_recipe, loaded_target, drafts, monkeypatch
):
    """If methods did not take turns, the first one would always find the caches as the prompt left them."""
    made, went, generate_once = harness_of(tiny_recipe, loaded_target, drafts, repeats=1), [], Harness._generate
    monkeypatch.setattr(Harness, "_warm_up", lambda *_: None)
    monkeypatch.setattr(
        Harness, "_generate", lambda self, method, *more: (went.append(method), generate_once(self, method, *more))[1]
    )
    prompts = [BenchmarkPrompt(str(number), "", ("Why?",)) for number in range(12)]
    records, _, _ = measured(made, prompts, [0.0])
    methods = [PLAIN, *drafts]
    turns = [went[begin : begin + len(methods)] for begin in range(0, len(went), len(methods))]
    assert len(turns) == 12 and all(sorted(turn) == sorted(methods) for turn in turns)
    assert {turn[0] for turn in turns} == set(methods)
    assert [record.method for record in records] == methods * 12


layout = generate._layout


def shifted_positions(tree, past, device):
    """The tree's nodes one position too far."""
    positions, visible = layout(tree, past, device)
    return positions + 1, visible


def everything_seen(tree, past, device):
    """Every node sees every other one, siblings and descendants included."""
    positions, visible = layout(tree, past, device)
    return positions, torch.ones_like(visible)


@pytest.mark.parametrize("wrong", [shifted_positions, everything_seen])
def test_a_wrong_tree_forward_fails_the_gate_above_temperature_0(
    tiny_recipe, loaded_target, drafts, monkeypatch, wrong
):
    monkeypatch.setattr(generate, "_layout", wrong)
    _, gates, _ = measured(harness_of(tiny_recipe, loaded_target, drafts), temperatures=[1.0])
    assert not any(gate.passed for gate in gates.values())
    assert all(gate.drift_ratio > 100 * MAX_DRIFT_RATIO for gate in gates.values())


def test_a_rule_that_takes_what_the_target_did_not_choose_fails_the_gate(
    tiny_recipe, loaded_target, drafts, monkeypatch
):
    def takes_the_first(tree, following):
        child = tree.children()[0][0]
        return [child], following(child)

    monkeypatch.setattr(generate, "accept_best", takes_the_first)
    _, gates, _ = measured(harness_of(tiny_recipe, loaded_target, drafts))
    for (_, method, temperature), gate in gates.items():
        assert gate.passed == (method == "drawn" and temperature > 0)


def test_a_distribution_that_is_not_plain_decodings_fails_the_gate(tiny_recipe, loaded_target, embed_head, monkeypatch):
    """The emitted tokens reveal a rule that takes every candidate, and a correct rule that gets another distribution
    than the candidates were drawn from.
    """
    draw = tree_module._Siblings._draw

    def of_another(self, draft, q_WKU, count, vocabulary):
        tokens, _ = draw(self, draft, q_WKU, count, vocabulary)
        return tokens, draw(self, draft, q_WKU.roll(7, -1), count, vocabulary)[1].clamp_min(1e-9)

    def always(tree, p_NV, randomness):
        child = tree.children()[0][0]
        return [child], int(randomness.draw_rows(p_NV[child][None].double())[0])

    prompts = [BenchmarkPrompt(str(n), "", (f"Question {n}?",)) for n in range(6)]
    sharp = {"drawn": LoadedMethod(make_draft(loaded_target, embed_head, VARIANTS["eagle"]), DRAWN)}
    made = harness_of(tiny_recipe, loaded_target, sharp, max_new_tokens=24, repeats=3)
    sound = measured(made, prompts, [1.0])[1]["bench", "drawn", 1.0]
    assert sound.passed and len(sound.places) > 350 and sound.fit > 0.01
    for owner, name, flaw in ((tree_module._Siblings, "_draw", of_another), (generate, "accept_drawn", always)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, flaw)
            wrong = measured(made, prompts, [1.0])[1]["bench", "drawn", 1.0]
        assert not wrong.passed and wrong.fit < MIN_P_VALUE


def parted(made, prompt, sampling, expected, place, got):
    """Return the gate's verdict on answers that diverge at `place`, where the draft's round chose `got`: from plain
    decoding's uncached logits, with only the two tokens' logits moved just far enough.
    """
    keeper = made._gatekeeper
    logits_V = keeper._uncached_logits([*prompt, *expected[:place]], 1)[0]

    def verdict(by):
        moved_V = logits_V.clone()
        moved_V[got] += by / 2
        moved_V[expected[place]] -= by / 2
        keeper._logits_by_decoding_again = lambda *_: moved_V
        chosen = int(sampling.choose(moved_V[None], None, accept.Sampler(sampling.seed), [place])[0])
        return chosen == got, keeper._rounding_decides("eagle", prompt, sampling, expected, [*expected[:place], got])

    return next((by / 64, *verdict(by / 64)) for by in range(64 * 64) if verdict(by / 64)[0])


def test_the_gate_forgives_only_what_plain_decodings_own_rounding_could_do(half, tiny_recipe, monkeypatch):
    """The test runs in bfloat16 at T = 0: the closer the two tokens, the smaller the move that swaps them. A swap is
    forgiven where the two are as close as plain decoding's own drift, and nowhere else: not where the gap is a tenth of
    the largest logit.
    """
    target, drafts = half
    made, verdicts = harness_of(tiny_recipe, target, drafts), []
    for seed in range(6):
        prompt = prompt_of(seed)
        expected = generate.decode_plain(target, prompt, Sampling(24, frozenset())).tokens
        for place in range(1, 24, 3):
            rows = made._gatekeeper._rows(tuple(prompt), tuple(expected[: place + 1]), max(place - 15, 0))
            best = rows.cached_TV[-1].topk(2)
            gap, second = (best.values[0] - best.values[1]).item(), best.indices[1].item()
            if best.indices[0] == expected[place] and gap > 0:
                _, swapped, forgiven = parted(made, prompt, Sampling(24, frozenset()), expected, place, second)
                assert swapped
                verdicts.append((gap / rows.drift, forgiven))
                assert not forgiven or gap <= MAX_DRIFT_RATIO * rows.drift * 2
                assert forgiven or gap > rows.floor
    assert {forgiven for _, forgiven in verdicts} == {True, False}
    assert max(gap for gap, forgiven in verdicts if forgiven) < min(4, max(gap for gap, _ in verdicts))


def test_what_no_rounding_can_cause_is_not_forgiven(half, tiny_recipe, loaded_target, drafts):
    target, in_half = half
    prompt = prompt_of(1)
    for made, sampling in (
        (harness_of(tiny_recipe, target, in_half), Sampling(8, frozenset())),
        (harness_of(tiny_recipe, loaded_target, drafts), Sampling(8, frozenset(), 1.0, seed=3)),
    ):
        keeper = made._gatekeeper
        expected = generate.decode_plain(made.target, prompt, sampling).tokens
        longer = [*expected, 5]
        assert not keeper._rounding_decides("eagle", prompt, sampling, expected, longer)  # goes on behind the end
        got = [*expected[:2], (expected[2] + 1) % 260]
        keeper._logits_by_decoding_again = lambda *_, k=keeper, e=expected: k._uncached_logits([*prompt, *e[:2]], 1)[0]
        assert not keeper._rounding_decides("eagle", prompt, sampling, expected, got)  # its own logits say otherwise
        keeper._logits_by_decoding_again = lambda *_: None
        assert not keeper._rounding_decides("eagle", prompt, sampling, expected, got)  # cannot be decoded again
    keeper = harness_of(tiny_recipe, loaded_target, drafts)._gatekeeper
    greedy = generate.decode_plain(loaded_target, prompt, Sampling(8, frozenset())).tokens
    swapped = [*greedy[:2], (greedy[2] + 1) % 260]
    keeper._logits_by_decoding_again = lambda *_: torch.zeros(260).index_fill(0, torch.tensor([swapped[2]]), 9.0)
    assert not keeper._rounding_decides(
        "eagle", prompt, Sampling(8, frozenset()), greedy, swapped
    )  # fp32: nothing ties


# -- in bfloat16 ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(tiny_target, embed_head):
    """The tiny target in bfloat16, and drafts for it with weights large enough to agree with it now and then."""
    target = Target(TargetConfig(model=str(tiny_target), device="cpu"), "bfloat16")
    made = {}
    for name in ("eagle", "jakiro"):
        draft = make_draft(target, embed_head, VARIANTS[name]).to(torch.bfloat16)
        draft.bind(EmbeddingAndHead(target.embedding_VD, target.head, embed_head.fingerprint))
        made[name] = LoadedMethod(draft, TreeConfig(depth=3, top_k=4, nodes=12))
    return target, made


def one_too_many(tree, following):
    """The right path, and one candidate more that the target did not choose."""
    path, bonus = accept.accept_best(tree, following)
    more = tree.children()[path[-1] if path else 0]
    return ([*path, more[0]], following(more[0])) if more else (path, bonus)


FAULTS = {
    "wrong position": ("_layout", shifted_positions),
    "wrong mask": ("_layout", everything_seen),
    "one candidate too many": ("accept_best", one_too_many),
}
HALF_PROMPTS = [BenchmarkPrompt(str(n), "", (f"Question {n}: why?",)) for n in range(6)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_in_bfloat16_a_sound_verifier_passes_and_a_wrong_one_fails(half, tiny_recipe, monkeypatch, fault, temperature):
    target, drafts = half
    if fault:
        monkeypatch.setattr(generate, *FAULTS[fault])
    made = harness_of(tiny_recipe, target, drafts, max_new_tokens=16)
    _, gates, _ = measured(made, HALF_PROMPTS[:2] if fault else HALF_PROMPTS, [temperature])  # one is seen at once
    for gate in gates.values():
        assert gate.passed == (fault is None), (gate.drift_ratio, gate.identical, gate.near_ties, gate.checked)
        assert (
            gate.drift_ratio <= MAX_DRIFT_RATIO
            if fault in (None, "one candidate too many")
            else gate.drift_ratio > MAX_DRIFT_RATIO
        )


def test_the_logits_that_a_token_was_chosen_from_are_found_again(tiny_recipe, loaded_target, drafts):
    made, prompt = harness_of(tiny_recipe, loaded_target, drafts), [65, 66, 67]
    for sampling in (Sampling(12, frozenset()), Sampling(12, frozenset(), 1.0, seed=4)):
        answer = generate.decode_speculative(loaded_target, drafts["jakiro"], prompt, sampling).tokens
        for place in range(1, 12):
            logits_V = made._gatekeeper._logits_by_decoding_again("jakiro", prompt, sampling, answer, place)
            assert torch.allclose(logits_V, made._gatekeeper._uncached_logits(prompt + answer[:place], 1)[0], atol=1e-4)
    assert (
        made._gatekeeper._logits_by_decoding_again("jakiro", prompt, sampling, [answer[0] + 1, *answer[1:]], 4) is None
    )


def test_probabilities_that_are_no_numbers_fail_the_gate(tiny_recipe, loaded_target, drafts):
    made, gate = harness_of(tiny_recipe, loaded_target, drafts), Gate(1.0, checked=1, identical=1, plain_drift=1.0)
    tree = build_tree(1, [2, 3], [0, 1], torch.device("cpu"))
    made._gatekeeper._examine_round(gate, [5, 6, 1], tree, torch.full((3, 260), math.nan))
    assert gate.rounds == 1 and gate.largest_drift == math.inf and not gate.passed


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(tiny_recipe, loaded_target, drafts):
    limit = loaded_target.config.max_position_embeddings
    long = BenchmarkPrompt("long", "", ("word " * limit,))
    made = harness_of(tiny_recipe, loaded_target, drafts)
    records, _, left_out = measured(made, [long, PROMPTS[1]], [0.0])
    assert left_out == {"bench": 1}
    assert {record.question_id for record in records} == {"two"}
    with pytest.raises(PipelineError, match="none of its 1 prompts fits"):
        measured(made, [long], [0.0])


# -- tasks ----------------------------------------------------------------------------------------------------------


def test_an_outcome_survives_being_written(tiny_recipe, loaded_target, drafts):
    outcome = harness_of(tiny_recipe, loaded_target, drafts).decode(EvalTask("bench", PROMPTS[1], 1.0))
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_what_is_finished_is_not_decoded_again(tiny_recipe):
    """Whatever stops the command, each prompt is decoded once."""
    requests, config = [], tiny_recipe.eval.model_copy(update={"temperatures": [0.0, 1.0]})
    recipe = tiny_recipe.model_copy(update={"eval": config})
    all_tasks = [EvalTask("bench", prompt, t) for t in (0.0, 1.0) for prompt in PROMPTS]
    job = tasks.EvalJob(recipe, {}, {}, all_tasks, "key")

    def fleet(_, __, missing, stop_after):
        for place, task in enumerate(reversed(missing)):  # in any order
            if place == stop_after:
                raise KeyboardInterrupt
            requests.append(task.name)
            yield task, Outcome([], {}, left_out=task.temperature > 0)

    with pytest.raises(KeyboardInterrupt), tasks.evaluation_lock(recipe):
        tasks.decode_all(job, lambda *arguments: fleet(*arguments, stop_after=3))
    outcomes = tasks.decode_all(job, lambda *arguments: fleet(*arguments, stop_after=None))
    assert sorted(requests) == sorted(task.name for task in all_tasks)
    assert [outcome.left_out for _, outcome in outcomes] == [False, False, True, True]  # in the recipe's order
