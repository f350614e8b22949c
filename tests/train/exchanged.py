"""The bytes that a rank exchanges, and those that it copies, in one optimiser step of a small draft by ZeRO stage.

torchrun --nproc-per-node 2 -m tests.train.exchanged DTYPE

It prints a line of JSON for each stage and each number of micro-batches: bytes by collective, as rank 0 hands them
over; bytes that copies and casts write outside of forward passes; and the parameters.
"""

import json
import os
import sys
from collections import Counter
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.recipe.sections import TrainConfig
from pipeline.running import entry
from train.engine.config import deepspeed_config
from train.engine.engine import start_distributed

WIDTH, LAYERS, LEAST = 128, 4, 1024  # bytes below which a tensor is a count, not a gradient or a weight
COLLECTIVES = {
    "all_reduce": 0,
    "reduce": 0,
    "broadcast": 0,
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 0,
    "all_gather": 0,
}
COPIES = {"copy_", "_to_copy", "clone", "cat", "_foreach_copy_"}


class Copies(TorchDispatchMode):
    """Adds up the bytes that copying operators write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in COPIES and isinstance(out, torch.Tensor) and out.nbytes >= LEAST:
            self.total += out.nbytes
        return out


def count_collectives(counts: Counter) -> list:
    """Return patches of the collectives, which add the bytes of their payload to `counts`: the tensor that is reduced
    or sent, what is scattered before it is, and what is gathered after it is.
    """

    def counting(name: str, place: int, function):
        def call(*args, **kwargs):
            values = [*args, *kwargs.values()]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            if tensors[place].nbytes >= LEAST:
                counts[name] += tensors[place].nbytes
            return function(*args, **kwargs)

        return call

    return [
        mock.patch.object(dist, name, counting(name, place, getattr(dist, name))) for name, place in COLLECTIVES.items()
    ]


def one_step(stage: int, dtype: str, accumulation: int, counts: Counter) -> dict:
    """Return what the second step exchanges and copies."""
    config = TrainConfig(
        global_batch=dist.get_world_size() * accumulation, micro_batch=1, dtype=dtype, zero_stage=stage
    )
    draft = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    parameters = LAYERS * WIDTH * WIDTH
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3)
    settings = deepspeed_config(config, accumulation, parameters)
    engine, *_ = deepspeed.initialize(model=draft, optimizer=optimizer, config=settings, dist_init_required=False)
    x = torch.randn(8, WIDTH, dtype=next(engine.module.parameters()).dtype)
    for _ in range(2):  # the second step has all its buffers
        counts.clear()
        copies = Copies()
        for _ in range(accumulation):
            loss = engine(x).float().square().sum()
            with copies:
                engine.backward(loss)
                engine.step()
    return {
        "stage": stage, "accumulation": accumulation, "parameters": parameters,
        "optimizer": type(engine.optimizer).__name__, "exchanged": dict(counts), "copied": copies.total,
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    counts: Counter = Counter()
    for patch in count_collectives(counts):  # DeepSpeed takes them as it starts
        patch.start()
    start_distributed()
    for stage in (0, 1, 2):
        for accumulation in (1, 4):
            if accumulation == 1 or stage or sys.argv[1] == "float32":
                line = one_step(stage, sys.argv[1], accumulation, counts)
                if dist.get_rank() == 0:
                    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    os.environ["DS_LOG_LEVEL"] = "error"
    entry.run_rank(main)
