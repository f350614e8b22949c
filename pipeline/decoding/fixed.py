"""A draft's round with fixed shapes, compiled: on a GPU one CUDA graph.

An eager round calls several hundred operators, and the GPU waits for the host between them. Here every tensor keeps its
shape and its address from round to round: the cache has one capacity, masks take the place of slices, and the number of
verified inputs is a number on the device. The forwards and the growth of the tree are those of `grow.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.basics.accelerator import compile_or_stay_eager, to_device
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import CandidatePool, DraftOutput, DraftRequest, Frontier, RoundInput, Timer
from pipeline.decoding.grow import Grower, dynamic_levels, not_finite_error, pools_of, select_best
from pipeline.lm.attention import additive_mask
from pipeline.lm.verifier import fixed_capacity

NEW_INPUTS = 32  # of one run; after a longer path the round runs several times


@dataclass
class Buffers:
    """A cache of fixed shapes, by layer (1, G, C, d): `capacity` places for verified inputs, then a tree's nodes."""

    keys: list[Tensor]
    values: list[Tensor]
    capacity: int


class _RoundCache:
    """The cache as a draft's attention calls it, in one forward."""

    def __init__(self, buffers: Buffers, place_T: Tensor | None, end: int):
        """Write new entries to the places `place_T`, or the last ones before `end`; show those before `end`."""
        self._buffers, self._place_T, self._end = buffers, place_T, end

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        buffers = self._buffers.keys[layer], self._buffers.values[layer]
        for buffer, new in zip(buffers, (keys, values), strict=True):
            if self._place_T is None:
                buffer[:, :, self._end - new.shape[2] : self._end] = new
            else:
                buffer.index_copy_(2, self._place_T, new)
        return buffers[0][:, :, : self._end], buffers[1][:, :, : self._end]


@dataclass
class _FixedInput:
    """The new inputs of a run, padded to `NEW_INPUTS`."""

    states_TSD: Tensor
    tokens_T: Tensor
    verified: Tensor  # number of inputs before these
    count: Tensor  # number of these that are not padding


