"""A training that is fed with answers which the target gives meanwhile: its rows are the plan's questions, so it makes
the weights of one for which all are answered before, whichever side is stopped.
"""

import json
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.artifacts.features import Wanted, feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.shards import QUESTIONS, FeatureStore, Manifest
from pipeline.lm.chat import Unusable
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running.state import features_state
from preprocess.dump import feeder
from preprocess.dump.plan import Plan
from preprocess.dump.report import read_rejected
from preprocess.dump.worker import SEVERAL, FeatureWorker
from preprocess.sources.dialogues import Dialogue
from preprocess.verify import damaged_shards
from tests.kit import checksums, dump_here, recipe_tree, without_ray, write_recipe, write_sharegpt
from tests.train.runs import lines_of, train_here
from tests.train.test_fed import WEIGHTS, left, watched
from train.input.stream import AnsweredStore
from train.loop import _Run

QUESTIONS_ASKED, LONG = 44, {3, *range(8, 16), 30}  # places in the plan, the second shard among them
WINDOW = ("features.keep=window", "train.window=1")
AT_ONCE = 3  # shards that the steps read ahead want
BOUND = 322_000  # bytes that these may take, if all answers were as long as may be


@pytest.fixture(scope="module")
def asked(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, features folder): as a dump leaves it before training. Some questions are too long to be asked."""
    folder = tmp_path_factory.mktemp("asked")
    source = write_sharegpt(folder / "data.json", 70)
    tree = recipe_tree(tiny_target, source, folder / "run")
    tree["data"] |= {"answers": "target", "max_dialogues": QUESTIONS_ASKED}
    tree["regenerate"] = {"temperature": 1.0, "max_new_tokens": 12}
    tree["train"]["global_batch"] = 4
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path, list(WINDOW))
    plan = Plan(recipe, load_tokenizer(recipe.target))
    planned = [one.doc_id for task in plan.tasks() if task.split == "train" for one in task.documents]
    (folder / "planned.json").write_text(json.dumps(planned))
    records = json.loads(source.read_text())
    for record in records:
        if record["id"] in [planned[place] for place in LONG]:
            record["conversations"][0]["value"] += " why?" * 40
    source.write_text(json.dumps(records))
    dump_here(recipe)
    return path, recipe.features_dir


def test_the_dump_keeps_questions_and_a_sample_and_accounts_for_all(asked, tmp_path):
    recipe, manifest = load_recipe(asked[0], list(WINDOW)), Manifest.load(asked[1])
    assert manifest.of("train") == [] and manifest.lacks("train") == manifest.text[QUESTIONS].rows == 44
    assert 0 < manifest.text["train"].rows < 8 and features_state(recipe)[0]
    before = checksums(recipe.features_dir)
    assert damaged_shards(recipe.features_dir, manifest, "window") == {}
    (recipe.features_dir / "text-train.arrow").unlink()
    assert not features_state(recipe)[0]
    dump_here(recipe)
    assert checksums(recipe.features_dir) == before


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def answered(asked, tmp_path_factory) -> Path:
    """The features folder with all answers, which a feeder left that was stopped."""
    recipe = copied(asked, tmp_path_factory.mktemp("answered"))

    def read_wanted(_: Recipe) -> Wanted:
        if len(Manifest.load(recipe.features_dir).of("train")) == 6:
            raise Stopped
        return Wanted(list(range(6)), 6, 6)

    with pytest.MonkeyPatch.context() as patched, without_ray(), pytest.raises(Stopped):
        patched.setattr(feeder, "read_wanted", read_wanted)
        feeder.feed(recipe)
    return recipe.features_dir


@pytest.fixture(scope="module")
def weights(asked, answered, tmp_path_factory) -> str:
    """The SHA-256 of those that these answers make."""
    output = tmp_path_factory.mktemp("weights")
    train_here((asked[0], answered), output, *WINDOW)
    return sha256(output / WEIGHTS)


def copied(asked, output: Path) -> Recipe:
    shutil.copytree(asked[1], output / "features")
    return load_recipe(asked[0], [f"output={output}", *WINDOW])


def test_either_side_is_stopped_and_the_weights_are_those_of_answers_that_were_all_there(
    asked, answered, weights, tmp_path, monkeypatch
):
    """In one process; what a kill leaves on the disk is shown in test_fed.py."""
    output, stop, sets = tmp_path / "fed", threading.Event(), [*WINDOW, f"features.disk_bytes={BOUND}"]
    recipe = copied(asked, output)
    one_step, read_wanted = _Run._one_step, feeder.read_wanted

    def first_steps(run: _Run, micro_batches) -> dict[str, str]:
        if run._engine.step == 9:
            raise Stopped
        return one_step(run, micro_batches)

    def until_stopped(recipe: Recipe) -> Wanted | None:
        if stop.is_set():
            raise Stopped
        return read_wanted(recipe)

    monkeypatch.setattr(feeder, "read_wanted", until_stopped)
    with watched(recipe.features_dir) as seen, ThreadPoolExecutor(2) as threads, without_ray():
        first = threads.submit(feeder.feed, recipe)
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr(_Run, "_one_step", first_steps)
            train_here(asked, output, *sets)
        with (
            monkeypatch.context() as patched,
            pytest.raises(PipelineError, match="has another vocabulary than the dump"),
        ):
            patched.setattr("train.loop.frequent_tokens", lambda *_: torch.arange(128))  # of another sample
            train_here(asked, output, *sets)
        stop.set()
        assert isinstance(first.exception(), Stopped) and left(recipe) != []
        stop.clear()
        second = threads.submit(feeder.feed, recipe)
        train_here(asked, output, *sets)
        rejected, made = second.result()
    assert "none left" in made and "too_long 10" in rejected and left(recipe) == []
    assert sha256(output / WEIGHTS) == weights
    sizes = sorted(sum(file.bytes for file in shard.files) for shard in Manifest.load(answered).of("train"))
    assert 0 < max(seen) <= sum(sizes[-AT_ONCE:]) < sum(sizes)
    steps = [[line["step"] for line in lines_of(output, kind)] for kind in ("train", "validation")]
    assert len(steps[0]) == 22 - 4 and steps[1][-1] == 22  # two steps of an epoch have no dialogue
    assert list(dict(read_rejected(recipe.features_dir)).values()).count("too_long") == len(LONG)


def test_answers_come_through_a_store(asked, weights, tmp_path):
    store, local = tmp_path / "store", tmp_path / "local"
    sets = [*WINDOW, f'features.store="file://{store}"', f"train.shards={local}"]
    recipe = load_recipe(asked[0], [f"output={tmp_path / 'run'}", *sets])
    dump_here(recipe)
    lasting = checksums(store)
    assert lasting == checksums(asked[1]) and not list(recipe.features_dir.glob("*.arrow"))
    with ThreadPoolExecutor(1) as thread, without_ray():
        feeding = thread.submit(feeder.feed, recipe)
        train_here(asked, tmp_path / "run", *sets)
        assert "none left" in feeding.result()[1]
    assert sha256(tmp_path / "run" / WEIGHTS) == weights
    assert checksums(store) == checksums(local) == lasting


def test_a_dump_that_keeps_all_has_the_same_rows_in_another_order_and_is_another(asked, answered, tmp_path):
    """No training goes on with the other's."""
    recipe = copied(asked, tmp_path)
    kept = load_recipe(asked[0], [f"output={tmp_path}"])
    assert kept.train_hash("jakiro") != recipe.train_hash("jakiro") and kept.hash != recipe.hash
    with pytest.raises(PipelineError, match=r"was dumped for features.keep='window': run the dump again"):
        train_here(asked, tmp_path)
    assert (
        dump_here(kept).total("train", "rows") == QUESTIONS_ASKED - len(LONG) and QUESTIONS not in dump_here(kept).text
    )
    assert not features_state(recipe)[0]
    with pytest.raises(PipelineError, match=r"was dumped for features.keep='all': run the dump again"):
        train_here(asked, tmp_path, *WINDOW)
    whole = FeatureStore(tmp_path / "features", "train", feature_spec(kept))
    given = {row.doc_id: row for row in map(whole.row, range(len(whole)))}
    store = AnsweredStore(load_recipe(asked[0], [f"output={answered.parent}", *WINDOW]), feature_spec(recipe))
    planned = json.loads((asked[0].parent / "planned.json").read_text())
    for number, doc_id in enumerate(one for first in range(0, 44, 8) for one in sorted(planned[first : first + 8])):
        row, other = store.row(number), given.get(doc_id)
        assert row.doc_id == doc_id and (other is None) == (doc_id in [planned[place] for place in LONG])
        if other is None:
            assert not row.loss_mask.any() and not row.hidden_TD.any()
        else:
            assert torch.equal(row.hidden_TD, other.hidden_TD)
            assert np.array_equal([row.input_ids, row.loss_mask], [other.input_ids, other.loss_mask])
    dump_here(recipe)
    assert checksums(tmp_path / "features") == checksums(asked[1]) and features_state(recipe)[0]


def test_questions_that_give_several_sequences_are_refused_or_rejected(asked, monkeypatch):
    with pytest.raises(PipelineError, match=r"data.long='windows' makes several sequences .* one of each question"):
        load_recipe(asked[0], [*WINDOW, "data.long=windows"])
    recipe = load_recipe(asked[0], list(WINDOW))
    worker = FeatureWorker(recipe, asked[1], Manifest.load(asked[1]).spec)
    two = [(f"doc1#{place}", None) for place in range(2)]  # as a template makes that shows earlier answers otherwise
    monkeypatch.setattr("preprocess.dump.worker.encode_sequences", lambda *_: (two, []))
    (conversation,) = next(worker._interview.hold([Dialogue("doc1", [{"role": "user", "content": "a"}], ())], False))
    with pytest.raises(Unusable, match=SEVERAL):
        worker._encoded(conversation, Counter())
