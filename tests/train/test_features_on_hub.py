"""Features are uploaded to a dataset repository in parts, the manifest last; an interrupted upload continues; a
training reads them.
"""

import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem

from eval.release import features as uploading
from eval.release.features import find_features_on_hub, push_features
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest
from pipeline.features.store import Store
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from preprocess.dump.driver import dump
from tests.hub import Hub, reached
from tests.loopback import object_store
from tests.train.runs import train_here

WEIGHTS = "drafts/jakiro/model.safetensors"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(uploading, "PART_FILES", 3)
    HfFileSystem.clear_instance_cache()
    with Hub() as hub, reached(monkeypatch, hub):
        yield hub
    HfFileSystem.clear_instance_cache()


@pytest.fixture
def recipe(dumped, tmp_path) -> Recipe:
    """The recipe of a copy of the dump."""
    shutil.copytree(dumped[1], tmp_path / "run/features")
    return load_recipe(dumped[0], [f"output={tmp_path / 'run'}"])


def push(recipe: Recipe) -> str:
    (line,) = push_features(recipe, "me/states", private=True)
    return line


def names(recipe: Recipe) -> set[str]:
    listed = {record.name for record in Manifest.load(recipe.paths.features).files}
    return listed | {MANIFEST, HELDOUT_PROMPTS, "recipe.json", "README.md"}


def test_they_go_in_parts_and_the_manifest_last(recipe, hub):
    line = push(recipe)
    (created,) = hub.created
    assert (created["name"], created["type"], created["visibility"]) == ("states", "dataset", "private")
    assert set(hub.files) == names(recipe)
    parts = hub.commits
    assert len(parts) > 2 and all(len(part) <= 3 for part in parts[:-1])
    assert MANIFEST in parts[-1] and not any(MANIFEST in part for part in parts[:-1])
    for record in Manifest.load(recipe.paths.features).files:
        assert hub.files[record.name] == (recipe.paths.features / record.name).read_bytes()
    assert f"{len(names(recipe)) - 4} of {len(names(recipe)) - 4} tables and shards sent" in line and "private" in line
    assert find_features_on_hub(recipe).items() > {"repository": "me/states", "revision": "1" * 40}.items()
    card = hub.files["README.md"].decode()
    total = Manifest.load(recipe.paths.features).total("train", "tokens")
    assert (
        f"| {total:,} |" in card and 'store = "hf://datasets/me/states"' in card and str(recipe.paths.run) not in card
    )
    sent = list(hub.requests)
    assert f": 0 of {len(names(recipe)) - 4} tables and shards sent" in push(recipe)
    assert not [request for request in hub.requests[len(sent) :] if "/commit/" in request or "PUT" in request]


def test_broken_off_they_go_on_where_they_were(recipe, hub):
    hub.faults["/commit/"] = 504
    with pytest.raises(PipelineError, match=r"arrives as a whole or not at all\. Run the same command again"):
        push(recipe)
    hub.faults.clear()
    (last,) = [record.name for record in Manifest.load(recipe.paths.features).files[-1:]]
    shard = recipe.paths.features / last
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PipelineError, match=f"{last}: its SHA-256 is .* Nothing of this part was sent"):
        push(recipe)
    before = set(hub.files)
    assert before and last not in before and MANIFEST not in before
    shard.write_bytes(content)
    sent = len(hub.commits)
    push(recipe)
    assert set(hub.files) == names(recipe)
    assert not before & {name for commit in hub.commits[sent:] for name in commit}


def test_another_dump_takes_the_place_of_the_one_that_is_there(recipe, hub):
    """The old manifest is removed before the first of its shards."""
    push(recipe)
    user_files = {"notes.md": b"mine", "more/features-train-000999.arrow": b"mine"}
    hub.files |= {MANIFEST: b"another one", "features-train-000999.arrow": b"old", **user_files}
    hub.files["features-train-000000.arrow"] = b"other states"
    sent = len(hub.commits)
    push(recipe)
    first, last = hub.commits[sent:]
    assert sorted(first) == ["features-train-000000.arrow", MANIFEST] and "features-train-000999.arrow" in last
    assert set(hub.files) == names(recipe) | set(user_files)


