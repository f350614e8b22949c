"""The decoding loop, speculative and plain side by side: same forward, same cache, same stop rule, same randomness,
same clock.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.basics.accelerator import synchronized_time, to_device
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.accept import Acceptance, Sampler, accept_best, accept_drawn, accept_drawn_on_device
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.contract import Cache, Draws, RoundInput, States, TargetModel
from pipeline.decoding.tree import Tree

LONGEST_PERIOD, REPEATED, REPEATED_SHARE = 64, 4, 0.75  # thresholds of `repeats_itself`
# An observer is called each round with all tokens so far, the tree, its logits_NV; a listener with new tokens, and it
# returns how many of them to keep before stopping, None to continue.
Observer = Callable[[list[int], Tree, Tensor], None]
Listener = Callable[[list[int]], int | None]


@dataclass(frozen=True)
class Sampling:
    """The settings of how the target's logits are processed (in transformers' order and meaning), and when to stop."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0  # of every token of prompt and answer so far
    seed: int = 0

    def process(self, logits_NV: Tensor, before_NL: Tensor | None) -> Tensor:
        """Return processed fp32 logits; ``before_NL`` are the tokens before each row's next one (only the penalty
        requires it).
        """
        processors = LogitsProcessorList()
        if self.repetition_penalty != 1.0 and before_NL is not None:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            processors.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                processors.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                processors.append(TopPLogitsWarper(self.top_p))
        before: Any = before_NL  # where it is None, no remaining processor reads it
        return processors(before, logits_NV.float())

    def scale(self, logits_NV: Tensor) -> Tensor:
        """Scale logits by the temperature alone."""
        return logits_NV.float() / self.temperature if self.temperature > 0 else logits_NV.float()

    def probabilities(self, logits_NV: Tensor, before_NL: Tensor | None = None) -> Tensor:
        """Return the probabilities that tokens are drawn from above temperature 0."""
        return self.process(logits_NV, before_NL).softmax(-1)

    def choose(self, logits_NV: Tensor, before_NL: Tensor | None, sampler: Sampler, places: list[int]) -> Tensor:
        """Return plain decoding's token [N] after each row: the argmax, or drawn with the random numbers of its
        position in the answer.
        """
        if self.temperature == 0:
            return self.process(logits_NV, before_NL).argmax(-1)
        return sampler.choose(self.probabilities(logits_NV, before_NL), places)

    def collect_before(
        self, prompt: list[int], answer: list[int], tree: Tree | None, device: torch.device
    ) -> Tensor | None:
        """Return ``before_NL``: prompt and answer so far, and after them each node's path; rows are padded with a token
        that they contain already. None where no processor requires it.
        """
        if self.repetition_penalty == 1.0:
            return None
        tokens = [*prompt, *answer]
        if tree is None:
            return to_device([tokens], device)
        paths = [[tree.tokens[n] for n in tree.path_to(node)] for node in range(len(tree.tokens))]
        longest = max(tree.depths)
        rows = [path + [tokens[-1]] * (longest - len(path)) for path in paths]
        prefix_NP = to_device(tokens, device).expand(len(rows), -1)
        return torch.cat([prefix_NP, to_device(rows, device, torch.long).view(len(rows), longest)], dim=1)

    def trim(self, tokens: list[int], already: int) -> tuple[list[int], bool]:
        """Cut new tokens after the first stop id or at the limit; return them and whether decoding ends."""
        tokens = tokens[: self.max_new_tokens - already]
        stop = next((place for place, token in enumerate(tokens) if token in self.stop_ids), None)
        if stop is not None:
            return tokens[: stop + 1], True
        return tokens, already + len(tokens) >= self.max_new_tokens


@dataclass
class Generation:
    """One decoded answer. Seconds count from the end of the prefill, which both methods share."""

    tokens: list[int]
    seconds: float = 0.0
    split: dict[str, float] = field(default_factory=dict)  # seconds of "draft" and "verify"; the rest is bookkeeping
    draft_forwards: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    untrimmed_tokens: int = 0  # emitted by passes, including those after the stop id or the limit
    depths: list[int] = field(default_factory=list)  # of each token in the tree that proposed it; 0: the target's own


