"""The key-value cache of tree decoding: it is written in place, and cut back to the accepted path after each round.

No accepted token is computed or copied twice: a round copies the accepted path's entries, not the prefix.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from pipeline.basics.accelerator import to_device

FIRST_CAPACITY = 256  # tokens, where the expected number is unknown; a buffer doubles when it is full


class GrowingLayer(CacheLayerMixin):
    """A layer's keys and values in buffers that double when they are full; attention reads views of the filled part."""

    is_sliding = False

    def __init__(self, expected: int = FIRST_CAPACITY):
        super().__init__()
        self.length, self._expected = 0, expected

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
        self._show(prefix + count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class FixedLayer(StaticLayer):
    """A static layer of transformers (one fixed shape, as CUDA graphs require) that can also keep a path."""

    def keep(self, prefix: int, moved: Tensor | None, count: int) -> None:
        if moved is not None:
            buffers: Any = (self.keys, self.values)
            for buffer in buffers:
                buffer[:, :, prefix : prefix + count] = buffer[:, :, moved]
        if self.is_initialized:
            self.cumulative_length.fill_(prefix + count)


class TreeCache(Cache):
    """A cache that can keep a path of a tree. Its `length` is a Python number, so the device is never asked. With a
    `capacity` every shape stays the same; otherwise memory for `expected` tokens is allocated at once.
    """

    layers: Any  # GrowingLayer or FixedLayer

    def __init__(self, layers: int = 0, capacity: int | None = None, expected: int = FIRST_CAPACITY):
        if capacity is None:
            growing: Any = partial(GrowingLayer, expected)
            super().__init__(layer_class_to_replicate=growing)
        else:
            super().__init__(layers=[FixedLayer(capacity) for _ in range(layers)])
        self.length, self.capacity = 0, capacity

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
