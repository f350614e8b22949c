"""What happens to the dump's workers: killed, hung, poisoned by a dialogue, too little memory for a batch. Real Ray,
real kills. What the pool does by itself: tests/pipeline/test_workers.py.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.recipe.load import load_recipe
from preprocess.dump.task import History, ShardTask
from tests.cluster import CPUS
from tests.kit import PATIENCE, dump_here, recipe_tree, run_warm, write_recipe, write_sharegpt

pytestmark = pytest.mark.real

# A dump whose workers have faults: a name, when, and what. `when` sees a batch's ids and how often it was true before.
# Where a worker hangs, the driver's clock jumps ahead by days once the driver has looked at it: nobody waits, and no
# patience depends on how fast the machine is.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, os.getcwd())
ahead = []
from pipeline.running import entry
from pipeline.recipe.load import load_recipe
from pipeline.running import workers
from preprocess.dump import driver, pool, worker

MARKS = Path(sys.argv[2])


class Faulty(worker.FeatureWorker):
    def _forward(self, batch):
        out = worker.FeatureWorker._forward(self, batch)
        ids = [document.doc_id for document in batch]
        {faults}
        return out


class Watching(workers.Pool):
    def __init__(self, *given):
        super().__init__(*given, clock=lambda: time.monotonic() + sum(ahead))

    def _look_for_hangs(self):
        hung = any(MARKS.glob("hung-*"))
        super()._look_for_hangs()
        if hung and not ahead:
            ahead.append(1e6)


driver.FeatureWorker, pool.Pool = Faulty, Watching
entry.run(lambda: print("\\n".join(driver.dump(load_recipe(sys.argv[1], sys.argv[3:])))))
"""
FAULT = """
        before = len(list(MARKS.glob("{0}-*")))
        if {1}:
            (MARKS / f"{0}-{{before}}").touch()
            {2}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
ANYWHERE = "'doc7' in ids"


@pytest.fixture(scope="module")
def recipe(tiny_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["features"] |= {"workers": 2, "hang_seconds": PATIENCE}
    return write_recipe(tree, folder / "recipe")


@pytest.fixture
def faulty_dump(recipe, tmp_path, on_cluster):
    """Runs a dump with these faults and settings; returns what came of it, and how often each fault happened."""

    def dump(*faults: tuple[str, str, str], sets: tuple[str, ...] = ()):
        marks, script = tmp_path / "marks", tmp_path / "script.py"
        marks.mkdir()
        script.write_text(SCRIPT.format(faults="".join(FAULT.format(*fault) for fault in faults)))
        command = [sys.executable, str(script), str(recipe), str(marks), f"output={tmp_path / 'run'}", *sets]
        done = run_warm(command, **on_cluster.environment)
        return done, Counter(mark.name.partition("-")[0] for mark in marks.iterdir())

    return dump


def content(folder: Path) -> dict[str, tuple[str, dict]]:
    return {shard.name: (shard.sha256, shard.rejected) for shard in Manifest.load(folder / "run/features").shards}


def doc_ids(recipe: Path, folder: Path) -> Counter:
    loaded = load_recipe(recipe, [f"output={folder / 'run'}"])
    stores = [FeatureStore(loaded.features_dir, split, feature_spec(loaded)) for split in ("train", "validation")]
    return Counter(store.row(index).doc_id for store in stores for index in range(len(store)))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    dump_here(load_recipe(recipe, [f"output={folder / 'run'}"]))
    return folder


def test_a_lost_worker_is_replaced_and_its_shard_is_the_same(faulty_dump, undisturbed, tmp_path):
    """One is killed, another hangs."""
    faults = (
        ("killed", f"{ANYWHERE} and not before", KILLED),
        ("hung", "'doc40' in ids and not before", "time.sleep(1000)"),
    )
    done, happened = faulty_dump(*faults)
    assert done.returncode == 0, done.stderr
    assert happened == {"killed": 1, "hung": 1} and done.stderr.count("a worker was lost (shard ") >= 2
    assert "it gave no sign of life for" in done.stderr
    assert content(tmp_path) == content(undisturbed)


def test_a_dialogue_that_kills_every_worker_is_set_aside_by_id(recipe, faulty_dump, undisturbed, tmp_path):
    done, happened = faulty_dump(("killed", ANYWHERE, KILLED))
    assert done.returncode == 0, done.stderr
    assert happened == {"killed": 4}  # in its batch, in its batch again, alone, alone again
    assert "kills_workers 1" in done.stdout and "set aside, for it kills workers: doc7" in done.stderr
    assert doc_ids(recipe, undisturbed) - doc_ids(recipe, tmp_path) == Counter(["doc7"])
    assert max(doc_ids(recipe, tmp_path).values()) == 1
    changed = [name for name, kept in content(tmp_path).items() if content(undisturbed)[name] != kept]
    assert len(changed) == 1
    rejected = [json.loads(line) for line in (tmp_path / "run/features/rejected.jsonl").read_text().splitlines()]
    assert {"doc_id": "doc7", "reason": "kills_workers"} in rejected


A, B, C, D = "abcd"


def tried(history: History, *losses: tuple[str, ...]) -> ShardTask:
    """The task after workers were lost while they were busy with these dialogues."""
    task = ShardTask("train", 0, [])
    for busy in losses:
        task = history.next_try(task, busy, "")
    return task


def test_single_losses_on_different_batches_blame_nobody():
    task = tried(History("features.batch_tokens"), (A, B), (C, D), ())
    assert task.suspects == () and task.set_aside == {}


def test_a_single_loss_while_probing_sets_nobody_aside():
    task = tried(History("features.batch_tokens"), (A, B, C), (A, B, C), (B,))
    assert task.suspects == (B, C) and task.set_aside == {}


def test_a_dialogue_in_a_batch_of_its_own_needs_two_losses():
    assert tried(History("features.batch_tokens"), (A,)).set_aside == {}
    assert list(tried(History("features.batch_tokens"), (A,), (A,)).set_aside) == [A]


def test_two_culprits_in_different_batches_are_both_found():
    history = History("features.batch_tokens")
    task = tried(history, (A, B), (A, B), (A,), (A,))
    assert list(task.set_aside) == [A] and task.suspects == (B,)
    task = history.next_try(task, (C, D), "")  # B came through alone, its batch, too
    assert task.suspects == () and list(task.set_aside) == [A]
    for busy in ((C, D), (D,), (D,)):
        task = history.next_try(task, busy, "")
    assert list(task.set_aside) == [A, D]


def test_a_batch_whose_dialogues_all_come_through_alone_is_too_large():
    with pytest.raises(PipelineError, match="the batch is too large"):
        tried(History("features.batch_tokens"), (A, B), (A, B), (A, B))


def test_a_batch_that_is_too_large_ends_the_job_with_one_clear_error(recipe, faulty_dump, undisturbed, tmp_path):
    done, happened = faulty_dump(("killed", f"{ANYWHERE} and len(ids) > 1", KILLED))
    assert done.returncode == 2
    assert happened == {"killed": 3}  # twice, and again after each of its dialogues came through alone
    assert "lower features.batch_tokens" in done.stderr and "Traceback" not in done.stderr
    dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}", "features.batch_tokens=1"]))
    assert doc_ids(recipe, tmp_path) == doc_ids(recipe, undisturbed)


def test_a_node_that_is_lost_is_made_up_for(on_cluster, faulty_dump, undisturbed, tmp_path):
    """Two Ray nodes with one worker each; the second node's processes are killed while its worker is busy."""
    on_cluster.start_node(f"--address={on_cluster.address}")
    head, second = on_cluster.raylets()
    there = f"os.environ['RAY_RAYLET_PID'] == '{second}' and not before"
    here = f"os.environ['RAY_RAYLET_PID'] == '{head}' and not before"
    faults = (
        ("lost", there, f"os.kill({second}, signal.SIGKILL); time.sleep(1000)"),
        ("waited", here, "while not any(MARKS.glob('lost-*')): time.sleep(0.01)"),
    )
    done, happened = faulty_dump(*faults, sets=(f"features.cpus_per_worker={CPUS}",))
    assert done.returncode == 0, done.stderr
    assert happened == {"lost": 1, "waited": 1} and on_cluster.raylets() == [head]
    assert "a worker was lost (shard " in done.stderr
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
