"""Rounds of the size that pays: finds the time a token takes when each round has the nodes and forwards that are worth
it, and predicts that from the target's own answers.

What a part of a round is worth depends on the time a token takes, and that on how rounds are sized: a fixed point. It
is iterated on the answers that fixed trees were chosen by, at all of whose places every source has proposed already. So
what decoding would do at each place is counted (pipeline/decoding/worth.py has the rule), not estimated.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eval.tuning.calibrate import Answer
from eval.tuning.costs import Costs
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.calibration import Line
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Pool
from pipeline.decoding.sources import Sources, stages_of
from pipeline.decoding.worth import Worth

ITERATIONS, CLOSE = 12, 1e-4
LEAST, MOST = 60, 12  # places of a point of a line of gains, and points of one


@dataclass
class Places:
    """One answer: at each of its A places, after each number of draft forwards, for each size of a tree."""

    chances_KAS: np.ndarray  # tokens that are expected to be accepted; -inf where a smaller size holds all candidates
    accepted_KAS: np.ndarray  # those that are


@dataclass
class Paced:
    """What rounds of the size that pays are expected to do."""

    worth: Worth
    tree: TreeConfig
    tau: float
    speedup: float  # over plain decoding
    forwards: float  # a round
    nodes: float  # a round, the root included


def places(answer: Answer, sources: Sources, tree: TreeConfig, sizes: list[int]) -> Places:
    """With a draft that grows as `tree` says, as far as it is let."""
    nothing = [Pool([], [], [])] * len(answer.text.following)
    expected, accepted = [], []
    for stage in (None, *stages_of(tree, sources.config)):
        pools = nothing if stage is None else answer.text.pools(stage)
        rows = zip(pools, answer.text.copied, answer.text.following, strict=True)
        sums, counts = [], []
        for drafted, copied, following in rows:
            found = sources.merged(drafted, copied, stage or tree, answer.temperature)
            gained, ranks = np.cumsum([0.0, *found.sorted()]), np.array(found.ranks(following))
            fits = [size <= len(gained) or smaller < len(gained) for smaller, size in pairwise([0, *sizes])]
            sums.append(
                [gained[min(n, len(gained)) - 1] if fit else -np.inf for n, fit in zip(sizes, fits, strict=True)]
            )
            counts.append([int((ranks < size - 1).sum()) for size in sizes])
        expected.append(sums)
        accepted.append(counts)
    return Places(np.array(expected), np.array(accepted))


def fixed_point(
    answers: list[Places], tree: TreeConfig, costs: Costs, sizes: list[int], begin: float
) -> tuple[Worth, Acceptance, float, float, float]:
    """The rule at the time a token takes under it, what it counts, its seconds, forwards and nodes. `begin`: seconds a
    token to start from.
    """
    forwards = costs.forwards(tree)
    verify, token = {size: costs.pass_of(size) for size in sizes}, begin
    closest, found = np.inf, None
    for _ in range(ITERATIONS):
        price_S = np.array([verify[size] - verify[1] for size in sizes]) / token
        values = [(one.chances_KAS - price_S).max(-1) for one in answers]
        gains = [gain(values, number) for number in range(len(forwards))]
        worth = Worth(token=token, verify=verify, forwards=forwards, gains=gains)
        counts, seconds, made, nodes = Acceptance(), 0.0, 0, 0
        for one, value_KA in zip(answers, values, strict=True):
            seconds, made, nodes = _walk(one, value_KA, worth, costs, counts, (seconds, made, nodes))
        before, token = token, seconds / counts.tokens
        if (apart := abs(token - before) / before) < closest:  # rounds are whole: the last one need not be the closest
            closest, found = apart, (worth, counts, seconds, made / counts.passes, nodes / counts.passes)
        if apart <= CLOSE:
            break
    assert found is not None
    return found


def _walk(
    one: Places, value_KA: np.ndarray, worth: Worth, costs: Costs, counts: Acceptance, so_far: tuple[float, int, int]
) -> tuple[float, int, int]:
    """Round after round along one answer."""
    seconds, made, nodes = so_far
    sizes = list(worth.verify)
    price_S = np.array([worth.price(size) for size in sizes])
    place, end = 0, value_KA.shape[1]
    while place < end:
        stage = 0
        while worth.pays(stage, float(value_KA[stage, place])):
            stage += 1
        chosen = int((one.chances_KAS[stage, place] - price_S).argmax())
        accepted = int(one.accepted_KAS[stage, place, chosen])
        emitted = min(accepted + 1, end - place)
        counts.add_pass(min(accepted, emitted), emitted)
        seconds += worth.verify[sizes[chosen]] + sum(worth.forwards[:stage]) + costs.rest
        made, nodes, place = made + stage, nodes + sizes[chosen], place + emitted
    return seconds, made, nodes


def gain(values: list[np.ndarray], number: int) -> Line:
    """What a round's forward of this number adds to its value on average, by the value without it."""
    without = np.concatenate([value_KA[number] for value_KA in values])
    added = np.concatenate([value_KA[number + 1] for value_KA in values]) - without
    order = np.argsort(without, kind="stable")
    parts = np.array_split(order, max(1, min(MOST, len(order) // LEAST)))
    # Places that are worth the same are one point, however many parts they fill.
    x, which = np.unique([without[part].mean() for part in parts], return_inverse=True)
    places_of = np.bincount(which, [len(part) for part in parts])
    y = np.bincount(which, [added[part].sum() for part in parts]) / places_of
    return Line(x=x.tolist(), y=y.tolist())


def paced(answers: list[Answer], sources: Sources, trees: list[TreeConfig], costs: Costs) -> Paced:
    """The best of `trees` to grow along, as far as it pays. Sizes are those whose verification was measured."""
    sizes, found = sorted(costs.verify), []
    for tree in trees:
        known = [places(answer, sources, tree, sizes) for answer in answers]
        worth, counts, seconds, forwards, nodes = fixed_point(known, tree, costs, sizes, costs.plain / 1.3)
        speedup = costs.plain * counts.tokens / seconds
        found.append(Paced(worth, tree, counts.tau, speedup, forwards, nodes))
    return max(found, key=lambda one: one.speedup)
