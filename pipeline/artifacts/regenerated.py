"""Answers that a target gave anew (preprocess/regenerate.py): the names of their files, and whose they are."""

from pathlib import Path

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, sha256

MANIFEST, DIALOGUES = "manifest.json", "dialogues.jsonl"


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
