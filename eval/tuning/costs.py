"""What a round costs on this machine: verifying n tokens, a draft forward of w nodes, and the rest."""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pipeline.basics.accelerator import now
from pipeline.basics.progress import Progress
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput, TreeSupport
from pipeline.decoding.generate import Sampling, speculative
from pipeline.decoding.method import LoadedMethod
from pipeline.lm.attention import behind
from pipeline.lm.model import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 10)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
REPEATS = 21
LEVELS_AT = 6  # nodes forwarded where further levels are timed
FEW, MANY = 6, 48  # nodes of the trees whose bookkeeping is timed


@dataclass(frozen=True)
class Costs:
    """What the parts of a round take, in seconds."""

    plain: float  # one token of plain decoding
    verify: dict[int, float]  # by tokens
    # by nodes forwarded, with the choice of their children: of a round's second draft forward, its third, ...; the last
    # one holds for all that follow
    steps: list[dict[int, float]]
    start: float  # a round's first draft forward, for one level
    rest: float  # of a round, beside draft and verification
    node: float = 0.0  # what each of its nodes adds to that
    # what each further level adds to a draft forward, by its number from 0; the last one holds for all that follow
    level: list[float] = field(default_factory=lambda: [0.0])

    @property
    def sizes(self) -> list[int]:
        return [size for size in self.verify if size > 1]

    def pass_of(self, nodes: int) -> float:
        """Verifying so many, and keeping the books of them."""
        return self.verify[nodes] + self.node * nodes

    def forwards(self, tree: TreeConfig) -> list[float]:
        """Each of a round's draft forwards."""
        last, deepest = len(self.steps) - 1, tree.forwards - 1
        found = [self.start, *(self.steps[min(number, last)][tree.top_k] for number in range(deepest))]
        found[-1] += ((tree.parallel or 1) - 1) * self.level[min(deepest, len(self.level) - 1)]
        return found

    def round(self, tree: TreeConfig) -> float:
        """One round with such a tree."""
        return self.pass_of(tree.nodes) + sum(self.forwards(tree)) + self.rest

    def said(self) -> str:
        verify = ", ".join(f"{n}: {1e3 * s:.1f}" for n, s in self.verify.items())
        steps = "; then ".join(", ".join(f"{w}: {1e3 * s:.2f}" for w, s in step.items()) for step in self.steps)
        return (
            f"a token of plain decoding {1e3 * self.plain:.1f} ms; verifying n tokens (ms): {verify}\na draft step of "
            f"w nodes (ms): {steps}; the first forward of a round {1e3 * self.start:.2f}, "
            f"bookkeeping {1e3 * self.rest:.2f} and {1e3 * self.node:.3f} a node"
        )


class _Parts:
    """The parts of a round behind `context` tokens, ready to be timed. Each ends with its result on the host."""

    def __init__(self, target: Target, methods: dict[str, LoadedMethod], context: int, longest: int):
        self._target, self._methods, self._context = target, methods, context
        self._cache = target.new_cache(context + longest)
        self._tokens = torch.arange(context + longest, device=target.device) % 1000 + 5
        self._text = self._tokens.tolist()
        needed = {layer for method in methods.values() for layer in method.draft.needs.auxiliary}
        self._layers = tuple(sorted(needed))
        given = target.forward(self._tokens[:context], self._cache, layers=self._layers)
        self._two = given.rows([0, 1])
        self._experts = {name: method.tree.candidates != "plain" for name, method in methods.items()}
        # By stepwise draft: its states behind the context and behind each forward of one node, and what these answered.
        self._states: dict[str, list[Any]] = {}
        self._answers: dict[str, list[DraftOutput]] = {}
        for name, method in methods.items():
            if method.draft.stepwise:
                state, inputs = method.draft.open(), RoundInput(self._text[: context + 1], given.of(method.draft.needs))
                self._answers[name] = [method.draft.start(state, inputs, DraftRequest(1, self._experts[name]))]
                self._states[name] = [copy.deepcopy(state)]
                for number in range(1, kinds_of(method.draft.config)):
                    self._states[name].append(copy.deepcopy(state))
                    self._answers[name].append(self._stepped(name, number, 1, state))

    def before(self, name: str, number: int) -> Any:
        """A copy of the draft's state before the forward of this number; a round's first one takes in two tokens."""
        return copy.deepcopy(self._states[name][number])

    def tasks(self, sizes: list[int]) -> dict[tuple, Callable[..., None]]:
        """The functions to time, by part; a draft's take a copy of its state, so that copying is not timed."""
        found: dict[tuple, Callable[..., None]] = {("verify", n): partial(self._verify, n) for n in sizes}
        for name, states in self._states.items():
            deep = [self._methods[name].draft.config.levels_of(number) for number in range(len(states))]
            found |= {("start", name, 0, levels): partial(self._start, name, levels) for levels in {1, deep[0]}}
            for n in range(1, len(states)):
                found |= {("step", name, n, 1, w): partial(self._step, name, n, 1, w) for w in WIDTHS}
                found[("step", name, n, deep[n], LEVELS_AT)] = partial(self._step, name, n, deep[n], LEVELS_AT)
        return found | {("plain",): self._plain}

    def _verify(self, size: int) -> None:
        context, device = self._context, self._target.device
        visible = behind(context, size, device)
        positions = torch.arange(size, device=device) + context
        found = self._target.forward(self._tokens[:size], self._cache, positions, visible, size, self._layers)
        self._target.head(found.final_ND).argmax(-1).tolist()
        self._cache.keep(context)

    def _plain(self) -> None:
        self._target.head(self._target.forward(self._tokens[:1], self._cache).final_ND[0]).argmax(-1).tolist()
        self._cache.keep(self._context)

    def _start(self, name: str, levels: int, state: Any) -> None:
        draft = self._methods[name].draft
        inputs = RoundInput(self._text[: self._context + 3], self._two.of(draft.needs))
        draft.start(state, inputs, DraftRequest(levels, self._experts[name])).logits_LWU[-1].argmax(-1).tolist()

    def _step(self, name: str, number: int, levels: int, width: int, state: Any) -> None:
        self._stepped(name, number, width, state, levels).logits_LWU[-1].argmax(-1).tolist()

    def _stepped(self, name: str, number: int, width: int, state: Any, levels: int = 1) -> DraftOutput:
        """The round's forward of this number, over `width` nodes below forwards of one node."""
        device = self._target.device
        above = torch.ones(width, number - 1, dtype=torch.bool, device=device)
        visible = torch.cat([above, torch.eye(width, dtype=torch.bool, device=device)], dim=1)
        carry = self._answers[name][number - 1].carry_WD[-1:].expand(width, -1)
        frontier = Frontier(self._tokens[:width], carry, visible, number)
        return self._methods[name].draft.step(state, frontier, DraftRequest(levels, self._experts[name]))


