"""A check of a feature folder.

    python -m preprocess.verify DIR [--rows 8] [--against ENGINE] [--recipe RECIPE] [--repair]

It reads every table and shard in full (a resumed dump and a training read only files that changed since this machine
last read them) and checks it against the manifest (size, SHA-256) and its schema. It compares rows, tokens and trained
tokens of the tables and shards of a finished dump with each other and with the manifest. It looks for files that the
manifest does not list, and forwards a sample of rows through the target again, by the recipe's engine or by another
one: --against transformers shows the error of an engine's states, layer by layer. The recipe is the one that this
user's dump left next to the shards on this machine, unless another is given; a recipe in a folder of another user is
not used. Files in a store are fetched into DIR first. --repair dumps damaged files again; nothing else is changed.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import get_args

from pipeline.artifacts.features import fetch, open_store, require_dump_of, target_differences
from pipeline.artifacts.provenance import OWN_RECIPE, own_recipe, read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import (
    ANSWERS,
    FILES,
    HELDOUT_PROMPTS,
    SPLITS,
    Manifest,
    ShardRecord,
    find_all_damage,
    find_prompts_damage,
    find_row_fault,
    open_shard,
    part_starts,
    text_name,
    usable_texts,
)
from pipeline.features.text import TextTable
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import identify
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from preprocess.dump.compare import compare
from preprocess.dump.driver import dump


def damaged_shards(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return name -> fault, over all files of the manifest, all of the folder and the held-out prompts."""
    files, damaged = manifest.files, {}
    with Progress("verify", len(files), "files") as progress:
        for record, reason in zip(files, find_all_damage(folder, files, recompute=True), strict=True):
            if reason:
                damaged[record.name] = reason
            progress.advance(1)
    texts = _open_texts(folder, manifest, damaged) if manifest.complete else {}
    for shard in (*manifest.shards, *manifest.answers):
        if shard.name not in damaged and (
            reason := _find_inconsistency(folder, shard, manifest.spec, texts.get(shard.name))
        ):
            damaged[shard.name] = reason
    listed = {record.name for record in files}
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        if path.name not in listed:
            damaged[path.name] = (
                "the manifest does not list it (a dump that was interrupted leaves such a file; it is redone)"
            )
    if manifest.complete and (reason := find_prompts_damage(folder, manifest)):
        damaged[HELDOUT_PROMPTS] = reason
    return damaged


def _open_texts(folder: Path, manifest: Manifest, damaged: dict[str, str]) -> dict[str, tuple[TextTable, int, int]]:
    """Return name of a shard -> its set's texts, the index of its first text there and the row that it counts from, for
    the sets whose tables are intact. Add to `damaged` the tables whose rows are not those of a finished dump's shards.
    """
    texts = {}
    for split in (*SPLITS, ANSWERS):
        tables = [record.name for record in manifest.text_of(split)]
        if damaged.keys() & set(tables) or (
            split == "train" and manifest.fed
        ):  # its shards are made and removed while training runs
            continue
        try:
            usable = usable_texts(folder, manifest, split)
        except PipelineError as error:
            damaged |= dict.fromkeys(tables or [text_name(split)], str(error))
            continue
        first = 0
        for record, part in zip(manifest.shards_of(split), part_starts(manifest.shards_of(split)), strict=True):
            texts[record.name] = usable, first, part
            first += record.rows
    return texts


def _find_inconsistency(
    folder: Path, record: ShardRecord, spec: FeatureSpec, texts: tuple[TextTable, int, int] | None
) -> str | None:
    """Describe the fault in a shard's schema, rows or counts; None where there is none. Rows and counts are compared
    with the shard's texts, where these are given.
    """
    try:
        reader = open_shard(folder, record, spec)
    except PipelineError as error:
        return str(error)
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    tokens = sum(len(batch.column("hidden")[0]) for batch in batches)
    if tokens != record.tokens:
        return f"it holds {tokens} tokens; the manifest says {record.tokens}"
    if texts is None:
        return None
    table, first, part = texts
    trained = 0
    for number, batch in enumerate(batches, first):
        if fault := find_row_fault(batch, table, number, part):
            return fault
        trained += int(table.mask(number).sum())
    if trained != record.trained_tokens:
        return f"its texts have {trained} trained tokens; the manifest says {record.trained_tokens}"
    return None


