"""Speculative decoding compared with plain decoding on the tiny target: same tokens, same distribution, honest
counts.
"""

from types import SimpleNamespace

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative, prefill
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.lm.states import Needs
from tests.pipeline.taught import (
    KINDS,
    NEVER,
    TREES,
    VARIANTS,
    forwards_of,
    greedy,
    grown,
    make_draft,
    planted,
    prompt_of,
    texts_of_paths,
)

# -- temperature 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*VARIANTS, *KINDS])
def test_greedy_answers_of_every_draft_and_kind_of_tree_are_plain_decodings(loaded_target, embed_head, kind):
    name, trees = (kind, TREES.values()) if kind in VARIANTS else (KINDS[kind][0], [KINDS[kind][1]] * 2)
    for seed, tree in enumerate(trees):
        draft = grown(make_draft(loaded_target, embed_head, VARIANTS[name], seed), **tree)
        got = decode_speculative(loaded_target, draft, prompt_of(seed), Sampling(16, NEVER))
        assert got.tokens == greedy(loaded_target, prompt_of(seed), 16)
        assert got.acceptance.tokens == 15


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        *[("eagle", 1), ("jakiro", 1), ("jakiro", 2), ("reduced", 1), ("reduced", 2)],
        *[("eagle3", 1), ("eagle3, 3.1's norms", 1), ("jakiro on eagle-3", 2)],
        ("sparse on eagle-3", 1),
        *[("gumiho", None), ("gumiho, reduced", None), ("medusa", None)],
        *[
            ("small-llama", None),
            ("small-llama, reduced", None),
            ("medusa, reduced", None),
            ("hydra", None),
            ("hydra++", None),
            ("hydra++, the target's head", None),
        ],
    ],
)
def test_a_taught_draft_is_accepted_deeply_and_changes_nothing(loaded_target, text, taught_drafts, name, parallel):
    """Real drafts, long accepted paths: also the guard of positions, features and cache, which only cost acceptance."""
    prompt, answer = text
    draft = grown(taught_drafts[name], parallel=parallel, depth=4, top_k=4, nodes=50)
    got = decode_speculative(loaded_target, draft, prompt, Sampling(48, NEVER))
    assert got.tokens == answer
    assert got.acceptance.tau > 3.5


@pytest.mark.parametrize(
    "kind", ["deep", "usual", *(kind for kind, (_, tree) in KINDS.items() if "siblings" not in tree)]
)
def test_sampled_answers_of_best_candidates_are_plain_decodings_with_the_same_seed(
    loaded_target, text, taught_drafts, kind
):
    """Not only in distribution: the same random number for the same place of the answer gives the same token."""
    name, tree = ("jakiro", TREES[kind]) if kind in TREES else KINDS[kind]
    draft = grown(taught_drafts[name], **tree)
    settings = {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "repetition_penalty": 1.1}
    accepted = 0
    for seed in range(2):
        sampling = Sampling(40, NEVER, **settings, seed=seed)
        got = decode_speculative(loaded_target, draft, text[0], sampling)
        assert got.tokens == decode_plain(loaded_target, text[0], sampling).tokens
        accepted += got.acceptance.tokens - got.acceptance.passes
    assert accepted > 0


@pytest.mark.parametrize("kind", ["eagle-1", "jakiro, static, drawn", "jakiro, decoupled", "eagle-3"])
def test_the_repetition_penalty_is_every_nodes_own(loaded_target, text, taught_drafts, kind):
    """A node is penalised for the tokens of its own path; plain decoding's answer at temperature 0 is transformers'."""
    name, tree = KINDS[kind]
    draft, prompt = grown(taught_drafts[name], **tree), text[0]
    sampling = Sampling(30, NEVER, repetition_penalty=1.4)
    want = decode_plain(loaded_target, prompt, sampling).tokens
    assert want != decode_plain(loaded_target, prompt, Sampling(30, NEVER)).tokens
    transformers_ids = loaded_target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=30,
        repetition_penalty=1.4,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert want[: len(transformers_ids)] == transformers_ids
    assert decode_speculative(loaded_target, draft, prompt, sampling).tokens == want


def test_many_stop_ids_end_an_answer_at_the_first_of_them(loaded_target, text, taught_drafts):
    prompt, answer = text
    stops = frozenset({answer[9], answer[14], answer[20], 259})
    want = decode_plain(loaded_target, prompt, Sampling(48, stops)).tokens
    assert want[-1] in stops and not stops & set(want[:-1])
    assert decode_speculative(loaded_target, grown(taught_drafts["eagle"]), prompt, Sampling(48, stops)).tokens == want


