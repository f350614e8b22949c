"""A gradient that is not finite, under each optimizer: the message, and the state of the weights afterwards.

python -m tests.train.gradients
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipeline.basics.errors import PipelineError
from pipeline.drafts import TrainedDraft, build, make_objective
from pipeline.drafts.eagle import EagleConfig
from pipeline.features.batch import Batch, collate
from pipeline.features.positions import Horizons
from pipeline.features.schema import TextRow
from pipeline.lm.states import EmbeddingAndHead, LMHead
from pipeline.recipe.sections import TrainConfig
from pipeline.running import entry
from train.engine.engine import TrainingEngine, start_distributed

WIDTH, VOCABULARY = 32, 64
SHAPES = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 128,
    "vocab_size": VOCABULARY,
    "target_layers": 2,
}


class Broken(torch.autograd.Function):
    """The same loss, without a gradient."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * float("nan")


def loss_of(draft: TrainedDraft, batch: Batch):
    """Return EAGLE's loss; without a gradient for the batch of step 2."""
    loss, sums = make_objective(draft.config).loss(draft, batch)
    return (Broken.apply(loss) if batch.step == 2 else loss), sums


def one_batch(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    mask = (np.arange(12) > 3).astype(np.uint8)
    rows = [
        TextRow(
            f"dialogue-{number}",
            torch.randint(VOCABULARY, (12,), generator=generator).int().numpy(),
            mask,
            torch.randn(12, WIDTH, generator=generator).bfloat16(),
        )
        for number in range(2)
    ]
    return [replace(collate(rows, Horizons([1]), {1: 14}), step=step)]


def weights_of(engine: TrainingEngine, draft: TrainedDraft) -> dict[str, torch.Tensor]:
    engine.copy_weights_to(copy := draft.validation_copy())
    return {name: value.clone() for name, value in copy.state_dict().items()}


def after_a_broken_step(dtype: str, stage: int) -> str:
    config = TrainConfig(
        dtype=dtype,
        zero_stage=stage,
        micro_batch=2,
        global_batch=2,
        learning_rate=1e-2,
        warmup_steps=1,
    )
    draft = build(EagleConfig(kind="eagle"), SHAPES)
    draft.initialise(0)
    embed_head = EmbeddingAndHead(torch.randn(VOCABULARY, WIDTH), LMHead(torch.randn(VOCABULARY, WIDTH)), "")
    draft.bind(embed_head)
    with tempfile.TemporaryDirectory() as folder:
        engine = TrainingEngine(draft, loss_of, config, 1, 20, Path(folder), "")
        draft.move_embed_head(engine.device, engine.dtype)
        engine.advance(one_batch(1))
        before = weights_of(engine, draft)
        try:
            engine.advance(one_batch(2))
        except PipelineError as error:
            is_unchanged = all(torch.equal(value, before[name]) for name, value in weights_of(engine, draft).items())
            return f"{str(error).split('.')[0]}; weights {'as before' if is_unchanged else 'CHANGED'}"
        return "no error"


def main() -> None:
    torch.set_num_threads(1)
    start_distributed()
    for dtype, stages in (("float32", (0, 1, 2)), ("bfloat16", (0, 1, 2, 3))):
        for stage in stages:
            sys.stdout.write(f"{dtype} ZeRO-{stage}: {after_a_broken_step(dtype, stage)}\n")


if __name__ == "__main__":
    os.environ["DS_LOG_LEVEL"] = "error"
    entry.run_rank(main)
