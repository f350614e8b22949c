"""Checking and repairing a feature folder."""

import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.basics import fingerprint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.schema import TextRow, to_stored_row
from pipeline.features.shards import FeatureStore, Manifest, find_all_damage, text_name, write_shard
from pipeline.features.text import write_text_table
from pipeline.recipe.load import load_recipe
from preprocess.verify import damaged_shards, main
from preprocess.verify import verify as check
from tests.kit import (
    call,
    checksums,
    dump_here,
    flip,
    recipe_tree,
    run_warm,
    save_tiny_target,
    without_ray,
    write_recipe,
    write_sharegpt,
)

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def dumped(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, features folder)"""
    folder = tmp_path_factory.mktemp("verify")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    recipe = write_recipe(tree, folder / "recipe")
    dump_here(load_recipe(recipe))
    return recipe, folder / "run/features"


def verify(dumped, *more: str):
    return run_warm([sys.executable, "-m", "preprocess.verify", *arguments(dumped, *more)])


def arguments(dumped, *more: str) -> list[str]:
    recipe, features = dumped
    return [str(features), "--recipe", str(recipe), *more]


def test_a_whole_folder_passes_and_its_rows_are_the_targets(dumped, tmp_path, capsys):
    """The recipe next to the features is used, with a local target: offline. No other user's recipe is used."""
    _, features = dumped
    call(main, str(features))
    output, shards = capsys.readouterr().out, len(Manifest.load(features).files)
    assert f"{shards} of {shards} tables and shards are whole; complete: True" in output
    assert re.search(r"16 rows forwarded again: largest relative error of a row 0\.00", output)
    shutil.copytree(features, tmp_path / "run/features", ignore=shutil.ignore_patterns("own-recipe.json"))
    with pytest.raises(PipelineError, match="name the one that it was dumped with, --recipe RECIPE"):
        call(main, str(tmp_path / "run/features"))
    call(main, str(tmp_path / "run/features"), "--rows", "0")
    assert "complete: True" in capsys.readouterr().out


def test_a_run_whose_name_is_a_number_is_found_from_inside(dumped, tmp_path, monkeypatch, capsys):
    shutil.copytree(dumped[1], tmp_path / "2024/features")
    monkeypatch.chdir(tmp_path)
    call(main, "2024/features", "--recipe", str(dumped[0]), "--rows", "1")
    assert "complete: True" in capsys.readouterr().out


def test_what_a_disk_lost_without_telling_is_found_and_repaired(dumped, tmp_path, monkeypatch, capsys):
    """Its size and times as they were when it was read: a dump and a training take it for whole."""
    _, features = dumped
    record = Manifest.load(features).shards[0]
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path))
    monkeypatch.setattr(fingerprint, "CACHED_FROM", 0)
    monkeypatch.setattr(fingerprint, "file_identity", lambda path: [0] * 5)
    assert list(find_all_damage(features, [record])) == [None]
    flip(features / record.name)
    assert list(find_all_damage(features, [record])) == [None]
    with pytest.raises(PipelineError, match="is not whole"):
        call(main, *arguments(dumped, "--rows", "0"))
    assert "its SHA-256" in next(find_all_damage(features, [record]))  # from now on they do not
    with without_ray():
        call(main, *arguments(dumped, "--repair", "--rows", "0"))
    assert f"{record.name}: its SHA-256 is not the manifest's" in capsys.readouterr().out
    assert sha256(features / record.name) == record.sha256