def test_a_round_reuses_every_accepted_tokens_keys_and_values(loaded_target, text, taught_drafts, monkeypatch):
    """Tokens that pass through the target: the prompt once, then each tree once. Nothing accepted is computed again."""
    prompt, forwarded = text[0], []
    forward = loaded_target.forward
    monkeypatch.setattr(
        loaded_target,
        "forward",
        lambda tokens, *rest, **more: forwarded.append(len(tokens)) or forward(tokens, *rest, **more),
    )
    draft = grown(taught_drafts["eagle"], depth=3, top_k=4, nodes=12)
    got = decode_speculative(loaded_target, draft, prompt, Sampling(30, NEVER))
    assert forwarded == [len(prompt), *[12] * got.acceptance.passes]
    assert got.draft_forwards == 3 * got.acceptance.passes


def test_a_compiled_target_decodes_the_same_answers(tiny_target, loaded_target, embed_head):
    """Use drafts of other layers one after the other; on a CPU only the compiler's front end runs."""
    compiled = Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")
    compiled.compile(backend="eager")
    deep, prompt = TREES["deep"], prompt_of(1)
    for name, tree in (("eagle3", deep), KINDS["jakiro, static, drawn"], ("eagle3, 3.1's norms", deep)):
        method = grown(make_draft(loaded_target, embed_head, VARIANTS[name]), **tree)
        for sampling in (Sampling(12, NEVER), Sampling(12, NEVER, temperature=1.0, seed=1)):
            want = decode_speculative(loaded_target, method, prompt, sampling)
            assert decode_speculative(compiled, method, prompt, sampling).tokens == want.tokens
            assert (
                decode_plain(compiled, prompt, sampling).tokens == decode_plain(loaded_target, prompt, sampling).tokens
            )


def test_plain_decoding_is_transformers_greedy_search(loaded_target):
    for seed in range(5):
        prompt = prompt_of(seed)
        for stop in (NEVER, frozenset({greedy(loaded_target, prompt, 8)[5]})):
            want = loaded_target.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=sorted(stop) or None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            got = decode_plain(loaded_target, prompt, Sampling(20, stop)).tokens
            if stop:
                assert got == want[: len(got)] and got[-1] in stop and len(got) <= 6
            else:
                # the model's own generation_config stops at <|end|>, plain was told not to
                assert got[: len(want)] == want


# -- drafts that know ----------------------------------------------------------------------------------------------


class Oracle:
    """A draft that is told the target's answer and right where ``right(position, depth)`` says so.

    `position` counts the tokens of the whole sequence before the proposed one, `depth` is that of the proposal.
    """

    stepwise, token_ids_U, target_vocabulary, needs = True, None, 260, Needs()
    config, rounds = JakiroConfig(), None
    propose = TrainedDraft.propose

    def __init__(self, sequence, right, vocabulary=260):
        self.sequence, self.right, self.vocabulary, self.name = sequence, right, vocabulary, "oracle"

    def open(self):
        return SimpleNamespace(verified=0)

    def _logits(self, position, depth):
        token = self.sequence[position] if position < len(self.sequence) else 0
        logits = torch.linspace(0, 1, self.vocabulary)
        logits[token] = 40.0 if self.right(position, depth) else -1e9
        return logits

    def _output(self, width, position, depth, request):
        levels = range(request.levels)
        logits = [self._logits(position + level, depth + level).expand(width, -1) for level in levels]
        return DraftOutput(torch.zeros(width, 1), logits)

    def start(self, state, inputs, request, places=1):
        assert inputs.tokens == self.sequence[: len(inputs.tokens)]
        state.verified += len(inputs.states_TSD)
        assert state.verified == len(inputs.tokens) - 1
        return self._output(1, state.verified + 1, 1, request)

    def step(self, state, frontier, request):
        return self._output(len(frontier.tokens_W), state.verified + 1 + frontier.depth, frontier.depth + 1, request)


ORACLE_TREES = [
    {"depth": 1, "top_k": 3, "nodes": 4},
    {"depth": 3, "top_k": 2, "nodes": 7},
    {"depth": 4, "top_k": 3, "nodes": 10, "parallel": 2},
    {"depth": 5, "top_k": 10, "nodes": 60},
]


