"""Speculative decoding beside plain decoding on the tiny target: same tokens, same distribution, honest counts."""

import pytest
import torch
from scipy.stats import chisquare

from pipeline.batch import collate
from pipeline.decoding import generate
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.decoding.tree import build_tree
from pipeline.drafts import build
from pipeline.drafts.base import Answer, DraftState, Frontier
from pipeline.drafts.layers import shapes_of
from pipeline.errors import PipelineError
from pipeline.features.schema import Row
from pipeline.sections import EagleConfig, JakiroConfig, TreeConfig
from pipeline.target import keep_cached

NEVER = frozenset()  # no stop id
CPU = torch.device("cpu")
VARIANTS = {
    "eagle": EagleConfig(kind="eagle"),
    "jakiro": JakiroConfig(kind="jakiro"),
    "four-experts": JakiroConfig(kind="jakiro", experts=4, experts_per_token=2, expert_width=24),
    "scalar": JakiroConfig(kind="jakiro", contrast="scalar", fc_bias=True),
    "not-hybrid": JakiroConfig(kind="jakiro", tree=TreeConfig()),
    "reduced": JakiroConfig(kind="jakiro", vocabulary=100),
}
TREES = {
    "deep": {"depth": 5, "top_k": 3, "nodes": 16},
    "wide": {"depth": 2, "top_k": 40, "nodes": 120},
    "usual": {"depth": 4, "top_k": 10, "nodes": 60},
}


def prompt_of(seed: int, length: int = 12) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def shaped(config, hybrid=None, **tree):
    hybrid = config.tree.hybrid if hybrid is None else hybrid
    return config.model_copy(update={"tree": TreeConfig(**tree, hybrid=hybrid)})


def make_draft(target, ends, config, seed=0):
    """Random weights, large enough for attention to tell positions apart (at the usual 0.02 it is all but uniform)."""
    draft = build(config, shapes_of(target.config))
    draft.initialise(seed)
    for weight in draft.parameters():
        if weight.ndim == 2:
            weight.data.mul_(10)
    if config.vocabulary:
        ids = torch.randperm(260, generator=torch.Generator().manual_seed(seed))[: config.vocabulary]
        draft.set_vocabulary(ids.sort().values)
    draft.bind(ends)
    return draft.eval().requires_grad_(False)


def greedy(target, prompt, count):
    return plain(target, prompt, Sampling(count, NEVER)).tokens


@torch.inference_mode()
def logits_after(target, tokens):
    """Plain logits after every token, from one causal forward without a cache."""
    return target.head(target.capture(torch.tensor([tokens])))[0]


def taught(target, ends, config, prompt, answer, steps=250):
    """A draft trained on one text until it knows it: what it proposes there is mostly accepted."""
    draft = build(config, shapes_of(target.config))
    draft.initialise(0)
    if config.vocabulary:
        others = [token for token in range(260) if token not in answer]
        draft.set_vocabulary(torch.tensor(sorted([*set(answer), *others[: config.vocabulary - len(set(answer))]])))
    draft.bind(ends)
    tokens = torch.tensor([*prompt, *answer])
    mask = torch.ones(len(tokens), dtype=torch.uint8).numpy()
    row = Row("text", tokens.int().numpy(), mask, target.capture(tokens[None])[0].clone())
    batch = collate([row], draft.horizons, "predicted", dict.fromkeys(draft.horizons, len(tokens) - 2))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        draft.loss(batch)[0].backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def text(loaded_target):
    """A prompt and the target's own continuation."""
    prompt = prompt_of(3)
    return prompt, greedy(loaded_target, prompt, 48)


@pytest.fixture(scope="module")
def taught_drafts(loaded_target, ends, text):
    names = ("eagle", "jakiro", "reduced")
    return {name: taught(loaded_target, ends, VARIANTS[name], *text) for name in names}


# -- temperature 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_answers_are_plain_decodings_token_for_token(loaded_target, ends, variant, tree):
    for seed in range(5):
        draft = make_draft(loaded_target, ends, shaped(VARIANTS[variant], **TREES[tree]), seed)
        got = speculative(loaded_target, draft, prompt_of(seed), Sampling(16, NEVER))
        assert got.tokens == greedy(loaded_target, prompt_of(seed), 16)
        assert got.acceptance.tokens == 15


