"""Features in an object store: a real S3 server on loopback, files, and an fsspec file system in memory."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.artifacts.features import feature_spec, fetch, heldout_prompts, open_store
from pipeline.artifacts.provenance import RECIPE
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, FeatureStore, Manifest, ShardRecord
from pipeline.features.store import Store
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from preprocess import verify
from preprocess.dump.driver import dump
from tests.kit import (
    call,
    checksums,
    dump_here,
    flip,
    recipe_tree,
    without_ray,
    write_recipe,
    write_sharegpt,
)
from tests.loopback import KEYS, Handler, Loopback
from tests.train.runs import train_here


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_what_is_put_comes_back(request, tmp_path, kind):
    url = {"file": f"file://{tmp_path}/store", "memory": "memory://store/run"}.get(kind) or request.getfixturevalue(
        "bucket"
    )
    store = Store(url)
    assert store.sizes() == {}
    (tmp_path / "here").mkdir()
    content = bytes(range(256)) * 20_000  # more than one part of an upload
    (tmp_path / "here/shard.arrow").write_bytes(content)
    store.put(tmp_path / "here/shard.arrow")
    assert store.sizes() == {"shard.arrow": len(content)}
    store.get("shard.arrow", tmp_path / "there")
    assert (tmp_path / "there/shard.arrow").read_bytes() == content
    with pytest.raises(PipelineError, match=r"has no other\.arrow"):
        store.get("other.arrow", tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["shard.arrow"]
    store.delete("shard.arrow")
    assert store.sizes() == {}


class Refusing(Loopback):
    """A store that lets nobody in. (One that does not answer is asked for six seconds.)"""

    def handler(self) -> type[Handler]:
        return type("Closed", (Handler,), {"do_GET": lambda asked: asked.answer("", 403, "application/xml")})


@pytest.mark.usefixtures("bucket")  # for its keys
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nope://bucket/x", "opening failed"),
        ("relative/folder", "has no scheme"),
        ("s3://shards/run?regin=us-east-1", "Unexpected query parameter"),
        ("s3://shards/run?endpoint_override={closed}&scheme=http&region=us-east-1", "listing failed"),
    ],
)
def test_a_store_that_cannot_be_reached_is_one_clear_error(url, message):
    with Refusing() as server, pytest.raises(PipelineError, match=message) as caught:
        Store(url.format(closed=server.url.removeprefix("http://"))).sizes()
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value) and "\n" not in str(caught.value)


# -- the stages ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumped(bucket, tiny_target, tmp_path_factory) -> tuple[Path, str, dict[str, str]]:
    """(recipe file with a store, address of the store, checksum by shard of the same dump without it)."""
    folder = tmp_path_factory.mktemp("store")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "plain")
    dump_here(load_recipe(write_recipe(tree, folder / "plain-recipe")))
    expected = checksums(folder / "plain/features")
    tree |= {"output": str(folder / "run")}
    tree["features"]["store"] = bucket
    recipe = write_recipe(tree, folder / "recipe")
    with without_ray():
        report = dump(load_recipe(recipe))
    assert "MB in s3://shards/run" in "\n".join(report)
    return recipe, bucket, expected


def fetched(recipe_file: Path, output: Path) -> tuple[Recipe, FeatureSpec]:
    recipe = load_recipe(recipe_file, [f"output={output}"])
    spec = feature_spec(recipe)
    fetch(recipe, spec)
    return recipe, spec


@pytest.mark.real
def test_shards_are_in_the_store_only_and_the_same_bytes(dumped, tmp_path):
    recipe_file, url, expected = dumped
    assert not list(load_recipe(recipe_file).paths.features.glob("*.arrow"))
    assert {*expected, MANIFEST, HELDOUT_PROMPTS, "rejected.jsonl", "recipe.json", "provenance.json"} == set(
        Store(url).sizes()
    )
    recipe, spec = fetched(recipe_file, tmp_path)
    assert checksums(recipe.paths.features) == expected
    assert len(FeatureStore(recipe.paths.features, "train", spec)) > 20
    public = json.loads((load_recipe(recipe_file).paths.features / "recipe.json").read_text())
    assert public["features"]["store"] == "s3://"


@pytest.mark.real
def test_another_head_node_goes_on_where_the_first_stopped(dumped, tmp_path):
    """An unfinished manifest and a lost object, in the store; an empty disk here."""
    recipe_file, url, expected = dumped
    store, manifest = Store(url), Manifest.load(load_recipe(recipe_file).paths.features)
    store.delete(sorted(expected)[1])
    manifest.complete = False
    (tmp_path / "edited").mkdir()
    manifest.save(tmp_path / "edited")
    store.put(tmp_path / "edited" / MANIFEST)
    dump_here(load_recipe(recipe_file, [f"output={tmp_path / 'again'}"]))
    recipe, _ = fetched(recipe_file, tmp_path / "trainer")
    assert checksums(recipe.paths.features) == expected


@pytest.mark.real
def test_training_fetches_what_it_lacks_and_refuses_what_is_damaged(dumped, tmp_path, capsys):
    recipe_file, url, expected = dumped
    (tmp_path / "features").mkdir()
    train_here((recipe_file, None), tmp_path, "train.epochs=1", draft="eagle")
    assert (tmp_path / "drafts/eagle/model.safetensors").exists()

    name = sorted(expected)[0]
    Store(url).get(name, tmp_path / "copy")
    intact = (tmp_path / "copy" / name).read_bytes()
    flip(tmp_path / "copy" / name)
    Store(url).put(tmp_path / "copy" / name)
    with pytest.raises(PipelineError, match="its SHA-256 is not the manifest's"):
        fetched(recipe_file, tmp_path / "other")
    arguments = [str(tmp_path / "third/features"), "--recipe", str(recipe_file)]
    with pytest.raises(PipelineError, match="is not whole"):
        call(verify.main, *arguments, "--rows", "0")
    assert f"{name}: its SHA-256" in capsys.readouterr().out
    with without_ray():
        call(verify.main, *arguments, "--repair")
    Store(url).get(name, tmp_path / "copy")
    assert (tmp_path / "copy" / name).read_bytes() == intact


@pytest.mark.real
def test_what_is_damaged_here_only_is_fetched_again(dumped, tmp_path):
    recipe_file, url, expected = dumped
    recipe, _ = fetched(recipe_file, tmp_path)
    before = Store(url).sizes()
    name = sorted(expected)[0]
    flip(recipe.paths.features / name)
    arguments = [str(recipe.paths.features), "--rows", "0"]
    with pytest.raises(PipelineError, match="name the one that it was dumped with"):
        call(verify.main, *arguments, "--repair")
    call(verify.main, *arguments, "--recipe", str(recipe_file))
    assert sha256(recipe.paths.features / name) == expected[name] and Store(url).sizes() == before


@pytest.mark.real
def test_a_finished_dump_can_move_into_a_store(dumped, tmp_path):
    """Its whole shards are sent off, not dumped again; only the plan is made anew."""
    recipe_file, _, expected = dumped
    plain = recipe_file.parent / "plain"
    shutil.copytree(plain, tmp_path / "run")
    url = f"file://{tmp_path}/store"
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run/features").glob("*.arrow")}
    dump_here(load_recipe(recipe_file, [f"output={tmp_path / 'run'}", f'features.store="{url}"']))
    assert stamps and not list((tmp_path / "run/features").glob("*.arrow"))
    recipe = load_recipe(recipe_file, [f"output={tmp_path / 'again'}", f'features.store="{url}"'])
    fetch(recipe, feature_spec(recipe))
    assert checksums(recipe.paths.features) == expected


def test_a_dump_that_is_not_finished_is_not_fetched(tiny_recipe, tmp_path):
    spec = feature_spec(tiny_recipe)
    (tmp_path / "store").mkdir()
    Manifest(spec, []).save(tmp_path / "store")
    recipe = tiny_recipe.with_features(store=f"file://{tmp_path}/store")
    recipe.paths.features.mkdir(parents=True)
    Manifest(spec, [], complete=True, answers_hash="mine").save(recipe.paths.features)
    with pytest.raises(PipelineError, match="the dump is not finished"):
        fetch(recipe, spec)
    assert Manifest.load(recipe.paths.features).answers_hash == "mine"  # what was here is untouched


def test_a_shard_that_was_dumped_anew_with_its_old_size_is_fetched_again(tiny_recipe, tmp_path):
    store, name = tmp_path / "store", "features-train-000000.arrow"
    store.mkdir()
    recipe = tiny_recipe.model_copy(update={"output": str(tmp_path / "run")}).with_features(store=f"file://{store}")
    (store / RECIPE).write_text("{}")
    (store / HELDOUT_PROMPTS).write_text("")
    for content in ("first", "other"):
        (store / name).write_text(content)
        record = ShardRecord(name, "train", 0, 1, 9, 4, len(content), sha256(store / name))
        prompts = sha256(store / HELDOUT_PROMPTS)
        Manifest(feature_spec(tiny_recipe), [record], complete=True, prompts_sha256=prompts).save(store)
        fetch(recipe)
        assert (recipe.paths.features / name).read_text() == content


@pytest.mark.parametrize("name", ["../../pwned.txt", "manifest.json"])
def test_a_store_cannot_make_a_trainer_write_outside_its_folder(tiny_recipe, tmp_path, name):
    """Its manifest's seal is right: whoever made it meant it."""
    spec, (store, away) = feature_spec(tiny_recipe), (tmp_path / "store/run/features", tmp_path / "store")
    store.mkdir(parents=True)
    for place in (store, away):
        (place / "pwned.txt").write_text("pwned")
    mark = {"bytes": 5, "sha256": sha256(away / "pwned.txt")}
    record = ShardRecord(name, "train", 0, rows=1, tokens=9, trained_tokens=4, **mark)
    Manifest(spec, [record], {}, complete=True).save(store)
    (tmp_path / "here").mkdir()
    tree = tiny_recipe.model_copy(update={"output": str(tmp_path / "here/run")})
    with pytest.raises(PipelineError, match=rf"manifest.json: '{name}' .* is not one that a dump writes"):
        fetch(tree.with_features(store=f"file://{store}"), spec)
    assert not [path for path in (tmp_path / "here").rglob("*") if path.is_file() and path.name != ".fetch.lock"]


