"""Whether a feature folder can be trusted.

    python -m preprocess.verify DIR [--rows 8] [--recipe RECIPE] [--repair]

Reads every table and shard in full (a dump that goes on and a training read what changed since it was last found
whole), checks it against the manifest (size, SHA-256), its schema and its counts, looks for files that the manifest
does not know, and forwards a sample of rows through the target again. The recipe is the one that the dump left beside
the shards on its own machine, unless another is given (one whose addresses hold credentials has to be, and any where
the shards were fetched from a store). What is in a store is fetched into DIR first. --repair dumps again what is
damaged; nothing else is touched.
"""

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from pipeline.artifacts.features import fetch, store_of
from pipeline.artifacts.provenance import OWN_RECIPE, RECIPE
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.features.checked import THREADS, forget
from pipeline.features.engines import open_source
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import (
    ANSWERS,
    FILES,
    HELDOUT_PROMPTS,
    SPLITS,
    FeatureStore,
    Manifest,
    Record,
    ShardRecord,
    damage,
    open_shard,
    prompts_damage,
)
from pipeline.features.source import FeatureSource
from pipeline.lm.model import fingerprint
from pipeline.recipe.load import load_recipe
from pipeline.running import entry
from preprocess.dump.driver import dump

# Relative errors that rounding in a batch of another shape may cause: of a whole row, and of its worst token. A token
# of another text or target has an error of about 1.
ALLOWED_ROW, ALLOWED_TOKEN = 0.05, 0.5


