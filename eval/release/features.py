"""Uploads a run's features to a dataset repository on the Hub, a part at a time, so that others train on them.

Guarantees: shards are read from disk as they are sent, or come from the recipe's store a part at a time; none is sent
whose content is not the manifest's. The manifest comes last, and goes first where another dump's is there: what it
names is there as a whole. Broken off, the same command sends what is not there yet.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import jinja2
from huggingface_hub.hf_api import RepoFile

from eval.release.hub import Repository
from pipeline.artifacts.provenance import RECIPE, revision
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, sha256, write_sealed, write_text
from pipeline.basics.progress import Progress
from pipeline.basics.public import public_name
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
from pipeline.features.store import Store
from pipeline.recipe.identity import digest, run_hash
from pipeline.recipe.recipe import Recipe

NEW_CARD = "features-README.new.md"  # of the run's folder: the dump's card, where the one on the Hub is edited
CARD, TEMPLATE = "README.md", Path(__file__).with_name("features.md.jinja")
PART_FILES, PART_BYTES = 50, 5 * 2**30  # of one commit: what the Hub advises; and of the disk, where a store is read


@dataclass(frozen=True)
class OnHub:
    """Where a run's features are."""

    repository: str
    revision: str  # the commit
    manifest: str  # its digest


def push_features(recipe: Recipe, repository: str, private: bool) -> list[str]:
    """Returns lines for the user, and writes down where the features are, for the release. Raises PipelineError for
    features that are not finished, damaged, or come and go.
    """
    recipe.paths.run.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".upload-", dir=recipe.paths.run) as place:
        source = _Source(recipe, Path(place))
        manifest = source.manifest
        manifest.require_complete(recipe.paths.features)
        if manifest.fed:
            raise PipelineError(
                f"{recipe.paths.features}: the shards of a run with features.keep = 'window' come and go, so there are "
                "none to upload: dump with features.keep = 'all'"
            )
        source.require_whole()
        there = Repository(repository, "dataset", "Run the same command again: it sends what is not there yet")
        card = _marked(_card(recipe, repository, manifest))
        seen = there.create(private, card)
        held, listed = there.files(), source.get(MANIFEST, None)
        others = sorted(name for name in held.keys() - {".gitattributes", CARD} if not _is_ours(name))
        if others and not any(map(_is_ours, held)):
            raise PipelineError(
                f"{repository} holds {', '.join(others[:3])}{', ...' if others[3:] else ''} and no features: name an "
                "empty repository, or one that is not there yet"
            )
        known = {name: found.lfs.sha256 for name, found in held.items() if found.lfs}
        lacking = [record for record in manifest.files if known.get(record.name) != record.sha256]
        if not lacking and MANIFEST in held and _holds(held[MANIFEST], listed):
            commit, said, notes = there.commit_of(), "there already, nothing to send", []
        else:
            gone = [MANIFEST] if MANIFEST in held else []
            sizes = sum(record.bytes for record in lacking)
            with Progress("upload", sizes, "bytes", quiet=not lacking) as progress:
                for part in _parts(lacking):
                    files = {record.name: source.get(record.name, record) for record in part}
                    there.commit(f"{len(part)} files of the features", files, gone)
                    progress.advance(sum(record.bytes for record in part))
                    source.forget()
                    gone = []
            listed_there = {record.name for record in manifest.files}
            stale = sorted(name for name in held.keys() - listed_there if _is_ours(name))  # of another dump
            last: dict[str, Path | bytes] = {n: source.get(n, None) for n in (HELDOUT_PROMPTS, RECIPE, MANIFEST)}
            notes: list[str] = []
            edited = there.read(CARD, Path(place)).decode(errors="replace") if CARD in held else card
            if _is_edited(edited):
                notes = _keep_card(recipe, repository, edited, card)
            else:
                last[CARD] = card.encode()
            found = there.commit(f"Features of {recipe.name}: {len(manifest.files)} files", last, stale)
            commit, said = found.oid, f"{len(lacking)} of {len(manifest.files)} tables and shards sent"
        write_sealed(_note(recipe), asdict(OnHub(repository, commit, digest(asdict(manifest)))))
    return [f"features: hf://datasets/{repository}, revision {commit}{seen}: {said}", *notes]


def features_on_hub(recipe: Recipe) -> OnHub | None:
    """Where the features of this run were uploaded to, as long as they are those."""
    note = _note(recipe)
    if not note.exists() or not (recipe.paths.features / MANIFEST).exists():
        return None
    found = OnHub(**read_sealed(note, "Remove it, and upload the features again"))
    return found if found.manifest == digest(asdict(Manifest.load(recipe.paths.features))) else None


