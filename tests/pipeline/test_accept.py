"""The acceptance rules, proved by enumerating every outcome of the real function, and tau."""

import math

import pytest
import torch
from scipy.stats import chisquare

from pipeline.decoding.accept import HALVINGS, Sampler, accept_best, accept_drawn, draw_by_halving
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.tree import build_tree
from tests.pipeline.exact import every_outcome
from tests.pipeline.scripted import ScriptedDraft, noise_by_path, paths_of, two_experts

CPU = torch.device("cpu")


class Language:
    """A target on a small vocabulary: a random distribution after every prefix, in fp64."""

    def __init__(self, seed: int, vocabulary: int, shape):
        self.vocabulary, self._shape, self._logits_by_path = vocabulary, shape, {}
        self._generator = torch.Generator().manual_seed(seed)

    def after(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._logits_by_path:
            raw = torch.randn(self.vocabulary, generator=self._generator, dtype=torch.float64) * 1.5
            self._logits_by_path[prefix] = self._shape(raw)
        return self._logits_by_path[prefix]

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
    top = p.masked_fill(p.cumsum(0) - p >= 0.7, 0)
    return torch.zeros_like(p).scatter(0, order, top / top.sum())


def certain(logits):
    return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)


def sometimes_certain(logits):
    return certain(logits) if logits[0] > 0 else full(logits)


SHAPES = [full, top_3, top_p, certain, sometimes_certain]


# Every kind of tree: (draft's tree, how many experts it needs). Small enough to enumerate every draw and decision.
BEST = {
    "dynamic": {"depth": 3, "top_k": 2, "nodes": 7},
    "dynamic, wide": {"depth": 2, "top_k": 4, "nodes": 9},
    "dynamic, two levels at once": {"depth": 3, "top_k": 2, "nodes": 8, "parallel": 2},
    "dynamic, three levels at once": {"depth": 3, "top_k": 2, "nodes": 8, "parallel": 3},
    "dynamic, decoupled": {"depth": 3, "top_k": 2, "nodes": 7, "candidates": "decoupled"},
    "static": {"paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "static, decoupled, two levels at once": {
        "paths": [[0], [1], [0, 0], [1, 0], [1, 1]],
        "candidates": "decoupled",
        "parallel": 2,
    },
}
DRAWN = {
    "drawn": {"paths": [[0], [1], [0, 0], [1, 0]], "siblings": "drawn"},
    "drawn, three siblings": {"paths": [[0], [1], [2], [0, 0]], "siblings": "drawn"},
    "drawn, two levels at once": {"paths": [[0], [1], [0, 0], [1, 0]], "siblings": "drawn", "parallel": 2},
    "drawn from each expert": {
        "paths": [[0], [1], [2], [1, 0]],
        "siblings": "drawn",
        "candidates": "decoupled",
    },
}
KINDS = BEST | DRAWN
SMALL = {  # enough for the flaws
    "two siblings": {"paths": [[0], [1]], "siblings": "drawn"},
    "one sibling of each expert": {"paths": [[0], [1]], "siblings": "drawn", "candidates": "decoupled"},
}


class Processing:
    """Stands for `Sampling`: the draft's own distribution, processed by `shape` as the target's is."""

    temperature = 1.0

    def __init__(self, shape):
        self._shape = shape

    def probabilities(self, logits):
        return torch.stack([self._shape(row.double()) for row in logits])


def grown(kind, seed, vocabulary, shape, chance):
    """A tree of the given kind from a scripted draft that knows nothing of the target."""
    script, *rest_of_paths = (noise_by_path(1000 * seed + number, vocabulary) for number in range(5))
    draft = ScriptedDraft(script, *rest_of_paths[:2], experts=two_experts(*rest_of_paths[2:]), vocabulary=vocabulary)
    return draft.grow(processing=Processing(shape), chance=chance, **(KINDS | SMALL)[kind])


def probabilities(tree, language):
    return torch.stack([language.after(path) for path in paths_of(tree)])


def best(tree, p_NV, script):
    return accept_best(tree, lambda node: script.choose(p_NV[node].tolist()))


def emitted_joint(kind, seed, language, shape, rule=None) -> tuple[torch.Tensor, float]:
    """Return the exact joint distribution of what one round emits, continued by plain sampling to depth + 1 tokens,
    over every draw of the draft and every decision of the rule; and the probability that something was accepted.
    """
    rule = rule or (accept_drawn if kind in DRAWN else best)

    def one_round(script):
        tree = grown(kind, seed, language.vocabulary, shape, script)
        path, bonus = rule(tree, probabilities(tree, language), script)
        return [tree.tokens[node] for node in path] + [bonus]

    length = TreeConfig(**(KINDS | SMALL)[kind]).depth + 1
    joint, accepted = torch.zeros((language.vocabulary,) * length, dtype=torch.float64), 0.0
    for emitted, weight in every_outcome(one_round):
        joint[tuple(emitted)] += weight * language.joint(tuple(emitted), length - len(emitted))
        accepted += weight * (len(emitted) > 1)
    return joint, accepted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0])