def repeats_itself(ids: list[int]) -> bool:
    """Return whether an answer ends in a loop: three in four of its last 4 x p tokens (at least 32) equal the token p
    positions before, for a period p of up to 64. So a loop that counts, or indents further with every line, is
    included.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        last = max(REPEATED * period, 32)
        if len(ids) >= last:
            repeated = sum(a == b for a, b in zip(ids[-last:-period], ids[period - last :], strict=True))
            if repeated >= REPEATED_SHARE * (last - period):
                return True
    return False


class Stopwatch:
    """A wall clock by name. It waits for the accelerator around every lap with `exact`, otherwise only at the ends."""

    def __init__(self, device: torch.device, exact: bool):
        self._device = device
        self._exact = exact or device.type == "cpu"
        self.laps: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._begin = self.read()

    def read(self) -> float:
        return synchronized_time(self._device)

    def total(self) -> float:
        return self.read() - self._begin

    def __call__(self, name: str, function: Callable, /, *arguments: Any, calls: int = 1) -> Any:
        self.calls[name] += calls
        if not self._exact:
            return function(*arguments)
        begin = self.read()
        result = function(*arguments)
        self.laps[name] += self.read() - begin
        return result


@dataclass
class Prefilled:
    """A prefill, which all answers to the prompt share; one answer at a time."""

    prompt: list[int]
    cache: Cache
    states: States
    logits_V: Tensor

    def reset(self) -> tuple[Cache, States, Tensor]:
        """Reset to the state after the prompt: drop what an answer wrote after it."""
        self.cache.keep(len(self.prompt))
        return self.cache, self.states, self.logits_V


@torch.inference_mode()
def prefill(target: TargetModel, prompt: list[int], room: int, layers: tuple[int, ...] = ()) -> Prefilled:
    """Forward the prompt. `room`: positions after the prompt that answers may need; `layers`: auxiliary ones that their
    drafts require.

    Raise PipelineError for a prompt without that room, and for logits that are not finite.
    """
    limit = target.positions
    if len(prompt) + room > limit:
        raise PipelineError(
            f"a prompt of {len(prompt)} tokens and up to {room} more exceed the target's {limit} positions: "
            "shorten the prompt or lower max_new_tokens"
        )
    cache = target.new_cache(len(prompt) + room)
    states = target.forward(to_device(prompt, target.device), cache, layers=layers)
    logits_V = target.head(states.final_ND[-1])
    if not logits_V.isfinite().all():
        raise NoAnswer(
            f"the target's logits are not finite in {target.dtype} after a prompt of {len(prompt)} tokens: use "
            "another dtype"
        )
    return Prefilled(prompt, cache, states, logits_V)


@torch.inference_mode()
def decode_plain(
    target: TargetModel,
    prompt: list[int],
    sampling: Sampling,
    prefilled: Prefilled | None = None,
    on_tokens: Listener = lambda _: None,
) -> Generation:
    """Decode autoregressively, one token a pass: the baseline."""
    sampler = Sampler(sampling.seed)
    cache, _, logits_V = (prefilled or prefill(target, prompt, sampling.max_new_tokens)).reset()
    watch = Stopwatch(target.device, exact=False)
    tokens: list[int] = []
    while True:
        before = sampling.collect_before(prompt, tokens, None, target.device)
        chosen = sampling.choose(logits_V[None], before, sampler, [len(tokens)]).tolist()
        new, done = _pass_on(on_tokens, *sampling.trim(chosen, len(tokens)))
        tokens += new
        if done:
            return Generation(tokens, watch.total(), depths=[0] * len(tokens))
        logits_V = target.head(target.forward(to_device(new, target.device), cache).final_ND[0])


@torch.inference_mode()
def decode_speculative(
    target: TargetModel,
    method: LoadedMethod,
    prompt: list[int],
    sampling: Sampling,
    observe: Observer | None = None,
    exact_split: bool = False,
    prefilled: Prefilled | None = None,
    on_tokens: Listener = lambda _: None,
) -> Generation:
    """Draft, verify and accept, until the stop rule holds. With trees of best candidates the answer is
    `decode_plain`'s, with drawn ones it is distributed as `decode_plain`'s. `exact_split` waits for a GPU between the
    parts of a round, which costs time. `on_tokens` is called with the tokens of every round.
    """
    draft, spec, sampler = method.draft, method.tree, Sampler(sampling.seed)
    layers, room = draft.needs.auxiliary, sampling.max_new_tokens + method.room(target.compiled)
    cache, states, logits_V = (prefilled or prefill(target, prompt, room, layers)).reset()
    watch = Stopwatch(target.device, exact_split)
    draws = Draws(sampling, sampler)
    before = sampling.collect_before(prompt, [], None, target.device)
    first = int(sampling.choose(logits_V[None], before, sampler, [0])[0])
    generation = Generation([])
    generation.tokens, done = _pass_on(on_tokens, *sampling.trim([first], 0))
    generation.depths = [0] * len(generation.tokens)
    state, text = draft.open(), [*prompt, first]
    while not done:
        tree = draft.propose(
            state, RoundInput(text, states.select(draft.needs), len(prompt) + room), spec, draws, watch
        )
        if target.verifies == "chain" and not tree.is_chain:
            raise PipelineError(f"{draft.name} proposes a tree, but the target verifies chains alone: give it a chain")
        past = cache.length
        positions, visible = _layout(tree, past, target.device)
        states, logits_NV = watch(
            "verify", _verify, target, tree.tokens_N, cache, positions, visible, spec.nodes, layers
        )
        if observe:
            observe(prompt + generation.tokens, tree, logits_NV)
        path, bonus = _accept(tree, logits_NV, sampling, sampler, prompt, generation.tokens)
        cache.keep(past, [past, *(past + node for node in path)])
        states = states.rows([0, *path])
        emitted = [*(tree.tokens[node] for node in path), bonus]
        text += emitted
        new, done = _pass_on(on_tokens, *sampling.trim(emitted, len(generation.tokens)))
        generation.tokens += new
        generation.depths += [*range(1, len(path) + 1), 0][: len(new)]
        generation.untrimmed_tokens += len(emitted)
        generation.acceptance.add_pass(min(len(path), len(new)), len(new))
    generation.seconds, generation.split, generation.draft_forwards = (
        watch.total(),
        dict(watch.laps),
        watch.calls["draft"],
    )
    return generation


def _pass_on(on_tokens: Listener, new: list[int], done: bool) -> tuple[list[int], bool]:
    """Return the tokens of a round that a listener keeps, and whether decoding ends."""
    end = on_tokens(new)
    return (new, done) if end is None else (new[:end], True)


def _layout(tree: Tree, past: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``positions_N``, each node's depth after the prefix, and ``visible_NC``: prefix, ancestors and itself."""
    prefix = torch.ones(len(tree.tokens), past, dtype=torch.bool, device=device)
    return tree.depths_N + past, torch.cat([prefix, tree.ancestors_NN], dim=1)


