"""What a round costs on this machine: verifying n tokens, a draft forward of w nodes, and the rest."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.decoding.generate import Sampling, speculative
from pipeline.drafts import Draft
from pipeline.drafts.base import DraftState, Frontier
from pipeline.target.model import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 10)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
REPEATS = 21


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    plain: float  # one token of plain decoding
    verify: dict[int, float]  # by tokens
    step: dict[int, float]  # by nodes forwarded
    start: float  # a round's first draft forward
    rest: float  # of a round, beside draft and verification

    @property
    def sizes(self) -> list[int]:
        return [size for size in self.verify if size > 1]

    def round(self, depth: int, top_k: int, nodes: int, parallel: int) -> float:
        """One round with such a tree."""
        return self.verify[nodes] + self.start + (depth - parallel) * self.step[top_k] + self.rest

    def said(self) -> str:
        verify = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in self.verify.items())
        step = ", ".join(f"{w}: {1e3 * s:.2f}" for w, s in self.step.items())
        return (
            f"a token of plain decoding {1e3 * self.plain:.1f} ms; verifying n tokens (ms): {verify}\na draft step of "
            f"w nodes (ms): {step}; the first forward of a round {1e3 * self.start:.2f}, "
            f"bookkeeping {1e3 * self.rest:.2f}"
        )


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafts: dict[str, Draft],
    context: int,
    max_nodes: int,
    samplings: list[Sampling],
    prompt: list[int],
    sizes: Sequence[int] = SIZES,
) -> dict[str, Costs]:
    """By draft. Medians over interleaved repeats, behind a prompt of `context` tokens; what the target costs is
    measured once for all drafts, so that their trees are chosen on equal terms. A compiled target is compiled for each
    of `sizes`.
    """
    device = target.device
    sizes = [size for size in sizes if size <= max_nodes]
    cache = target.new_cache(context + max_nodes)
    tokens = torch.arange(context + max_nodes, device=device) % 1000 + 5
    hidden_TD = target.forward(tokens[:context], cache)
    states = {name: DraftState() for name in drafts}
    for name, draft in drafts.items():
        draft.start(states[name], hidden_TD, tokens[:context])

    def verify(size: int) -> None:
        seen = torch.ones(size, context + size, dtype=torch.bool, device=device).tril(context)
        target.head(
            target.forward(tokens[:size], cache, torch.arange(size, device=device) + context, seen, size)
        ).argmax(-1).tolist()
        cache.keep(context)

    def start(name: str) -> None:
        drafts[name].start(states[name], hidden_TD[:2], tokens[:2], True).next_WU.argmax(-1).tolist()
        states[name].verified = context

    def step(name: str, width: int) -> None:
        states[name].cache.keep(context)
        eye = torch.eye(width, dtype=torch.bool, device=device)
        frontier = Frontier(tokens[:width], hidden_TD[:width], eye, 1)
        drafts[name].step(states[name], frontier, True).next_WU.argmax(-1).tolist()

    def plain() -> None:
        target.head(target.forward(tokens[:1], cache)[0]).argmax(-1).tolist()
        cache.keep(context)

    tasks: dict[tuple, Callable[[], None]] = {("verify", n): partial(verify, n) for n in sizes}
    tasks |= {("step", name, w): partial(step, name, w) for name in drafts for w in WIDTHS}
    tasks |= {("start", name): partial(start, name) for name in drafts} | {("plain",): plain}
    times: dict[tuple, list[float]] = {key: [] for key in tasks}
    for _ in range(REPEATS + 1):
        for key, task in tasks.items():
            begin = time.perf_counter()
            task()
            times[key].append(time.perf_counter() - begin)
    median = {key: statistics.median(found[1:]) for key, found in times.items()}
    out = {}
    for name, draft in drafts.items():
        rest = []
        for sampling in samplings:
            one = speculative(target, draft, prompt, sampling, exact_split=True)
            rest.append((one.seconds - one.split["draft"] - one.split["verify"]) / max(one.acceptance.passes, 1))
        out[name] = Costs(
            median[("plain",)],
            {n: median["verify", n] for n in sizes},
            {w: median["step", name, w] for w in WIDTHS},
            median["start", name],
            statistics.fmean(rest),
        )
    return out