def test_a_round_of_any_tree_emits_exactly_the_targets_joint_distribution(seed, kind, shape):
    vocabulary = 4 if kind in DRAWN else 5
    language = Language(seed, vocabulary, shape)
    joint, accepted = emitted_joint(kind, seed, language, shape)
    expected = language.joint((), joint.ndim)
    for length in range(1, joint.ndim + 1):
        later_axes = tuple(range(length, joint.ndim))
        got, want = (x.sum(later_axes) if later_axes else x for x in (joint, expected))
        assert (got - want).abs().max() < 1e-6, f"the first {length} tokens"
    assert (joint[expected == 0] == 0).all(), "a token without mass was emitted"
    assert accepted > 0 or shape is not full


def error(kind, rule, seed=0) -> float:
    language = Language(seed, 4, full)
    joint, _ = emitted_joint(kind, seed, language, full, rule)
    return (joint - language.joint((), joint.ndim)).abs().max().item()


def test_enumerating_visits_every_sequence_of_choices_once():
    def decide(script):
        first = script.choose([0.5, 0.0, 0.5])
        return (
            first,
            script.accept(0.25) if first else None,
            int(script.draw_rows(torch.tensor([[0.0, 0.4, 0.6]]))[0]),
        )

    outcomes = list(every_outcome(decide))
    assert [result for result, _ in outcomes] == [
        (0, None, 1),
        (0, None, 2),
        (2, False, 1),
        (2, False, 2),
        (2, True, 1),
        (2, True, 2),
    ]
    assert [weight for _, weight in outcomes] == pytest.approx([0.2, 0.3, 0.15, 0.225, 0.05, 0.075])


def flawed(flaw):
    """The rule for drawn trees with one mistake."""

    def rule(tree, p_NV, chance):
        children, node, path = tree.children(), 0, []
        while True:
            p_V, accepted = p_NV[node].double(), None
            for rank, child in enumerate(children[node]):
                token, q_V = tree.tokens[child], tree.proposals[child]
                if flaw == "q of the first sibling for all" and rank:
                    q_V = tree.proposals[children[node][0]]
                if chance.accept(1.0 if flaw == "always accepts" else min(1.0, (p_V[token] / q_V[token]).item())):
                    accepted = child
                    break
                if flaw == "conditions on the token only":
                    p_V = p_V.clone()
                    p_V[token] = 0
                elif flaw != "does not condition":
                    p_V = (p_V - q_V).clamp_min(0)
                p_V = p_V if p_V.sum() == 0 else p_V / p_V.sum()
            if accepted is None:
                return path, int(
                    chance.draw_rows((p_NV[node] if flaw == "draws from the unconditioned p" else p_V)[None])[0]
                )
            path.append(accepted)
            node = accepted

    return rule


@pytest.mark.parametrize(
    ("kind", "flaw"),
    [
        ("two siblings", "always accepts"),
        ("two siblings", "does not condition"),
        ("two siblings", "conditions on the token only"),
        ("two siblings", "q of the first sibling for all"),
        ("one sibling of each expert", "q of the first sibling for all"),  # as if q were always the same expert's
        ("two siblings", "draws from the unconditioned p"),
    ],
)
def test_the_enumeration_catches_a_wrong_rule_for_drawn_trees(kind, flaw):
    assert error(kind, flawed(None)) < 1e-12  # without a flaw it is the rule
    assert error(kind, flawed(flaw)) > 1e-3


def test_the_enumeration_catches_siblings_that_are_drawn_with_replacement():
    """A token can be drawn twice, while each proposal says that it cannot."""

    def forgetful(tree, p_NV, chance):
        first, *rest_of_paths = tree.children()[0]
        for child in rest_of_paths:
            tree.tokens[child] = int(chance.draw_rows(tree.proposals[first][None])[0])
        return accept_drawn(tree, p_NV, chance)

    assert error("two siblings", forgetful) > 1e-3


def test_the_enumeration_catches_best_candidates_under_the_rule_for_drawn_ones():
    """The released code accepts a deterministic list as if it had been drawn from q."""

    def as_if_drawn(tree, p_NV, chance):
        tree.proposals = [None, *(torch.full((4,), 0.25).double() for _ in tree.tokens[1:])]
        return accept_drawn(tree, p_NV, chance)

    assert error("dynamic", best) < 1e-12
    assert error("dynamic", as_if_drawn) > 1e-3


# -- one random number a token --------------------------------------------------------------------------------------


def shares(p_V: torch.Tensor, token: int) -> list[tuple[float, bool]]:
    """Halve from the complete vocabulary to the token: return the lower half's share of the mass, and whether the token
    is in the upper.
    """
    out, low, high = [], 0, 1 << (len(p_V) - 1).bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        lower, both = p_V[low:middle].sum().item(), p_V[low:high].sum().item()
        out.append((lower / both if both else 0.0, token >= middle))
        low, high = (middle, high) if token >= middle else (low, middle)
    return out


