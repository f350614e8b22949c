"""The lossless rules that accept a path of a tree and emit the next token, and tau: each is defined once.

Every rule emits each token with exactly the probability that plain decoding would give it (proofs: docs/lossless.md).

Best candidates   the tree is a function of the context. The target's own next token is chosen after every node as plain
                  decoding would choose it, with the same random number; the longest path of such tokens is accepted. So
                  the answer equals plain decoding's, token for token, at every temperature.
Drawn candidates  speculative sampling with several siblings: x_j, drawn from q_j, is accepted with min(1, p / q_j); on
                  rejection p becomes norm(max(0, p - q_j)).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.basics.accelerator import to_device
from pipeline.decoding.contract import Randomness
from pipeline.decoding.tree import Tree

HALVINGS = 32  # random numbers per token: enough for any vocabulary below 2 ** 32


class Sampler:
    """A seeded source of randomness, on the CPU for every device: `HALVINGS` numbers for each position of the answer,
    and separate ones for coins and draws.
    """

    BLOCK = 256

    def __init__(self, seed: int):
        self._placed = torch.Generator().manual_seed(seed)
        second = int(torch.randint(1 << 32, (), generator=self._placed))  # torch's CPU generator uses 32 bits of a seed
        self._generator = torch.Generator().manual_seed(second)
        self._next = torch.empty(0, dtype=torch.float64)  # of coins and draws: made already, not used yet
        self._numbers = torch.empty(0, HALVINGS, dtype=torch.float64)

    def _draw_through(self, place: int) -> Tensor:
        while len(self._numbers) <= place:
            more = torch.rand(self.BLOCK, HALVINGS, generator=self._placed, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, more])
        return self._numbers

    def numbers(self, place: int) -> Tensor:
        """Return the random numbers of the answer's token at `place`: float64 [HALVINGS]."""
        return self._draw_through(place)[place]

    def choose(self, p_NV: Tensor, places: list[int]) -> Tensor:
        """Choose row n's token [N] with the random numbers of the answer's ``places[n]``-th token."""
        return draw_by_halving(p_NV, self._draw_through(max(places))[places])

    def accept(self, probability: float) -> bool:
        return self._use(1).item() < probability

    def draw_rows(self, q_WV: Tensor) -> Tensor:
        return draw_by_halving(q_WV, self._use(len(q_WV) * HALVINGS).view(-1, HALVINGS))

    def draw_ahead(self, p_NV: Tensor, coins: list[int]) -> Tensor:
        """Draw row n's token [N] as `draw_rows` would after ``coins[n]`` more coins. No random number is used up."""
        return draw_by_halving(p_NV, self._look(max(coins) + HALVINGS).unfold(0, HALVINGS, 1)[coins])

    def skip_draw(self) -> None:
        """Use up the random numbers of one draw."""
        self._use(HALVINGS)

    def _look(self, count: int) -> Tensor:
        missing = max(count - len(self._next), 0)
        more = torch.rand(missing, generator=self._generator, dtype=torch.float64)
        self._next = torch.cat([self._next, more])
        return self._next[:count]

    def _use(self, count: int) -> Tensor:
        numbers = self._look(count)
        self._next = self._next[count:]
        return numbers


def draw_by_halving(p_NV: Tensor, u_NH: Tensor) -> Tensor:
    """Draw a token from each row [N], with its probability in the row: the vocabulary is halved until one token is
    left. Each halving uses its own random number, which selects the lower half with that half's share of the mass.

    Two distributions that differ by rounding give the same token unless a number falls between two shares. A share's
    error is that of its own masses; along one cumulated distribution the errors of all earlier tokens would add up.
    """
    vocabulary = p_NV.shape[1]
    inner = (
        max((vocabulary - 1).bit_length(), 1) // 2
    )  # halvings within blocks of ids; the masses of blocks are summed first, in one pass
    blocks_NBI = F.pad(p_NV, (0, -vocabulary % (1 << inner))).unflatten(1, (-1, 1 << inner))
    u_NH = to_device(u_NH, p_NV.device)
    block_N, used = _descend(blocks_NBI.sum(-1, dtype=torch.float64), u_NH)
    block_N = block_N.clamp_max(blocks_NBI.shape[1] - 1)  # a row without mass ends after the last one
    inside_NI = blocks_NBI[torch.arange(len(p_NV), device=p_NV.device), block_N].double()
    place_N, _ = _descend(inside_NI, u_NH[:, used:])
    return ((block_N << inner) + place_N).clamp_max(vocabulary - 1)


