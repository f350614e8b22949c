"""Upload a run's features to a dataset repository on the Hub, a part at a time, so that others can train on them.

Guarantees: shards are read from disk as they are sent, and none is sent whose content is not the manifest's. The
manifest is uploaded last, and another dump's manifest is removed first: every file that a manifest names is on the Hub.
After an interruption the same command sends what is missing.
"""

import hashlib
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from eval.release.card import render
from eval.release.folder import CARD
from eval.release.hub import Repository
from pipeline.artifacts.features import fetch
from pipeline.artifacts.provenance import RECIPE, revision
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_sealed, write_text
from pipeline.basics.progress import Progress
from pipeline.features.shards import (
    ANSWERS,
    FILES,
    HELDOUT_PROMPTS,
    MANIFEST,
    SPLITS,
    Manifest,
    Record,
    file_kind,
    find_damage,
    find_prompts_damage,
)
from pipeline.recipe.identity import digest, run_hash
from pipeline.recipe.recipe import Recipe

NEW_CARD = "features-README.new.md"  # in the run's folder: the dump's card, if the one on the Hub was edited
PART_FILES = 50  # files of one commit, as the Hub recommends


def push_features(recipe: Recipe, repository: str, private: bool) -> list[str]:
    """Upload the features, and record their place for the release. Return lines for the user. Features of a store are
    fetched to the run's folder first. Raise PipelineError if the features are unfinished, damaged, or made while
    training runs.
    """
    fetch(recipe)
    folder, manifest = recipe.paths.features, Manifest.load(recipe.paths.features)
    _require_lasting(folder, manifest)
    card = _mark_card(_render_card(recipe, repository, manifest))
    hub = Repository(repository, "dataset", "Run the same command again: it sends what is not there yet")
    visibility, hub_files = hub.create(private, card), hub.files()
    foreign = sorted(path for path in hub_files.keys() - {".gitattributes", CARD} if not _is_shard(path))
    if foreign and not any(map(_is_shard, hub_files)):
        raise PipelineError(
            f"{repository} holds {', '.join(foreign[:3])}{', ...' if foreign[3:] else ''} and no features: name an "
            "empty repository, or one that does not exist yet"
        )
    hub_sha256 = {path: file.lfs.sha256 for path, file in hub_files.items() if file.lfs}
    lacking = [record for record in manifest.files if hub_sha256.get(record.name) != record.sha256]
    removed = [MANIFEST] if MANIFEST in hub_files else []
    with Progress("upload", sum(record.bytes for record in lacking), "bytes", quiet=not lacking) as progress:
        for start in range(0, len(lacking), PART_FILES):
            part = lacking[start : start + PART_FILES]
            hub.commit(f"{len(part)} files of the features", {r.name: _checked_path(folder, r) for r in part}, removed)
            progress.advance(sum(record.bytes for record in part))
            removed = []
    last: dict[str, Path | bytes] = {name: folder / name for name in (HELDOUT_PROMPTS, RECIPE, MANIFEST)}
    notes = []
    if CARD in hub_files and _is_edited(hub.read(CARD)):
        write_text(recipe.paths.run / NEW_CARD, card)
        notes = [f"{CARD} in {repository} is edited and stays: this dump's own is {recipe.paths.run / NEW_CARD}"]
    else:
        last[CARD] = card.encode()
    stale = sorted(hub_files.keys() - {record.name for record in manifest.files})
    commit = hub.commit(f"Features of {recipe.name}", last, filter(_is_shard, stale)).oid
    facts = {"repository": repository, "revision": commit, "manifest": digest(asdict(manifest))}
    write_sealed(_note_path(recipe), facts)
    sent = f"{len(lacking)} of {len(manifest.files)} tables and shards sent"
    return [f"features: hf://datasets/{repository}, revision {commit}{visibility}: {sent}", *notes]


def find_features_on_hub(recipe: Recipe) -> dict[str, str] | None:
    """Return the repository that the features of this run were uploaded to, its revision and the digest of their
    manifest; None if the features are not, or no longer, those.
    """
    path = _note_path(recipe)
    if not path.exists() or not (recipe.paths.features / MANIFEST).exists():
        return None
    facts = read_sealed(path, "Remove it, and upload the features again")
    return facts if facts["manifest"] == digest(asdict(Manifest.load(recipe.paths.features))) else None


def _note_path(recipe: Recipe) -> Path:
    return recipe.paths.run / "features-on-hub.json"


def _require_lasting(folder: Path, manifest: Manifest) -> None:
    """Raise PipelineError if the dump is not finished, or if a file that belongs to its shards is missing or of another
    dump.
    """
    manifest.require_complete(folder)
    if manifest.fed:
        raise PipelineError(
            f"{folder}: the shards of a run with features.keep = 'window' come and go, so there are none to upload: "
            "dump with features.keep = 'all'"
        )
    states = {HELDOUT_PROMPTS: find_prompts_damage(folder, manifest)}
    states[RECIPE] = None if (folder / RECIPE).is_file() else "it is missing"
    for name, reason in states.items():
        if reason:
            raise PipelineError(
                f"{folder / name}: {reason}. Run the dump again: it writes the file again, and keeps shards"
            )


def _checked_path(folder: Path, record: Record) -> Path:
    """Return the path of a record's file. Raise PipelineError if its content is not the record's."""
    path = folder / record.name
    if reason := find_damage(folder, record):
        raise PipelineError(
            f"{file_kind(record)} {path}: {reason}. Nothing of this part was sent. It can be dumped again: "
            f"jakiro verify {folder} --recipe RECIPE --repair"
        )
    return path


def _is_shard(path: str) -> bool:
    """Return whether a path in a repository is that of a table or shard."""
    return "/" not in path and any(fnmatch(path, pattern) for pattern in FILES)


def _mark_card(card: str) -> str:
    """Return a card with a last line, which a page does not show, by which an edited card is recognised."""
    return f"{card}\n<!-- jakiro {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def _is_edited(card: str) -> bool:
    return card != _mark_card(card.rpartition("\n<!-- jakiro ")[0])


def _render_card(recipe: Recipe, repository: str, manifest: Manifest) -> str:
    return render(
        "features.md.jinja",
        recipe=recipe,
        recipe_hash=run_hash(recipe),
        repository=repository,
        manifest=manifest,
        sets={name: manifest.shards_of(name) for name in (*SPLITS, ANSWERS)},
        bytes=sum(record.bytes for record in manifest.files),
        code=revision(),
    )
