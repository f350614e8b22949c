"""Pools of candidate tokens: the continuations that prompt lookup copies, and the merging of several sources' pools.

The copies continue earlier occurrences of the text's last tokens: the longest suffix that occurs earlier first, then
shorter ones, the latest occurrence first. Pools are merged by path: the same token below the same node is one node.

This file imports the standard library alone: vLLM's plug-in (infra/vllm_jakiro) has it, too, by a link.
"""

from collections import defaultdict
from dataclasses import dataclass

LONGEST = 8  # maximum number of tokens that are compared
MAX_MATCHES = 32  # positions that one lookup returns at most, the best ones
CHAIN = 10  # maximum number of tokens copied at once
BRANCHES = 3  # maximum number of copied children of one node
COPIES = BRANCHES * CHAIN  # maximum number of copied candidates

# The probability that the first copied token is right, by the number of matching tokens, and that each further one is,
# given those before: rough averages over greedy and sampled answers of the embedded default.
FIRST_CHANCES = (0.18, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)
FURTHER_CHANCE = 0.85
ALTERNATIVE_CHANCE = 0.05  # for a continuation that is not the first choice


@dataclass
class CandidatePool:
    """The candidates of one source below the root, parents before children."""

    tokens: list[int]  # target ids
    parents: list[int]  # 0: the root; n: the pool's n-th candidate, from 1
    scores: list[float]  # the source's ranking: of two at one depth the higher one is likelier

    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths[1:]


class SuffixIndex:
    """An index of the n-grams of a text.

    It maps every n-gram of up to LONGEST tokens to the positions where it ends. A token costs LONGEST entries, and a
    lookup visits a bounded number of positions, however long the text is.
    """

    def __init__(self) -> None:
        self._end_positions: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._read = 0

    def extend(self, tokens: list[int]) -> None:
        """Extend the index to `tokens`, which begin with those that it already has."""
        for end in range(self._read, len(tokens)):
            for length in range(1, min(LONGEST, end + 1) + 1):
                self._end_positions[tuple(tokens[end + 1 - length : end + 1])].append(end)
        self._read = len(tokens)

    def matches(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Return earlier positions that end with the text's last tokens, with the number of matching tokens (at most
        LONGEST): the longest match first, among equal ones the latest position.
        """
        matches: dict[int, int] = {}
        for length in range(min(LONGEST, len(tokens)), 0, -1):
            places = self._end_positions.get(tuple(tokens[-length:]), [])
            for place in reversed(places):
                if len(matches) == MAX_MATCHES:
                    return list(matches.items())
                if place < len(tokens) - 1:
                    matches.setdefault(place, length)
        return list(matches.items())


def copy_continuations(
    matches: list[tuple[list[int], int, int]], depth: int = CHAIN, top_k: int = BRANCHES, count: int = COPIES
) -> CandidatePool:
    """Return candidates, whose score is the number of matching tokens before the continuation.

    `matches` are (text, position in it, matching length), the longest first. A continuation that is not the first
    choice at some node scores LONGEST less, so that every first choice is ranked higher.
    """
    pool = CandidatePool([], [], [])
    children: list[dict[int, int]] = [{}]  # of each node: token -> its child
    for text, place, length in matches:
        above, first = 0, True
        for token in text[place + 1 : place + 1 + depth]:
            if token not in children[above]:
                if len(children[above]) == top_k or len(pool.tokens) == count:
                    break
                first = first and not children[above]
                children[above][token] = len(children)
                children.append({})
                pool.tokens.append(token)
                pool.parents.append(above)
                pool.scores.append(float(length if first else length - LONGEST))
            above = children[above][token]
            first = first and pool.scores[above - 1] > 0
        if len(pool.tokens) == count:
            break
    return pool


def copy_probability(depth: int, score: float) -> float:
    """Return the probability that the target's text goes through a copied candidate of this depth and score."""
    first = FIRST_CHANCES[min(int(score), len(FIRST_CHANCES)) - 1] if score > 0 else ALTERNATIVE_CHANCE
    return first * FURTHER_CHANCE ** (depth - 1)


@dataclass
class Merged:
    """The nodes of all pools, parents before children, with the probability that the target's text goes through
    each.
    """

    tokens: list[int]
    parents: list[int]  # 0: the root; n: the n-th node, from 1
    probabilities: list[float]
    order: list[int]  # the nodes from 1 on, likeliest first: every prefix of it is connected

    def likeliest(self, nodes: int, chain: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens and parents of the likeliest ones, or of the best chain; `nodes` counts the root."""
        selected = self.best_chain(nodes - 1) if chain else self.order[: nodes - 1]
        places = {number: place for place, number in enumerate(selected, start=1)} | {0: 0}
        return [self.tokens[n - 1] for n in selected], [places[self.parents[n - 1]] for n in selected]

    def best_chain(self, length: int) -> list[int]:
        """Return the path below the root, of at most `length` nodes, that is expected to have the most accepted tokens:
        the sum of its nodes' probabilities.
        """
        depths, expected = [0], [0.0]
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            depths.append(depths[parent] + 1)
            expected.append(expected[parent] + probability)
        end = max((node for node, depth in enumerate(depths) if depth <= length), key=expected.__getitem__)
        path: list[int] = []
        while end:
            path.insert(0, end)
            end = self.parents[end - 1]
        return path

    def chain_tokens(self, length: int) -> list[int]:
        return [self.tokens[node - 1] for node in self.best_chain(length)]

    def ranks(self, following: list[int]) -> list[int]:
        """Return the places in `order` of the nodes that a text goes through, from the root on, as far as they
        exist.
        """
        above = zip(self.parents, self.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(above, start=1)}
        place_of = {number: place for place, number in enumerate(self.order)}
        ranks, node = [], 0
        for token in following:
            node = children.get((node, token), -1)
            if node < 0:
                break
            ranks.append(place_of[node])
        return ranks


def merge(pools: list[tuple[CandidatePool, list[float]]]) -> Merged:
    """Merge pools, given with their candidates' probabilities, by path.

    A node that several sources propose has probability 1 - (1 - a)(1 - b), as if they erred independently. No node is
    likelier than its parent.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    node_by_edge: dict[tuple[int, int], int] = {}
    for pool, pool_probabilities in pools:
        node_of = [0]
        for token, parent, probability in zip(pool.tokens, pool.parents, pool_probabilities, strict=True):
            key = (node_of[parent], token)
            node = node_by_edge.get(key)
            if node is None:
                tokens.append(token)
                parents.append(key[0])
                probabilities.append(probability)
                node = node_by_edge[key] = len(tokens)
            else:
                probabilities[node - 1] = 1 - (1 - probabilities[node - 1]) * (1 - probability)
            node_of.append(node)
    for place, parent in enumerate(parents):
        if parent:
            probabilities[place] = min(probabilities[place], probabilities[parent - 1])
    order = sorted(range(1, len(tokens) + 1), key=lambda node: -probabilities[node - 1])
    return Merged(tokens, parents, probabilities, order)
