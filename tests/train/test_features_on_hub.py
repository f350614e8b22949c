"""Features go to a dataset repository in parts, the manifest last; broken off they go on; a training reads them."""

import json
import re
import shutil
import tomllib

import pytest
from huggingface_hub import HfFileSystem, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from eval.release import features as uploading
from eval.release.features import features_on_hub, push_features
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest
from pipeline.features.store import Store
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from preprocess.dump.driver import dump
from tests.hub import Hub, reach
from tests.loopback import object_store
from tests.train.runs import train_here

WEIGHTS = "drafts/jakiro/model.safetensors"


@pytest.fixture
def hub(monkeypatch):
    with Hub() as hub:
        reach(monkeypatch, hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setattr(uploading, "PART_FILES", 3)
        HfFileSystem.clear_instance_cache()
        yield hub
        set_client_factory(default_client_factory)
        HfFileSystem.clear_instance_cache()


@pytest.fixture
def recipe(dumped, tmp_path) -> Recipe:
    """Of a copy of the dump."""
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
    parts = [commit["changes"] for commit in hub.commits]
    assert len(parts) > 2 and all(len(part) <= 3 for part in parts[:-1])
    assert MANIFEST in parts[-1] and not any(MANIFEST in part for part in parts[:-1])
    for record in Manifest.load(recipe.paths.features).files:
        assert hub.files[record.name] == (recipe.paths.features / record.name).read_bytes()
    assert f"{len(names(recipe)) - 4} of {len(names(recipe)) - 4} tables and shards sent" in line and "private" in line
    found = features_on_hub(recipe)
    assert (found.repository, found.revision) == ("me/states", "1" * 40)
    card = hub.files["README.md"].decode()
    total = Manifest.load(recipe.paths.features).total("train", "tokens")
    assert (
        f"| {total:,} |" in card and 'store = "hf://datasets/me/states"' in card and str(recipe.paths.run) not in card
    )
    sent = list(hub.requests)
    assert push(recipe).endswith("there already, nothing to send")
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
    assert not before & {name for commit in hub.commits[sent:] for name in commit["changes"]}


def test_another_dump_takes_the_place_of_the_one_that_is_there(recipe, hub):
    """Its manifest goes before the first of its shards does."""
    push(recipe)
    mine = {"notes.md": b"mine", "more/features-train-000999.arrow": b"mine"}
    hub.files |= {MANIFEST: b"another one", "features-train-000999.arrow": b"old", **mine}
    hub.files["features-train-000000.arrow"] = b"other states"
    sent = len(hub.commits)
    push(recipe)
    first, last = hub.commits[sent:]
    assert sorted(first["changes"]) == ["features-train-000000.arrow", MANIFEST]
    assert "features-train-000999.arrow" in last["changes"]
    assert set(hub.files) == names(recipe) | set(mine)


def test_a_card_that_somebody_edited_stays_and_that_is_told(recipe, hub):
    push(recipe)
    card = hub.files["README.md"]
    hub.files[MANIFEST] = b"another one"
    push(recipe)  # nobody edited it
    assert hub.files["README.md"] == card
    mark = card.splitlines()[-1]
    edited = b"# Mine\n\nWritten by hand.\n"
    for content, new in ((edited, True), (edited + mark + b"\n", False), (card.replace(b"float32", b"f32"), False)):
        hub.files |= {"README.md": content, MANIFEST: b"another one"}
        line, *notes = push_features(recipe, "me/states", private=True)
        beside = recipe.paths.run / "features-README.new.md"
        assert hub.files["README.md"] == content and hub.files[MANIFEST] != b"another one" and "sent" in line
        assert (
            notes[0].startswith("README.md in me/states is edited, or of an earlier version, and stays")
            and len(notes) == 1
        )
        assert (str(beside) in notes[0]) == beside.exists() == new
        assert not new or beside.read_bytes() == card


def test_a_repository_of_other_things_is_left_alone(recipe, hub):
    hub.exists, hub.files = (
        True,
        {"data-00000-of-00001.arrow": b"x", "README.md": b"x", "train/features-train-0.arrow": b"x"},
    )
    with pytest.raises(
        PipelineError, match=r"me/states holds data-00000-of-00001\.arrow, train/.* and no features: name"
    ):
        push(recipe)
    assert not hub.commits


def test_what_goes_with_the_shards_is_looked_at_first(recipe, hub):
    prompts = recipe.paths.features / HELDOUT_PROMPTS
    prompts.write_text(prompts.read_text() + "{}\n")
    with pytest.raises(PipelineError, match=f"{HELDOUT_PROMPTS}: its SHA-256 is not the manifest's"):
        push(recipe)
    prompts.unlink()
    with pytest.raises(PipelineError, match=f"{HELDOUT_PROMPTS} is missing"):
        push(recipe)
    assert not hub.requests


def test_what_is_not_whole_is_not_uploaded(recipe, hub):
    manifest = Manifest.load(recipe.paths.features)
    manifest.complete = False
    manifest.save(recipe.paths.features)
    with pytest.raises(PipelineError, match="the dump is not finished"):
        push(recipe)
    manifest.complete, manifest.fed = True, True
    manifest.save(recipe.paths.features)
    with pytest.raises(PipelineError, match="come and go, so there are none to upload"):
        push(recipe)
    assert not hub.requests and features_on_hub(recipe) is None


def test_from_a_store_a_part_at_a_time_is_on_disk(recipe, hub, monkeypatch):
    with object_store() as url:
        for path in recipe.paths.features.iterdir():
            Store(url).put(path)
        there = recipe.with_features(store=url)
        held = []
        forget = uploading._Source.forget
        monkeypatch.setattr(
            uploading._Source, "forget", lambda self: held.append(len(list(self._folder.iterdir()))) or forget(self)
        )
        push(there)
    assert set(hub.files) == names(recipe) and max(held) <= 3 + 3  # with manifest, prompts and recipe


@pytest.mark.real
def test_a_training_reads_them_there(dumped, undisturbed, recipe, hub, tmp_path):
    """By a recipe of other data, as the card says: its weights are those of the dump itself."""
    push(recipe)
    card = hub.files["README.md"].decode()
    keys = tomllib.loads(re.search("(?s)```toml\n(.*?)```", card)[1])
    sets = [f"{section}.{key}={json.dumps(value)}" for section in keys for key, value in keys[section].items()]
    output = tmp_path / "elsewhere"
    (output / "features").mkdir(parents=True)
    other = load_recipe(dumped[0], [*sets, f"output={output}"])
    sent = len(hub.commits)
    assert "shards" in "".join(dump(other))  # there is nothing to do
    train_here((dumped[0], output / "features"), output, *sets)
    assert sha256(output / WEIGHTS) == sha256(undisturbed / WEIGHTS) and len(hub.commits) == sent
    with pytest.raises(PipelineError, match="nothing can be added to it"):
        dump(load_recipe(dumped[0], [*sets, f"output={tmp_path / 'more'}", "features.answer_tokens=3"]))