@pytest.mark.parametrize(
    ("name", "hybrid"), [("eagle", False), ("jakiro", False), ("jakiro", True), ("reduced", False), ("reduced", True)]
)
def test_a_taught_draft_is_accepted_deeply_and_changes_nothing(loaded_target, text, taught_drafts, name, hybrid):
    """Real drafts, long accepted paths: also the guard of positions, features and cache, which only cost acceptance."""
    prompt, answer = text
    draft = taught_drafts[name]
    draft.config = shaped(draft.config, hybrid, depth=4, top_k=4, nodes=50)
    got = speculative(loaded_target, draft, prompt, Sampling(48, NEVER))
    assert got.tokens == answer
    assert got.acceptance.tau > 3.5


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
            got = plain(loaded_target, prompt, Sampling(20, stop)).tokens
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

    draft_token_ids = None

    def __init__(self, sequence, right, vocabulary=260, **tree):
        self.sequence, self.right, self.vocabulary = sequence, right, vocabulary
        self.config = EagleConfig(kind="eagle").model_copy(update={"tree": TreeConfig(**tree)})

    def _logits(self, position, depth):
        known = self.sequence[position] if position < len(self.sequence) else 0
        logits = torch.linspace(0, 1, self.vocabulary)
        logits[known] = 40.0 if self.right(position, depth) else -1e9
        return logits

    def _answer(self, width, position, depth):
        following = self._logits(position, depth).expand(width, -1)
        ahead = self._logits(position + 1, depth + 1).expand(width, -1)
        return Answer(torch.zeros(width, 1), following, ahead)

    def start(self, state, hidden_TD, tokens_T):
        assert len(hidden_TD) == len(tokens_T)
        begin = state.verified + 1
        assert tokens_T.tolist() == self.sequence[begin : begin + len(tokens_T)]
        state.verified += len(tokens_T)
        return self._answer(1, state.verified + 1, 1)

    def step(self, state, frontier):
        return self._answer(len(frontier.tokens_W), state.verified + 1 + frontier.depth, frontier.depth + 1)


ORACLE_TREES = [
    {"depth": 1, "top_k": 3, "nodes": 4},
    {"depth": 3, "top_k": 2, "nodes": 7},
    {"depth": 4, "top_k": 3, "nodes": 10, "hybrid": True},
    {"depth": 5, "top_k": 10, "nodes": 60},
]


def decode_with(target, right, tree, count, stop=NEVER, prompt=None):
    prompt = prompt or prompt_of(1)
    sequence = [*prompt, *greedy(target, prompt, count + 8)]
    got = speculative(target, Oracle(sequence, right, **tree), prompt, Sampling(count, stop))
    assert got.tokens == plain(target, prompt, Sampling(count, stop)).tokens
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
    assert got.untrimmed_tokens == len(got.tokens)


@pytest.mark.parametrize("tree", ORACLE_TREES[1:])
def test_a_draft_that_is_right_at_depth_one_only_has_tau_two(loaded_target, tree):
    got = decode_with(loaded_target, lambda position, depth: depth == 1, tree, 1 + 2 * 6)
    assert (got.acceptance.tau, got.acceptance.accepted) == (2.0, [6, 6])


