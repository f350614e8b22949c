"""The part of `infra.check` that times whole rounds of decoding, with an acceptance that does not depend on weights."""

import time
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from infra.check.shapes import CheckSettings, device, new_methods
from infra.check.timing import judge, peak_memory
from pipeline.decoding import generate
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.tree import Tree
from pipeline.lm.model import Target

ROUNDS, PATH = 40, 3  # rounds of one answer, and the nodes that each accepts
ROUND_GOALS = {"at once": 1.6, "in the end": 1.35}  # the time of a round in plain tokens


class Operators(TorchDispatchMode):
    """Counts operators, apart from those of the target's forward and head."""

    def __init__(self, target: Target):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._place, self._target = "round", target
        self._forward, self._head = target.forward, target.head

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[self._place] += 1
        return function(*args, **(kwargs or {}))

    def count_as_target(self, function):
        """Return the function, whose operators are counted as the target's."""

        def call(*args, **kwargs):
            self._place = "target"
            try:
                return function(*args, **kwargs)
            finally:
                self._place = "round"

        return call

    def __enter__(self):
        self._patch = mock.patch.object(self._target, "forward", self.count_as_target(self._forward))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)


def accept_path(tree: Tree, logits_NV: torch.Tensor, *_: Any) -> tuple[list[int], int]:
    """Accept the first path of `PATH` nodes, or the longest. The token after it is read from the device."""
    depth = min(PATH, max(tree.depths))
    path = tree.path_to(tree.depths.index(depth))
    return path, int(logits_NV[path[-1] if path else 0].argmax())


def measure_rounds(settings: CheckSettings) -> dict[str, Any]:
    """Time rounds of each draft, twice, next to plain tokens; eager, then compiled if there is time."""
    begin, recipe = time.monotonic(), settings.recipe()
    figures: dict[str, Any] = {}
    goals: dict[str, tuple[float, str, float]] = {}
    for kind in ("eager", "compiled"):
        if kind == "compiled" and time.monotonic() - begin > settings.seconds / 3:
            figures[kind] = "no time was left"
            break
        target = Target(recipe.target, settings.half_dtype)
        methods = new_methods(recipe, target)
        if kind == "compiled":
            target.compile(**settings.compiler)
            for method in methods.values():
                method.draft.compile_rounds(**settings.compiler)
        for name, method in methods.items():
            measured = _time_rounds(settings, target, method)
            figures |= {f"{kind}_{name}_{key}": value for key, value in measured.items()}
            if kind == "compiled":
                ratio = measured["round_ms"] / measured["plain_ms"]
                goals |= {
                    f"{name}, a compiled round in plain tokens, {when}": (ratio, "<=", g)
                    for when, g in ROUND_GOALS.items()
                }
    return figures | judge(goals) | peak_memory()


def _time_rounds(settings: CheckSettings, target: Target, method: LoadedMethod) -> dict[str, Any]:
    prompt = [token % 200 + 5 for token in range(settings.shape.context)]
    rounds = ROUNDS if device() == "cuda" else 3
    sampling = Sampling(rounds * (PATH + 1), frozenset())
    with mock.patch.object(generate, "_accept", accept_path):

        def decode(**options: Any) -> Any:
            return decode_speculative(target, method, prompt, sampling, **options)

        decode()  # compiles, and brings the weights there
        answers = [decode() for _ in range(2)]
        count = answers[0].acceptance.passes
        took = [1e3 * answer.seconds / answer.acceptance.passes for answer in answers]
        split = decode(exact_split=True).split
        counts: Counter[str] = Counter()
        if not target.compiled:  # compiled code accepts no dispatch mode
            with Operators(target) as operators:
                decode()
            counts = operators.counts
        kernels = _profile(decode) if device() == "cuda" else {}
    plain = min(decode_plain(target, prompt, Sampling(rounds, frozenset())).seconds for _ in range(2)) / rounds
    return {
        "round_ms": round(min(took), 3),
        "turns_ms": [round(value, 3) for value in took],
        "plain_ms": round(1e3 * plain, 3),
        "split_ms": {part: round(1e3 * seconds / count, 3) for part, seconds in split.items()},
        "operators": {place: round(number / count) for place, number in counts.items()} or None,
        **kernels,
    }


def _profile(decode: Any) -> dict[str, Any]:
    """Return the kernels of a round and the share of the time in which the GPU computes."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        answer = decode()
        seconds = time.perf_counter() - begin
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    busy = sum(event.device_time_total for event in events) / 1e6
    return {"kernels": round(len(events) / answer.acceptance.passes), "busy": round(busy / seconds, 3)}
