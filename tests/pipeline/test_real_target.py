"""The embedded target: sampled rounds against its own distribution, and a tree's answer against plain decoding's."""

import pytest
import torch
from scipy.stats import chisquare

from eval.measure.packed import pack_linears
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput
from pipeline.decoding.generate import Sampling, speculative
from pipeline.decoding.method import LoadedMethod
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target
from pipeline.lm.states import Needs

PROMPT, RUNS, KEPT = "The weather today is", 90, 4
DRAWN = TreeConfig(paths=[[0], [1], [0, 0]], siblings="drawn")


@pytest.fixture(scope="module")
def real_target() -> Target:
    target = Target(TargetConfig(model="embedded:smollm2-135m-instruct", device="cpu"), "float32")
    pack_linears(target.decoder)
    return target


class Knowing:
    """A draft that has the target's distribution after the prompt and after its likeliest tokens, with too little for
    the likeliest: right now and then.
    """

    stepwise, token_ids_U, config, needs = True, None, EagleConfig(), Needs()
    propose = TrainedDraft.propose

    def __init__(self, target: Target, prompt: list[int]):
        self.target_vocabulary = target.config.vocab_size
        self._after = {(): self._logits(target, prompt)}
        self._after |= {(t,): self._logits(target, [*prompt, t]) for t in self._after[()].topk(KEPT).indices.tolist()}
        self._unknown, self.name = torch.zeros(target.config.vocab_size), "knowing"

    @staticmethod
    @torch.inference_mode()
    def _logits(target, tokens):
        logits_V = target.head(target.capture(torch.tensor([tokens]))[0, -1])
        logits_V[logits_V.argmax()] -= 3
        return logits_V

    def open(self):
        return None

    def start(self, state, inputs, request, places=1):
        first = len(inputs.states_TSD) == len(inputs.tokens) - 1  # of the answer's rounds
        known = self._after.get(tuple(inputs.tokens[-1:]) if first else None, self._unknown)
        return DraftOutput(torch.zeros(1, 1), [known[None]])

    def step(self, state, frontier, request):
        return DraftOutput(torch.zeros(len(frontier.tokens_W), 1), [self._unknown.expand(len(frontier.tokens_W), -1)])


@torch.inference_mode()
def joint_of_two(target, prompt, sampling):
    def after(tokens):
        p_V = sampling.probabilities(target.head(target.capture(torch.tensor([tokens]))[0, -1:]))[0].double()
        return {token: p_V[token].item() for token in p_V.nonzero()[:, 0].tolist()}

    return {(a, b): p * q for a, p in after(prompt).items() for b, q in after([*prompt, a]).items()}


def test_the_first_two_tokens_of_drawn_trees_have_the_real_targets_distribution(real_target):
    prompt = real_target.tokenizer(PROMPT)["input_ids"]
    settings = {"max_new_tokens": 2, "stop_ids": frozenset(), "temperature": 1.0, "top_k": KEPT}
    expected = joint_of_two(real_target, prompt, Sampling(**settings))
    method = LoadedMethod(Knowing(real_target, prompt), DRAWN)
    counts, accepted = dict.fromkeys(expected, 0), 0
    for seed in range(RUNS):
        got = speculative(real_target, method, prompt, Sampling(**settings, seed=seed))
        counts[tuple(got.tokens)] += 1
        accepted += len(got.acceptance.accepted) > 1
    assert RUNS / 10 < accepted < RUNS  # both ways of emitting the second token take part
    cells = [pair for pair, p in expected.items() if p * RUNS >= 5]
    rest = [pair for pair in expected if pair not in cells]
    observed = [counts[pair] for pair in cells] + [sum(counts[pair] for pair in rest)]
    request = [expected[pair] * RUNS for pair in cells] + [sum(expected[pair] for pair in rest) * RUNS]
    assert len(cells) > 3
    keep = [place for place, w in enumerate(request) if w > 0]
    total = sum(request[place] for place in keep)
    assert chisquare([observed[p] for p in keep], [request[p] * RUNS / total for p in keep]).pvalue > 1e-3
