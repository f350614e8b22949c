"""tau and what is counted for it: by hand, merged, and as the released scripts add it up."""

import math

import pytest

from pipeline.decoding.accept import Acceptance, legacy_tau


def passes(*pairs) -> Acceptance:
    out = Acceptance()
    for accepted, emitted in pairs:
        out.add_pass(accepted, emitted)
    return out


@pytest.mark.parametrize(
    ("each", "tau", "rates"),
    [
        ([(0, 1), (2, 3), (1, 2), (3, 4)], 2.5, [3 / 4, 2 / 3, 1 / 2]),
        ([(0, 1), (0, 1), (0, 1)], 1.0, []),  # never right
        ([(4, 5), (4, 5)], 5.0, [1.0] * 4),  # always right: the depth and one
        ([(3, 4), (3, 1)], 2.5, [1.0] * 3),  # trimmed tokens are not counted
    ],
)
def test_tau_is_tokens_per_pass_and_rates_are_conditional(each, tau, rates):
    counted = passes(*each)
    assert (counted.tau, counted.rate_by_depth()) == (tau, rates)
    assert counted.accepted[0] == counted.passes == len(each) and counted.tokens == sum(new for _, new in each)
    assert math.isnan(Acceptance().tau) and Acceptance().rate_by_depth() == []


@pytest.mark.parametrize("turned", [False, True])
def test_merging_counts_is_counting_everything(turned):
    counts, two = passes((0, 1), (3, 4)), passes((1, 2), (1, 2), (5, 6))
    first, second = (two, counts) if turned else (counts, two)
    first.merge(second)
    assert first == passes((0, 1), (3, 4), (1, 2), (1, 2), (5, 6))


def released_script(new_tokens: list[list[int]], idxs: list[list[int]]) -> float:
    """Add up records as the released evaluation does: `idxs` are the numbers of the last passes, counted from 0."""
    both = zip(new_tokens, idxs, strict=True)
    return sum(0 if sum(idx) == 0 else sum(new) / sum(idx) for new, idx in both) / len(new_tokens)


def test_legacy_tau_is_the_released_scripts_figure():
    """Three prompts of two turns and one, by hand: (12 + 9) / (2 + 1), (5 + 16) / (1 + 4), 8 / 2."""
    prompts = [[(12, 3), (9, 2)], [(5, 2), (16, 5)], [(8, 3)]]
    assert legacy_tau(prompts) == pytest.approx((21 / 3 + 21 / 5 + 8 / 2) / 3)
    assert legacy_tau(prompts) == released_script([[12, 9], [5, 16], [8]], [[2, 1], [1, 4], [2]])


def test_legacy_tau_counts_a_prompt_without_further_passes_as_0_as_the_script_does():
    assert legacy_tau([[(4, 1)], [(0, 0)], [(6, 3)], []]) == 3.0 / 4
    assert legacy_tau([[(4, 1)], [(6, 3)]]) == released_script([[4], [6]], [[0], [2]]) == 1.5
    assert legacy_tau([[(4, 1)]]) == 0.0 and math.isnan(legacy_tau([]))