@pytest.mark.parametrize("tree", ORACLE_TREES)
def test_a_draft_that_sometimes_agrees_lies_between(loaded_target, tree):
    got = decode_with(loaded_target, lambda position, depth: position % 5 not in (0, 1), tree, 41)
    assert 1 < got.acceptance.tau < tree["depth"] + 1


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
    assert got.untrimmed_tokens == 1 + 5 + 5


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 10, 11])
def test_the_limit_cuts_inside_a_pass(loaded_target, limit):
    tree = {"depth": 4, "top_k": 2, "nodes": 7}
    got = decode_with(loaded_target, lambda position, depth: True, tree, limit)
    passes = -(-(limit - 1) // 5)
    assert len(got.tokens) == limit
    assert (got.acceptance.tokens, got.acceptance.passes) == (limit - 1, passes)
    assert got.untrimmed_tokens == 1 + 5 * passes


def test_a_stop_id_as_first_token_ends_at_once(loaded_target):
    first = greedy(loaded_target, prompt_of(1), 1)
    got = decode_with(loaded_target, lambda *_: True, ORACLE_TREES[1], 20, frozenset(first))
    assert (got.tokens, got.acceptance.passes) == (first, 0)


@pytest.mark.parametrize(
    ("tokens", "already", "want"),
    [
        ([1, 2, 3], 0, ([1, 2, 3], False)),
        ([1, 9, 3], 0, ([1, 9], True)),
        ([9], 4, ([9], True)),
        ([1, 2, 9], 8, ([1, 2], True)),  # the limit comes before the stop id
        ([1, 2], 8, ([1, 2], True)),
        ([1, 8, 9], 0, ([1, 8], True)),
    ],
)
def test_trimming(tokens, already, want):
    assert Sampling(10, frozenset({8, 9})).trimmed(tokens, already) == want


def test_a_prompt_that_leaves_no_room_is_refused(loaded_target, ends):
    draft = make_draft(loaded_target, ends, shaped(VARIANTS["eagle"], depth=3, top_k=2, nodes=5))
    sampling = Sampling(24, NEVER)
    with pytest.raises(PipelineError, match=r"a prompt of 1001 tokens.* 24 more .*1024 positions.*max_new_tokens"):
        plain(loaded_target, [1] * 1001, sampling)
    with pytest.raises(PipelineError, match=r"a prompt of 998 tokens.* 27 more .*1024 positions"):
        speculative(loaded_target, draft, [1] * 998, sampling)


def test_the_longest_prompt_that_fits_is_decoded(loaded_target, ends):
    draft = make_draft(loaded_target, ends, shaped(VARIANTS["eagle"], depth=3, top_k=2, nodes=5))
    prompt = prompt_of(2, 1024 - 4 - 3)
    got = speculative(loaded_target, draft, prompt, Sampling(4, NEVER))
    assert got.tokens == greedy(loaded_target, prompt, 4)


@pytest.mark.parametrize("variant", ["eagle", "jakiro"])
def test_a_prompt_of_one_token_is_decoded(loaded_target, ends, variant):
    draft = make_draft(loaded_target, ends, shaped(VARIANTS[variant], **TREES["usual"]))
    got = speculative(loaded_target, draft, [65], Sampling(12, NEVER))
    assert got.tokens == greedy(loaded_target, [65], 12)


# -- the target's pass over a tree ----------------------------------------------------------------------------------


TREE = ([5, 6, 7, 8, 7, 9, 1, 1], [0, 0, 1, 1, 2, 3, 6, 4])  # depths 1 1 2 2 2 3 4 3


def paths_of(tree):
    """Tokens from the root to each node, both included."""
    paths = [[tree.tokens[0]]]
    for node in range(1, len(tree.tokens)):
        paths.append([*paths[tree.parents[node]], tree.tokens[node]])
    return paths


@torch.inference_mode()
def test_verifying_a_tree_is_a_plain_forward_of_every_path(loaded_target):
    prompt = prompt_of(7)
    tree = build_tree(65, *TREE, CPU)
    cache = loaded_target.new_cache()
    loaded_target.forward(torch.tensor(prompt), cache)
    hidden_ND, logits_NV = generate._verify(loaded_target, tree, cache, len(prompt))
    for node, path in enumerate(paths_of(tree)):
        whole = loaded_target.capture(torch.tensor([[*prompt, *path]]))[0, -1]
        assert torch.allclose(hidden_ND[node], whole, atol=1e-5, rtol=1e-5)
        assert torch.allclose(logits_NV[node], loaded_target.head(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", [[], [1], [2], [1, 3], [1, 4, 8], [2, 5], [1, 3, 6, 7]])
@torch.inference_mode()
def test_the_cache_of_an_accepted_path_is_a_fresh_ones(loaded_target, path):
    prompt = prompt_of(7)
    tree = build_tree(65, *TREE, CPU)
    cache, past = loaded_target.new_cache(), len(prompt)
    loaded_target.forward(torch.tensor(prompt), cache)
    generate._verify(loaded_target, tree, cache, past)
    keep_cached(cache, past, [past, *(past + node for node in path)])

    tokens = [*prompt, 65, *(tree.tokens[node] for node in path)]
    fresh = loaded_target.new_cache()
    loaded_target.forward(torch.tensor(tokens), fresh)
    assert cache.get_seq_length() == fresh.get_seq_length() == len(tokens)
    for got, want in zip(cache.layers, fresh.layers, strict=True):
        assert torch.allclose(got.keys, want.keys, atol=1e-5)
        assert torch.allclose(got.values, want.values, atol=1e-5)
    following = torch.tensor([66])
    assert torch.allclose(loaded_target.forward(following, cache), loaded_target.forward(following, fresh), atol=1e-5)


def test_every_rounds_probabilities_are_plain_ones(loaded_target, text, taught_drafts):
    """Over a whole sampled answer, with accepted paths in between, the verifier never loses its place."""
    prompt, _ = text
    draft = taught_drafts["jakiro"]
    draft.config = shaped(draft.config, True, depth=3, top_k=8, nodes=40)
    sampling = Sampling(32, NEVER, temperature=0.1, top_k=20, seed=5)
    rounds = []
    got = speculative(loaded_target, draft, prompt, sampling, lambda *seen: rounds.append(seen))
    assert got.acceptance.passes == len(rounds) and got.acceptance.tau > 1.2
    sequence = [*prompt, *got.tokens]
    for tokens, tree, logits_NV in rounds:
        assert tokens == sequence[: len(tokens)] and tokens[-1] == tree.tokens[0]
        plain_NV = torch.stack([logits_after(loaded_target, tokens[:-1] + path)[-1] for path in paths_of(tree)])
        error = (sampling.probabilities(plain_NV) - sampling.probabilities(logits_NV)).abs().max().item()
        assert error < 1e-4  # a logit error of 1e-5, divided by the temperature


# -- the draft's cache ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def training_time(draft, hidden_TD, tokens_T):
    """The answers of the training forward at every position, all branches."""
    positions = torch.arange(len(tokens_T))[None]
    u = draft._trunk(hidden_TD[None], tokens_T[None], positions, None, None)
    return {horizon: value[0] for horizon, value in draft.branches(u).items()}


def same_answer(draft, answer, row, branches, place):
    head = draft.ends.head
    assert torch.allclose(answer.hidden_WD[row], branches[1][place], atol=1e-5, rtol=1e-5)
    assert torch.allclose(answer.next_WU[row], head(branches[1][place]), atol=1e-5, rtol=1e-5)
    if answer.ahead_WU is not None:
        assert torch.allclose(answer.ahead_WU[row], head(branches[2][place]), atol=1e-5, rtol=1e-5)


def random_inputs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 32, generator=generator), torch.randint(0, 260, (count,), generator=generator)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_starting_in_pieces_is_the_training_forward(loaded_target, ends, variant):
    draft = make_draft(loaded_target, ends, VARIANTS[variant])
    hidden, tokens = random_inputs(20)
    whole, state, begin = training_time(draft, hidden, tokens), DraftState(), 0
    for count in (7, 1, 4, 1, 1, 6):
        answer = draft.start(state, hidden[begin : begin + count], tokens[begin : begin + count])
        begin += count
        assert answer.hidden_WD.shape == (1, 32) and state.verified == begin
        assert (answer.ahead_WU is not None) == draft.config.tree.hybrid
        same_answer(draft, answer, 0, whole, begin - 1)


def two_levels(draft, state, seed):
    """Forwards three nodes of depth 1, then three of depth 2 (children of rows 0, 2, 0): answers and inputs."""
    hidden, tokens = random_inputs(6, seed)
    eye = torch.eye(3, dtype=torch.bool)
    first = draft.step(state, Frontier(tokens[:3], hidden[:3], eye, 1))
    seen = torch.cat([eye[[0, 2, 0]], eye], dim=1)
    second = draft.step(state, Frontier(tokens[3:], hidden[3:], seen, 2))
    return first, second, hidden, tokens


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_step_is_the_training_forward_of_each_nodes_path(loaded_target, ends, variant):
    draft = make_draft(loaded_target, ends, VARIANTS[variant])
    hidden, tokens = random_inputs(9)
    state = DraftState()
    draft.start(state, hidden, tokens)
    first, second, below, below_tokens = two_levels(draft, state, seed=1)
    for answer, row, path in [(first, w, [w]) for w in range(3)] + [
        (second, w, [parent, 3 + w]) for w, parent in enumerate([0, 2, 0])
    ]:
        branches = training_time(draft, torch.cat([hidden, below[path]]), torch.cat([tokens, below_tokens[path]]))
        same_answer(draft, answer, row, branches, -1)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_rejected_tree_leaves_no_trace_in_the_drafts_cache(loaded_target, ends, variant):
    draft = make_draft(loaded_target, ends, VARIANTS[variant])
    hidden, tokens = random_inputs(15)
    used, clean = DraftState(), DraftState()
    for begin, end in ((0, 8), (8, 9), (9, 12), (12, 15)):
        after_tree = draft.start(used, hidden[begin:end], tokens[begin:end])
        without = draft.start(clean, hidden[begin:end], tokens[begin:end])
        assert torch.equal(after_tree.hidden_WD, without.hidden_WD)
        assert torch.equal(after_tree.next_WU, without.next_WU)
        assert used.cache.get_seq_length() == clean.cache.get_seq_length() == end
        two_levels(draft, used, seed=begin)
    same_answer(draft, after_tree, 0, training_time(draft, hidden, tokens), -1)


def test_the_loop_feeds_the_draft_true_features_beside_the_tokens_after_them(loaded_target, text, taught_drafts):
    """Everything that `start` was given over a whole answer: f_i of plain decoding, beside t_{i+1}."""
    prompt, _ = text
    draft = taught_drafts["eagle"]
    draft.config = shaped(draft.config, False, depth=3, top_k=4, nodes=12)
    fed = []

    class Spy:
        config, draft_token_ids, step = draft.config, draft.draft_token_ids, draft.step

        def start(self, state, hidden_TD, tokens_T):
            fed.append((hidden_TD, tokens_T))
            return draft.start(state, hidden_TD, tokens_T)

    got = speculative(loaded_target, Spy(), prompt, Sampling(30, NEVER))
    hidden, tokens = (torch.cat(parts) for parts in zip(*fed, strict=True))
    sequence = [*prompt, *got.tokens]
    assert tokens.tolist() == sequence[1 : 1 + len(tokens)] and len(tokens) > len(prompt) + 15
    assert torch.allclose(hidden, loaded_target.capture(torch.tensor([sequence]))[0, : len(hidden)], atol=1e-5)
    assert any(len(part) > 1 for _, part in fed[1:])


# -- temperature above 0 --------------------------------------------------------------------------------------------


def joint_of_two(target, prompt, sampling):
    """The exact distribution of the first two tokens of plain sampling."""
    first = sampling.probabilities(logits_after(target, prompt)[-1:])[0].double()
    out = {}
    for token in first.nonzero()[:, 0].tolist():
        second = sampling.probabilities(logits_after(target, [*prompt, token])[-1:])[0].double()
        for after in second.nonzero()[:, 0].tolist():
            out[token, after] = (first[token] * second[after]).item()
    return out


@pytest.mark.parametrize("method", ["plain", "speculative"])
def test_the_first_two_sampled_tokens_have_the_targets_distribution(loaded_target, text, taught_drafts, method):
    prompt, runs = text[0], 1000
    draft = taught_drafts["jakiro"]
    draft.config = shaped(draft.config, True, depth=2, top_k=5, nodes=12)
    settings = {"max_new_tokens": 2, "stop_ids": NEVER, "temperature": 1.0, "top_k": 4}
    expected = joint_of_two(loaded_target, prompt, Sampling(**settings))
    counts = dict.fromkeys(expected, 0)
    accepted = 0
    for seed in range(runs):
        sampling = Sampling(**settings, seed=seed)
        if method == "plain":
            got = plain(loaded_target, prompt, sampling)
        else:
            got = speculative(loaded_target, draft, prompt, sampling)
            accepted += len(got.acceptance.accepted) > 1
        counts[tuple(got.tokens)] += 1
    if method == "speculative":
        assert accepted > runs / 10  # both ways of emitting the second token take part
    rare = [pair for pair, p in expected.items() if p * runs < 5]
    cells = [pair for pair in expected if pair not in rare]
    observed = [counts[pair] for pair in cells] + [sum(counts[pair] for pair in rare)]
    wanted = [expected[pair] * runs for pair in cells] + [sum(expected[pair] for pair in rare) * runs]
    if not rare:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(cells) > 6
    assert chisquare(observed, [w * runs / sum(wanted) for w in wanted]).pvalue > 1e-3


@pytest.mark.parametrize(
    "processing", [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_k": 5, "top_p": 0.6, "temperature": 1.5}]
)
@pytest.mark.parametrize("name", ["eagle", "jakiro"])
def test_no_token_outside_the_processed_support_is_emitted(loaded_target, text, taught_drafts, name, processing):
    prompt, emitted = text[0], 0
    draft = taught_drafts[name]
    draft.config = shaped(draft.config, name == "jakiro", depth=3, top_k=4, nodes=14)
    for seed in range(5):
        sampling = Sampling(24, NEVER, **{"temperature": 1.0, **processing}, seed=seed)
        got = speculative(loaded_target, draft, prompt, sampling).tokens
        p_TV = sampling.probabilities(logits_after(loaded_target, [*prompt, *got[:-1]])[len(prompt) - 1 :])
        assert (p_TV[range(len(got)), got] > 0).all()
        emitted += len(got)
    assert emitted == 5 * 24


def test_top_k_one_is_greedy_decoding(loaded_target, text, taught_drafts):
    prompt, answer = text
    got = speculative(loaded_target, taught_drafts["eagle"], prompt, Sampling(20, NEVER, temperature=1.0, top_k=1))
    assert got.tokens == answer[:20]


def test_sampled_answers_are_a_function_of_the_seed(loaded_target, text, taught_drafts):
    def decode(seed):
        return speculative(
            loaded_target, taught_drafts["eagle"], text[0], Sampling(16, NEVER, temperature=1.0, seed=seed)
        ).tokens

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
