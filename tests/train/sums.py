"""The error of a gradient that DeepSpeed sums over two ranks and several micro-batches in bfloat16.

torchrun --nproc-per-node 2 -m tests.train.sums DTYPE

DTYPE: in which ranks exchange gradients. It prints one line for each ZeRO stage, and
what each rank decides of rank 0's and of rank 1's wish.
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

from pipeline.recipe.sections import TrainConfig
from pipeline.running import entry
from train.engine.config import deepspeed_config
from train.engine.engine import start_distributed
from train.engine.ranks import decide_on_rank_0

ROWS, WIDTH, ACCUMULATION = 64, 128, 2


def error_of_a_sum(stage: int, dtype: str) -> float:
    """Return the largest error of the mean gradient. Weights start at 0 and the rate is 1, so they end as its negative;
    each micro-batch's gradient is a random matrix, exact in bfloat16.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = TrainConfig(
        global_batch=ranks * ACCUMULATION, micro_batch=1, zero_stage=stage, clip_norm=1e9, warmup_steps=0,
        deepspeed={"communication_data_type": dtype} if dtype != "default" else {},
    )  # fmt: skip
    layer = torch.nn.Linear(WIDTH, ROWS, bias=False)
    torch.nn.init.zeros_(layer.weight)
    engine, *_ = deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=1.0),
        config=deepspeed_config(config, ACCUMULATION, ROWS * WIDTH),
        dist_init_required=False,
    )
    generator = torch.Generator().manual_seed(stage)
    gradients = torch.randn(ranks, ACCUMULATION, ROWS, WIDTH, generator=generator).bfloat16()
    for gradient in gradients[rank]:
        engine.backward((engine(torch.eye(WIDTH).bfloat16()).T * gradient).sum())
        engine.step()
    weight = safe_get_full_fp32_param(next(engine.module.parameters()))
    return (weight.double() + gradients.double().mean((0, 1))).abs().max().item()


def main() -> None:
    torch.set_num_threads(1)
    start_distributed()
    for stage in (1, 2, 3):
        error = error_of_a_sum(stage, sys.argv[1])
        if dist.get_rank() == 0:
            sys.stdout.write(f"ZeRO-{stage}: {error:.1e}\n")
    rank = dist.get_rank()
    decisions = [decide_on_rank_0(value, torch.device("cpu")) for value in (rank == 0, rank == 1)]
    sys.stdout.write(f"rank {rank} decides {decisions}\n")


if __name__ == "__main__":
    os.environ["DS_LOG_LEVEL"] = "error"
    entry.run_rank(main)
