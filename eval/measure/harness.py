"""Decode every prompt with every method, interleaved in one process, and check that decoding is lossless.

A method is plain decoding, or a draft with a tree; with a compiled target plain decoding is also timed eagerly. A task
is one prompt at one temperature: each of its turns is decoded several times by all methods in turn, with the same
random numbers; a later turn continues one fixed history, plain decoding's greedy answers, for every method. Tasks are
independent of each other, so they can be finished one by one, anywhere.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from eval.measure.gate import Gate, Gatekeeper
from eval.measure.prompts import BenchmarkPrompt
from pipeline.artifacts.provenance import hardware
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.contract import Draft, States
from pipeline.decoding.generate import Generation, Prefilled, Sampling, decode_plain, decode_speculative, prefill
from pipeline.lm.chat import parse_answer, prompt_ids
from pipeline.lm.model import Target
from pipeline.lm.verifier import fixed_capacity
from pipeline.recipe.checks import PLAIN
from pipeline.recipe.recipe import Recipe

EAGER = f"{PLAIN}, eager"  # plain decoding that is not compiled


@dataclass(frozen=True)
class EvalTask:
    """One prompt at one temperature."""

    benchmark: str
    prompt: BenchmarkPrompt
    temperature: float

    @property
    def name(self) -> tuple[str, str, float]:
        return self.benchmark, self.prompt.question_id, self.temperature

    @property
    def title(self) -> str:
        return f"benchmark {self.benchmark}, prompt {self.prompt.question_id}"


@dataclass(frozen=True)
class Record:
    """One generation and its place: benchmark, question, turn, temperature, method and repeat."""

    benchmark: str
    question_id: str
    turn: int
    temperature: float
    method: str
    repeat: int
    generation: Generation


@dataclass(frozen=True)
class DecodedPrompt:
    """The target's own answer to one of a task's prompts."""

    task: EvalTask
    prompt: list[int]
    answer: list[int]


@dataclass
class Outcome:
    """The result of one task."""

    records: list[Record]
    gates: dict[str, Gate]  # by method
    left_out: bool = False  # the prompt leaves the target no room for an answer
    hardware: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Outcome":
        return TypeAdapter(cls).validate_python(raw)


class Harness:
    def __init__(self, recipe: Recipe, target: Target, methods: dict[str, LoadedMethod]):
        self._recipe, self._config, self.target, self.methods = recipe, recipe.eval, target, methods
        self._warm_shapes = set()
        self._prefilled: dict[bool, Prefilled] = {}  # by whether it is plain decoding's; of the last prompt
        self.encode_turns = cache(self._encode_turns)
        filled = f", single rows filled up to {target.filled}" if target.filled > 1 else ""
        self._hardware = hardware(recipe.target.device) + filled
        self._gatekeeper = Gatekeeper(target, methods)
        self._baselines: tuple[str, ...] = (PLAIN, EAGER) if target.compiled else (PLAIN,)

    def decode(self, task: EvalTask, on_progress: Callable[[], None] = lambda: None) -> Outcome:
        """Decode all of a task's answers, and check them by the gate; `on_progress` is called after each answer, also
        of a warm-up.
        """
        encoded = self.encode_turns(task.prompt)
        if encoded is None:
            return Outcome([], {}, left_out=True, hardware=self._hardware)
        gates = {name: Gate.for_method(method, task.temperature) for name, method in self.methods.items()}
        outcome = Outcome([], gates, hardware=self._hardware)
        for turn, ids in enumerate(encoded):
            self._warm_up(ids, on_progress)
            self._decode_turn(task, turn, ids, outcome, on_progress)
        return outcome

    # -- decoding ------------------------------------------------------------------------------------------------

    def sampling(self, temperature: float, key: str) -> Sampling:
        config = self._config
        seed = zlib.crc32(f"{self._recipe.seed} {key}".encode())
        stops = frozenset(self.target.stop_ids())
        return Sampling(config.max_new_tokens, stops, temperature, config.top_k, config.top_p, seed=seed)

    def sampling_of(self, task: EvalTask, turn: int, repeat: int) -> Sampling:
        """Return the sampling of a task's turn and repeat, the same for every method."""
        return self.sampling(task.temperature, f"{task.benchmark} {task.prompt.question_id} {turn} {repeat}")

    def decode_plainly(self, tasks: list[EvalTask]) -> list[DecodedPrompt]:
        """Return the target's own answers that `decode` compares with, of two tokens and more, in the tasks' order."""
        answers: list[DecodedPrompt] = []
        with Progress("answers of the target", len(tasks), "prompts") as progress:
            for task in tasks:
                answers += self._plain_answers(task)
                progress.advance(1)
        return answers

    def _plain_answers(self, task: EvalTask) -> Iterator[DecodedPrompt]:
        """Yield the target's own answer to each turn and repeat."""
        for turn, ids in enumerate(self.encode_turns(task.prompt) or []):
            answer: list[int] = []
            for repeat in range(self._config.repeats):
                if task.temperature > 0 or not repeat:  # greedy answers do not differ
                    answer = decode_plain(self.target, ids, self.sampling_of(task, turn, repeat)).tokens
                if len(answer) > 1:  # the first token is that of the prefill: none is left to draft
                    yield DecodedPrompt(task, ids, answer)

    def states(self, tokens: list[int], drafts: Iterable[Draft]) -> States:
        """Return the target's states along a text that all of these drafts need."""
        return self.target.states(tokens, [layer for draft in drafts for layer in draft.needs.auxiliary])

    def _generate(self, method: str, ids: list[int], sampling: Sampling) -> Generation:
        if method == EAGER:
            with self.target.eager():
                return decode_plain(self.target, ids, sampling)
        prefilled = self._prefill(ids, method == PLAIN)
        if method == PLAIN:
            return decode_plain(self.target, ids, sampling, prefilled)
        return decode_speculative(self.target, self.methods[method], ids, sampling, prefilled=prefilled)

    def _prefill(self, ids: list[int], is_plain: bool) -> Prefilled | None:
        """Return the prefill of a prompt, computed once for all drafts' answers, and once for plain decoding's: no
        draft's round writes into the cache of the answers that it is compared with. None for a compiled target, whose
        caches have another shape for each method.
        """
        if self.target.compiled:
            return None
        prefilled = self._prefilled.get(is_plain)
        if prefilled is None or prefilled.prompt != ids:
            self._prefilled.pop(is_plain, None)
            layers = {layer for method in self.methods.values() for layer in method.draft.needs.auxiliary}
            room = self._config.max_new_tokens + max(method.room(False) for method in self.methods.values())
            prefilled = self._prefilled[is_plain] = prefill(self.target, ids, room, tuple(sorted(layers)))
        return prefilled

    def _warm_up(self, ids: list[int], on_progress: Callable[[], None]) -> None:
        """Decode once before the first answer; with a compiled target before the first answer of each shape, so that no
        answer includes compilation.
        """
        spare = self._config.max_new_tokens
        sizes = [spare, *(spare + method.room(True) for method in self.methods.values())]
        shape = tuple(fixed_capacity(len(ids) + size) for size in sizes) if self.target.compiled else ()
        if shape in self._warm_shapes:
            return
        self._warm_shapes.add(shape)
        for method in (*self._baselines, *self.methods):
            self._generate(method, ids, self.sampling(0.0, "warm-up"))
            on_progress()

    def _encode_turns(self, prompt: BenchmarkPrompt) -> list[list[int]] | None:
        """Return the token ids of each turn's prompt, earlier turns answered by plain greedy decoding; None if one is
        too long.
        """
        tree_room = max(method.room(self.target.compiled) for method in self.methods.values())
        room = self.target.positions - self._config.max_new_tokens - tree_room
        messages, encoded = prompt.messages(), []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            encoded.append(prompt_ids(self.target.tokenizer, messages))
            if len(encoded[-1]) > room:
                return None
            if place + 1 < len(prompt.turns):
                answer = decode_plain(self.target, encoded[-1], self.sampling(0.0, "history")).tokens
                messages.append(parse_answer(self.target.tokenizer, answer))
        return encoded

    def _decode_turn(
        self, task: EvalTask, turn: int, ids: list[int], outcome: Outcome, on_progress: Callable[[], None]
    ) -> None:
        methods, place = (
            [*self._baselines, *self.methods],
            (task.benchmark, task.prompt.question_id, turn, task.temperature),
        )
        repeats: list[tuple[Sampling, dict[str, list[int]]]] = []
        shift = zlib.crc32(f"{place}".encode())  # each turn and each repeat starts with another method
        for repeat in range(self._config.repeats):
            sampling, generations = self.sampling_of(task, turn, repeat), {}
            for number in range(len(methods)):
                method = methods[(shift + number + repeat) % len(methods)]
                generations[method] = self._generate(method, ids, sampling)
                on_progress()
            outcome.records += [Record(*place, method, repeat, generations[method]) for method in methods]
            repeats.append((sampling, {method: generation.tokens for method, generation in generations.items()}))
        for method, gate in outcome.gates.items():
            pairs = [(sampling, answers[PLAIN], answers[method]) for sampling, answers in repeats]
            self._gatekeeper.compare(gate, method, ids, pairs, on_progress)
            # Greedily, on an exact target, an answer is its own proof.
            if task.temperature > 0 or not self.target.is_exact:
                sampling, answers = repeats[0]
                prefilled = self._prefill(ids, False)
                self._gatekeeper.examine_rounds(gate, method, ids, sampling, answers[PLAIN], prefilled)
            on_progress()


def pool_outcomes(
    outcomes: Iterable[tuple[str, Outcome]],
) -> tuple[list[Record], dict[tuple[str, str, float], Gate], dict[str, int]]:
    """Return all records; the gates by (benchmark, method, temperature); by benchmark the number of tasks that were
    left out.
    """
    records: list[Record] = []
    gates: dict[tuple[str, str, float], Gate] = {}
    left_out: dict[str, int] = {}
    for benchmark, outcome in outcomes:
        records += outcome.records
        left_out[benchmark] = left_out.get(benchmark, 0) + outcome.left_out
        for method, gate in outcome.gates.items():
            pooled_gate = gates.setdefault((benchmark, method, gate.temperature), Gate(gate.temperature, gate.drawn))
            pooled_gate.merge(gate)
    answered = {record.benchmark for record in records}
    for benchmark, count in left_out.items():
        if benchmark not in answered:
            raise PipelineError(
                f"benchmark {benchmark}: none of its {count} prompts fits the target's positions with an answer: lower "
                "eval.max_new_tokens"
            )
    return records, gates, left_out
