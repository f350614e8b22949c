"""Trainings whose loss is a mean over dialogues (`train.weighting = "dialogue"`), however a global batch is cut."""

import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.recipe.load import load_recipe
from tests.train.runs import largest_difference, run_training, train_here

pytestmark = pytest.mark.real
BY_DIALOGUE = "train.weighting=dialogue"


def weights_of(output) -> torch.Tensor:
    return torch.cat([x.flatten() for x in load_file(output / "drafts/jakiro/model.safetensors").values()])


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param([], id="alone", marks=pytest.mark.long),
        pytest.param(["train.pack_tokens=200", "train.global_batch=4"], id="packed"),
    ],
)
def test_accumulation_and_ranks_change_no_training_by_dialogue(dumped, tmp_path, packed):
    """One micro-batch a step on one rank; several there; and several on each of two ranks."""
    size = 4 if packed else 8
    train_here(dumped, tmp_path / "whole", *packed, BY_DIALOGUE, f"train.micro_batch={size}")
    train_here(dumped, tmp_path / "cut", *packed, BY_DIALOGUE, "train.micro_batch=1")
    done = run_training(dumped, tmp_path / "ranks", *packed, BY_DIALOGUE, "train.micro_batch=1", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    train_here(dumped, tmp_path / "token", *packed, f"train.micro_batch={size}")
    whole, by_token = weights_of(tmp_path / "whole"), weights_of(tmp_path / "token")
    for other in ("cut", "ranks"):
        curve = largest_difference(tmp_path / "whole", tmp_path / other)
        weights = ((weights_of(tmp_path / other) - whole).norm() / (by_token - whole).norm()).item()
        print(f"{other}: losses differ by {curve:.1e}, weights by {weights:.1e} of what the weighting changes")
        assert curve < 1e-5 and weights < 1e-4
    assert largest_difference(tmp_path / "whole", tmp_path / "token") > 1e-4


def test_another_weighting_is_another_draft(dumped, undisturbed):
    changed = load_recipe(dumped[0], [f"output={undisturbed}", BY_DIALOGUE])
    with pytest.raises(PipelineError, match=r'train.weighting: "token" -> "dialogue"'):
        checkpoint.require_trained_under(changed, "jakiro")
