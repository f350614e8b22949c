"""Decodes every prompt with every method, interleaved in one process, and checks that nothing was lost.

A method is "plain" or a draft's name. Each (prompt, turn, temperature) is decoded several times by all methods in
turn; the second turn of a prompt continues one fixed history, plain decoding's greedy answers, for every method.
"""

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.prompts import Prompt
from pipeline.chat import prompt_ids
from pipeline.decoding.accept import first_token_distribution
from pipeline.decoding.generate import Generation, Sampling, plain, speculative
from pipeline.decoding.tree import Tree
from pipeline.drafts import Draft
from pipeline.progress import Progress
from pipeline.recipe import EvalConfig, Recipe
from pipeline.target import Target

PLAIN = "plain"
EXACT = 1e-6  # largest difference allowed between a round's enumerated output distribution and the target's


@dataclass(frozen=True)
class Record:
    """One generation and where it belongs."""

    benchmark: str
    question_id: str
    turn: int
    temperature: float
    method: str
    repeat: int
    generation: Generation


@dataclass
class Gate:
    """The losslessness gate of one draft on one benchmark at one temperature."""

    temperature: float
    checked: int = 0  # answers at T = 0, rounds at T > 0
    identical: int = 0  # T = 0: answers equal to plain decoding, token for token
    near_ties: int = 0  # T = 0 below fp32: answers that part where the two tokens' logits nearly tie
    largest_error: float = 0.0  # T > 0: of the enumerated distribution of a round's first token

    @property
    def passed(self) -> bool:
        if self.temperature == 0:
            return self.checked > 0 and self.identical + self.near_ties == self.checked
        return self.checked > 0 and self.largest_error <= EXACT


class Bench:
    def __init__(self, recipe: Recipe, target: Target, drafts: dict[str, Draft]):
        self._recipe, self._config, self._target, self._drafts = recipe, recipe.eval, target, drafts
        self.records: list[Record] = []
        self.gates: dict[tuple[str, str, float], Gate] = {}  # (benchmark, draft, temperature)

    def run(self, benchmarks: dict[str, list[Prompt]]) -> None:
        config, methods = self._config, [PLAIN, *self._drafts]
        turns = sum(len(prompt.turns) for prompts in benchmarks.values() for prompt in prompts)
        self._warm_up(next(iter(benchmarks.values())))
        total = turns * sum(self._repeats(temperature) for temperature in config.temperatures) * len(methods)
        with Progress("decode", total, "answers") as progress:
            for name, prompts in benchmarks.items():
                histories = [self._with_histories(prompt) for prompt in prompts]
                for temperature in config.temperatures:
                    for prompt, encoded in zip(prompts, histories, strict=True):
                        for turn, ids in enumerate(encoded):
                            self._decode(name, prompt, turn, ids, temperature, methods, progress)
                    if temperature > 0:
                        self._enumerate(name, [ids for encoded in histories for ids in encoded], temperature)

    def _repeats(self, temperature: float) -> int:
        return self._config.sampled_repeats if temperature > 0 else self._config.repeats

    # -- decoding ------------------------------------------------------------------------------------------------

    def _sampling(self, temperature: float, key: str) -> Sampling:
        config: EvalConfig = self._config
        seed = zlib.crc32(f"{self._recipe.seed} {key}".encode())
        stops = frozenset(self._target.stop_ids())
        return Sampling(config.max_new_tokens, stops, temperature, config.top_k, config.top_p, seed)

    def _one(self, method: str, ids: list[int], sampling: Sampling) -> Generation:
        if method == PLAIN:
            return plain(self._target, ids, sampling)
        return speculative(self._target, self._drafts[method], ids, sampling)

    def _warm_up(self, prompts: list[Prompt]) -> None:
        for prompt in prompts[: self._config.warmups]:
            ids = prompt_ids(self._target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            for method in (PLAIN, *self._drafts):
                self._one(method, ids, self._sampling(0.0, "warm-up"))

    def _with_histories(self, prompt: Prompt) -> list[list[int]]:
        """Token ids of each turn's prompt, earlier turns answered by plain greedy decoding."""
        messages, encoded = [], []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            encoded.append(prompt_ids(self._target.tokenizer, messages))
            if place + 1 < len(prompt.turns):
                answer = plain(self._target, encoded[-1], self._sampling(0.0, "history")).tokens
                text = self._target.tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return encoded

    def _decode(
        self, benchmark, prompt: Prompt, turn: int, ids, temperature: float, methods, progress: Progress
    ) -> None:
        for repeat in range(self._repeats(temperature)):
            answers = {}
            for place in range(len(methods)):  # each repeat starts with another method
                method = methods[(place + repeat) % len(methods)]
                sampling = self._sampling(temperature, f"{benchmark} {prompt.question_id} {turn} {repeat} {method}")
                answers[method] = self._one(method, ids, sampling)
                self.records.append(
                    Record(benchmark, prompt.question_id, turn, temperature, method, repeat, answers[method])
                )
                progress.advance(1, benchmark=benchmark, T=temperature)
            if temperature == 0:
                for method in self._drafts:
                    self._compare(benchmark, method, ids, answers[PLAIN].tokens, answers[method].tokens)

    # -- the gate ------------------------------------------------------------------------------------------------

    def _gate(self, benchmark: str, draft: str, temperature: float) -> Gate:
        return self.gates.setdefault((benchmark, draft, temperature), Gate(temperature))

    def _compare(self, benchmark: str, draft: str, ids: list[int], expected: list[int], got: list[int]) -> None:
        gate = self._gate(benchmark, draft, 0.0)
        gate.checked += 1
        if got == expected:
            gate.identical += 1
        elif self._target.dtype != torch.float32 and self._nearly_tied(ids, expected, got):
            gate.near_ties += 1

    def _nearly_tied(self, ids: list[int], expected: list[int], got: list[int]) -> bool:
        """Whether the first two tokens that differ have logits within 4 units of rounding of the largest logit."""
        if len(expected) != len(got) and expected[: len(got)] == got[: len(expected)]:
            return False  # one only goes on longer: no tie can cause that
        place = next(n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b)
        prefix = torch.tensor(ids + expected[:place], device=self._target.device)
        with torch.inference_mode():
            logits_V = self._target.head(self._target.forward(prefix, self._target.new_cache())[-1]).float()
        gap = (logits_V[expected[place]] - logits_V[got[place]]).abs()
        return bool(gap <= 4 * torch.finfo(self._target.dtype).eps * logits_V.abs().max())

    def _enumerate(self, benchmark: str, encoded: list[list[int]], temperature: float) -> None:
        """Untimed: real rounds, whose first token's distribution is summed over every outcome of the acceptance rule."""
        for draft_name, draft in self._drafts.items():
            gate = self._gate(benchmark, draft_name, temperature)

            def observe(tree: Tree, p_NV: Tensor, gate: Gate = gate) -> None:
                if gate.checked < self._config.gate_rounds:
                    gate.checked += 1
                    exact = p_NV[0].double().cpu()
                    error = (first_token_distribution(tree, p_NV) - exact / exact.sum()).abs().max().item()
                    gate.largest_error = max(gate.largest_error, error)

            for number, ids in enumerate(encoded):
                if gate.checked >= self._config.gate_rounds:
                    break
                sampling = replace(self._sampling(temperature, f"gate {number}"), max_new_tokens=16)
                speculative(self._target, draft, ids, sampling, observe)