def verify(
    folder: Path, recipe_path: Path | None, overrides: list[str], rows: int, repair: bool, against: str | None = None
) -> None:
    """Print the results of all checks. Raise PipelineError for a fault that was not repaired."""
    output = json.dumps(str(folder.absolute().parent.resolve()), ensure_ascii=False)  # in TOML's syntax
    overrides = [*overrides, f"output={output}"]
    recipe = load_recipe(recipe_path, overrides) if recipe_path else own_recipe(folder, overrides)
    if recipe is None and (rows or repair):
        raise PipelineError(
            f"{folder} holds no {OWN_RECIPE} that this user wrote for it on this machine, and no other recipe of a "
            "folder is trusted: name the one that it was dumped with, --recipe RECIPE (and the overrides, --set "
            "section.key=value). --rows 0 checks sizes and checksums without one"
        )
    damaged = _fetch_damaged(folder, recipe)
    manifest = Manifest.load(folder)
    for name, reason in damaged.items():
        print(f"{name}: {reason}")
    intact = sum(record.name not in damaged for record in manifest.files)
    print(f"{intact} of {len(manifest.files)} tables and shards are whole; complete: {manifest.complete}")
    if repair and recipe and (damaged or not manifest.complete):
        _repair(folder, recipe, manifest, damaged)
        manifest = Manifest.load(folder)
        damaged = damaged_shards(folder, manifest)
    if damaged or not manifest.complete:
        raise PipelineError(f"{folder} is not whole. Repair it: jakiro verify {folder} --recipe RECIPE --repair")
    if recipe and rows:
        _forward_again(folder, recipe, manifest, rows, against)


def _fetch_damaged(folder: Path, recipe: Recipe | None) -> dict[str, str]:
    """Return the damaged files. Local ones are first fetched again from the store; those damaged there, too, remain."""
    if recipe:
        fetch(recipe, checksums=False)
    damaged = damaged_shards(folder, Manifest.load(folder))
    if damaged and recipe and recipe.features.store:
        for name in damaged:
            (folder / name).unlink(missing_ok=True)
        fetch(recipe, checksums=False)
        damaged = damaged_shards(folder, Manifest.load(folder))
    return damaged


def _require_runs_folder(folder: Path, recipe: Recipe) -> None:
    if recipe.paths.features.resolve() != folder.resolve():
        raise PipelineError(f"{folder}: the features folder of a run is called {recipe.paths.features.name}")


def _repair(folder: Path, recipe: Recipe, manifest: Manifest, damaged: dict[str, str]) -> None:
    """Dump damaged and missing files again."""
    require_dump_of(recipe, manifest.spec, partial(read_recorded, folder), folder)
    _require_runs_folder(folder, recipe)
    store = open_store(recipe)
    for name in {record.name for record in manifest.files} & set(damaged):
        if store is not None:
            store.delete(name)
        (folder / name).unlink(missing_ok=True)  # else the dump trusts its size and SHA-256
    print("\n".join(dump(recipe)))
    fetch(recipe, checksums=False)


def _forward_again(folder: Path, recipe: Recipe, manifest: Manifest, rows: int, against: str | None) -> None:
    """Compare a sample of each set with the target, by another engine where one is named."""
    _require_runs_folder(folder, recipe)
    if differences := target_differences(identify(recipe.target), manifest.spec):
        raise PipelineError(
            f"{folder}: dumped from another target than {recipe.target.model} is now ({'; '.join(differences)}); dump "
            "again"
        )
    lines, wrong = compare(folder, manifest.spec, recipe.target, rows, against)
    print("\n".join(lines))
    if wrong:
        raise PipelineError(f"{folder}: the hidden states of {wrong} are not the target's; dump into another folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's features folder")
    parser.add_argument("--recipe", type=Path, help="default: the dump's own, in the folder")
    parser.add_argument("--set", dest="overrides", metavar="section.key=value", action="append", default=[])
    parser.add_argument("--rows", type=int, default=8, help="rows of each split to forward again (0: none)")
    engines = get_args(TargetConfig.model_fields["engine"].annotation)
    parser.add_argument("--against", choices=engines, help="the engine that forwards them; default: the recipe's")
    parser.add_argument("--repair", action="store_true", help="dump again what is damaged or missing")
    arguments = parser.parse_args()
    if arguments.against and not arguments.rows:
        parser.error("--against compares rows: --rows 0 leaves none")
    folder = arguments.folder
    verify(folder, arguments.recipe, arguments.overrides, arguments.rows, arguments.repair, arguments.against)


if __name__ == "__main__":
    entry.run(main)
