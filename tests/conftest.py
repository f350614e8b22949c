"""Fixtures around the tiny target of `tests.kit`."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # four tests run at a time, and waiting threads must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"  # as for the commands: the first who asks decides for the whole process
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # read when Ray is imported

import pytest

from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.recipe import Recipe
from tests import cluster
from tests.kit import recipe_tree, save_tiny_target, write_sharegpt
from tests.loopback import object_store
from tests.warm import RAYS_PYTHON, warm_workers

# Files that take more than a minute, besides those with tests marked `real`.
SLOW = {"vllm", "workers", "drop_in", "architectures", "harness", "device", "generate", "abilities"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the quick ones then fill up what is left of the time, and no worker ends long before
    another.
    """
    slow = {item.path for item in items if item.get_closest_marker("real") or item.path.stem[5:] in SLOW}
    items.sort(key=lambda item: item.path not in slow)  # stable


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def loaded_target(tiny_target) -> Target:
    return Target(TargetConfig(model=str(tiny_target), device="cpu"), "float32")


@pytest.fixture(scope="session")
def embed_head(loaded_target, tiny_target) -> EmbeddingAndHead:
    return loaded_target.embed_head(fingerprint(TargetConfig(model=str(tiny_target))))


@pytest.fixture
def tiny_recipe(tiny_target, tmp_path) -> Recipe:
    return Recipe.model_validate(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run"))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture(scope="session")
def rays_python() -> Iterator[str]:
    with warm_workers() as python:
        yield python


@pytest.fixture(scope="session")
def warm(rays_python) -> dict[str, str]:
    """Return the environment of a command that starts in a warm process: its own Ray has warm workers, too."""
    return {RAYS_PYTHON: rays_python}


@pytest.fixture(scope="session")
def started_cluster(rays_python) -> Iterator[cluster.Cluster]:
    with cluster.started(rays_python) as running_cluster:
        yield running_cluster


@pytest.fixture
def on_cluster(started_cluster, monkeypatch) -> cluster.Cluster:
    """Jobs of this process, and commands that it starts, join the session's cluster."""
    monkeypatch.setenv("RAY_ADDRESS", started_cluster.address)
    return started_cluster


@pytest.fixture(scope="module")
def taking_jobs(rays_python) -> Iterator[cluster.Cluster]:
    """A cluster with a dashboard."""
    with cluster.started(rays_python, dashboard=True) as running_cluster:
        yield running_cluster