def _note(recipe: Recipe) -> Path:
    return recipe.paths.run / "features-on-hub.json"


class _Source:
    """The features' files: in the run's folder; from a store brought to `place`, until they are forgotten."""

    def __init__(self, recipe: Recipe, place: Path):
        self._store = Store(recipe.features.store) if recipe.features.store else None
        self._folder, self._brought = (place if self._store else recipe.paths.features), list[Path]()
        if self._store:
            self._store.get(MANIFEST, place)
        self.manifest = Manifest.load(self._folder)

    def require_whole(self) -> None:
        """Raises PipelineError where what goes with the shards is not there, or not the dump's."""
        self.get(RECIPE, None)
        self.get(HELDOUT_PROMPTS, None)
        if reason := prompts_damage(self._folder, self.manifest):
            raise PipelineError(f"{self._folder / HELDOUT_PROMPTS}: {reason}. Run the dump again: it writes it anew")

    def get(self, name: str, record: Record | None) -> Path:
        """Raises PipelineError for a file that is not the record's."""
        path = self._folder / name
        if self._store and name != MANIFEST:
            self._store.get(name, self._folder, record.sha256 if record else None)
            self._brought.append(path)
        elif not record and not path.is_file():
            raise PipelineError(f"{path} is missing. Run the dump again: it writes it anew, and keeps the shards")
        elif record and (reason := damage(self._folder, record)):
            raise PipelineError(
                f"{kind_of(record)} {path}: {reason}. Nothing of this part was sent. It can be dumped again: "
                f"jakiro verify {self._folder} --recipe RECIPE --repair"
            )
        return path

    def forget(self) -> None:
        while self._brought:
            self._brought.pop().unlink()


def _parts(records: list[Record]) -> Iterator[list[Record]]:
    """At most PART_FILES each, and PART_BYTES unless one is larger."""
    part: list[Record] = []
    for record in records:
        if part and (len(part) == PART_FILES or sum(one.bytes for one in part) + record.bytes > PART_BYTES):
            yield part
            part = []
        part.append(record)
    if part:
        yield part


def _is_ours(name: str) -> bool:
    """Whether a path in a repository is that of a table or shard."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in FILES)


def _holds(found: RepoFile, path: Path) -> bool:
    """Whether what is there is this file, by what the Hub says of it."""
    if found.lfs:
        return found.lfs.sha256 == sha256(path)
    content = path.read_bytes()
    return found.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _marked(card: str) -> str:
    """Return a card with a last line, which a page does not show, that tells it from one that a person edited."""
    text = card.rstrip("\n") + "\n"
    return f"{text}{_mark(text)}\n"


def _mark(card: str) -> str:
    return f"<!-- jakiro {hashlib.sha256(card.encode()).hexdigest()} -->"


def _is_edited(card: str) -> bool:
    """Return whether a card is another than `_marked` made."""
    text, _, mark = card.rstrip("\n").rpartition("\n")
    return mark != _mark(f"{text}\n")


def _keep_card(recipe: Recipe, repository: str, edited: str, card: str) -> list[str]:
    """Leave an edited card where it is; write the dump's own into the run's folder, unless the edited one is made from
    it. Return what the user should know.
    """
    kept, new = f"{CARD} in {repository} is edited, or of an earlier version, and stays", recipe.paths.run / NEW_CARD
    if card.splitlines()[-1] in edited:
        new.unlink(missing_ok=True)
        return [kept]
    write_text(new, card)
    return [f"{kept}, without this dump's figures: merge {new} into it, its last line included"]


def _card(recipe: Recipe, repository: str, manifest: Manifest) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    return environment.from_string(TEMPLATE.read_text()).render(
        repository=repository,
        target=public_name(recipe.target.model),
        target_revision=recipe.target.revision,
        source=public_name(recipe.data.source),
        own_answers=recipe.data.answers == "target",
        max_length=recipe.data.max_length,
        calibration_prompts=recipe.data.calibration_prompts,
        answer_tokens=recipe.features.answer_tokens,
        spec=manifest.spec,
        sets={name: manifest.of(name) for name in (*SPLITS, ANSWERS)},
        total=manifest.total,
        bytes=sum(record.bytes for record in manifest.files),
        code=revision(),
        recipe_hash=run_hash(recipe),
    )