def test_a_card_that_somebody_edited_stays_and_that_is_told(recipe, hub):
    push(recipe)
    card, new_card = hub.files["README.md"], recipe.paths.run / "features-README.new.md"
    for edited in (b"# Mine\n", card.replace(b"float32", b"f32")):  # the second one keeps the mark
        hub.files["README.md"] = edited
        _, note = push_features(recipe, "me/states", private=True)
        assert note == f"README.md in me/states is edited and stays: this dump's own is {new_card}"
        assert hub.files["README.md"] == edited and new_card.read_bytes() == card
        new_card.unlink()
    unedited_card = b"of another dump, and unedited"
    hub.files["README.md"] = unedited_card + f"\n<!-- jakiro {hashlib.sha256(unedited_card).hexdigest()} -->\n".encode()
    push(recipe)
    assert hub.files["README.md"] == card


def test_a_repository_of_other_things_is_left_alone(recipe, hub):
    names = ("data-00000-of-00001.arrow", "README.md", "train/features-train-0.arrow")
    hub.exists, hub.files = True, dict.fromkeys(names, b"x")
    message = r"me/states holds data-00000-of-00001\.arrow, train/.* and no features: name"
    with pytest.raises(PipelineError, match=message):
        push(recipe)
    assert not hub.commits


def change_manifest(folder: Path, **values: bool) -> None:
    manifest = Manifest.load(folder)
    for name, value in values.items():
        setattr(manifest, name, value)
    manifest.save(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / HELDOUT_PROMPTS).write_text("{}\n"), f"{HELDOUT_PROMPTS}: its SHA-256 is not the"),
        (lambda folder: (folder / HELDOUT_PROMPTS).unlink(), f"{HELDOUT_PROMPTS}: it is missing"),
        (lambda folder: (folder / "recipe.json").unlink(), "recipe.json: it is missing"),
        (lambda folder: change_manifest(folder, complete=False), "the dump is not finished"),
        (lambda folder: change_manifest(folder, fed=True), "come and go, so there are none to upload"),
    ],
)
def test_what_is_not_whole_is_refused_before_the_hub_is_asked(recipe, hub, change, message):
    change(recipe.paths.features)
    with pytest.raises(PipelineError, match=message):
        push(recipe)
    assert not hub.requests and find_features_on_hub(recipe) is None


def test_those_of_a_store_are_brought_first(recipe, hub):
    with object_store() as url:
        for path in recipe.paths.features.iterdir():
            Store(url).put(path)
        shutil.rmtree(recipe.paths.features)
        push(recipe.with_features(store=url))
    assert set(hub.files) == names(recipe)


@pytest.mark.real
def test_a_training_reads_them_there(dumped, undisturbed, recipe, hub, tmp_path):
    """The recipe has other data, as the card says; the weights are those of a training on the dump itself."""
    push(recipe)
    card = hub.files["README.md"].decode()
    keys = tomllib.loads(re.search("(?s)```toml\n(.*?)```", card)[1])
    sets = [f"{section}.{key}={json.dumps(value)}" for section in keys for key, value in keys[section].items()]
    output = tmp_path / "elsewhere"
    (output / "features").mkdir(parents=True)
    recipe = load_recipe(dumped[0], [*sets, f"output={output}"])
    sent = len(hub.commits)
    assert "shards" in "".join(dump(recipe))  # there is nothing to do
    train_here((dumped[0], output / "features"), output, *sets)
    assert sha256(output / WEIGHTS) == sha256(undisturbed / WEIGHTS) and len(hub.commits) == sent
    with pytest.raises(PipelineError, match="is only read"):
        dump(load_recipe(dumped[0], [*sets, f"output={tmp_path / 'more'}", "features.answer_tokens=3"]))
