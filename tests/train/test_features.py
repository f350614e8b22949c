"""Features on a trainer's own disk, the checks of each of a host's ranks, and the agreement of ranks: with ranks in
this process.
"""

import errno
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.artifacts.features import fetch
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import Manifest
from pipeline.features.store import Store
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from tests.kit import change_sealed, flip
from tests.train.runs import train_here
from train import main
from train.engine import ranks
from train.input import features


@pytest.fixture
def shared(dumped, tmp_path) -> Recipe:
    """A run whose features are in a shared folder and are to be read from this node's own."""
    shutil.copytree(dumped[1], tmp_path / "run/features")
    return load_recipe(dumped[0], [f"output={tmp_path}/run", f"train.shards={tmp_path}/local"])


def bring(recipe: Recipe, expected: FeatureSpec) -> None:
    """Open the features as training does."""
    fetch(recipe, expected, folder=recipe.paths.shards)


def content(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.glob("*.arrow")}


# -- bringing --------------------------------------------------------------------------------------------------------


def test_a_nodes_ranks_bring_its_shards_once(shared, monkeypatch):
    spec, brought = Manifest.load(shared.paths.features).spec, []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda *arguments: brought.append(arguments[1]) or get(*arguments))
    with ThreadPoolExecutor(4) as node:
        list(node.map(lambda _: bring(shared, spec), range(4)))
    assert content(shared.paths.shards) == content(shared.paths.features)
    assert sorted(brought) == sorted(content(shared.paths.features))
    (shared.paths.shards / brought[0]).write_bytes(b"half")
    bring(shared, spec)
    assert content(shared.paths.shards) == content(shared.paths.features) and brought[-1] == brought[0]
    manifest = Manifest.load(shared.paths.features)
    name = manifest.shards[1].name
    flip(shared.paths.features / name)  # dumped anew, of the same size
    manifest.shards[1] = replace(manifest.shards[1], sha256=sha256(shared.paths.features / name))
    manifest.save(shared.paths.features)
    bring(shared, spec)
    assert content(shared.paths.shards) == content(shared.paths.features) and brought[-1] == name


def test_from_a_store_they_come_to_the_place_that_is_named(shared, tmp_path):
    store = shutil.copytree(shared.paths.features, tmp_path / "store")
    expected, spec = content(store), Manifest.load(store).spec
    shutil.rmtree(shared.paths.features)
    recipe = shared.with_features(store=f"file://{store}")
    bring(recipe, spec)
    assert content(recipe.paths.shards) == expected and not recipe.paths.features.exists()
    with pytest.raises(PipelineError, match=f"{recipe.paths.shards}.* features of another chat template"):
        bring(recipe, replace(spec, template="1" * 16))


def test_nothing_is_brought_where_no_place_is_named(dumped):
    recipe = load_recipe(dumped[0])
    before = {path: path.stat() for path in recipe.paths.features.iterdir()}
    bring(recipe, Manifest.load(recipe.paths.features).spec)
    assert recipe.paths.shards == recipe.paths.features
    assert before == {path: path.stat() for path in recipe.paths.features.iterdir()}


def test_what_is_damaged_in_the_shared_folder_does_not_arrive(shared):
    name = min(content(shared.paths.features))
    flip(shared.paths.features / name)
    with pytest.raises(PipelineError, match=rf"{shared.paths.features}: {name} is damaged there, its SHA-256 is not"):
        bring(shared, Manifest.load(shared.paths.features).spec)
    assert not (shared.paths.shards / name).exists() and not list(shared.paths.shards.glob(".features*"))
    (shared.paths.features / name).unlink()
    with pytest.raises(PipelineError, match=f"{shared.paths.features} has no {name}"):
        bring(shared, Manifest.load(shared.paths.features).spec)


def test_a_place_that_holds_another_dump_is_refused(shared):
    manifest = Manifest.load(shared.paths.features)
    shared.paths.shards.mkdir()
    replace(manifest, spec=replace(manifest.spec, template="0" * 16)).save(shared.paths.shards)
    with pytest.raises(PipelineError, match=f"{shared.paths.shards}.* features of another chat template"):
        bring(shared, manifest.spec)
    assert not content(shared.paths.shards)


def test_a_place_whose_manifest_is_of_another_version_or_damaged_says_to_remove_it(shared):
    """The dump is sound: no message asks to dump again, and no file of it is overwritten."""
    spec = Manifest.load(shared.paths.features).spec
    bring(shared, spec)
    manifest = shared.paths.shards / "manifest.json"
    for change in (lambda: change_sealed(manifest, lambda raw: raw["spec"].update(version=1)), lambda: flip(manifest)):
        change()
        where = f"train.shards {shared.paths.shards}: .* Remove that folder"
        with pytest.raises(PipelineError, match=where) as refused:
            bring(shared, spec)
        assert "dump again" not in str(refused.value)


# -- checking --------------------------------------------------------------------------------------------------------


class Together:
    """A process group whose other ranks send these messages; `sent` is what rank 0 broadcasts."""

    def __init__(self, messages: list[str], sent=None, rank: int = 0):
        self._messages, self._sent, self._rank = messages, sent, rank

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return 1 + len(self._messages)

    def all_gather_object(self, values: list, value: str) -> None:
        values[:] = [*self._messages[: self._rank], value, *self._messages[self._rank :]]

    def broadcast_object_list(self, values: list) -> None:
        if self._rank:
            values[0] = self._sent


