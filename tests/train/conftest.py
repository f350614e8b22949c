"""One dump for all trainings, and one training that nothing disturbs."""

from pathlib import Path

import pytest

from tests.train.runs import dump_for, losses, train_here


@pytest.fixture(scope="session")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    return dump_for(tiny_target, tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def undisturbed(dumped, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    train_here(dumped, output)
    assert len(losses(output)) == 20
    return output
