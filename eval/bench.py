"""Decodes every prompt with every method, interleaved in one process, and checks that nothing was lost.

A method is "plain" or a draft's name. Each (prompt, turn, temperature) is decoded several times by all methods in
turn; the second turn of a prompt continues one fixed history, plain decoding's greedy answers, for every method.
"""

import math
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
from pipeline.errors import PipelineError
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.sections import EvalConfig
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
    checked: int = 0  # T = 0: prompts (each turn is one), however often decoded; T > 0: rounds
    identical: int = 0  # T = 0: prompts whose answers equal plain decoding's, token for token
    near_ties: int = 0  # T = 0 below fp32: prompts whose answers part where the two tokens' logits nearly tie
    largest_error: float = 0.0  # T > 0: of the enumerated distribution of a round's first token
    largest_drift: float = 0.0  # T > 0: between probabilities of the tree's forward and of plain decoding's
    drift_allowed: float = 0.0  # rounding: square root of the dtype's epsilon

    @property
    def passed(self) -> bool:
        if self.temperature == 0:
            return self.checked > 0 and self.identical + self.near_ties == self.checked
        return self.checked > 0 and self.largest_error <= EXACT and self.largest_drift <= self.drift_allowed


class Bench:
    def __init__(self, recipe: Recipe, target: Target, drafts: dict[str, Draft]):
        self._recipe, self._config, self._target, self._drafts = recipe, recipe.eval, target, drafts
        self.records: list[Record] = []
        self.gates: dict[tuple[str, str, float], Gate] = {}  # (benchmark, draft, temperature)
        self.left_out: dict[str, int] = {}  # by benchmark: prompts too long for the target's positions

    def run(self, benchmarks: dict[str, list[Prompt]]) -> None:
        config, methods = self._config, [PLAIN, *self._drafts]
        encoded = {name: self._encode(name, prompts) for name, prompts in benchmarks.items()}
        turns = sum(len(turns) for prompts in encoded.values() for _, turns in prompts)
        self._warm_up(encoded)
        total = turns * sum(self._repeats(temperature) for temperature in config.temperatures) * len(methods)
        with Progress("decode", total, "answers") as progress:
            for name, prompts in encoded.items():
                for temperature in config.temperatures:
                    for prompt, turns in prompts:
                        for turn, ids in enumerate(turns):
                            self._decode(name, prompt, turn, ids, temperature, methods, progress)
                    if temperature > 0:
                        self._enumerate(name, [ids for _, turns in prompts for ids in turns], temperature)

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

    def _warm_up(self, encoded: dict[str, list[tuple[Prompt, list[list[int]]]]]) -> None:
        for _, turns in next(iter(encoded.values()))[: self._config.warmups]:
            for method in (PLAIN, *self._drafts):
                self._one(method, turns[0], self._sampling(0.0, "warm-up"))

    def _encode(self, name: str, prompts: list[Prompt]) -> list[tuple[Prompt, list[list[int]]]]:
        """Each prompt with the token ids of its turns; those that leave the target no room to answer are counted only."""
        found = [(prompt, self._with_histories(prompt)) for prompt in prompts]
        kept = [(prompt, turns) for prompt, turns in found if turns is not None]
        self.left_out[name] = len(found) - len(kept)
        if not kept:
            raise PipelineError(
                f"benchmark {name}: none of its {len(found)} prompts fits the target's "
                f"{self._target.config.max_position_embeddings} positions with an answer: lower eval.max_new_tokens"
            )
        return kept

    def _with_histories(self, prompt: Prompt) -> list[list[int]] | None:
        """Token ids of each turn's prompt, earlier turns answered by plain greedy decoding; None when one is too long."""
        deepest = max(draft.config.tree.depth for draft in self._drafts.values())
        room = self._target.config.max_position_embeddings - self._config.max_new_tokens - deepest
        messages, encoded = [], []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            encoded.append(prompt_ids(self._target.tokenizer, messages))
            if len(encoded[-1]) > room:
                return None
            if place + 1 < len(prompt.turns):
                answer = plain(self._target, encoded[-1], self._sampling(0.0, "history")).tokens
                text = self._target.tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return encoded

    def _decode(
        self, benchmark, prompt: Prompt, turn: int, ids, temperature: float, methods, progress: Progress
    ) -> None:
        repeats: list[dict[str, list[int]]] = []  # the tokens of each method
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
            repeats.append({method: answer.tokens for method, answer in answers.items()})
        if temperature == 0:
            for method in self._drafts:
                self._compare(benchmark, method, ids, [(answers[PLAIN], answers[method]) for answers in repeats])

    # -- the gate ------------------------------------------------------------------------------------------------

    def _gate(self, benchmark: str, draft: str, temperature: float) -> Gate:
        return self.gates.setdefault((benchmark, draft, temperature), Gate(temperature))

    def _compare(self, benchmark: str, draft: str, ids: list[int], pairs: list[tuple[list[int], list[int]]]) -> None:
        """One prompt's answers of plain decoding and of the draft, one pair a repeat."""
        gate = self._gate(benchmark, draft, 0.0)
        gate.checked += 1
        differing = [(expected, got) for expected, got in pairs if expected != got]
        if not differing:
            gate.identical += 1
        elif self._target.dtype != torch.float32 and all(self._nearly_tied(ids, *pair) for pair in differing):
            gate.near_ties += 1

    def _nearly_tied(self, ids: list[int], expected: list[int], got: list[int]) -> bool:
        """Whether the first two tokens that differ have logits within 4 units of rounding of the largest logit."""
        if len(expected) != len(got) and expected[: len(got)] == got[: len(expected)]:
            return False  # one only goes on longer: no tie can cause that
        place = next(n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b)
        logits_V = self._plain_logits(ids + expected[:place], 1)[0].float()
        gap = (logits_V[expected[place]] - logits_V[got[place]]).abs()
        return bool(gap <= 4 * torch.finfo(self._target.dtype).eps * logits_V.abs().max())

    def _enumerate(self, benchmark: str, encoded: list[list[int]], temperature: float) -> None:
        """Untimed, real rounds. The first token's distribution is summed over every outcome of the acceptance rule, and
        the probabilities along the tree's longest path are compared with those of plain decoding after the same tokens.
        """
        for draft_name, draft in self._drafts.items():
            gate = self._gate(benchmark, draft_name, temperature)
            gate.drift_allowed = torch.finfo(self._target.dtype).eps ** 0.5
            for number, ids in enumerate(encoded):
                if gate.checked >= self._config.gate_rounds:
                    break
                sampling = replace(self._sampling(temperature, f"gate {number}"), max_new_tokens=16)

                def observe(tokens: list[int], tree: Tree, logits_NV: Tensor, gate=gate, sampling=sampling) -> None:
                    if gate.checked < self._config.gate_rounds:
                        self._examine(gate, sampling, tokens, tree, logits_NV)

                speculative(self._target, draft, ids, sampling, observe)

    def _examine(self, gate: Gate, sampling: Sampling, tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
        """One round of the gate. A figure that is not a number fails it."""
        gate.checked += 1
        p_NV = sampling.probabilities(logits_NV)
        exact = p_NV[0].double().cpu()
        error = (first_token_distribution(tree, p_NV) - exact / exact.sum()).abs().max().item()
        path = tree.longest_path()
        plainly = self._plain_logits([*tokens, *(tree.tokens[node] for node in path[1:])], len(path))
        seen, expected = (torch.softmax(x.float() / sampling.temperature, -1) for x in (logits_NV[path], plainly))
        drift = (seen - expected).abs().max().item()
        gate.largest_error = max(gate.largest_error, error if error == error else math.inf)
        gate.largest_drift = max(gate.largest_drift, drift if drift == drift else math.inf)

    @torch.inference_mode()
    def _plain_logits(self, tokens: list[int], last: int) -> Tensor:
        """The target's logits after each of the `last` tokens, from one causal forward without a cache before it."""
        hidden_TD = self._target.forward(torch.tensor(tokens, device=self._target.device), self._target.new_cache())
        return self._target.head(hidden_TD[-last:])
