"""The decoding loop, speculative and plain side by side: same forward, same cache, same stop rule, same clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pipeline.decoding.accept import Acceptance, Chance, Sampler, accept_greedy, accept_sampled
from pipeline.decoding.tree import Tree, grow
from pipeline.drafts.base import Draft, DraftState
from pipeline.errors import PipelineError
from pipeline.target import Target, keep_cached

Observer = Callable[[list[int], Tree, Tensor], None]  # sees each round: all tokens so far, the tree, its logits_NV


@dataclass(frozen=True)
class Sampling:
    """How the target's distribution is processed, and when to stop."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """The processed distribution in fp32 (temperature, top-k, top-p in transformers' order and meaning)."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers(None, logits_NV.float()).softmax(-1)

    def choose(self, logits_V: Tensor, chance: Chance) -> int:
        """One token of plain decoding."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        return chance.draw(self.probabilities(logits_V[None])[0])

    def trimmed(self, tokens: list[int], already: int) -> tuple[list[int], bool]:
        """Cuts new tokens behind the first stop id or at the limit; says whether decoding ends."""
        tokens = tokens[: self.max_new_tokens - already]
        stop = next((place for place, token in enumerate(tokens) if token in self.stop_ids), None)
        if stop is not None:
            return tokens[: stop + 1], True
        return tokens, already + len(tokens) >= self.max_new_tokens


@dataclass
class Generation:
    """One decoded answer. Seconds run from the end of the prompt's own forward, which both methods share."""

    tokens: list[int]
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    acceptance: Acceptance = field(default_factory=Acceptance)
    untrimmed_tokens: int = 0  # with what was verified beyond the stop id or the limit


class _Clock:
    """Wall-clock laps; waits for the accelerator, if there is one, so that a lap holds its own work."""

    def __init__(self, device: torch.device):
        self._wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
        self.now()

    def now(self) -> float:
        self._wait()
        return time.perf_counter()


def _prefill(target: Target, prompt: list[int], spare: int):
    limit = target.config.max_position_embeddings
    if len(prompt) + spare > limit:
        raise PipelineError(
            f"a prompt of {len(prompt)} tokens and up to {spare} more exceed the target's {limit} positions: "
            "shorten the prompt or lower eval.max_new_tokens"
        )
    cache = target.new_cache()
    hidden_TD = target.forward(torch.tensor(prompt, device=target.device), cache)
    logits_V = target.head(hidden_TD[-1])
    if not logits_V.isfinite().all():
        raise PipelineError(
            f"the target's logits are not finite in {target.dtype} after a prompt of {len(prompt)} tokens: use another dtype"
        )
    return cache, hidden_TD, logits_V


@torch.inference_mode()
def plain(target: Target, prompt: list[int], sampling: Sampling) -> Generation:
    """Autoregressive decoding, one token a pass: the baseline."""
    chance = Sampler(sampling.seed)
    cache, _, logits_V = _prefill(target, prompt, sampling.max_new_tokens)
    clock = _Clock(target.device)
    begin = clock.now()
    tokens, done = sampling.trimmed([sampling.choose(logits_V, chance)], 0)
    while not done:
        hidden = target.forward(torch.tensor(tokens[-1:], device=target.device), cache)
        new, done = sampling.trimmed([sampling.choose(target.head(hidden[0]), chance)], len(tokens))
        tokens += new
    return Generation(tokens, clock.now() - begin)


@torch.inference_mode()
def speculative(
    target: Target, draft: Draft, prompt: list[int], sampling: Sampling, observe: Observer | None = None
) -> Generation:
    """Draft, verify, accept, until the stop rule holds. The output is distributed exactly as `plain`'s."""
    spec = draft.config.tree
    chance = Sampler(sampling.seed)
    cache, hidden_TD, logits_V = _prefill(target, prompt, sampling.max_new_tokens + spec.depth)
    clock = _Clock(target.device)
    begin = clock.now()
    out = Generation([])
    first = sampling.choose(logits_V, chance)
    out.tokens, done = sampling.trimmed([first], 0)
    out.untrimmed_tokens = 1
    state = DraftState()
    inputs = [*prompt[1:], first]  # t_{i+1} beside f_i
    while not done:
        lap = clock.now()
        fed = torch.tensor(inputs, device=target.device)
        answer = draft.start(state, hidden_TD, fed)
        tree = grow(draft, state, inputs[-1], answer, spec)
        drafted = clock.now()
        past = cache.get_seq_length()
        hidden_ND, logits_NV = _verify(target, tree, cache, past)
        verified = clock.now()
        if observe:
            observe(prompt + out.tokens, tree, logits_NV)
        path, bonus = _accept(tree, logits_NV, sampling, chance)
        keep_cached(cache, past, [past, *(past + node for node in path)])
        hidden_TD = hidden_ND[[0, *path]]
        inputs = [*(tree.tokens[node] for node in path), bonus]
        new, done = sampling.trimmed(inputs, len(out.tokens))
        out.tokens += new
        out.untrimmed_tokens += len(inputs)
        out.acceptance.add_pass(min(len(path), len(new)), len(new))
        out.draft_seconds += drafted - lap
        out.verify_seconds += verified - drafted
    out.seconds = clock.now() - begin
    return out


def _verify(target: Target, tree: Tree, cache, past: int) -> tuple[Tensor, Tensor]:
    """One target forward over the tree: ``hidden_ND`` and ``logits_NV``. A node stands at its depth behind the prefix."""
    prefix = torch.ones(len(tree.tokens), past, dtype=torch.bool, device=target.device)
    positions = torch.tensor(tree.depths, device=target.device) + past
    hidden_ND = target.forward(tree.tokens_N, cache, positions, torch.cat([prefix, tree.ancestors_NN], dim=1))
    return hidden_ND, target.head(hidden_ND)


def _accept(tree: Tree, logits_NV: Tensor, sampling: Sampling, chance: Chance) -> tuple[list[int], int]:
    if sampling.temperature == 0:
        return accept_greedy(tree, logits_NV.argmax(-1).tolist())
    return accept_sampled(tree, sampling.probabilities(logits_NV), chance)
