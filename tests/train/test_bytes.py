"""The bytes that training moves: those of a batch, and those that ranks exchange in a step."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from pipeline.drafts import load_settings, make_objective
from pipeline.features.schema import FP8, FeatureSpec, TextRow
from pipeline.features.shards import FeatureStore, write_features
from pipeline.recipe.sections import TrainConfig
from tests.strict import DEVICE, rehearsal
from train.input.data import Batches

WIDTH, LAYERS, LENGTHS = 256, 8, (130, 60, 99, 129)


def tensors_of(batch) -> list[torch.Tensor]:
    values = [getattr(batch, entry.name) for entry in fields(batch)]
    return [value for value in (*values, *batch.scales.values()) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("packed", [None, 512])
@pytest.mark.parametrize("stored_dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("kind", ["eagle", "jakiro", "eagle3", "dflash", "p-eagle"])
def test_a_batch_carries_each_state_once(tmp_path, kind, stored_dtype, packed):
    """A row of one dialogue carries T + 1 final states, a packed row T and one more for each dialogue; and T of each
    auxiliary layer. Everything else is 24 bytes an input, and in float8 4 more for each state.
    """
    settings = load_settings({"kind": kind})
    needs = settings.needs(LAYERS)
    layers, size = len(needs.auxiliary), 1 if stored_dtype == FP8 else 2
    spec = FeatureSpec(
        WIDTH, stored_dtype, "target", "tokenizer", "template", "recipe",
        auxiliary_layers=" ".join(map(str, needs.auxiliary)),
    )  # fmt: skip
    rows = [
        TextRow(
            f"doc{number}", np.full(length, number, np.int32), np.ones(length, np.uint8),
            torch.ones(length, WIDTH).bfloat16(), torch.ones(length, layers, WIDTH).bfloat16() if layers else None,
        )
        for number, length in enumerate(LENGTHS)
    ]  # fmt: skip
    write_features(tmp_path, spec, {"train": [rows]})
    count = 1 if packed else len(rows)
    config = TrainConfig(global_batch=count, micro_batch=count, pack_tokens=packed, epochs=1)
    loader = Batches(FeatureStore(tmp_path, "train", spec), config, make_objective(settings), needs, 0, 0, 1)
    with rehearsal():
        (batch,) = loader.micro_batches(0, DEVICE)
        bytes_sent = sum(x.numel() * x.itemsize for x in tensors_of(batch))
        inputs, dialogues = batch.tokens_BT.shape[1], max(map(len, batch.documents))
    assert dialogues == (len(rows) if packed else 1)
    states = count * (inputs + dialogues + layers * inputs)
    per_state = WIDTH * size + (4 if stored_dtype == FP8 else 0)
    before = count * (2 + layers) * inputs * per_state
    print(f"{kind}, {stored_dtype}, {count} rows of {inputs}: {bytes_sent:,} bytes, with labels {before:,} + ids")
    assert bool(batch.noise) == needs.final
    assert bytes_sent <= states * per_state + 24 * count * inputs