def kinds_of(draft: TreeSupport) -> int:
    """How many of a round's forwards, the first included, differ from those that follow; at most the second where all
    after the first are alike.
    """
    found = 1
    while draft.levels_of(found) and (found == 1 or draft.levels_of(found) != draft.levels_of(found - 1)):
        found += 1
    return found


@torch.inference_mode()
def measure_costs(
    target: Target,
    methods: dict[str, LoadedMethod],
    context: int,
    max_nodes: int,
    samplings: list[Sampling],
    prompt: list[int],
    sizes: Sequence[int] = SIZES,
) -> dict[str, Costs]:
    """The costs of each draft: medians over interleaved repeats, behind a prompt of `context` tokens. What the target
    costs is measured once for all drafts, so that their trees are chosen on equal terms. A compiled target is compiled
    for each of `sizes`.
    """
    sizes = [size for size in sizes if size <= max_nodes]
    parts = _Parts(target, methods, context, max_nodes)
    tasks = parts.tasks(sizes)
    times: dict[tuple, list[float]] = {key: [] for key in tasks}
    with Progress("time forwards", REPEATS + 1, "rounds") as progress:
        for _ in range(REPEATS + 1):
            for key, task in tasks.items():
                states = [parts.before(key[1], key[2])] if key[0] in ("start", "step") else []
                begin = now(target.device)  # the copies are made
                task(*states)
                times[key].append(now(target.device) - begin)
            progress.advance(1)
    median = {key: statistics.median(found[1:]) for key, found in times.items()}
    found = {}
    for name, method in methods.items():
        rest, node, forward = _bookkeeping(target, method, samplings, prompt, max_nodes)
        found[name] = Costs(
            median[("plain",)],
            {n: median["verify", n] for n in sizes},
            [
                {w: median.get(("step", name, number, 1, w), 0.0) + forward for w in WIDTHS}
                for number in range(1, max(kinds_of(method.draft.config), 2))
            ],
            median.get(("start", name, 0, 1), 0.0),
            rest,
            node,
            _levels(median, name, method.draft.config),
        )
    return found


def _levels(median: dict[tuple, float], name: str, config: TreeSupport) -> list[float]:
    """What each further level of a forward adds, by its number."""
    found = []
    for number in range(kinds_of(config)):
        kind, width = ("step", [LEVELS_AT]) if number else ("start", [])
        levels = config.levels_of(number)
        one, all_ = (median.get((kind, name, number, n, *width), 0.0) for n in (1, levels))
        found.append(max(0.0, all_ - one) / max(levels - 1, 1))
    return found


def _bookkeeping(
    target: Target, method: LoadedMethod, samplings: list[Sampling], prompt: list[int], max_nodes: int
) -> tuple[float, float, float]:
    """Seconds of a round beside draft and verification: what it takes anyway, what each node adds, and what each draft
    forward after the first. From three trees: a small one, one of more nodes, and a deeper one.
    """
    few, many = min(FEW, max_nodes), min(MANY, max_nodes)

    def seconds(nodes: int, depth: int) -> tuple[float, TreeConfig]:
        """Time of the bookkeeping, and the tree: it has as many draft forwards as its depth can have."""
        config = method.draft.config
        depth = max(d for d in range(1, min(depth, nodes - 1) + 1) if config.parallels(d))
        shape: Any = {"depth": depth, "top_k": max(WIDTHS), "parallel": min(config.parallels(depth))}
        most = config.most(TreeConfig(nodes=depth + 1, **shape))
        tree = TreeConfig(nodes=min(nodes, most), candidates=method.tree.candidates, **shape)
        resolved = LoadedMethod(method.draft, tree)
        return statistics.fmean(_rest(target, resolved, sampling, prompt) for sampling in samplings), resolved.tree

    (small, given), (large, wide) = seconds(few, 2), seconds(many, 2)
    deep, long = seconds(few, 4) if method.draft.stepwise and few > 4 else (small, given)
    node = max(0.0, (large - small) / max(wide.nodes - given.nodes, 1))
    further = long.forwards - given.forwards
    forward = max(0.0, (deep - small) / further) if further > 0 else 0.0
    return max(0.0, small - node * given.nodes - (given.forwards - 1) * forward), node, forward


def _rest(target: Target, method: LoadedMethod, sampling: Sampling, prompt: list[int]) -> float:
    one = speculative(target, method, prompt, sampling, exact_split=True)
    return (one.seconds - one.split.get("draft", 0.0) - one.split["verify"]) / max(one.acceptance.passes, 1)