@pytest.fixture
def alone(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "dist", Together([]))
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("word", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_each_host_checks_all_of_its_shards(shared, alone, monkeypatch, word):
    """The shares do not depend on the ranks' numbers in the job; a rank that knows no others checks all files."""
    names = sorted(record.name for record in Manifest.load(shared.paths.features).files)
    bring(shared, Manifest.load(shared.paths.features).spec)
    checked: list[str] = []

    def read(path: Path, **_) -> str:
        checked.append(path.name)
        return sha256(path)

    monkeypatch.setattr("pipeline.features.shards.cached_sha256", read)
    features._require_intact(shared)
    assert sorted(checked) == names
    for count in (2, 3, 100):
        checked.clear()
        monkeypatch.setenv(word, str(count))
        for number in range(count):
            monkeypatch.setenv("LOCAL_RANK", str(number))
            features._require_intact(shared)
        assert sorted(checked) == names


def test_a_shard_that_is_damaged_on_one_host_ends_all_ranks_by_name(shared, alone, monkeypatch):
    spec = Manifest.load(shared.paths.features).spec
    bring(shared, spec)
    opened = features.open_checked(shared, spec)
    assert [len(store) for store in opened[:2]] == [40, 8]
    name = max(content(shared.paths.shards))
    flip(shared.paths.shards / name)
    with pytest.raises(PipelineError, match=f"{shared.paths.shards}/{name} on .* it is fetched again") as damaged:
        features.open_checked(shared, spec)
    (shared.paths.shards / name).unlink()
    bring(shared, spec)  # now whole here, but not on the host of another rank
    monkeypatch.setattr(ranks, "dist", Together(["", str(damaged.value)]))
    with pytest.raises(PipelineError, match=f"{shared.paths.shards}/{name} on "):
        features.open_checked(shared, spec)


def test_checksums_are_read_once_a_run_and_only_where_something_is_to_be_trained(dumped, monkeypatch, capsys):
    """The checks run once for two drafts, and not at all if no draft is to be trained."""
    calls = []
    monkeypatch.setattr(main, "start_distributed", lambda: None)
    monkeypatch.setattr(main, "leave_distributed", lambda: None)
    monkeypatch.setattr(main, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    monkeypatch.setattr(main, "open_checked", lambda *_: calls.append("checked"))
    monkeypatch.setattr("sys.argv", ["train/main.py", str(dumped[0])])
    monkeypatch.setattr(main, "train", lambda _, names, __, features, *___: calls.append(names) or features() or names)
    main.main()
    assert calls == [["eagle"], "checked", ["jakiro"]] and capsys.readouterr().out == "eagle\njakiro\n"
    monkeypatch.setattr(main, "train", lambda _, names, *__: [f"{' and '.join(names)}: trained already"])
    monkeypatch.setattr("sys.argv", [*sys.argv, "--set", "train.together=true"])
    main.main()
    assert calls.count("checked") == 1 and capsys.readouterr().out == "eagle and jakiro: trained already\n"


# -- agreeing --------------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_is_everybodys(monkeypatch):
    monkeypatch.setattr(ranks, "dist", Together(["", "rank 2 says why"], sent="theirs", rank=1))
    with pytest.raises(PipelineError, match=r"^rank 2 says why$"), ranks.fail_together():
        pass
    with pytest.raises(PipelineError, match=r"^mine, which comes first$"), ranks.fail_together():
        raise PipelineError("mine, which comes first")
    with pytest.raises(PipelineError, match=r"^a file: No space left on device"), ranks.fail_together():
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(PipelineError, match="rank 2 says why"):
        ranks.run_on_rank_0(lambda: "mine")
    monkeypatch.setattr(ranks, "dist", Together(["", ""], sent="theirs", rank=1))
    assert ranks.run_on_rank_0(lambda: "mine") == "theirs"
    monkeypatch.setattr(ranks, "dist", Together(["", ""]))
    assert ranks.run_on_rank_0(lambda: "mine") == "mine"


def test_a_folder_for_resume_states_that_not_all_nodes_see_is_refused(tmp_path, alone, monkeypatch):
    features.require_shared(tmp_path)
    assert not list(tmp_path.iterdir())
    elsewhere = Together([""], sent=tmp_path / ".seen-by-rank-0.tmp", rank=1)
    monkeypatch.setattr(ranks, "dist", elsewhere)
    with pytest.raises(
        PipelineError, match="is not the one of rank 0, but resume states need an output that all nodes see"
    ):
        features.require_shared(tmp_path)


# -- as a user starts it ---------------------------------------------------------------------------------------------


@pytest.mark.real
def test_shards_in_a_place_of_their_own(dumped, undisturbed, tmp_path):
    """The weights are those of a training without copies, and no copy is left afterwards."""
    train_here(dumped, tmp_path / "run", f"train.shards={tmp_path / 'local'}")
    saved = tmp_path / "run/drafts/jakiro"
    assert sha256(saved / "model.safetensors") == sha256(undisturbed / "drafts/jakiro/model.safetensors")
    assert content(tmp_path / "local") == content(dumped[1])
    assert not (saved / "resume").exists()
    assert all(str(tmp_path) not in path.read_text() for path in saved.glob("*.json"))
