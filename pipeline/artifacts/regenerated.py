"""Answers that a target gave anew (preprocess/regenerate.py): the names of their files, and whose they are."""

from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import SEAL, unsealed
from pipeline.lm.fingerprint import known_sha256

MANIFEST, DIALOGUES = "manifest.json", "dialogues.jsonl"
REMEDY = "Run jakiro regenerate again with the recipe that made it: what is answered is kept"


def are_of(source: str, target_fingerprint: str) -> bool:
    """Whether a data source holds this target's own answers, as it gave them."""
    path = Path(source).expanduser()
    try:
        made = _made_beside(path)
    except PipelineError:
        return False
    return made is not None and made["made_by"].get("target") == target_fingerprint and _is_whole(path, made)


def require_whole(source: str) -> None:
    """Raises PipelineError where a data source is that of a regeneration that is not finished, or has another content
    than this wrote. A manifest.json of anything else beside it does not matter.
    """
    path = Path(source.removeprefix("file://")).expanduser()
    made = _made_beside(path)
    if made and made.get("dialogues_sha256") is None:
        raise PipelineError(
            f"data.source {path}: its regeneration is not finished ({MANIFEST} has no dialogues_sha256), so these are "
            f"dialogues of an earlier one. {REMEDY}"
        )
    if made and not _is_whole(path, made):
        raise PipelineError(
            f"data.source {path} was changed or damaged after it was written: its SHA-256 is not that in {MANIFEST}. "
            f"{REMEDY}. To train on a file that you changed, move it away from the manifest"
        )


def _made_beside(path: Path) -> dict[str, Any] | None:
    """What the manifest beside a regeneration's dialogues says; None where these are no such dialogues."""
    manifest = path.with_name(MANIFEST)
    if path.name != DIALOGUES or not path.is_file() or not manifest.is_file():
        return None
    content = manifest.read_bytes()
    if not all(f'"{key}"'.encode() in content for key in ("made_by", SEAL)):
        return None
    made = unsealed(content, manifest, REMEDY)
    return made if isinstance(made.get("made_by"), dict) else None


def _is_whole(path: Path, made: dict[str, Any]) -> bool:
    return made.get("dialogues_sha256") == known_sha256(path)
