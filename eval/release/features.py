"""Uploads a run's features to a dataset repository on the Hub, a part at a time, so that others train on them.

Guarantees: shards are read from disk as they are sent, and none is sent whose content is not the manifest's. The
manifest comes last, and goes first where another dump's is there: what it names is there as a whole. Broken off, the
same command sends what is not there yet.
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
    damage,
    kind_of,
    prompts_damage,
)
from pipeline.recipe.identity import digest, run_hash
from pipeline.recipe.recipe import Recipe

NEW_CARD = "features-README.new.md"  # of the run's folder: the dump's card, where the one on the Hub is edited
PART_FILES = 50  # of one commit: what the Hub advises


def push_features(recipe: Recipe, repository: str, private: bool) -> list[str]:
    """Returns lines for the user, and writes down where the features are, for the release. Those of a store are brought
    to the run's folder first. Raises PipelineError for features that are not finished, damaged, or come and go.
    """
    fetch(recipe)
    folder, manifest = recipe.paths.features, Manifest.load(recipe.paths.features)
    _require_lasting(folder, manifest)
    card = _marked(_card(recipe, repository, manifest))
    there = Repository(repository, "dataset", "Run the same command again: it sends what is not there yet")
    seen, held = there.create(private, card), there.files()
    foreign = sorted(path for path in held.keys() - {".gitattributes", CARD} if not _is_shard(path))
    if foreign and not any(map(_is_shard, held)):
        raise PipelineError(
            f"{repository} holds {', '.join(foreign[:3])}{', ...' if foreign[3:] else ''} and no features: name an "
            "empty repository, or one that is not there yet"
        )
    sums = {path: file.lfs.sha256 for path, file in held.items() if file.lfs}
    lacking = [record for record in manifest.files if sums.get(record.name) != record.sha256]
    gone = [MANIFEST] if MANIFEST in held else []
    with Progress("upload", sum(record.bytes for record in lacking), "bytes", quiet=not lacking) as progress:
        for start in range(0, len(lacking), PART_FILES):
            part = lacking[start : start + PART_FILES]
            there.commit(f"{len(part)} files of the features", {r.name: _whole(folder, r) for r in part}, gone)
            progress.advance(sum(record.bytes for record in part))
            gone = []
    last: dict[str, Path | bytes] = {name: folder / name for name in (HELDOUT_PROMPTS, RECIPE, MANIFEST)}
    notes = []
    if CARD in held and _is_edited(there.read(CARD)):
        write_text(recipe.paths.run / NEW_CARD, card)
        notes = [f"{CARD} in {repository} is edited and stays: this dump's own is {recipe.paths.run / NEW_CARD}"]
    else:
        last[CARD] = card.encode()
    stale = sorted(held.keys() - {record.name for record in manifest.files})
    commit = there.commit(f"Features of {recipe.name}", last, filter(_is_shard, stale)).oid
    facts = {"repository": repository, "revision": commit, "manifest": digest(asdict(manifest))}
    write_sealed(_note(recipe), facts)
    sent = f"{len(lacking)} of {len(manifest.files)} tables and shards sent"
    return [f"features: hf://datasets/{repository}, revision {commit}{seen}: {sent}", *notes]


def features_on_hub(recipe: Recipe) -> dict[str, str] | None:
    """The repository that the features of this run were uploaded to, its revision and the digest of their manifest, as
    long as they are those.
    """
    note = _note(recipe)
    if not note.exists() or not (recipe.paths.features / MANIFEST).exists():
        return None
    known = read_sealed(note, "Remove it, and upload the features again")
    return known if known["manifest"] == digest(asdict(Manifest.load(recipe.paths.features))) else None


def _note(recipe: Recipe) -> Path:
    return recipe.paths.run / "features-on-hub.json"


def _require_lasting(folder: Path, manifest: Manifest) -> None:
    """Raises PipelineError where the dump is not finished, or what goes with its shards is not there, or not its."""
    manifest.require_complete(folder)
    if manifest.fed:
        raise PipelineError(
            f"{folder}: the shards of a run with features.keep = 'window' come and go, so there are none to upload: "
            "dump with features.keep = 'all'"
        )
    states = {HELDOUT_PROMPTS: prompts_damage(folder, manifest)}
    states[RECIPE] = None if (folder / RECIPE).is_file() else "it is missing"
    for name, reason in states.items():
        if reason:
            raise PipelineError(f"{folder / name}: {reason}. Run the dump again: it writes it anew, and keeps shards")


def _whole(folder: Path, record: Record) -> Path:
    """Raises PipelineError for a file that is not the record's."""
    path = folder / record.name
    if reason := damage(folder, record):
        raise PipelineError(
            f"{kind_of(record)} {path}: {reason}. Nothing of this part was sent. It can be dumped again: "
            f"jakiro verify {folder} --recipe RECIPE --repair"
        )
    return path


def _is_shard(path: str) -> bool:
    """Whether a path in a repository is that of a table or shard."""
    return "/" not in path and any(fnmatch(path, pattern) for pattern in FILES)


def _marked(card: str) -> str:
    """Return a card with a last line, which a page does not show, that tells it from one that a person edited."""
    return f"{card}\n<!-- jakiro {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def _is_edited(card: str) -> bool:
    return card != _marked(card.rpartition("\n<!-- jakiro ")[0])


def _card(recipe: Recipe, repository: str, manifest: Manifest) -> str:
    return render(
        "features.md.jinja",
        recipe=recipe,
        recipe_hash=run_hash(recipe),
        repository=repository,
        manifest=manifest,
        sets={name: manifest.of(name) for name in (*SPLITS, ANSWERS)},
        bytes=sum(record.bytes for record in manifest.files),
        code=revision(),
    )