def _descend(mass_NP: Tensor, u_NH: Tensor) -> tuple[Tensor, int]:
    """Halve P parts until one is left; return its number [N], and how many random numbers that took."""
    halvings = (mass_NP.shape[1] - 1).bit_length()
    levels = [F.pad(mass_NP, (0, (1 << halvings) - mass_NP.shape[1]))]  # padded with mass 0 to a power of two
    for _ in range(halvings - 1):
        levels.append(levels[-1].unflatten(1, (-1, 2)).sum(-1))
    rows_N = torch.arange(len(mass_NP), device=mass_NP.device)
    part_N = torch.zeros_like(rows_N)
    for number in range(halvings):
        lower_N, upper_N = levels[-1 - number].unflatten(1, (-1, 2))[rows_N, part_N].unbind(1)
        part_N = 2 * part_N + (u_NH[:, number] * (lower_N + upper_N) >= lower_N)
    return part_N, halvings


def log_odds(scores_NV: Tensor, token: int, second_token: int) -> tuple[Tensor, int]:
    """Compare two tokens in `draw_by_halving`: return the log-odds [N] of the half that takes small numbers, from each
    row's logits (float64), at the halving that separates them, and its index from 0. A number u chooses that half where
    log(u / (1 - u)) is below these log-odds.
    """
    bits = max((scores_NV.shape[1] - 1).bit_length(), 1)
    above = (token ^ second_token).bit_length() - 1  # halvings after the one that separates them
    first = (token >> (above + 1)) << (above + 1)
    lower, upper = (
        scores_NV[:, begin : begin + (1 << above)].double().logsumexp(-1) for begin in (first, first + (1 << above))
    )
    return lower - upper, bits - above - 1


def accept_best(tree: Tree, following: Callable[[int], int]) -> tuple[list[int], int]:
    """Return ``(path, bonus)``: the nodes below the root that match the target's own choices, and its choice after
    them.

    ``following(node)`` is the target's token after a node: the argmax of its processed logits, or drawn from them.
    """
    path: list[int] = []
    children, node = tree.children(), 0
    while True:
        token = following(node)
        match = next((child for child in children[node] if tree.tokens[child] == token), None)
        if match is None:
            return path, token
        path.append(match)
        node = match


def accept_drawn(tree: Tree, p_NV: Tensor, randomness: Randomness) -> tuple[list[int], int]:
    """Return ``(path, bonus)`` by rejection sampling; ``p_NV`` are the target's processed probabilities after each
    node. Only the nodes that the walk reaches are computed, and the host reads from the device at each of them.
    """
    path: list[int] = []
    children, node = tree.children(), 0
    while True:
        rates_C, left_1V = _reject(tree, [[child] for child in children[node]], p_NV[node : node + 1].double())
        accepted = _first_accepted(children[node], rates_C.tolist(), randomness)
        if accepted is None:
            return path, int(randomness.draw_rows(left_1V)[0])
        path.append(accepted)
        node = accepted


def accept_drawn_on_device(tree: Tree, p_NV: Tensor, sampler: Sampler) -> tuple[list[int], int]:
    """Return what `accept_drawn` does, from the same random numbers, with one read from the device: the rates of all
    nodes and the token drawn after each, 16 bytes a node.

    A node fixes how many coins precede its draw: on the path to it one for each child up to the accepted one, and then
    one for each of its own children.
    """
    children, nodes = tree.children(), range(len(tree.tokens))
    before = [0] * len(nodes)  # coins until a node is reached
    for node in nodes:
        for rank, child in enumerate(children[node], start=1):
            before[child] = before[node] + rank
    order = sorted(nodes, key=lambda node: -len(children[node]))
    ranks = [list(filter(None, column)) for column in zip_longest(*(children[node] for node in order))]
    rates_C, left_NV = _reject(tree, ranks, p_NV[to_device(order, p_NV.device)].double())
    bonus_N = sampler.draw_ahead(left_NV, [before[node] + len(children[node]) for node in order])
    numbers = torch.cat([rates_C, bonus_N.double()]).tolist()  # the only wait for the device
    rates = dict(zip(chain(*ranks), numbers, strict=False))
    path, node = [], 0
    while (accepted := _first_accepted(children[node], [rates[n] for n in children[node]], sampler)) is not None:
        path.append(accepted)
        node = accepted
    sampler.skip_draw()
    return path, int(numbers[len(rates) + order.index(node)])