class _FixedForwards:
    """The forwards of one round, as `Grower` calls them; all tensors have the same shapes in every round."""

    def __init__(self, draft: Any, buffers: Buffers):
        self.draft, self._buffers, self._window = draft, buffers, draft.config.window
        self._place_C = torch.arange(buffers.capacity, device=buffers.keys[0].device)
        self.name, self.token_ids_U = draft.name, draft.token_ids_U

    def start(self, _state: Any, inputs: _FixedInput, request: DraftRequest, _places: int = 1) -> DraftOutput:
        """Forward the new inputs. Padding is written after them, and the next run writes over it."""
        position_T = inputs.verified + torch.arange(NEW_INPUTS, device=self._place_C.device)
        self._end, self._nodes = inputs.verified + inputs.count, 0
        cache = _RoundCache(self._buffers, position_T, self._buffers.capacity)
        features_TD = self.draft.features(inputs.states_TSD)
        u_TD = self._forward(features_TD, inputs.tokens_T, position_T, self._see(position_T), cache)
        return self.draft.output(u_TD.index_select(0, inputs.count[None] - 1), request)

    def step(self, _state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        """Forward the nodes of a level, as `Draft.step` defines."""
        position_W = (self._end + (frontier.depth - 1)).expand(len(frontier.tokens_W))
        prefix_WC = self._see(position_W) & (self._place_C < self._end)
        self._nodes += len(frontier.tokens_W)
        cache = _RoundCache(self._buffers, None, self._buffers.capacity + self._nodes)
        visible_WC = torch.cat([prefix_WC, frontier.visible_WC], dim=1)
        u_WD = self._forward(frontier.carry_WD, frontier.tokens_W, position_W, visible_WC, cache)
        return self.draft.output(u_WD, request)

    def _see(self, position_T: Tensor) -> Tensor:
        """Return which verified inputs are in sight of each position, bool (T, C)."""
        visible_TC = self._place_C <= position_T[:, None]
        return visible_TC & (self._place_C > position_T[:, None] - self._window) if self._window else visible_TC

    def _forward(self, features: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, cache: Any) -> Tensor:
        mask = additive_mask(visible, features.dtype)[None, None]
        return self.draft.trunk(features[None], tokens[None], positions[None], mask, cache)[0]


class FixedRounds:
    """The rounds of one draft for trees of best candidates. One sequence at a time: all use the same memory."""

    def __init__(self, draft: Any, backend: Any = "inductor"):
        """`draft`: a `FeatureDraft` in its place and dtype. Without a `backend` nothing is compiled."""
        self._draft, self._backend = draft, backend
        self._buffers: dict[tuple[int, int], Buffers] = {}  # by number of inputs and of nodes
        self._rounds: dict[Any, Callable[..., Tensor]] = {}  # by tree and number of candidates
        self._sequence: tuple[Any, Buffers] | None = None  # the state and the memory of the last one
        parts = draft.embed_head
        for tensor in chain(draft.parameters(), draft.buffers(), parts.head.parameters(), [parts.embedding_VD]):
            torch._dynamo.mark_static_address(tensor)  # else a CUDA graph copies it in every round

    def pool(self, state: Any, inputs: RoundInput, tree: TreeConfig, count: int, timer: Timer) -> CandidatePool:
        """Return the best `count` candidates, as `grow.best_pool` does, and count the new inputs as verified."""
        states_TSD, columns = inputs.states_TSD, None
        if not state.verified:
            timer("draft", self._begin, state, inputs, tree, calls=0)
            states_TSD = states_TSD[-1:]
        assert self._sequence and self._sequence[0] is state, "another sequence has used the memory of this one"
        run = partial(self._find_round(tree, count), self._sequence[1])
        for first in range(0, len(states_TSD), NEW_INPUTS):
            part_TSD, after = states_TSD[first : first + NEW_INPUTS], len(states_TSD) - first
            tokens = inputs.tokens[-after:][: len(part_TSD)]
            columns = timer("draft", self._run, run, state, part_TSD, tokens, calls=tree.forwards)
        assert columns is not None
        (pool,), failed = pools_of(columns)
        if failed:
            raise not_finite_error(self._draft)
        return pool

    def _begin(self, state: Any, inputs: RoundInput, tree: TreeConfig) -> None:
        """Read the prompt's inputs with an eager forward, and copy their keys and values to the memory."""
        eager, count = self._draft.open(), len(inputs.states_TSD)
        self._draft.start(eager, inputs, DraftRequest())
        shape = fixed_capacity(max(inputs.positions, len(inputs.tokens))), tree.top_k * (tree.forwards - 1)
        if shape not in self._buffers:
            self._buffers[shape] = _make_buffers(eager.cache.layers, *shape)
        buffers = self._buffers[shape]
        for layer, keys, values in zip(eager.cache.layers, buffers.keys, buffers.values, strict=True):
            keys[:, :, :count], values[:, :, :count] = layer.keys, layer.values
        state.verified, self._sequence = count - 1, (state, buffers)

    def _run(self, run: Callable[..., Tensor], state: Any, states_TSD: Tensor, tokens: list[int]) -> Tensor:
        """Run a round over new inputs, padded to one shape."""
        count, padding = len(tokens), NEW_INPUTS - len(tokens)
        numbers = to_device([*tokens, *[0] * padding, state.verified, count], states_TSD.device)
        padded_TSD = F.pad(states_TSD, (0, 0, 0, 0, 0, padding))
        state.verified += count
        return run(padded_TSD, numbers[:NEW_INPUTS], numbers[NEW_INPUTS], numbers[NEW_INPUTS + 1])

    def _find_round(self, tree: TreeConfig, count: int) -> Callable[..., Tensor]:
        """Return the round for such a tree; it is compiled when it is first called."""
        key = repr(tree), count
        if key in self._rounds:
            return self._rounds[key]

        def run(buffers: Buffers, *inputs: Tensor) -> Tensor:
            forwards: Any = _FixedForwards(self._draft, buffers)
            fixed_input: Any = _FixedInput(*inputs)
            grower = Grower(forwards, None, fixed_input, tree)
            return select_best(list(dynamic_levels(grower, tree, 1, grower.device)), count, grower.nonfinite)

        self._rounds[key] = run
        if self._backend is not None:
            on_gpu = self._backend == "inductor" and self._draft.device.type == "cuda"
            graphs: Any = {"mode": "reduce-overhead"} if on_gpu else {}
            options = {"backend": self._backend, "dynamic": False, "fullgraph": True, **graphs}
            self._rounds[key] = compile_or_stay_eager(run, f"rounds of draft {self._draft.name!r}", **options)
        return self._rounds[key]


def _make_buffers(layers: Any, capacity: int, nodes: int) -> Buffers:
    """Allocate a cache for layers with such keys and values. The padding of new inputs has room after the capacity."""
    length = capacity + NEW_INPUTS
    keys, values = (
        [x.new_zeros(*x.shape[:2], length + nodes, x.shape[3]) for x in column]
        for column in zip(*((layer.keys, layer.values) for layer in layers), strict=True)
    )
    for tensor in (*keys, *values):
        torch._dynamo.mark_static_address(tensor)
    return Buffers(keys, values, length)