def _verify(
    target: TargetModel,
    tokens_N: Tensor,
    cache: Cache,
    positions_N: Tensor,
    visible_NC: Tensor,
    width: int,
    layers: tuple[int, ...] = (),
) -> tuple[States, Tensor]:
    """Run one target forward over the tree: return its states and ``logits_NV``."""
    states = target.forward(tokens_N, cache, positions_N, visible_NC, width, layers)
    return states, target.head(states.final_ND)


def _accept(
    tree: Tree, logits_NV: Tensor, sampling: Sampling, sampler: Sampler, prompt: list[int], answer: list[int]
) -> tuple[list[int], int]:
    before, on_cpu = sampling.collect_before(prompt, answer, tree, logits_NV.device), logits_NV.device.type == "cpu"
    if tree.proposals is not None:
        rule = accept_drawn if on_cpu else accept_drawn_on_device
        return rule(tree, sampling.probabilities(logits_NV, before), sampler)
    places = [len(answer) + depth for depth in tree.depths]
    if not on_cpu:
        following = sampling.choose(logits_NV, before, sampler, places).tolist()  # the only wait for the device
        return accept_best(tree, following.__getitem__)

    def choose_at(node: int) -> int:  # a CPU needs no waiting, and most nodes are never reached
        row_before = None if before is None else before[node : node + 1]
        return int(sampling.choose(logits_NV[node : node + 1], row_before, sampler, [places[node]])[0])

    return accept_best(tree, choose_at)