@pytest.mark.parametrize("vocabulary", [3, 4, 9, 16, 40, 260])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_that_give_a_token_have_its_probability(shape, vocabulary):
    """The lower half's numbers are those below its share: the product of a token's shares is its probability, and just
    these numbers give it.
    """
    p_V = shape(2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    for token in range(0, vocabulary, max(vocabulary // 20, 1)):
        path = shares(p_V, token)
        assert math.prod(1 - s if upper else s for s, upper in path) == pytest.approx(p_V[token].item(), abs=1e-12)
        if p_V[token] == 0:
            continue
        for inside in (1e-9, 0.5, 1 - 1e-9):
            numbers = [s + inside * (1 - s) if upper else inside * s for s, upper in path]
            u_1H = torch.tensor([numbers + [0.5] * (HALVINGS - len(numbers))], dtype=torch.float64)
            assert draw_by_halving(p_V[None], u_1H).tolist() == [token]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_token_without_mass_is_never_chosen(number):
    for place in range(37):
        p_1V = torch.zeros(1, 37).index_fill_(1, torch.tensor([place]), 0.3)
        assert draw_by_halving(p_1V, torch.full((1, HALVINGS), number, dtype=torch.float64)).tolist() == [place]


def test_rounding_seldom_changes_a_choice():
    """Noise of relative size 1e-6 in every probability, as float32 has it, on a real vocabulary's number of tokens:
    along one cumulated distribution, where the errors of all tokens before a place add up, it changes choices several
    times as often.
    """
    generator = torch.Generator().manual_seed(0)
    noise, rows, vocabulary, by_cumulation, halved = 1e-3, 400, 4096, 0, 0
    for _ in range(25):
        p_NV = (2 * torch.randn(rows, vocabulary, generator=generator)).double().softmax(-1)
        tilt_NV = torch.linspace(-noise, noise, vocabulary).expand(
            rows, -1
        )  # as far as errors lean one way, they add up
        other_NV = p_NV * (1 + tilt_NV + noise / 10 * torch.randn(rows, vocabulary, generator=generator).double())
        u_NH = torch.rand(rows, HALVINGS, generator=generator, dtype=torch.float64)
        halved += (draw_by_halving(p_NV, u_NH) != draw_by_halving(other_NV, u_NH)).sum().item()
        cumulated = [(x / x.sum(-1, keepdim=True)).cumsum(-1) for x in (p_NV, other_NV)]
        outcomes = [torch.searchsorted(x, u_NH[:, :1].contiguous()) for x in cumulated]
        by_cumulation += (outcomes[0] != outcomes[1]).sum().item()
    assert halved * 10 < by_cumulation, (halved, by_cumulation)


def test_tokens_of_one_place_are_chosen_with_the_same_numbers():
    """So a node at depth d of a tree is given the token that plain decoding would choose there."""
    p_NV = torch.rand(6, 12, generator=torch.Generator().manual_seed(0)).softmax(-1)
    sampler, again = Sampler(5), Sampler(5)
    expected_tokens = [again.choose(p_NV, [place] * 6).tolist() for place in range(300)]
    places = [0, 1, 1, 2, 299, 2]
    assert sampler.choose(p_NV, places).tolist() == [expected_tokens[place][row] for row, place in enumerate(places)]
    assert expected_tokens[0] == Sampler(5).choose(p_NV, [0] * 6).tolist()


def test_choices_coins_and_draws_have_their_probabilities_and_are_independent():
    """Check two places' choices, a coin and a draw of one seed. This is the one test by chi-square; the rules are
    enumerated.
    """
    seeds, p_V, quarter = 4000, torch.tensor([0.3, 0.0, 0.7]), torch.full((1, 4), 0.25)
    counts = torch.zeros(3, 3, 2, 4)
    for seed in range(seeds):
        chance = Sampler(seed)
        first, second = chance.choose(torch.stack([p_V, p_V]), [0, 1]).tolist()
        counts[first, second, int(chance.accept(0.25)), chance.draw_rows(quarter)] += 1
    coin = torch.tensor([0.75, 0.25])
    expected = (p_V[:, None, None, None] * p_V[:, None, None] * coin[:, None] * quarter[0] * seeds).flatten()
    assert counts.flatten()[expected == 0].sum() == 0
    assert chisquare(counts.flatten()[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_a_sampler_is_a_function_of_its_seed():
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]])

    def script(seed):
        chance = Sampler(seed)
        return [(chance.accept(0.5), chance.draw_rows(p).item(), chance.choose(p, [n]).item()) for n in range(50)]

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
def test_the_longest_path_of_the_targets_own_tokens_is_taken_and_its_token_after_it(best_N, path, bonus):
    assert accept_best(build_tree(0, *GREEDY_TREE, CPU), best_N.__getitem__) == (path, bonus)