@pytest.mark.parametrize(("old", "new"), [('"train"', '"validation"'), ("s", "\xff")])
def test_a_stores_manifest_that_was_changed_is_refused(tiny_recipe, tmp_path, old, new):
    spec, store = feature_spec(tiny_recipe), tmp_path / "store"
    store.mkdir()
    record = ShardRecord("features-train-000000.arrow", "train", 0, 1, 9, 4, 5, "0" * 64)
    Manifest(spec, [record], {}, complete=True).save(store)
    (store / MANIFEST).write_bytes((store / MANIFEST).read_text().replace(old, new, 1).encode("latin-1"))
    with pytest.raises(PipelineError, match=r"store/manifest.json (was changed or damaged|is not JSON)"):
        Store(f"file://{store}").manifest()


def test_held_out_prompts_that_changed_in_the_store_do_not_arrive(tiny_recipe, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (store / HELDOUT_PROMPTS).write_text('{"turns": ["why?"]}\n')
    Manifest(feature_spec(tiny_recipe), complete=True, prompts_sha256=sha256(store / HELDOUT_PROMPTS)).save(store)
    recipe = tiny_recipe.with_features(store=f"file://{store}")
    assert heldout_prompts(recipe).read_text() == '{"turns": ["why?"]}\n'
    (store / HELDOUT_PROMPTS).write_text('{"turns": ["who?"]}\n')
    with pytest.raises(PipelineError, match=r"heldout_prompts.jsonl is damaged there"):
        heldout_prompts(recipe)
    assert "why" in (recipe.paths.features / HELDOUT_PROMPTS).read_text()


@pytest.mark.real
def test_features_of_other_settings_are_not_even_fetched(dumped, tmp_path):
    recipe_file, _, _ = dumped
    other_recipe = load_recipe(recipe_file, [f"output={tmp_path}", "data.max_length=100"])
    with pytest.raises(PipelineError, match="other data or feature settings"):
        fetch(other_recipe, feature_spec(other_recipe))
    assert not list((tmp_path / "features").glob("*.arrow"))


def test_without_a_store_nothing_is_fetched(tiny_recipe):
    assert open_store(tiny_recipe) is None
    fetch(tiny_recipe)
    assert not tiny_recipe.paths.features.exists()
