"""The acceptance rules, proved by enumerating every outcome of the real function, and tau."""

import math

import pytest
import torch
from scipy.stats import chisquare

from pipeline.decoding.accept import (
    Acceptance,
    Sampler,
    accept_greedy,
    accept_sampled,
    every_outcome,
    first_token_distribution,
    legacy_tau,
)
from pipeline.decoding.tree import build_tree

CPU = torch.device("cpu")


class Language:
    """A target on a small vocabulary: a random distribution after every prefix, in fp64."""

    def __init__(self, seed: int, vocabulary: int, shape):
        self.vocabulary, self._shape, self._known = vocabulary, shape, {}
        self._generator = torch.Generator().manual_seed(seed)

    def after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._known:
            raw = torch.randn(self.vocabulary, generator=self._generator, dtype=torch.float64) * 1.5
            self._known[prefix] = self._shape(raw)
        return self._known[prefix]

    def joint(self, prefix: tuple[int, ...], length: int) -> torch.Tensor:
        """The distribution of the `length` tokens after `prefix`, one axis a token."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        tails = [self.joint((*prefix, token), length - 1) for token in range(self.vocabulary)]
        return torch.stack([p * tail for p, tail in zip(self.after(prefix), tails, strict=True)])


def full(logits):
    return logits.softmax(-1)


def top_3(logits):
    return logits.masked_fill(logits < logits.topk(3).values[-1], -math.inf).softmax(-1)


def top_p(logits):
    """The smallest set of best tokens with at least 0.7 of the mass."""
    p, order = logits.softmax(-1).sort(descending=True)
    kept = p.masked_fill(p.cumsum(0) - p >= 0.7, 0)
    return torch.zeros_like(p).scatter(0, order, kept / kept.sum())


def certain(logits):
    return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)


def sometimes_certain(logits):
    return certain(logits) if logits[0] > 0 else full(logits)


SHAPES = [full, top_3, top_p, certain, sometimes_certain]


def random_tree(seed: int, vocabulary: int):
    """Root, then up to 3 levels; every node gets 0 to 4 different children (the root at least 2)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens, parents, level = [], [], [0]
    for depth in range(3):
        below = []
        for parent in level:
            low = 2 if depth == 0 else 0
            count = int(torch.randint(low, 5, (), generator=generator))
            for token in torch.randperm(vocabulary, generator=generator)[:count].tolist():
                tokens.append(token)
                parents.append(parent)
                below.append(len(tokens))
        level = below[:6]
    return build_tree(0, tokens, parents, CPU)


def paths_of(tree):
    paths = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def probabilities(tree, language):
    return torch.stack([language.after(path) for path in paths_of(tree)])


def emitted_joint(tree, language, rule) -> torch.Tensor:
    """What one round emits, continued by plain sampling to depth + 1 tokens: its exact joint distribution."""
    length = max(tree.depths) + 1
    paths, p_NV = paths_of(tree), probabilities(tree, language)
    joint = torch.zeros((language.vocabulary,) * length, dtype=torch.float64)
    for (path, _), weight, drawn_V in every_outcome(lambda chance: rule(tree, p_NV, chance)):
        if weight == 0:
            continue
        prefix = paths[path[-1]] if path else ()
        for token in range(language.vocabulary):
            if drawn_V[token] != 0:
                emitted = (*prefix, token)
                joint[emitted] += weight * drawn_V[token] * language.joint(emitted, length - len(emitted))
    return joint