def _reject(tree: Tree, ranks: list[list[int]], p_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Reject the children of R nodes, sibling after sibling, all on the device of ``p_RV``. Return p / q of each of the
    C children when its turn comes [C], in the order of `ranks`, and what p has become at the end [R, V].

    ``ranks[k]`` holds the k-th children of the first nodes; the others have fewer.
    """
    assert tree.proposals is not None
    tokens_C = to_device([tree.tokens[child] for child in chain(*ranks)], p_RV.device, torch.long)
    rates = [p_RV.new_empty(0)]
    for siblings, tokens_S1 in zip(ranks, tokens_C[:, None].split([len(x) for x in ranks]), strict=True):
        p_SV, q_SV = p_RV[: len(siblings)], torch.stack([tree.proposals[child] for child in siblings])
        rates.append((p_SV.gather(1, tokens_S1) / q_SV.gather(1, tokens_S1))[:, 0])
        residual_SV = (p_SV - q_SV).clamp_min(0)
        mass_S1 = residual_SV.sum(-1, keepdim=True)  # 0: p is q up to rounding, and this rejection has probability 0
        left_SV = torch.where(mass_S1 > 0, residual_SV / mass_S1, p_SV)
        p_RV = torch.cat([left_SV, p_RV[len(siblings) :]])
    return torch.cat(rates), p_RV


def _first_accepted(siblings: list[int], rates: list[float], randomness: Randomness) -> int | None:
    pairs = zip(siblings, rates, strict=True)
    return next((child for child, rate in pairs if randomness.accept(min(1.0, rate))), None)


@dataclass
class Acceptance:
    """The raw counts of one or many generations; the only place where tau is computed.

    tau = tokens emitted by verification passes / verification passes. A pass emits its accepted tokens and one more;
    tokens after a stop id or beyond the limit are not counted; the first token, which the prefill gives, belongs to no
    pass.
    """

    tokens: int = 0
    passes: int = 0
    accepted: list[int] = field(default_factory=list)  # accepted[k]: passes that accepted at least k draft tokens

    def add_pass(self, accepted: int, emitted: int) -> None:
        self.passes += 1
        self.tokens += emitted
        self.accepted.extend([0] * (accepted + 1 - len(self.accepted)))
        for depth in range(accepted + 1):
            self.accepted[depth] += 1

    def merge(self, second: "Acceptance") -> None:
        self.tokens += second.tokens
        self.passes += second.passes
        self.accepted.extend([0] * (len(second.accepted) - len(self.accepted)))
        for depth, count in enumerate(second.accepted):
            self.accepted[depth] += count

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else float("nan")

    def rate_by_depth(self) -> list[float]:
        """Return the share of passes that accepted a token at depth k, of those that accepted one at depth k - 1 (k =
        1, 2, ...).
        """
        pairs = zip(self.accepted[1:], self.accepted, strict=False)
        return [deeper / shallower for deeper, shallower in pairs]


def legacy_tau(prompts: Iterable[Sequence[tuple[int, int]]]) -> float:
    """Compute the released scripts' figure, which is reported next to tau under its own name: the mean over prompts of
    (new tokens of all turns) / (sum over turns of R - 1) for R passes.

    Parameters: (new tokens, R) of each turn of each prompt. The scripts' new tokens include the prompt's own first
    token, lack the last pass's last one and keep tokens after the stop id: as many as the passes emitted, uncut. A
    prompt whose turns take one pass each counts as 0, as in the scripts; NaN without prompts.
    """
    ratios = []
    for turns in prompts:
        tokens, fewer = sum(new for new, _ in turns), sum(max(passes - 1, 0) for _, passes in turns)
        ratios.append(tokens / fewer if fewer else 0.0)
    return sum(ratios) / len(ratios) if ratios else float("nan")
