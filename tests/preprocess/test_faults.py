"""Faults of the dump's workers: killed, hung, poisoned by a dialogue, too little memory for a batch. Real Ray,
real kills. What the pool does by itself: tests/pipeline/test_workers.py.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.recipe.load import load_recipe
from pipeline.running.crew import WorkerFailure
from pipeline.running.workers import WorkerPool
from preprocess.dump import driver, pool
from preprocess.dump.task import ShardTask, next_try
from preprocess.dump.worker import FeatureWorker
from tests.cluster import CPUS
from tests.kit import PATIENCE, dump_here, recipe_tree, write_recipe, write_sharegpt

pytestmark = pytest.mark.real


def faulty(markers: Path, faults: dict[str, tuple[Callable[[list[str], int], bool], Callable[[], object]]]) -> type:
    """A worker with faults, by name: when, of a batch's ids and of how often it was true before; and what happens. (All
    of it is made in functions, for Ray to send it as it is: a worker need not import the tests.)
    """

    class Faulty(FeatureWorker):
        def _forward(self, batch):
            out = FeatureWorker._forward(self, batch)
            for name, (when, fault) in faults.items():
                before = len(list(markers.glob(f"{name}-*")))
                if when([document.doc_id for document in batch], before):
                    (markers / f"{name}-{before}").touch()
                    fault()
            return out

    return Faulty


def watching(markers: Path, hung: str = "hung-*") -> type:
    """A pool whose clock jumps ahead by days, once it has looked at a worker that hangs: nobody waits, and no patience
    depends on how fast the machine is.
    """
    ahead: list[float] = []

    class Watching(WorkerPool):
        def __init__(self, *arguments):
            super().__init__(*arguments, clock=lambda: time.monotonic() + sum(ahead))

        def _check_hangs(self, watch):
            hung_before = len(list(markers.glob(hung)))
            super()._check_hangs(watch)
            if hung_before > len(ahead):
                ahead.append(1e6)

    return Watching


def killed() -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def recipe(tiny_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["features"] |= {"workers": 2, "hang_seconds": PATIENCE}
    return write_recipe(tree, folder / "recipe")


@pytest.fixture
def faulty_dump(recipe, tmp_path, on_cluster, monkeypatch):
    """Runs a dump with faults and these settings; returns its report."""
    markers = tmp_path / "marks"
    markers.mkdir()

    def dump(sets: tuple[str, ...] = (), **faults) -> str:
        monkeypatch.setattr(driver, "FeatureWorker", faulty(markers, faults))
        monkeypatch.setattr(pool, "WorkerPool", watching(markers))
        return "\n".join(driver.dump(load_recipe(recipe, [f"output={tmp_path / 'run'}", *sets])))

    return dump


def happened(folder: Path) -> Counter:
    """Return how often each fault happened."""
    return Counter(mark.name.partition("-")[0] for mark in (folder / "marks").iterdir())


def content(folder: Path) -> dict[str, tuple[str, dict]]:
    return {shard.name: (shard.sha256, shard.rejected) for shard in Manifest.load(folder / "run/features").shards}


def doc_ids(recipe: Path, folder: Path) -> Counter:
    loaded = load_recipe(recipe, [f"output={folder / 'run'}"])
    stores = [FeatureStore(loaded.paths.features, split, feature_spec(loaded)) for split in ("train", "validation")]
    return Counter(store.row(index).doc_id for store in stores for index in range(len(store)))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    dump_here(load_recipe(recipe, [f"output={folder / 'run'}"]))
    return folder


def test_a_lost_worker_is_replaced_and_what_kills_every_worker_is_set_aside(
    recipe, faulty_dump, undisturbed, tmp_path, caplog
):
    """One dialogue kills whoever works on it; after that another worker hangs."""
    markers = tmp_path / "marks"
    report = faulty_dump(
        killed=(lambda ids, before: "doc7" in ids, killed()),
        hung=(lambda ids, before: not before and (markers / "killed-3").exists(), lambda: time.sleep(1000)),
    )
    # In its batch, in its batch again, alone, alone again.
    assert happened(tmp_path) == {"killed": 4, "hung": 1} and caplog.text.count("a worker failed (shard ") >= 5
    assert "it sent no heartbeat for" in caplog.text
    assert "kills_workers 1" in report and "set aside, since it kills workers: doc7" in caplog.text
    assert doc_ids(recipe, undisturbed) - doc_ids(recipe, tmp_path) == Counter(["doc7"])
    assert max(doc_ids(recipe, tmp_path).values()) == 1
    changed = [name for name, expected in content(tmp_path).items() if content(undisturbed)[name] != expected]
    assert len(changed) == 1
    rejected = [json.loads(line) for line in (tmp_path / "run/features/rejected.jsonl").read_text().splitlines()]
    assert {"doc_id": "doc7", "reason": "kills_workers"} in rejected


A, B, C, D = "abcd"


@pytest.mark.parametrize(
    ("failures", "suspects", "set_aside"),
    [
        ([(A, B), (C, D), ()], (), []),  # single ones, on different batches
        ([(A, B, C), (A, B, C), (B,)], (B, C), []),  # a single one while probing
        ([(A,)], (A,), []),  # of a batch of its own
        ([(A,), (A,)], (), [A]),
        ([(A, B), (A, B), (A,), (A,)], (B,), [A]),
        ([(A, B), (A, B), (A,), (A,), (C, D)], (), [A]),  # B came through alone, its batch, too
        ([(A, B), (A, B), (A,), (A,), (C, D), (C, D), (D,), (D,)], (), [A, D]),  # two culprits in different batches
    ],
)
def test_a_dialogue_is_set_aside_after_two_failures_alone(failures, suspects, set_aside):
    task = ShardTask("train", 0, [])
    for busy in failures:
        task = next_try(task, WorkerFailure(busy, "", ValueError()), "features.batch_tokens")
    assert task.suspects == suspects and list(task.set_aside) == set_aside


def test_a_batch_that_is_too_large_ends_the_job_with_one_clear_error(recipe, faulty_dump, undisturbed, tmp_path):
    with pytest.raises(PipelineError, match=r"the batch is too large: lower features\.batch_tokens"):
        faulty_dump(killed=(lambda ids, before: "doc7" in ids and len(ids) > 1, killed()))
    assert happened(tmp_path) == {"killed": 3}  # twice, and again after each of its dialogues came through alone
    dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}", "features.batch_tokens=1"]))
    assert doc_ids(recipe, tmp_path) == doc_ids(recipe, undisturbed)


def test_a_node_that_is_lost_is_made_up_for(on_cluster, faulty_dump, undisturbed, tmp_path, caplog):
    """Two Ray nodes with one worker each; the second node is killed while its worker is busy. Its shard is the same."""
    on_cluster.start_node(f"--address={on_cluster.address}")
    (head, second), markers = on_cluster.raylets(), tmp_path / "marks"

    def busy_on(raylet: int) -> Callable[[list[str], int], bool]:
        return lambda ids, before: os.environ["RAY_RAYLET_PID"] == str(raylet) and not before

    def lose() -> None:
        os.kill(second, signal.SIGKILL)
        time.sleep(1000)

    def wait() -> None:
        while not any(markers.glob("lost-*")):
            time.sleep(0.01)

    faulty_dump((f"features.cpus_per_worker={CPUS}",), lost=(busy_on(second), lose), waited=(busy_on(head), wait))
    assert happened(tmp_path) == {"lost": 1, "waited": 1} and on_cluster.raylets() == [head]
    assert "a worker failed (shard " in caplog.text
    assert content(tmp_path) == content(undisturbed)


def test_an_error_while_loading_keeps_its_message(recipe, tmp_path):
    """It comes from a worker: the driver never loads the weights. How it gets out: tests/pipeline/test_workers.py."""
    weights = Path(load_recipe(recipe).target.model) / "model.safetensors"
    copy = tmp_path / "target"
    copy.mkdir()
    for file in weights.parent.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    with pytest.raises(PipelineError, match=r"cannot be loaded.*mismatched"):
        dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}", f"target.model={copy}"]))
