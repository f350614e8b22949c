"""Answers that a target generated (preprocess/regenerate.py): the names of their files, and checks of their origin."""

from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import SEAL, parse_sealed
from pipeline.basics.fingerprint import cached_sha256

MANIFEST, DIALOGUES = "manifest.json", "dialogues.jsonl"
REMEDY = "Run jakiro regenerate again with the recipe that made it: what is answered is kept"


def holds_answers_of(source: str, target_fingerprint: str) -> bool:
    """Return whether a data source holds this target's own answers, unchanged."""
    path = Path(source).expanduser()
    try:
        manifest = _read_manifest_next_to(path)
    except PipelineError:
        return False
    return (
        manifest is not None
        and manifest["made_by"].get("target") == target_fingerprint
        and _is_unchanged(path, manifest)
    )


def require_unchanged(source: str) -> None:
    """Raise PipelineError if a data source is the result of an unfinished regeneration, or was changed since. An
    unrelated manifest.json next to it is ignored.
    """
    path = Path(source.removeprefix("file://")).expanduser()
    manifest = _read_manifest_next_to(path)
    if manifest and manifest.get("dialogues_sha256") is None:
        raise PipelineError(
            f"data.source {path}: its regeneration is not finished ({MANIFEST} has no dialogues_sha256), so these are "
            f"dialogues of an earlier one. {REMEDY}"
        )
    if manifest and not _is_unchanged(path, manifest):
        raise PipelineError(
            f"data.source {path} was changed or damaged after it was written: its SHA-256 is not that in {MANIFEST}. "
            f"{REMEDY}. To train on a file that you changed, move it away from the manifest"
        )


def _read_manifest_next_to(path: Path) -> dict[str, Any] | None:
    """Return the manifest next to a regeneration's dialogues; None if the file is not a regeneration's."""
    manifest = path.with_name(MANIFEST)
    if path.name != DIALOGUES or not path.is_file() or not manifest.is_file():
        return None
    content = manifest.read_bytes()
    if not all(f'"{key}"'.encode() in content for key in ("made_by", SEAL)):
        return None
    made = parse_sealed(content, manifest, REMEDY)
    return made if isinstance(made.get("made_by"), dict) else None


def _is_unchanged(path: Path, manifest: dict[str, Any]) -> bool:
    return manifest.get("dialogues_sha256") == cached_sha256(path)
