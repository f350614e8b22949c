"""The caches of decoding, which keep the accepted tokens of each round.

A tree's is written in place and cut back to the accepted path: a round copies the path's entries, not the prefix. A
chain's serves targets whose layers merge all tokens into a state, which cannot be cut back.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from pipeline.basics.accelerator import to_device

STATE_COPIES = 3  # of a chain's cache: the current states, those before the chain, and those after the prompt
MAX_PENDING = 16  # accepted tokens that are forwarded again with a chain; more are forwarded before it
FIRST_CAPACITY = 256  # tokens, where the expected number is unknown; a buffer doubles when it is full


class GrowingLayer(CacheLayerMixin):
    """A layer's keys and values in buffers that double when they are full; attention reads views of the filled part."""

    is_sliding = False

    def __init__(self, expected: int = FIRST_CAPACITY):
        super().__init__()
        self.length, self._expected = 0, expected
        self.indexer_keys: Tensor | None = None  # of a sparse layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = [x.new_empty((*x.shape[:-2], 0, x.shape[-1])) for x in (key_states, value_states)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._grow(end)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self._show(end)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append the keys (B, N, D) of a sparse layer's indexer, and return all of them."""
        past = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*past, indexer_key_states], dim=1)
        return self.indexer_keys

    def _grow(self, needed: int) -> None:
        capacity = max(self._expected, needed, 2 * self._buffers[0].shape[-2])
        for place, old in enumerate(self._buffers):
            larger = old.new_empty((*old.shape[:-2], capacity, old.shape[-1]))
            larger[:, :, : self.length] = old[:, :, : self.length]
            self._buffers[place] = larger

    def _show(self, length: int) -> None:
        self.length = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def keep(self, prefix: int, moved: Tensor | None, count: int) -> None:
        """Keep the first `prefix` entries, then `count` more: those at `moved`, or the following ones when it is
        None.
        """
        if moved is not None:
            for buffer in self._buffers:
                buffer[:, :, prefix : prefix + count] = buffer[:, :, moved]
        if (keys := self.indexer_keys) is not None:
            following = keys[:, prefix : prefix + count] if moved is None else keys[:, moved]
            self.indexer_keys = torch.cat([keys[:, :prefix], following], dim=1)
        self._show(prefix + count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """A cache that can keep a path of a tree. Its `length` is a Python number, so the device is never asked. Memory for
    `expected` tokens is allocated at once, and grows.
    """

    layers: Any  # GrowingLayer
    capacity: int | None = None  # of a cache whose shapes stay the same

    def __init__(self, expected: int = FIRST_CAPACITY):
        growing: Any = partial(GrowingLayer, expected)
        super().__init__(layer_class_to_replicate=growing)
        self.length = 0

    def keep(self, prefix: int, path: Sequence[int] = ()) -> None:
        """Keep the first `prefix` cached tokens and after them those at the absolute positions `path`, in that
        order.
        """
        contiguous = list(path) == list(range(prefix, prefix + len(path)))
        moved: dict[Any, Tensor] = {}  # one copy to each device, however many layers it has
        for layer in self.layers:
            device = layer.keys.device if layer.is_initialized else None
            if device and not contiguous and device not in moved:
                moved[device] = to_device(path, device)
            layer.keep(prefix, moved.get(device), len(path))
        self.length = prefix + len(path)


@dataclass
class _Stack:
    """The memory of layers with the same shapes: keys and values (L, B, G, C, d), and the number of tokens (L)."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class FixedCache(Cache):
    """A cache with the `keep` of a `TreeCache` in transformers' static layers: one fixed shape, as CUDA graphs require.
    Layers of the same shapes are views of the same memory, so that one operator moves a path in all of them.
    """

    layers: Any  # StaticLayer

    def __init__(self, layers: int, capacity: int):
        super().__init__(layers=[StaticLayer(capacity) for _ in range(layers)])
        self.length, self.capacity = 0, capacity
        self._stacks: list[_Stack] = []

    def stack(self) -> None:
        """Move the layers' memory to stacks. Call it after the first forward, which allocates it, and before compiled
        ones, which are bound to its addresses.
        """
        alike: dict[Any, list[Any]] = {}
        for layer in self.layers if not self._stacks else ():
            kind = (layer.device, layer.dtype, layer.keys.shape, layer.values.shape)
            alike.setdefault(kind, []).append(layer)
        for layers in alike.values():
            keys, values = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
            # Two numbers a layer, of which one is read: an address of compiled code is a multiple of 16 bytes.
            lengths = layers[0].cumulative_length.new_full((len(layers), 2), self.length)[:, 0]
            self._stacks.append(_Stack(keys, values, lengths))
            for place, layer in enumerate(layers):
                layer.keys, layer.values, layer.cumulative_length = keys[place], values[place], lengths[place]
                for tensor in (layer.keys, layer.values, layer.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)

    def keep(self, prefix: int, path: Sequence[int] = ()) -> None:
        """Keep the tokens that `TreeCache.keep` keeps."""
        end = prefix + len(path)
        for stack in self._stacks:
            if list(path) != list(range(prefix, end)):
                moved = to_device(path, stack.keys.device)
                for buffer in (stack.keys, stack.values):
                    buffer[:, :, :, prefix:end] = buffer.index_select(3, moved)
            stack.lengths.fill_(end)
        self.length = end


class ChainCache:
    """A cache in the form that the model makes itself, for targets whose states cannot be cut back to an earlier token.

    Before a chain is verified the states are copied. Where one of its tokens is rejected, the copy replaces them, and
    the accepted tokens become `pending`: the next forward takes them again, in front of its own, so that no pass is
    added. Keys and values are not copied: transformers' layers never change them in place.
    """

    capacity = None

    def __init__(self) -> None:
        self.length = 0  # tokens, those of the last forward included
        self.states: Any = None  # of transformers; None before the first forward
        self.pending: Tensor | None = None  # the last tokens of `length` that `states` lack
        self._saved: _Saved | None = None  # before the last chain
        self._prompt: _Saved | None = None  # after the first forward

    @property
    def pending_count(self) -> int:
        return 0 if self.pending is None else len(self.pending)

    def take_pending(self, more_than: int) -> Tensor | None:
        """Remove the pending tokens, if they are more than that, and return them: they are to be forwarded next."""
        if self.pending is None or len(self.pending) <= more_than:
            return None
        pending_N, self.pending = self.pending, None
        self.length -= len(pending_N)
        return pending_N

    def begin(self, tokens_N: Tensor) -> Tensor:
        """Prepare a forward of new tokens. Return all tokens that it takes: the pending ones and the new ones."""
        if self._prompt is None and self.states is not None:
            self._prompt = _Saved(self.length, copy_states(self.states))
        all_N = tokens_N if self.pending is None else torch.cat([self.pending, tokens_N])
        if self.length and len(tokens_N) > 1:  # the first of them is never rejected
            self._saved = _Saved(self.length - self.pending_count, copy_states(self.states), all_N)
        return all_N

    def end(self, states: Any, count: int) -> None:
        """Store the model's cache after a forward with `count` new tokens."""
        self.states, self.pending, self.length = states, None, self.length + count

    def keep(self, prefix: int, path: Sequence[int] = ()) -> None:
        """Keep the first `prefix` tokens and after them those at the positions `path`, which follow them directly."""
        assert list(path) == list(range(prefix, prefix + len(path))), "a chain's tokens follow each other"
        length = prefix + len(path)
        if length < self.length:
            if self._prompt and length == self._prompt.length:
                self.states, self.pending = copy_states(self._prompt.states), None
            else:
                assert self._saved and length > self._saved.length, "no states of an earlier token are kept"
                self.states, self.pending = self._saved.states, self._saved.following_N[: length - self._saved.length]
        self.length, self._saved = length, None


@dataclass
class _Saved:
    """States after `length` tokens, and the tokens of the forward that followed."""

    length: int
    states: Any
    following_N: Any = None


def copy_states(states: Any) -> Any:
    """Copy a cache of transformers. Its keys and values are shared with the copy, as a forward makes new ones."""
    shared = {id(tensor): tensor for layer in states.layers for tensor in _keys_and_values(layer)}
    return copy.deepcopy(states, shared)


def state_bytes(states: Any) -> int:
    """Return the bytes of a cache that `copy_states` copies."""
    shared = {id(tensor) for layer in states.layers for tensor in _keys_and_values(layer)}
    tensors = {id(tensor): tensor for tensor in _tensors_in(states) if id(tensor) not in shared}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)
    elif type(value).__module__.startswith("transformers."):
        yield from _tensors_in(vars(value))


def _keys_and_values(layer: Any) -> Iterator[Any]:
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        yield from (layer.keys, layer.values)