def damaged_shards(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Name -> what is wrong, over all files of the manifest, all of the folder and the held-out prompts."""
    found = {}

    def reason_of(record: Record) -> str | None:
        reason = damage(folder, record)
        return reason or (_inconsistency(folder, record, manifest.spec) if isinstance(record, ShardRecord) else None)

    files = manifest.files
    with Progress("verify", len(files), "files") as progress, ThreadPoolExecutor(THREADS) as threads:
        for record, reason in zip(files, threads.map(reason_of, files), strict=True):
            if reason:
                found[record.name] = reason
            progress.advance(1)
    if found:  # a disk may lose bits without telling: what was found whole before may be the same file
        forget(folder)
    known = {record.name for record in files}
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        if path.name not in known:
            found[path.name] = (
                "the manifest does not know it (a dump that was interrupted leaves such a file; it is redone)"
            )
    if manifest.complete and (reason := prompts_damage(folder, manifest)):
        found[HELDOUT_PROMPTS] = reason
    return found


def _inconsistency(folder: Path, record: ShardRecord, spec: FeatureSpec) -> str | None:
    try:
        reader = open_shard(folder, record, spec)
    except PipelineError as error:
        return str(error)
    tokens = sum(len(reader.get_batch(number).column("hidden")[0]) for number in range(reader.num_record_batches))
    return None if tokens == record.tokens else f"it holds {tokens} tokens; the manifest says {record.tokens}"


def recomputed(store: FeatureStore, source: FeatureSource, rows: int) -> dict[str, tuple[float, float]]:
    """Document id -> relative error of its stored hidden states against the target's now, of the row (of its worst
    layer, with auxiliary ones) and of the worst token, for a fixed random sample.
    """
    errors = {}
    for number in sorted(random.Random(0).sample(range(len(store)), min(rows, len(store)))):
        row = store.row(number)
        fresh_TSD = next(source.states([row.input_ids])).float().cpu()
        stored = [row.hidden_TD[:, None]] + ([] if row.auxiliary_TKD is None else [row.auxiliary_TKD])
        wrong_TSD = torch.cat(stored, 1).float() - fresh_TSD
        worst = (wrong_TSD.norm(dim=-1) / fresh_TSD.norm(dim=-1)).max()
        of_state_S = wrong_TSD.norm(dim=(0, 2)) / fresh_TSD.norm(dim=(0, 2))
        errors[row.doc_id] = (of_state_S.max().item(), worst.item())
    return errors


def recipe_beside(folder: Path) -> Path | None:
    """The recipe that the dump left in the folder: its own; else, where nothing was cut off from it, the public
    copy.
    """
    if (folder / OWN_RECIPE).exists():
        return folder / OWN_RECIPE
    public = folder / RECIPE
    if not public.exists():
        return None
    recipe = load_recipe(public)
    whole = recipe.dump_hash == Manifest.load(folder).spec.recipe and not recipe.features.store
    return public if whole else None


def verify(folder: Path, recipe_path: Path | None, overrides: list[str], rows: int, repair: bool) -> None:
    """Prints what was checked. Raises PipelineError when something is wrong (and was not repaired)."""
    if recipe_path is None and (rows or repair):
        raise PipelineError(
            f"{folder} holds no recipe with the target's and the source's places: give the one that it was dumped "
            "with, --recipe RECIPE (and the overrides, --set section.key=value). --rows 0 checks sizes and checksums "
            "without one"
        )
    sets = [
        *overrides,
        f"output={json.dumps(str(folder.absolute().parent.resolve()), ensure_ascii=False)}",
    ]  # in TOML's syntax
    store = store_of(load_recipe(recipe_path, sets)) if recipe_path else None
    if store:
        fetch(load_recipe(recipe_path, sets), checksums=False)
    manifest = Manifest.load(folder)
    found = damaged_shards(folder, manifest)
    if store and found:  # here only? What is damaged in the store, too, stays
        for name in found:
            (folder / name).unlink(missing_ok=True)
        fetch(load_recipe(recipe_path, sets), checksums=False)
        found = damaged_shards(folder, manifest)
    for name, reason in found.items():
        print(f"{name}: {reason}")
    whole = sum(record.name not in found for record in manifest.files)
    print(f"{whole} of {len(manifest.files)} tables and shards are whole; complete: {manifest.complete}")
    needs_recipe = rows or (repair and (found or not manifest.complete))
    recipe = load_recipe(recipe_path, sets) if needs_recipe else None
    if repair and recipe and recipe.dump_hash != manifest.spec.recipe:
        raise PipelineError(
            f"{recipe_path} is not the recipe that {folder} was dumped with (a copy in the folder has credentials cut "
            "off): give it with --recipe"
        )
    if recipe and recipe.features_dir.resolve() != folder.resolve():
        raise PipelineError(f"{folder}: the features folder of a run is called {recipe.features_dir.name}")
    if repair and recipe and (found or not manifest.complete):
        known = {record.name for record in manifest.files}
        for name in (name for name in found if store and name in known):
            store.delete(name)
            (folder / name).unlink(missing_ok=True)
        print("\n".join(dump(recipe)))
        fetch(recipe, checksums=False)
        found, manifest = damaged_shards(folder, Manifest.load(folder)), Manifest.load(folder)
    if found or not manifest.complete:
        raise PipelineError(
            f"{folder} is not whole. Repair it: python -m preprocess.verify {folder} --recipe RECIPE --repair"
        )
    if recipe and rows:
        if fingerprint(recipe.target) != manifest.spec.target:
            raise PipelineError(f"{folder}: dumped from another target than {recipe.target.model} is now; dump again")
        source = open_source(recipe.target, manifest.spec.auxiliary_numbers)
        errors = {
            doc_id: error
            for split in (*SPLITS, ANSWERS)
            if manifest.total(split, "rows")
            for doc_id, error in recomputed(FeatureStore(folder, split, manifest.spec), source, rows).items()
        }
        of_row, of_token = (max(error[place] for error in errors.values()) for place in (0, 1))
        print(
            f"{len(errors)} rows forwarded again: largest relative error of a row {of_row:.4f} (allowed "
            f"{ALLOWED_ROW}), of a token {of_token:.4f} (allowed {ALLOWED_TOKEN})"
        )
        wrong = [name for name, (row, token) in errors.items() if not (row <= ALLOWED_ROW and token <= ALLOWED_TOKEN)]
        if wrong:
            raise PipelineError(
                f"{folder}: the hidden states of {wrong[0]} are not the target's; dump into another folder"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's features folder")
    parser.add_argument("--recipe", type=Path, help="default: the dump's own, in the folder")
    parser.add_argument("--set", dest="overrides", metavar="section.key=value", action="append", default=[])
    parser.add_argument("--rows", type=int, default=8, help="rows of each split to forward again (0: none)")
    parser.add_argument("--repair", action="store_true", help="dump again what is damaged or missing")
    arguments = parser.parse_args()
    folder = arguments.folder
    verify(folder, arguments.recipe or recipe_beside(folder), arguments.overrides, arguments.rows, arguments.repair)


if __name__ == "__main__":
    entry.run(main)
