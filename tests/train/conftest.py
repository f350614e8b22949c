"""One dump for all trainings, and trainings that nothing disturbs."""

from pathlib import Path

import pytest

from pipeline.basics.files import sha256
from tests.train.runs import dump_for, losses, run_training, train_here


@pytest.fixture(scope="session")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    return dump_for(tiny_target, tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def undisturbed(dumped, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    train_here(dumped, output)
    assert len(losses(output)) == 20
    return output


@pytest.fixture(scope="session")
def by_two(dumped, tmp_path_factory) -> str:
    """The SHA-256 of the weights that two ranks make, in windows of one shard."""
    output = tmp_path_factory.mktemp("by-two")
    assert run_training(dumped, output, "train.micro_batch=2", "train.window=1", ranks=2).returncode == 0
    return sha256(output / "drafts/jakiro/model.safetensors")
