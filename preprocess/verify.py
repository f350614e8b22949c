"""Whether a feature folder can be trusted.

    python -m preprocess.verify DIR [--rows 8] [--against ENGINE] [--recipe RECIPE] [--repair]

Reads every table and shard in full (a dump that goes on and a training read what changed since this machine last read
it) and checks it against the manifest (size, SHA-256) and its schema. Compares rows, tokens and trained tokens of
the tables and shards of a finished dump with each other and with the manifest. Looks for files that the manifest does
not know, and forwards a sample of rows through the target again, by the recipe's engine or by another one: --against
transformers says how far an engine's states are off, layer by layer. The recipe is the one that this user's dump left
beside the shards on this machine, unless another is given; nobody else's folder supplies one. What is in a store is
fetched into DIR first. --repair dumps again what is damaged; nothing else is touched.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import get_args

from pipeline.artifacts.features import fetch, of_another_target, require_dump_of, store_of
from pipeline.artifacts.provenance import OWN_RECIPE, own_recipe, recorded
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
    damages,
    open_shard,
    part_starts,
    prompts_damage,
    row_fault,
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
    """Name -> what is wrong, over all files of the manifest, all of the folder and the held-out prompts."""
    files, found = manifest.files, {}
    with Progress("verify", len(files), "files") as progress:
        for record, reason in zip(files, damages(folder, files, anew=True), strict=True):
            if reason:
                found[record.name] = reason
            progress.advance(1)
    texts = _texts(folder, manifest, found) if manifest.complete else {}
    for shard in (*manifest.shards, *manifest.answers):
        if shard.name not in found and (reason := _inconsistency(folder, shard, manifest.spec, texts.get(shard.name))):
            found[shard.name] = reason
    known = {record.name for record in files}
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        if path.name not in known:
            found[path.name] = (
                "the manifest does not know it (a dump that was interrupted leaves such a file; it is redone)"
            )
    if manifest.complete and (reason := prompts_damage(folder, manifest)):
        found[HELDOUT_PROMPTS] = reason
    return found


def _texts(folder: Path, manifest: Manifest, found: dict[str, str]) -> dict[str, tuple[TextTable, int, int]]:
    """Name of a shard -> its set's texts, the number of its first there and the row that it counts from, of the sets
    whose tables are whole. Adds to `found` the tables that hold other rows than the shards of a finished dump are of.
    """
    texts = {}
    for split in (*SPLITS, ANSWERS):
        tables = [record.name for record in manifest.text_of(split)]
        if found.keys() & set(tables) or (split == "train" and manifest.fed):  # its shards come and go
            continue
        try:
            usable = usable_texts(folder, manifest, split)
        except PipelineError as error:
            found |= dict.fromkeys(tables or [text_name(split)], str(error))
            continue
        first = 0
        for record, part in zip(manifest.of(split), part_starts(manifest.of(split)), strict=True):
            texts[record.name] = usable, first, part
            first += record.rows
    return texts


def _inconsistency(
    folder: Path, record: ShardRecord, spec: FeatureSpec, texts: tuple[TextTable, int, int] | None
) -> str | None:
    """What is wrong with a shard's schema, rows or counts; these are compared with its texts where there are any."""
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
        if fault := row_fault(batch, table, number, part):
            return fault
        trained += int(table.mask(number).sum())
    if trained != record.trained_tokens:
        return f"its texts have {trained} trained tokens; the manifest says {record.trained_tokens}"
    return None


def verify(
    folder: Path, recipe_path: Path | None, overrides: list[str], rows: int, repair: bool, against: str | None = None
) -> None:
    """Prints what was checked. Raises PipelineError when something is wrong (and was not repaired)."""
    output = json.dumps(str(folder.absolute().parent.resolve()), ensure_ascii=False)  # in TOML's syntax
    overrides = [*overrides, f"output={output}"]
    recipe = load_recipe(recipe_path, overrides) if recipe_path else own_recipe(folder, overrides)
    if recipe is None and (rows or repair):
        raise PipelineError(
            f"{folder} holds no {OWN_RECIPE} that this user wrote for it on this machine, and no other recipe of a "
            "folder is trusted: give the one that it was dumped with, --recipe RECIPE (and the overrides, --set "
            "section.key=value). --rows 0 checks sizes and checksums without one"
        )
    found = _damaged(folder, recipe)
    manifest = Manifest.load(folder)
    for name, reason in found.items():
        print(f"{name}: {reason}")
    whole = sum(record.name not in found for record in manifest.files)
    print(f"{whole} of {len(manifest.files)} tables and shards are whole; complete: {manifest.complete}")
    if repair and recipe and (found or not manifest.complete):
        _repair(folder, recipe, manifest, found)
        manifest = Manifest.load(folder)
        found = damaged_shards(folder, manifest)
    if found or not manifest.complete:
        raise PipelineError(f"{folder} is not whole. Repair it: jakiro verify {folder} --recipe RECIPE --repair")
    if recipe and rows:
        _forward_again(folder, recipe, manifest, rows, against)


def _damaged(folder: Path, recipe: Recipe | None) -> dict[str, str]:
    """What is damaged here is fetched again where a store has it; what is damaged there, too, stays."""
    if recipe:
        fetch(recipe, checksums=False)
    found = damaged_shards(folder, Manifest.load(folder))
    if found and recipe and recipe.features.store:
        for name in found:
            (folder / name).unlink(missing_ok=True)
        fetch(recipe, checksums=False)
        found = damaged_shards(folder, Manifest.load(folder))
    return found


def _require_runs_folder(folder: Path, recipe: Recipe) -> None:
    if recipe.paths.features.resolve() != folder.resolve():
        raise PipelineError(f"{folder}: the features folder of a run is called {recipe.paths.features.name}")


def _repair(folder: Path, recipe: Recipe, manifest: Manifest, found: dict[str, str]) -> None:
    """Dumps again what was found damaged, and what is missing."""
    require_dump_of(recipe, manifest.spec, partial(recorded, folder), folder)
    _require_runs_folder(folder, recipe)
    store = store_of(recipe)
    for name in {record.name for record in manifest.files} & set(found):
        if store is not None:
            store.delete(name)
        (folder / name).unlink(missing_ok=True)  # the dump takes a file for whole by its size and SHA-256
    print("\n".join(dump(recipe)))
    fetch(recipe, checksums=False)


def _forward_again(folder: Path, recipe: Recipe, manifest: Manifest, rows: int, against: str | None) -> None:
    """Compares a sample of each set with the target, by another engine where one is named."""
    _require_runs_folder(folder, recipe)
    if differences := of_another_target(identify(recipe.target), manifest.spec):
        raise PipelineError(
            f"{folder}: dumped from another target than {recipe.target.model} is now ({'; '.join(differences)}); dump "
            "again"
        )
    said, wrong = compare(folder, manifest.spec, recipe.target, rows, against)
    print("\n".join(said))
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
