"""The tree cache against a plain list of entries."""

import pytest
import torch

from pipeline.lm.cache import FIRST_CAPACITY, FixedCache, TreeCache


class Model:
    """A model of what the cache should hold: one number an entry, the same in keys and values except for the sign."""

    def __init__(self, cache: TreeCache | FixedCache, layers: int):
        self.cache, self.layers, self.entries, self.next = cache, layers, [], 1.0

    def add(self, count: int) -> None:
        new = [self.next + n for n in range(count)]
        self.next += count
        self.entries += new
        states = torch.tensor(new)[None, None, :, None].expand(1, 2, count, 3)
        for layer in range(self.layers):
            keys, values = self.cache.update(states + layer, -states - layer, layer)
        self.cache.length += count
        if isinstance(self.cache, FixedCache):
            self.cache.stack()
        self.check(keys, values, self.layers - 1)

    def keep(self, prefix: int, path: list[int]) -> None:
        self.cache.keep(prefix, path)
        self.entries = self.entries[:prefix] + [self.entries[place] for place in path]

    def check(self, keys, values, layer):
        want = torch.tensor(self.entries) + layer
        assert self.cache.length == len(self.entries)
        assert keys.shape[2] == (self.cache.capacity or len(self.entries))
        for got, sign in ((keys, 1), (values, -1)):
            assert torch.equal(got[0, 0, : len(self.entries), 0], sign * want)
            assert torch.equal(got[0, 1, : len(self.entries), 2], sign * want)


@pytest.mark.parametrize("capacity", [None, 1024])
def test_a_tree_is_appended_and_cut_back_to_its_accepted_path(capacity):
    generator = torch.Generator().manual_seed(0)
    model = Model(FixedCache(3, capacity) if capacity else TreeCache(), 3)
    model.add(200)
    for _ in range(40):
        past, nodes = len(model.entries), int(torch.randint(1, 20, (), generator=generator))
        model.add(nodes)
        depth = int(torch.randint(0, nodes, (), generator=generator))
        below = sorted(torch.randperm(nodes - 1, generator=generator)[:depth].tolist()) if nodes > 1 else []
        model.keep(past, [past, *(past + 1 + node for node in below)])
    assert len(model.entries) > FIRST_CAPACITY  # it has grown
    model.keep(7, [])
    model.add(2)
    assert model.cache.get_seq_length() == 9


def test_accepted_entries_are_not_copied_again():
    """Until the buffer is full, what attention reads are views of the same memory."""
    model = Model(TreeCache(), 1)
    model.add(10)
    address = model.cache.layers[0].keys.data_ptr()
    for _ in range(20):
        model.add(6)
        model.keep(len(model.entries) - 6, [len(model.entries) - 6, len(model.entries) - 2])
        assert model.cache.layers[0].keys.data_ptr() == address