def error(tree, language, rule=accept_sampled) -> float:
    """The largest deviation from the product of the target's conditionals."""
    length = max(tree.depths) + 1
    return (emitted_joint(tree, language, rule) - language.joint((), length)).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocabulary", [5, 6, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_round_emits_exactly_the_targets_joint_distribution(seed, vocabulary, shape):
    tree, language = random_tree(seed, vocabulary), Language(seed, vocabulary, shape)
    joint = emitted_joint(tree, language, accept_sampled)
    expected = language.joint((), joint.ndim)
    for length in range(1, joint.ndim + 1):
        beyond = tuple(range(length, joint.ndim))
        got, want = (x.sum(beyond) if beyond else x for x in (joint, expected))
        assert (got - want).abs().max() < 1e-6, f"the first {length} tokens"
    assert (joint.flatten(1).sum(1) - language.after(())).abs().max() < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_no_token_without_mass_is_ever_emitted(shape):
    for seed in range(8):
        tree, language = random_tree(seed, 6), Language(seed, 6, shape)
        p_NV, paths = probabilities(tree, language), paths_of(tree)
        for (path, _), weight, drawn_V in every_outcome(lambda chance, t=tree, p=p_NV: accept_sampled(t, p, chance)):
            if weight == 0:
                continue
            assert all(p_NV[tree.parents[node]][tree.tokens[node]] > 0 for node in path)
            stopped = path[-1] if path else 0
            assert (drawn_V[language.after(paths[stopped]) == 0] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_weights_of_all_outcomes_sum_to_one(seed, shape):
    tree, language = random_tree(seed, 7), Language(seed, 7, shape)
    p_NV = probabilities(tree, language)
    outcomes = list(every_outcome(lambda chance: accept_sampled(tree, p_NV, chance)))
    assert sum(weight for _, weight, _ in outcomes) == pytest.approx(1, abs=1e-12)
    for _, weight, drawn_V in outcomes:
        assert weight == 0 or drawn_V.sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_first_token_distribution_is_the_targets(seed, shape):
    tree, language = random_tree(seed, 7), Language(seed, 7, shape)
    got = first_token_distribution(tree, probabilities(tree, language))
    assert (got - language.after(())).abs().max() < 1e-6


@pytest.mark.parametrize("p", [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 1.0]])
def test_first_token_distribution_when_the_siblings_exhaust_the_support(p):
    """top_k = 1, or a top-k no larger than the tree's: after them nothing is left to renormalise."""
    tree = build_tree(9, [0, 1, 2], [0, 0, 0], CPU)
    p_NV = torch.tensor([p] * 4)
    assert first_token_distribution(tree, p_NV).tolist() == p


def flawed(flaw):
    """The rule with one mistake."""

    def rule(tree, p_NV, chance):
        children, node, path = tree.children(), 0, []
        while True:
            p_V, accepted = p_NV[node].clone(), None
            for child in children[node]:
                token = tree.tokens[child]
                if p_V[token] <= 0:
                    continue
                probability = (
                    p_NV[node][token].item() if flaw == "accepts with the unconditioned p" else p_V[token].item()
                )
                if chance.accept(1.0 if flaw == "always accepts" else probability):
                    accepted = child
                    break
                if flaw != "does not zero":
                    p_V[token] = 0
                if flaw != "does not renormalise":
                    p_V /= p_V.sum()
            if accepted is None:
                return path, chance.draw(p_NV[node] if flaw == "draws from the unconditioned p" else p_V)
            path.append(accepted)
            node = accepted

    return rule


@pytest.mark.parametrize(
    "flaw",
    [
        "always accepts",
        "does not zero",
        "does not renormalise",
        "accepts with the unconditioned p",
        "draws from the unconditioned p",
    ],
)
def test_the_enumeration_catches_a_wrong_rule(flaw):
    tree, language = random_tree(0, 6), Language(0, 6, full)
    assert error(tree, language, flawed(None)) < 1e-12  # without a flaw it is the rule
    assert error(tree, language, flawed(flaw)) > 1e-3


def test_the_enumeration_catches_a_repeated_sibling_that_is_not_conditioned():
    """A token offered twice: the real rule survives it (its p is zero by then), a rule that forgets does not."""
    tree, language = build_tree(0, [2, 2, 3], [0, 0, 0], CPU), Language(5, 5, full)
    assert error(tree, language) < 1e-12
    assert error(tree, language, flawed("does not zero")) > 1e-3


def test_every_outcome_visits_each_sequence_of_decisions_once():
    tree, language = random_tree(2, 8), Language(2, 8, full)
    p_NV = probabilities(tree, language)
    paths = [tuple(path) for (path, _), _, _ in every_outcome(lambda chance: accept_sampled(tree, p_NV, chance))]
    assert len(paths) == len(set(paths)) == len(tree.tokens)  # it may stop at any node


def test_sampled_rounds_pass_a_chi_square_test_on_two_tokens():
    """One seeded Sampler over many rounds: pairs of the first two tokens against the exact joint distribution."""
    vocabulary, rounds = 5, 12_000
    tree, language = random_tree(4, vocabulary), Language(4, vocabulary, full)
    p_NV, paths, chance = probabilities(tree, language), paths_of(tree), Sampler(11)
    counts = torch.zeros(vocabulary, vocabulary)
    for _ in range(rounds):
        path, bonus = accept_sampled(tree, p_NV, chance)
        emitted = [tree.tokens[node] for node in path] + [bonus]
        if len(emitted) == 1:
            emitted.append(chance.draw(language.after((bonus,))))
        counts[emitted[0], emitted[1]] += 1
    assert len(paths) > 5
    assert chisquare(counts.flatten(), language.joint((), 2).flatten() * rounds).pvalue > 1e-3


