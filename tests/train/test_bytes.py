"""The bytes that training moves: those of a batch, and those that ranks exchange in a step."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch

from pipeline.drafts import load_settings, make_objective
from pipeline.features.schema import FP8, FeatureSpec, TextRow
from pipeline.features.shards import FeatureStore, write_features
from pipeline.recipe.sections import TrainConfig
from tests.kit import BIN, free_port, run_command
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


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_exchange_what_training_md_says(dtype):
    """Gradients of P parameters: once a step, by ZeRO-2 once a micro-batch. Weights: from ZeRO-1 on, once a step."""
    launcher = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = run_command([*launcher, "-m", "tests.train.exchanged", dtype])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == (6 if dtype == "float32" else 5), done.stderr
    weight, copied = 4 if dtype == "float32" else 2, {}
    for line in lines:
        stage, accumulation, count = line["stage"], line["accumulation"], line["parameters"]
        gradient = 4 if stage or dtype == "float32" else 2
        times = accumulation if stage == 2 else 1
        want = {"all_reduce": gradient * times * count} | ({"all_gather_into_tensor": weight * count} if stage else {})
        copied[stage, accumulation] = line["copied"] / count
        shown = {name: f"{value / count:g} P" for name, value in line["exchanged"].items()}
        print(
            f"{dtype}, ZeRO-{stage}, {accumulation} micro-batches ({line['optimizer']}): {shown}, "
            f"copied {copied[stage, accumulation]:.1f} P"
        )
        assert line["exchanged"] == want
    assert copied[1, 4] < copied[2, 4] and copied[1, 1] <= copied[2, 1]
    assert (copied[0, 1] < copied[1, 1]) == (dtype == "float32")
