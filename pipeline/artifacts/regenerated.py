"""Answers that a target gave anew (preprocess/regenerate.py): the names of their files, and whose they are."""

from functools import lru_cache
from pathlib import Path

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import SEAL, file_identity, read_sealed, sha256, unsealed
from pipeline.lm.fingerprint import weights_sha256

MANIFEST, DIALOGUES = "manifest.json", "dialogues.jsonl"
REMEDY = "Run jakiro regenerate again with the recipe that made it: what is answered is kept"


def are_of(source: str, target_fingerprint: str) -> bool:
    """Whether a data source holds this target's own answers, as it gave them."""
    path = Path(source).expanduser()
    manifest = path.with_name(MANIFEST)
    if path.name != DIALOGUES or not path.is_file() or not manifest.is_file():
        return False
    try:
        found = read_sealed(manifest, "")
        return found["made_by"]["target"] == target_fingerprint and found["dialogues_sha256"] == sha256(path)
    except (PipelineError, KeyError, TypeError):  # a file of that name that is none
        return False


def require_whole(source: str) -> None:
    """Raises PipelineError where a data source is that of a regeneration that is not finished, or has another content
    than this wrote. A manifest.json of anything else beside it does not matter.
    """
    path = Path(source.removeprefix("file://")).expanduser()
    manifest = path.with_name(MANIFEST)
    if path.name == DIALOGUES and path.is_file() and manifest.is_file():
        _require_whole(path, manifest, *file_identity(path), *file_identity(manifest))


@lru_cache(maxsize=16)
def _require_whole(path: Path, manifest: Path, *_identities: int) -> None:
    """Once a process, as long as neither file changes."""
    content = manifest.read_bytes()
    if not all(f'"{key}"'.encode() in content for key in ("made_by", SEAL)):
        return
    found = unsealed(content, manifest, REMEDY)
    if "made_by" not in found:
        return
    wanted = found.get("dialogues_sha256")
    if wanted is None:
        raise PipelineError(
            f"data.source {path}: its regeneration is not finished ({manifest} has no dialogues_sha256), so these are "
            f"dialogues of an earlier one. {REMEDY}"
        )
    if (got := weights_sha256(path)) != wanted:
        raise PipelineError(
            f"data.source {path} was changed or damaged after it was written: its SHA-256 is {got}, {manifest} says "
            f"{wanted}. {REMEDY}. To train on a file that you changed, move it away from the manifest"
        )
