"""A dump by engines of another environment whose faults are real: workers and engines are killed, hang, are
interrupted. What an engine's process does by itself: tests/pipeline/test_vllm.py.
"""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from pipeline.artifacts.features import feature_spec
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.recipe.recipe import Recipe
from preprocess.dump import driver, pool
from tests import engines
from tests.kit import PATIENCE, byte_tokenizer, dump_here, recipe_tree, wait_until, write_sharegpt
from tests.preprocess.test_faults import faulty, watching

pytestmark = [pytest.mark.real, pytest.mark.long]
COUNT = 12  # dialogues
(MARK,) = byte_tokenizer()("~")["input_ids"]  # a token of one dialogue


def by_engine(target: Path, folder: Path, name: str, fault: str = "", **features) -> tuple[Recipe, str]:
    """The recipe of a dump, and its engine's Python."""
    data = write_sharegpt(folder / "data.json", COUNT)
    data.write_text(data.read_text().replace("question 7.0", "question ~"))
    python = engines.environment(folder / f"environment-{name}", fault)
    tree = recipe_tree(target, data, folder / name)
    tree["target"] |= {"engine": "vllm", "engine_python": python}
    tree["data"] |= {"validation_dialogues": 2, "heldout_prompts": 2, "calibration_prompts": 2}
    tree["features"] |= {"rows_per_shard": 4, "hang_seconds": PATIENCE, **features}
    return Recipe.model_validate(tree), python


def content(recipe: Recipe) -> dict[str, tuple[str, dict]]:
    manifest = Manifest.load(recipe.paths.features)
    return {shard.name: (shard.sha256, shard.rejected) for shard in (*manifest.shards, *manifest.answers)}


def test_engines_of_two_workers_do_not_disturb_each_other_whoever_is_killed(
    tiny_target, tmp_path, on_cluster, monkeypatch, caplog
):
    """Two workers of one node: an engine is killed in mid-step, then a worker, whose engine ends by itself."""
    recipe, python = by_engine(tiny_target, tmp_path, "killed", f"dies {MARK} 1", workers=2)
    marker_folder = tmp_path / "marks"
    marker_folder.mkdir()
    kill = {"killed": (lambda ids, before: "doc3" in ids and not before, lambda: os.kill(os.getpid(), signal.SIGKILL))}
    monkeypatch.setattr(driver, "FeatureWorker", faulty(marker_folder, kill))
    assert any("engine: vllm 0.0.0, whose states of a sample were at most" in line for line in driver.dump(recipe))
    assert "the engine ended with status -9" in caplog.text and caplog.text.count("a worker failed (shard ") == 2
    began = engines.started(python)
    assert len(began) == len(set(began.values())) >= 3
    wait_until(lambda: not engines.left_of(python))
    undisturbed, _ = by_engine(tiny_target, tmp_path, "undisturbed")
    dump_here(undisturbed)
    assert content(recipe) == content(undisturbed)


def test_a_dialogue_that_an_engine_never_answers_is_set_aside(tiny_target, tmp_path, on_cluster, monkeypatch, caplog):
    recipe, python = by_engine(tiny_target, tmp_path, "hangs", f"hangs {MARK}", rows_per_shard=1)
    monkeypatch.setattr(pool, "WorkerPool", watching(Path(python).parent, "hangs-*"))
    report = "\n".join(driver.dump(recipe))
    assert "kills_workers 1" in report and "set aside, since it kills workers: doc7" in caplog.text
    assert caplog.text.count("it sent no heartbeat for") == 2 and len(engines.started(python)) == 3
    wait_until(lambda: not engines.left_of(python))
    spec = feature_spec(recipe)
    stores = [FeatureStore(recipe.paths.features, split, spec) for split in ("train", "validation")]
    assert Counter(store.row(n).doc_id for store in stores for n in range(len(store))) == Counter(
        f"doc{n}" for n in range(COUNT) if n != 7
    )