def test_every_damage_is_named_and_repaired_to_the_same_bytes(dumped, capsys):
    _, features = dumped
    prompts = features / "heldout_prompts.jsonl"
    before, before_of_prompts = checksums(features), sha256(prompts)
    truncated, flipped, missing, unknown = (features / f"features-train-00000{number}.arrow" for number in range(4))
    os.truncate(truncated, 100)
    flip(flipped)
    flip(prompts)
    missing.unlink()
    manifest = Manifest.load(features)
    manifest.shards = [record for record in manifest.shards if record.name != unknown.name]
    manifest.save(features)
    result = verify(dumped, "--rows", "0")
    assert result.returncode == 2 and "is not whole" in result.stderr
    for path, reason in (
        (truncated, "it has 100 bytes"),
        (flipped, "its SHA-256 is not the manifest's"),
        (prompts, "its SHA-256 is not the manifest's"),
        (missing, "it is missing"),
        (unknown, "the manifest does not list it"),
    ):
        assert f"{path.name}: {reason}" in result.stdout
    with without_ray():
        call(main, *arguments(dumped, "--repair"))
    assert "rows forwarded again" in capsys.readouterr().out
    assert checksums(features) == before and sha256(prompts) == before_of_prompts


def test_files_that_disagree_are_named_though_their_checksums_are_the_manifests(dumped, tmp_path):
    """Repairing dumps them again: the checksums do not tell."""
    recipe, features = dumped
    folder = tmp_path / "run/features"
    shutil.copytree(features, folder)
    before, manifest = checksums(features), Manifest.load(folder)
    spec, size, reasons = manifest.spec, manifest.shards_of("train")[0].rows, {}
    store, heldout = (FeatureStore(folder, split, spec) for split in ("train", "validation"))

    def write_again(index: int, reason: str, rows: list[tuple[int, TextRow]], **counts: int) -> None:
        record = manifest.shards_of("train")[index]
        again = write_shard(
            folder, "train", index, spec, (to_stored_row(row, number, spec) for number, row in rows), {}
        )
        record_fields = {"bytes": again.bytes, "sha256": again.sha256} | counts
        manifest.shards[manifest.shards.index(record)] = replace(record, **record_fields)
        reasons[record.name] = reason

    def rows_of(index: int) -> list[tuple[int, TextRow]]:
        return [(number, store.row(number)) for number in range(index * size, (index + 1) * size)]

    trained = manifest.shards_of("train")[0].trained_tokens + 1
    write_again(0, r"its texts have \d+ trained tokens; the manifest says \d+", rows_of(0), trained_tokens=trained)
    (_, row), *further_rows = rows_of(1)
    write_again(1, "it names row 3 of the text table where the manifest says 8", [(3, row), *further_rows])
    (first, first_row), (second, second_row), *further_rows = rows_of(2)  # one token less here, one more there
    exchanged = [(first, shortened(first_row)), (second, lengthened(second_row)), *further_rows]
    write_again(2, r"it holds (\d+) states for row 16, whose text has \d+ tokens", exchanged)
    texts = [heldout.row(number) for number in range(len(heldout) - 1)]
    manifest.text["validation"] = write_text_table(folder / text_name("validation"), texts, spec)
    reasons[text_name("validation")] = f"the validation table holds {len(texts)} dialogues"
    manifest.save(folder)
    damaged = damaged_shards(folder, Manifest.load(folder))
    assert damaged.keys() == reasons.keys() and all(re.search(reasons[name], damaged[name]) for name in damaged)
    with without_ray():
        check(folder, recipe, [], rows=0, repair=True)
    assert checksums(folder) == before


def shortened(row: TextRow) -> TextRow:
    return replace(row, input_ids=row.input_ids[1:], loss_mask=row.loss_mask[1:], hidden_TD=row.hidden_TD[1:])


def lengthened(row: TextRow) -> TextRow:
    ids, mask = (np.append(values, values[-1:]) for values in (row.input_ids, row.loss_mask))
    return replace(row, input_ids=ids, loss_mask=mask, hidden_TD=torch.cat([row.hidden_TD, row.hidden_TD[-1:]]))


def test_rows_of_another_target_are_refused(dumped, tmp_path):
    second_target = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(PipelineError, match="dumped from another target"):
        call(main, *arguments(dumped, "--set", f"target.model={second_target}"))