def decode_with(target, right, tree, count, stop=NEVER, prompt=None):
    prompt = prompt or prompt_of(1)
    sequence = [*prompt, *greedy(target, prompt, count + 8)]
    got = decode_speculative(
        target, grown(Oracle(sequence, right), **{"parallel": 1, **tree}), prompt, Sampling(count, stop)
    )
    assert got.tokens == decode_plain(target, prompt, Sampling(count, stop)).tokens
    assert len(got.depths) == len(got.tokens) and sum(map(bool, got.depths)) == sum(got.acceptance.accepted[1:])
    return got


@pytest.mark.parametrize("tree", ORACLE_TREES)
def test_a_draft_that_never_agrees_has_tau_one(loaded_target, tree):
    got = decode_with(loaded_target, lambda position, depth: False, tree, 13)
    assert (got.acceptance.tau, got.acceptance.passes, got.acceptance.accepted) == (1.0, 12, [12])


@pytest.mark.parametrize("tree", ORACLE_TREES)
def test_a_draft_that_always_agrees_has_tau_depth_plus_one(loaded_target, tree):
    got = decode_with(loaded_target, lambda position, depth: True, tree, 1 + 4 * (tree["depth"] + 1))
    assert (got.acceptance.tau, got.acceptance.passes) == (tree["depth"] + 1, 4)
    assert got.acceptance.rate_by_depth() == [1.0] * tree["depth"]
    assert got.depths == [0, *[*range(1, tree["depth"] + 1), 0] * 4]
    assert got.untrimmed_tokens == len(got.tokens) - 1  # the first token belongs to no pass


@pytest.mark.parametrize("tree", ORACLE_TREES[1:])
def test_a_draft_that_is_right_at_depth_one_only_has_tau_two(loaded_target, tree):
    got = decode_with(loaded_target, lambda position, depth: depth == 1, tree, 1 + 2 * 6)
    assert (got.acceptance.tau, got.acceptance.accepted, got.depths) == (2.0, [6, 6], [0, *[1, 0] * 6])


# -- where decoding ends -------------------------------------------------------------------------------------------


