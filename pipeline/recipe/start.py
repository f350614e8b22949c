"""Where a draft's training begins: ``draft.NAME.start``, a draft's folder, or OWNER/NAME@COMMIT of the Hub."""

import hashlib
import json
import re
from pathlib import Path

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.lm.fingerprint import known_sha256

ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")  # a commit: a branch would move
MARK = "content:"
SUFFIXES = {".safetensors", ".bin", ".pt", ".ckpt"}


def marked(start: str) -> str:
    """The start as hashes and artifacts name it: a folder by its weights and shapes, wherever it lies.

    Raises PipelineError where there is no such folder.
    """
    if ON_HUB.fullmatch(start) or start.startswith(MARK):
        return start
    folder = start_folder(start)
    config = read_json(folder / "config.json")
    sums = [known_sha256(path) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    content = json.dumps([config.get("shapes", config), sums], sort_keys=True)
    return MARK + hashlib.sha256(content.encode()).hexdigest()[:16]


def start_folder(start: str) -> Path:
    """Raises PipelineError for what is no folder of a draft."""
    folder = Path(start).expanduser()
    if start.startswith(MARK) or not (folder / "config.json").is_file():
        raise PipelineError(
            f"draft.NAME.start={start!r}: expected a draft's folder, with its config.json and weights, or "
            "OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits"
        )
    return folder
