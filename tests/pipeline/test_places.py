"""Experts by place: alike they are one MLP, and each of them answers its own guesses alone."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.drafts import objective_of
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.features.batch import collate
from pipeline.features.schema import Row
from tests.pipeline.taught import make_draft, prompt_of

EXPERT = [0, 0, 1, 2]  # of each of four guesses, where there are three
LAST = re.compile(r"layers\.1\.mlp\.experts\.(\d)\.down_proj\.weight")


def rows() -> list[Row]:
    found = []
    for seed, length in ((1, 15), (2, 9)):
        states = torch.randn(length, 3, 32, generator=torch.Generator().manual_seed(seed))
        mask = (np.arange(length) >= 3).astype(np.uint8)
        found.append(Row(f"row{seed}", np.array(prompt_of(seed, length), np.int32), mask, states[:, 0], states[:, 1:]))
    return found


@pytest.mark.parametrize(
    "config",
    [DFlashConfig(layers=2, block=5, auxiliary_layers=[1, 2]), PEagleConfig(layers=2, depths=4)],
    ids=["dflash", "p-eagle"],
)
def test_each_expert_answers_its_own_guesses(loaded_target, embed_head, config):
    several, one = (make_draft(loaded_target, embed_head, each) for each in (replace(config, experts=3), config))
    weights = one.state_dict()
    several.load_state_dict({name: weights[re.sub(r"experts\.\d\.", "", name)] for name in several.state_dict()})
    objective = objective_of(config)
    batch = collate(rows(), objective, dict.fromkeys(objective.groups, 10), auxiliary=range(2))
    losses = [objective.loss(draft, batch)[0].item() for draft in (several, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    alike = several(batch)[0]
    for name, weight in several.named_parameters():
        if found := LAST.fullmatch(name):
            kept = weight.data.clone()
            weight.data.zero_()
            differ = [not torch.equal(*pair) for pair in zip(several(batch)[0], alike, strict=True)]
            assert differ == [expert == int(found[1]) for expert in EXPERT]
            weight.data.copy_(kept)