def test_draws_and_coins_of_one_seed_are_independent():
    """The first draw picks the first token of an answer, the first coin decides about the second one."""
    seeds, quarter = 6000, torch.full((4,), 0.25)
    counts = torch.zeros(4, 2)
    for seed in range(seeds):
        chance = Sampler(seed)
        counts[chance.draw(quarter), int(chance.accept(0.5))] += 1
    assert chisquare(counts.flatten(), [seeds / 8] * 8).pvalue > 1e-3


def test_a_sampler_is_a_function_of_its_seed():
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def script(seed):
        chance = Sampler(seed)
        return [(chance.accept(0.5), chance.draw(p)) for _ in range(50)]

    assert script(3) == script(3)
    assert script(3) != script(4)


def test_a_sampler_accepts_certainties_only():
    chance = Sampler(0)
    assert all(chance.accept(1.0) for _ in range(200))
    assert not any(chance.accept(0.0) for _ in range(200))


#            root(0) -> 1:a=5  2:b=6;  1 -> 3:7 4:8;  2 -> 5:7;  3 -> 6:9
GREEDY_TREE = ([5, 6, 7, 8, 7, 9], [0, 0, 1, 1, 2, 3])


@pytest.mark.parametrize(
    ("best_N", "path", "bonus"),
    [
        ([1, 0, 0, 0, 0, 0, 0], [], 1),
        ([5, 1, 0, 0, 0, 0, 0], [1], 1),
        ([5, 7, 0, 9, 0, 0, 3], [1, 3, 6], 3),
        ([5, 7, 0, 8, 0, 0, 3], [1, 3], 8),
        ([5, 8, 0, 0, 2, 0, 0], [1, 4], 2),
        ([6, 7, 7, 9, 0, 4, 0], [2, 5], 4),
        ([6, 7, 9, 9, 0, 4, 0], [2], 9),
    ],
)
def test_greedy_takes_the_longest_argmax_path_and_the_argmax_after_it(best_N, path, bonus):
    assert accept_greedy(build_tree(0, *GREEDY_TREE, CPU), best_N) == (path, bonus)


def passes(*pairs) -> Acceptance:
    out = Acceptance()
    for accepted, emitted in pairs:
        out.add_pass(accepted, emitted)
    return out


def test_tau_is_tokens_per_pass_and_rates_are_conditional():
    counted = passes((0, 1), (2, 3), (1, 2), (3, 4))
    assert (counted.tokens, counted.passes, counted.accepted) == (10, 4, [4, 3, 2, 1])
    assert counted.tau == 2.5
    assert counted.rate_by_depth() == [3 / 4, 2 / 3, 1 / 2]


def test_a_draft_that_never_agrees_has_tau_one():
    counted = passes((0, 1), (0, 1), (0, 1))
    assert (counted.tau, counted.rate_by_depth()) == (1.0, [])


def test_a_draft_that_always_agrees_has_tau_depth_plus_one():
    counted = passes((4, 5), (4, 5))
    assert (counted.tau, counted.rate_by_depth()) == (5.0, [1.0] * 4)


def test_trimmed_tokens_are_not_counted():
    counted = passes((3, 4), (3, 1))
    assert (counted.tau, counted.accepted) == (2.5, [2, 2, 2, 2])


def test_no_pass_has_no_tau():
    assert math.isnan(Acceptance().tau)
    assert Acceptance().rate_by_depth() == []


@pytest.mark.parametrize("turned", [False, True])
def test_merging_counts_is_counting_everything(turned):
    one, two = passes((0, 1), (3, 4)), passes((1, 2), (1, 2), (5, 6))
    first, second = (two, one) if turned else (one, two)
    first.merge(second)
    assert first == passes((0, 1), (3, 4), (1, 2), (1, 2), (5, 6))


def test_legacy_tau_divides_untrimmed_tokens_by_one_pass_fewer():
    answers = [passes((2, 3), (2, 3), (1, 2)), passes((4, 5), (0, 1))]
    assert legacy_tau(answers, [9, 7]) == 16 / 3
    assert legacy_tau([passes((2, 3))], [4]) == 4  # a single pass is not divided by zero
    assert math.isnan(legacy_tau([], []))
