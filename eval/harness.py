"""Decodes every prompt with every method, interleaved in one process, and checks that nothing was lost.

A method is "plain", or a draft with a tree. A unit is one prompt at one temperature: each of its turns is decoded several
times by all methods in turn, with the same random numbers; a later turn continues one fixed history, plain decoding's
greedy answers, for every method. Units are independent of each other, so they can be finished one by one, anywhere.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from scipy.stats import kstest
from torch import Tensor

from eval.exact import drawn_error
from eval.prompts import Prompt
from pipeline.chat import prompt_ids
from pipeline.decoding import replay
from pipeline.decoding.accept import Acceptance, Sampler
from pipeline.decoding.generate import Generation, Sampling, plain, speculative
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts import Draft
from pipeline.errors import PipelineError
from pipeline.provenance import hardware
from pipeline.recipe import Recipe
from pipeline.target import Target, fixed_capacity

PLAIN = "plain"
UNLIKELY = 1e-4  # p-value below which drawn answers are not plain decoding's
EXACT = 1e-6  # largest difference allowed between a round's enumerated output distribution and the target's


@dataclass(frozen=True)
class Unit:
    """One prompt at one temperature."""

    benchmark: str
    prompt: Prompt
    temperature: float

    @property
    def name(self) -> tuple[str, str, float]:
        return self.benchmark, self.prompt.question_id, self.temperature


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
    """The losslessness gate of one method on one benchmark at one temperature."""

    temperature: float
    drawn: bool = (
        False  # candidates are drawn at this temperature: answers have plain decoding's distribution, not its tokens
    )
    checked: int = 0  # prompts (each turn is one), however often decoded
    identical: int = 0  # prompts whose answers equal plain decoding's, token for token
    near_ties: int = 0  # prompts whose answers part where rounding decides
    rounds: int = 0  # of those looked at
    largest_error: float = 0.0  # drawn: of the enumerated distribution of a round's first token
    largest_drift: float = 0.0  # between logits of the tree's forward and of plain decoding's, over the largest logit
    drift_allowed: float = 0.0  # rounding: square root of the dtype's epsilon
    places: list[float] = field(
        default_factory=list
    )  # drawn: where each emitted token lies in plain decoding's distribution

    @property
    def fit(self) -> float:
        """p-value of the emitted tokens' places being uniform, as they are when plain decoding emits them (Kolmogorov-Smirnov)."""
        return float(kstest(self.places, "uniform").pvalue) if self.places else 0.0

    @property
    def passed(self) -> bool:
        if not self.checked or self.largest_drift > self.drift_allowed:
            return False
        if self.drawn:
            return self.rounds > 0 and self.largest_error <= EXACT and self.fit >= UNLIKELY
        return self.identical + self.near_ties == self.checked and (self.rounds > 0 or self.temperature == 0)

    def merge(self, other: "Gate") -> None:
        for name in ("checked", "identical", "near_ties", "rounds", "places"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("largest_error", "largest_drift", "drift_allowed"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


@dataclass
class Outcome:
    """What a unit gave."""

    records: list[Record]
    gates: dict[str, Gate]  # by method
    left_out: bool = False  # the prompt leaves the target no room to answer
    hardware: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Outcome":
        records = []
        for record in raw["records"]:
            generation = record["generation"] | {"acceptance": Acceptance(**record["generation"]["acceptance"])}
            records.append(Record(**record | {"generation": Generation(**generation)}))
        gates = {name: Gate(**gate) for name, gate in raw["gates"].items()}
        return cls(records, gates, raw["left_out"], raw["hardware"])


class Harness:
    def __init__(self, recipe: Recipe, target: Target, methods: dict[str, Draft], exact_split: bool = False):
        """`exact_split`: wait for a GPU between the parts of a round (see `speculative`)."""
        self._recipe, self._config, self.target, self.methods = recipe, recipe.eval, target, methods
        self._exact_split, self._warm = exact_split, set()
        self._histories: dict[Prompt, list[list[int]] | None] = {}

    def decode(self, unit: Unit, told: Callable[[], None] = lambda: None) -> Outcome:
        """All of a unit's answers, and what the gate says of them; `told` is called after each answer, those of a warm-up, too."""
        encoded = self.with_histories(unit.prompt)
        if encoded is None:
            return Outcome([], {}, left_out=True, hardware=hardware(self._recipe.target.device))
        gates = {name: self._new_gate(draft, unit.temperature) for name, draft in self.methods.items()}
        outcome = Outcome([], gates, hardware=hardware(self._recipe.target.device))
        for turn, ids in enumerate(encoded):
            self._warm_up(ids, told)
            self._decode_turn(unit, turn, ids, outcome, told)
        return outcome

    @property
    def repeats(self) -> dict[bool, int]:
        """By whether the temperature is above 0."""
        return {False: self._config.repeats, True: self._config.sampled_repeats}

    # -- decoding ------------------------------------------------------------------------------------------------

    def sampling(self, temperature: float, key: str) -> Sampling:
        config = self._config
        seed = zlib.crc32(f"{self._recipe.seed} {key}".encode())
        stops, penalty = frozenset(self.target.stop_ids()), config.repetition_penalty
        return Sampling(config.max_new_tokens, stops, temperature, config.top_k, config.top_p, penalty, seed)

    def sampling_of(self, unit: Unit, turn: int, repeat: int) -> Sampling:
        """The same for every method."""
        return self.sampling(unit.temperature, f"{unit.benchmark} {unit.prompt.question_id} {turn} {repeat}")

    def plain_answers(self, unit: Unit) -> Iterator[tuple[list[int], list[int]]]:
        """The target's own answers that `decode` compares with, of two tokens and more: (prompt, answer) of each turn and repeat."""
        for turn, ids in enumerate(self.with_histories(unit.prompt) or []):
            answer: list[int] = []
            for repeat in range(self.repeats[unit.temperature > 0]):
                if unit.temperature > 0 or not repeat:  # greedy ones do not differ
                    answer = plain(self.target, ids, self.sampling_of(unit, turn, repeat)).tokens
                if len(answer) > 1:  # the first token is the prompt's pass: none is left to draft
                    yield ids, answer

    def walks(
        self, grown: list[tuple[Draft, int, int, int]], prompt: list[int], answer: list[int]
    ) -> list[replay.Walk]:
        """Each draft's largest tree (depth, top-k, parallel levels) below every token of an answer of the target's own, which is forwarded once for
        all of them.
        """
        tokens = prompt + answer
        hidden_TD = self.target.capture(torch.tensor([tokens]))[0]
        return [replay.collect(draft, hidden_TD, tokens, len(prompt), *largest) for draft, *largest in grown]

    def _one(self, method: str, ids: list[int], sampling: Sampling) -> Generation:
        if method == PLAIN:
            return plain(self.target, ids, sampling)
        return speculative(self.target, self.methods[method], ids, sampling, exact_split=self._exact_split)

    def _warm_up(self, ids: list[int], told: Callable[[], None]) -> None:
        """Before the first answer; of a compiled target before the first of each shape, so that no answer pays for compiling."""
        spare = self._config.max_new_tokens
        sizes = [spare, *(spare + max(d.config.tree.nodes, d.config.tree.depth + 1) for d in self.methods.values())]
        shape = tuple(fixed_capacity(len(ids) + size) for size in sizes) if self.target.compiled else ()
        if shape in self._warm:
            return
        self._warm.add(shape)
        for _ in range(self._config.warmups):
            for method in (PLAIN, *self.methods):
                self._one(method, ids, self.sampling(0.0, "warm-up"))
                told()

    def with_histories(self, prompt: Prompt) -> list[list[int]] | None:
        """Token ids of each turn's prompt, earlier turns answered by plain greedy decoding; None when one is too long."""
        if prompt not in self._histories:
            self._histories[prompt] = self._encoded(prompt)
        return self._histories[prompt]

    def _encoded(self, prompt: Prompt) -> list[list[int]] | None:
        trees = [draft.config.tree for draft in self.methods.values()]
        spare = max(max(tree.depth for tree in trees), max(tree.nodes for tree in trees) if self.target.compiled else 0)
        room = self.target.config.max_position_embeddings - self._config.max_new_tokens - spare
        messages, encoded = [], []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            encoded.append(prompt_ids(self.target.tokenizer, messages))
            if len(encoded[-1]) > room:
                return None
            if place + 1 < len(prompt.turns):
                answer = plain(self.target, encoded[-1], self.sampling(0.0, "history")).tokens
                text = self.target.tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return encoded

    def _decode_turn(self, unit: Unit, turn: int, ids: list[int], outcome: Outcome, told: Callable[[], None]) -> None:
        methods, place = [PLAIN, *self.methods], (unit.benchmark, unit.prompt.question_id, turn, unit.temperature)
        repeats: list[tuple[Sampling, dict[str, list[int]]]] = []
        for repeat in range(self.repeats[unit.temperature > 0]):
            sampling, answers = self.sampling_of(unit, turn, repeat), {}
            for number in range(len(methods)):  # each repeat starts with another method
                method = methods[(number + repeat) % len(methods)]
                generation = self._one(method, ids, sampling)
                answers[method] = generation.tokens
                outcome.records.append(Record(*place, method, repeat, generation))
                told()
            repeats.append((sampling, answers))
        for method, gate in outcome.gates.items():
            pairs = [(sampling, answers[PLAIN], answers[method]) for sampling, answers in repeats]
            self._compare(gate, method, ids, pairs)
            if unit.temperature > 0 or self.target.dtype != torch.float32:  # in fp32 a greedy answer is its own proof
                self._look_at_rounds(gate, method, ids, repeats[0][0])

    # -- the gate ------------------------------------------------------------------------------------------------

    def _new_gate(self, draft: Draft, temperature: float) -> Gate:
        drawn = temperature > 0 and draft.config.tree.siblings != "best"
        return Gate(temperature, drawn, drift_allowed=torch.finfo(self.target.dtype).eps ** 0.5)

    def _compare(
        self, gate: Gate, method: str, ids: list[int], answers: list[tuple[Sampling, list[int], list[int]]]
    ) -> None:
        """One prompt's answers of plain decoding and of the draft, one pair a repeat."""
        gate.checked += 1
        differing = [(sampling, expected, got) for sampling, expected, got in answers if expected != got]
        if gate.drawn:
            for sampling, _, got in answers:
                gate.places += self._places(ids, sampling, got)
        if not differing:
            gate.identical += 1
        elif not gate.drawn and all(self._rounding_decides(gate, method, ids, *pair) for pair in differing):
            gate.near_ties += 1

    def _places(self, ids: list[int], sampling: Sampling, answer: list[int]) -> list[float]:
        """Each token's place in plain decoding's distribution at its position, likeliest tokens first: the mass before it and a
        random part of its own. Uniform and independent when the answer is drawn from that distribution.
        """
        chain = build_tree(ids[-1], answer[:-1], list(range(len(answer) - 1)), self.target.device)
        logits_TV = self._plain_logits([*ids, *answer[:-1]], len(answer))
        p_TV = sampling.probabilities(logits_TV, sampling.before(ids, [], chain, logits_TV.device)).double().cpu()
        own_T = p_TV.gather(1, torch.tensor(answer)[:, None])
        before_T = (p_TV * (p_TV > own_T)).sum(-1)
        part_T = torch.rand(len(answer), generator=torch.Generator().manual_seed(sampling.seed), dtype=torch.float64)
        return (before_T + part_T * own_T[:, 0]).clamp(0, 1).tolist()

    def _rounding_decides(
        self, gate: Gate, method: str, ids: list[int], sampling: Sampling, expected: list[int], got: list[int]
    ) -> bool:
        """Whether the answers part although the draft's round did all that plain decoding does, on logits that are plain
        decoding's but for rounding. At temperature 0 in fp32 nothing is forgiven.
        """
        if sampling.temperature == 0 and self.target.dtype == torch.float32:
            return False
        if len(expected) != len(got) and expected[: len(got)] == got[: len(expected)]:
            return False  # one only goes on longer: no rounding can cause that
        place = next(n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b)
        logits_V = self._logits_of(method, ids, sampling, got, place)
        if logits_V is None:
            return False
        tokens = ids + expected[:place]
        plain_1V, before = self._plain_logits(tokens, 1), sampling.before(tokens, [], None, logits_V.device)
        chosen = int(sampling.choose(logits_V[None], before, Sampler(sampling.seed), [place])[0])
        return chosen == got[place] and _drift(logits_V[None], plain_1V) <= gate.drift_allowed

    def _logits_of(
        self, method: str, ids: list[int], sampling: Sampling, answer: list[int], place: int
    ) -> Tensor | None:
        """The logits that the answer's token at `place` was chosen from, by decoding it again; None when it comes out otherwise."""
        found: list[Tensor] = []

        def observe(tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
            begin = len(tokens) - len(ids)
            if begin > place or tokens[len(ids) :] != answer[:begin]:
                return
            children, node = tree.children(), 0
            for token in answer[begin:place]:
                node = next((child for child in children[node] if tree.tokens[child] == token), None)
                if node is None:
                    return
            found.append(logits_NV[node].clone())

        speculative(self.target, self.methods[method], ids, sampling, observe)
        return found[-1] if found else None

    def _look_at_rounds(self, gate: Gate, method: str, ids: list[int], sampling: Sampling) -> None:
        """Untimed, the answer's first rounds: the tree forward's logits beside plain decoding's after the same tokens, and for drawn candidates the distribution of the first token over every draw and decision."""
        draft, until = self.methods[method], gate.rounds + self._config.gate_rounds

        def observe(tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
            if gate.rounds < until:
                self._examine(gate, sampling, tokens, tree, logits_NV)

        few = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, 8 * self._config.gate_rounds))
        speculative(self.target, draft, ids, few, observe)

    def _examine(self, gate: Gate, sampling: Sampling, tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
        """One round of the gate. A figure that is not a number fails it."""
        gate.rounds += 1
        path = tree.longest_path()
        plainly = self._plain_logits([*tokens, *(tree.tokens[node] for node in path[1:])], len(path))
        gate.largest_drift = max(gate.largest_drift, _drift(logits_NV[path], plainly))
        if gate.drawn and tree.proposals is not None:
            before = sampling.before(tokens, [], tree, logits_NV.device)
            error = drawn_error(tree, sampling.probabilities(logits_NV, before)[0])
            gate.largest_error = max(gate.largest_error, error if error == error else math.inf)

    @torch.inference_mode()
    def _plain_logits(self, tokens: list[int], last: int) -> Tensor:
        """The target's logits after each of the `last` tokens, from one causal forward without a cache before it."""
        hidden_TD = self.target.capture(torch.tensor([tokens]))[0]
        return self.target.head(hidden_TD[-last:])


def _drift(logits: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest logit; infinite where a figure is not a number."""
    found = ((logits.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    return found if found == found else math.inf


def pooled(
    outcomes: Iterable[tuple[str, Outcome]],
) -> tuple[list[Record], dict[tuple[str, str, float], Gate], dict[str, int]]:
    """All records; the gates by (benchmark, method, temperature); by benchmark the units that were left out."""
    records: list[Record] = []
    gates: dict[tuple[str, str, float], Gate] = {}
    left_out: dict[str, int] = {}
    for benchmark, outcome in outcomes:
        records += outcome.records
        left_out[benchmark] = left_out.get(benchmark, 0) + outcome.left_out
        for method, gate in outcome.gates.items():
            found = gates.setdefault((benchmark, method, gate.temperature), Gate(gate.temperature, gate.drawn))
            found.merge(gate)
    answered = {record.benchmark for record in records}
    for benchmark, count in left_out.items():
        if benchmark not in answered:
            raise PipelineError(
                f"benchmark {benchmark}: none of its {count} prompts fits the target's positions with an answer: lower "
                "eval.max_new_tokens"
            )
    return records, gates, left_out