def test_tokens_behind_a_stop_id_are_dropped_and_not_counted(loaded_target):
    tree = {"depth": 4, "top_k": 2, "nodes": 7}
    answer, prompt = None, None
    for seed in range(20):  # a stop id that first appears in the middle of a pass
        prompt = prompt_of(seed)
        answer = greedy(loaded_target, prompt, 12)
        if answer[7] not in answer[:7]:
            break
    assert answer[7] not in answer[:7]
    got = decode_with(loaded_target, lambda position, depth: True, tree, 40, frozenset({answer[7]}), prompt)
    assert got.tokens == answer[:8]  # the stop id itself stays
    assert (got.acceptance.tokens, got.acceptance.passes, got.acceptance.tau) == (7, 2, 3.5)  # 5, then 2 of 5
    assert got.untrimmed_tokens == 5 + 5


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 10, 11])
def test_the_limit_cuts_inside_a_pass(loaded_target, limit):
    tree = {"depth": 4, "top_k": 2, "nodes": 7}
    got = decode_with(loaded_target, lambda position, depth: True, tree, limit)
    passes = -(-(limit - 1) // 5)
    assert len(got.tokens) == limit
    assert (got.acceptance.tokens, got.acceptance.passes) == (limit - 1, passes)
    assert got.untrimmed_tokens == 5 * passes
    assert got.depths == [0, *[1, 2, 3, 4, 0] * passes][:limit]


def test_a_stop_id_as_first_token_ends_at_once(loaded_target):
    first = greedy(loaded_target, prompt_of(1), 1)
    got = decode_with(loaded_target, lambda *_: True, ORACLE_TREES[1], 20, frozenset(first))
    assert (got.tokens, got.acceptance.passes) == (first, 0)


def test_a_prompt_that_leaves_no_room_is_refused(loaded_target, embed_head):
    draft = grown(make_draft(loaded_target, embed_head, VARIANTS["eagle"]), depth=3, top_k=2, nodes=5)
    sampling = Sampling(24, NEVER)
    with pytest.raises(PipelineError, match=r"a prompt of 1001 tokens.* 24 more .*1024 positions.*max_new_tokens"):
        decode_plain(loaded_target, [1] * 1001, sampling)
    with pytest.raises(PipelineError, match=r"a prompt of 998 tokens.* 27 more .*1024 positions"):
        decode_speculative(loaded_target, draft, [1] * 998, sampling)


@pytest.mark.parametrize("length", [1, 400, 1024 - 4 - 3], ids=["one token", "longer than any taught", "the longest"])
@pytest.mark.parametrize("variant", ["eagle", "jakiro"])
def test_a_prompt_of_any_length_is_decoded(loaded_target, embed_head, variant, length):
    draft = grown(make_draft(loaded_target, embed_head, VARIANTS[variant]), depth=3, top_k=2, nodes=5)
    prompt = prompt_of(9, length)
    assert decode_speculative(loaded_target, draft, prompt, Sampling(4, NEVER)).tokens == greedy(
        loaded_target, prompt, 4
    )


# -- the target's pass over a tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [[], [1], [2], [1, 3], [1, 4, 8], [2, 5], [1, 3, 6, 7]])
def test_every_nodes_states_are_a_plain_forwards_of_its_path_whatever_was_accepted_before(
    loaded_target, embed_head, monkeypatch, right
):
    """The accepted path is kept in the cache, in its order, and nothing else of its tree."""
    draft, rounds, prompt = make_draft(loaded_target, embed_head, VARIANTS["eagle3"]), [], prompt_of(7)
    monkeypatch.setattr(draft, "propose", planted(loaded_target, right))
    forwards, _ = forwards_of(loaded_target, monkeypatch)
    got = decode_speculative(
        loaded_target, grown(draft), prompt, Sampling(12, NEVER), lambda *seen: rounds.append(seen)
    )
    assert got.tokens == greedy(loaded_target, prompt, 12) and len(got.acceptance.accepted) > len(right)
    for (tokens, tree, logits_NV), states in zip(rounds, forwards, strict=True):
        for node, text in enumerate(texts_of_paths(tokens[:-1], tree)):
            want = loaded_target.states(text, draft.needs.auxiliary).rows([-1])
            assert torch.allclose(states.final_ND[node], want.final_ND[0], atol=1e-5, rtol=1e-5)
            assert torch.allclose(states.auxiliary_NSD[node], want.auxiliary_NSD[0], atol=1e-5, rtol=1e-5)
            assert torch.allclose(logits_NV[node], loaded_target.head(want.final_ND[0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_the_loop_feeds_the_draft_true_states_beside_the_tokens_after_them(
    loaded_target, text, taught_drafts, variant, monkeypatch
):
    """Everything that `start` was given over a whole answer: plain decoding's states of t_i, with t_{i+1}."""
    prompt, draft, fed = text[0], taught_drafts[variant], []
    start = draft.start

    def spied(state, inputs, *request):
        fed.append((inputs.states_TSD, inputs.tokens[-len(inputs.states_TSD) :]))
        return start(state, inputs, *request)

    monkeypatch.setattr(draft, "start", spied)
    got = decode_speculative(loaded_target, grown(draft, depth=3, top_k=4, nodes=12), prompt, Sampling(30, NEVER))
    states, tokens = torch.cat([part for part, _ in fed]), [token for _, part in fed for token in part]
    sequence = [*prompt, *got.tokens]
    assert tokens == sequence[1 : 1 + len(tokens)] and len(tokens) > len(prompt) + 15
    want = loaded_target.states(sequence, draft.needs.auxiliary).select(draft.needs)
    assert torch.allclose(states, want[: len(states)], atol=1e-5)
    assert any(len(part) > 1 for part, _ in fed[1:])


def test_answers_that_share_the_prompts_forward_are_those_that_do_not(loaded_target, embed_head):
    """One after the other, of methods that require different states of the target, each with its own room."""
    prompt, sampling = prompt_of(1), Sampling(24, NEVER)
    methods = [
        grown(make_draft(loaded_target, embed_head, VARIANTS[name]), depth=3, top_k=3, nodes=8)
        for name in ("eagle", "eagle3")
    ]
    shared = prefill(loaded_target, prompt, 24 + 8, tuple(methods[1].draft.needs.auxiliary))
    for _ in range(2):
        alone, together = (
            decode_plain(loaded_target, prompt, sampling),
            decode_plain(loaded_target, prompt, sampling, shared),
        )
        assert alone.tokens == together.tokens
        for method in methods:
            alone = decode_speculative(loaded_target, method, prompt, sampling)
            together = decode_speculative(loaded_target, method, prompt, sampling, prefilled=shared)
            assert (alone.tokens, alone.acceptance) == (together.tokens, together.acceptance)
