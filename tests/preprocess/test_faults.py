"""What happens to workers: killed, hung, poisoned by a dialogue, too little memory for a batch. Real Ray, real
kills.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.recipe.load import load_recipe
from preprocess.dump.task import History, ShardTask
from tests.kit import (
    BIN,
    PATIENCE,
    dump_here,
    free_port,
    ray_processes,
    recipe_tree,
    run_command,
    run_warm,
    stop_ray,
    write_recipe,
    write_sharegpt,
)

pytestmark = pytest.mark.real

# A dump whose workers have a fault: `when` sees the batch's ids and how often it was true before. Where a worker hangs,
# the driver's clock jumps ahead by days once the driver has looked at it: nobody waits, and no patience depends on how
# fast the machine is.
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
        ids, before = [document.doc_id for document in batch], len(list(MARKS.iterdir()))
        if {when}:
            (MARKS / f"{{before}}-{{os.getpid()}}").touch()
            {what}
        return out


class Watching(workers.Pool):
    def __init__(self, *given):
        super().__init__(*given, clock=lambda: time.monotonic() + sum(ahead))

    def _look_for_hangs(self):
        hung = {hangs} and any(MARKS.iterdir())
        super()._look_for_hangs()
        if hung and not ahead:
            ahead.append(1e6)


driver.FeatureWorker, pool.Pool = Faulty, Watching
entry.run(lambda: print("\\n".join(driver.dump(load_recipe(sys.argv[1], sys.argv[3:])))))
"""
KILLED, HUNG = "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)"
ANYWHERE = "'doc7' in ids"


@pytest.fixture(scope="module")
def recipe(tiny_target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["features"] |= {"workers": 2, "hang_seconds": PATIENCE}
    return write_recipe(tree, folder / "recipe")


def faulty_dump(recipe: Path, folder: Path, when: str, what: str, *overrides: str, **environment: str):
    folder.mkdir(exist_ok=True)
    marks, script = folder / "marks", folder / "script.py"
    marks.mkdir()
    script.write_text(SCRIPT.format(when=when, what=what, hangs=what == HUNG))
    sets = [f"output={folder / 'run'}", *overrides]
    command = [sys.executable, str(script), str(recipe), str(marks), *sets]
    done = run_command(command, **environment) if environment else run_warm(command)
    return done, len(list(marks.iterdir()))


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


# With one worker, none is ready while its replacement loads.
@pytest.mark.parametrize("what, workers", [(KILLED, 2), (HUNG, 2), (HUNG, 1)], ids=["killed", "hung", "hung alone"])
def test_a_lost_worker_is_replaced_and_its_shard_is_the_same(recipe, undisturbed, tmp_path, what, workers):
    done, faults = faulty_dump(recipe, tmp_path, f"{ANYWHERE} and before == 0", what, f"features.workers={workers}")
    assert done.returncode == 0, done.stderr
    assert ("it gave no sign of life for" in done.stderr) == (what == HUNG)
    assert faults == 1 and "a worker was lost (shard " in done.stderr
    assert content(tmp_path) == content(undisturbed)


def test_a_dialogue_that_kills_every_worker_is_set_aside_by_id(recipe, undisturbed, tmp_path):
    done, faults = faulty_dump(recipe, tmp_path, ANYWHERE, KILLED)
    assert done.returncode == 0, done.stderr
    assert faults == 4  # in its batch, in its batch again, alone, alone again
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


def test_a_batch_that_is_too_large_ends_the_job_with_one_clear_error(recipe, undisturbed, tmp_path):
    done, faults = faulty_dump(recipe, tmp_path, f"{ANYWHERE} and len(ids) > 1", KILLED)
    assert done.returncode == 2
    assert faults == 3  # twice, and again after each of its dialogues came through alone
    assert "lower features.batch_tokens" in done.stderr and "Traceback" not in done.stderr
    dump_here(load_recipe(recipe, [f"output={tmp_path / 'run'}", "features.batch_tokens=1"]))
    assert doc_ids(recipe, tmp_path) == doc_ids(recipe, undisturbed)


def test_a_node_that_is_lost_is_made_up_for(recipe, undisturbed, tmp_path):
    """Two Ray nodes with one worker each; the second node's processes are killed while its worker is busy."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        address = f"127.0.0.1:{free_port()}"
        cluster = {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
        ray = [str(BIN / "ray"), "start", "--num-cpus=1", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
        try:
            for more in (
                ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false"],
                [f"--address={address}"],
            ):
                started = run_command([*ray, *more], **cluster)
                assert started.returncode == 0, started.stderr
            nodes = [
                process for process in ray_processes(short) if "raylet --" in process[1] or "/raylet" in process[1]
            ]
            second = [pid for pid, words in nodes if " --head" not in words]
            assert len(second) == 1
            what = f"os.kill({second[0]}, signal.SIGKILL)"
            done, faults = faulty_dump(
                recipe, tmp_path, f"{ANYWHERE} and before == 0", what, RAY_ADDRESS=address, **cluster
            )
        finally:
            stop_ray(short)
    assert done.returncode == 0, done.stderr
    assert faults >= 1 and content(tmp_path) == content(undisturbed)


def test_an_error_while_loading_keeps_its_message(recipe, tmp_path):
    """In a worker only: the driver never loads the weights."""
    weights = Path(load_recipe(recipe).target.model) / "model.safetensors"
    copy = tmp_path / "target"
    copy.mkdir()
    for file in weights.parent.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    done, _ = faulty_dump(recipe, tmp_path, "False", "pass", f"target.model={copy}")
    assert done.returncode == 2
    assert "cannot be loaded" in done.stderr and "mismatched" in done.stderr and "Traceback" not in done.stderr
