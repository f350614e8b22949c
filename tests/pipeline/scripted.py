"""Drafts whose answers are scripted."""

import torch

from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput, Draws, RoundInput
from pipeline.decoding.grow import grow


class ScriptedDraft:
    """Answers after a path of tokens with ``next_logits(path)`` and ``ahead_logits(path)``.

    A hidden state carries the number of the forwarded path, so that a feature of another node gives another answer;
    every frontier's mask is compared with the ancestry of the paths forwarded so far.
    """

    rounds = None

    def __init__(self, next_logits, *ahead_logits, ids=None, experts=None, vocabulary=50):
        """``experts(path)`` gives (logits [K, U], log-weights [K]); `ahead_logits` are functions of the path, by
        level.
        """
        self.next_logits, self.ahead_logits, self.token_ids_U, self.experts = (
            next_logits,
            ahead_logits,
            ids,
            experts,
        )
        self.paths, self.lineage, self.steps, self.depths = [()], [set()], 0, []
        self.target_vocabulary, self.name = vocabulary, "scripted"

    def _output(self, numbers, request):
        paths = [self.paths[number] for number in numbers]
        ahead = [torch.stack([logits(path) for path in paths]) for logits in self.ahead_logits[: request.levels - 1]]
        hidden = torch.tensor(numbers, dtype=torch.float32)[:, None]
        expert_logits = (
            [torch.stack(x) for x in zip(*map(self.experts, paths), strict=True)] if self.experts else [None, None]
        )
        return DraftOutput(hidden, [torch.stack([self.next_logits(path) for path in paths]), *ahead], *expert_logits)

    def start(self, state, inputs, request, places=1):
        return self._output([0], request)

    def step(self, state, frontier, request):
        self.steps += 1
        last = frontier.depth == self.tree.forwards - 1
        assert request.levels == (self.tree.parallel if last else 1)
        self.depths.append(frontier.depth)
        numbers = []
        for token, hidden in zip(frontier.tokens_W.tolist(), frontier.carry_WD[:, 0].tolist(), strict=True):
            numbers.append(len(self.paths))
            self.lineage.append({*self.lineage[int(hidden)], len(self.paths)})
            self.paths.append((*self.paths[int(hidden)], token))
        expected = [[ancestor in self.lineage[number] for ancestor in range(1, len(self.paths))] for number in numbers]
        assert frontier.visible_WC.tolist() == expected
        assert {len(self.paths[number]) for number in numbers} == {frontier.depth}
        return self._output(numbers, request)

    def grow(self, root=0, processing=None, chance=None, **spec):
        self.tree = TreeConfig(**{"parallel": 1, **spec})
        draws = Draws(processing, chance) if processing else None
        return grow(self, None, RoundInput([root], torch.zeros(0, 0, 1)), self.tree, draws)


def paths_of(tree):
    paths = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def noise_by_path(seed, vocabulary, decimals=None):
    """Random logits, a function of the path; `decimals` rounds them, so that ties abound."""

    def logits(path):
        number = seed
        for token in path:
            number = (number * 1000 + token + 1) % (2**31 - 1)
        values = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(number))
        return values if decimals is None else values.round(decimals=decimals)

    return logits


def two_experts(first, second, balance=0.6):
    """Experts from two scripts, routed alike everywhere."""
    weights = torch.tensor([balance, 1 - balance]).log()
    return lambda path: (torch.stack([first(path), second(path)]), weights)
