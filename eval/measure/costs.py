"""What a round costs on this machine: verifying n tokens, a draft forward of w nodes, and the rest."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeline.decoding.contract import Frontier, Method, Verified, Wanted
from pipeline.decoding.generate import Sampling, speculative
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
    methods: dict[str, Method],
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
    drafts, text = {name: method.draft for name, method in methods.items()}, tokens.tolist()
    layers = tuple(sorted({layer for draft in drafts.values() for layer in draft.needs.auxiliary}))
    given = target.forward(tokens[:context], cache, layers=layers)
    before, two, opened = {}, given.rows([0, 1]), {}
    stepwise = [name for name, draft in drafts.items() if draft.stepwise]
    for name in stepwise:
        draft = drafts[name]
        before[name] = draft.open()
        opened[name] = draft.start(before[name], Verified(text[: context + 1], given.of(draft.needs)), Wanted())

    trees = {name: method.tree for name, method in methods.items()}
    wanted = {name: Wanted(tree.parallel or 1, tree.candidates != "plain") for name, tree in trees.items()}

    def verify(size: int) -> None:
        seen = torch.ones(size, context + size, dtype=torch.bool, device=device).tril(context)
        found = target.forward(tokens[:size], cache, torch.arange(size, device=device) + context, seen, size, layers)
        target.head(found.final_ND).argmax(-1).tolist()
        cache.keep(context)

    def start(name: str, state: Any) -> None:
        seen = Verified(text[: context + 3], two.of(drafts[name].needs))
        drafts[name].start(state, seen, wanted[name]).logits_LWU[0].argmax(-1).tolist()

    def step(name: str, width: int, state: Any) -> None:
        eye = torch.eye(width, dtype=torch.bool, device=device)
        frontier = Frontier(tokens[:width], opened[name].carry_WD.expand(width, -1), eye, 1)
        drafts[name].step(state, frontier, wanted[name]).logits_LWU[0].argmax(-1).tolist()

    def plain() -> None:
        target.head(target.forward(tokens[:1], cache).final_ND[0]).argmax(-1).tolist()
        cache.keep(context)

    tasks: dict[tuple, Callable[..., None]] = {("verify", n): partial(verify, n) for n in sizes}
    tasks |= {("step", name, w): partial(step, name, w) for name in stepwise for w in WIDTHS}
    tasks |= {("start", name): partial(start, name) for name in stepwise} | {("plain",): plain}
    times: dict[tuple, list[float]] = {key: [] for key in tasks}
    for _ in range(REPEATS + 1):
        for key, task in tasks.items():
            states = [copy.deepcopy(before[key[1]])] if key[0] in ("start", "step") else []
            begin = time.perf_counter()
            task(*states)
            times[key].append(time.perf_counter() - begin)
    median = {key: statistics.median(found[1:]) for key, found in times.items()}
    out = {}
    for name, method in methods.items():
        rest = []
        for sampling in samplings:
            one = speculative(target, method, prompt, sampling, exact_split=True)
            elsewhere = one.seconds - one.split.get("draft", 0.0) - one.split["verify"]
            rest.append(elsewhere / max(one.acceptance.passes, 1))
        out[name] = Costs(
            median[("plain",)],
            {n: median["verify", n] for n in sizes},
            {w: median.get(("step", name, w), 0.0) for w in WIDTHS},
            median.get(("start", name), 0.0),
            statistics.fmean(rest),
        )
    return out
