"""One dump for all trainings, and one training that nothing disturbs."""

from pathlib import Path

import pytest

from tests.kit import run_command, train_command
from tests.train.runs import dump_for, linked, losses


@pytest.fixture(scope="session")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    return dump_for(tiny_target, tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="session")
def undisturbed(dumped, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    command = train_command(linked(dumped, output), f"output={output}", "train.micro_batch=4", draft="jakiro")
    done = run_command(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(output)) == 20
    return output
