"""What is known of a finished run by its files: the report that was measured, the trees that were tuned, the release's
own list.

Guarantee: what was changed or damaged after it was written is refused by name, and a file that they name is a plain
name in the folder where they are.
"""

from pathlib import Path
from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed

REPORT, RELEASE = "report.json", "release.json"
_AGAIN = "Restore it, or remove it and run python eval/main.py RECIPE again: prompts that are decoded are kept"
_MOVE = "Move the folder away and run python eval/main.py RECIPE again"
_KEYS = (
    "name",
    "provenance",
    "target",
    "drafts",
    "results",
    "table",
    "plots",
    "samples",
    "settings",
    "template_fingerprint",
)


def read_report(path: Path) -> dict[str, Any]:
    """What eval/main.py measured. Raises PipelineError."""
    found = read_sealed(path, _AGAIN)
    if missing := [key for key in _KEYS if key not in found]:
        raise PipelineError(f"{path} has no {missing[0]!r}: it is of another version. {_AGAIN}")
    for plot in found["plots"]:  # name -> SHA-256
        if not is_plain(plot) or not plot.endswith(".png"):
            raise PipelineError(f"{path}: {plot!r} is no name of a plot beside it. {_AGAIN}")
    return found


def read_tuned_trees(path: Path) -> dict[str, dict[str, Any]]:
    """By method, what eval/tune.py found out; empty when it never ran. Raises PipelineError."""
    return read_sealed(path, "Remove it, and run python eval/tune.py RECIPE again") if path.exists() else {}


def read_release(folder: Path) -> dict[str, dict[str, str]]:
    """The release's list of its own files: name -> SHA-256 under "files", and under "pending" those that were being put
    there when a release was broken off. Empty lists where there is none. Raises PipelineError.
    """
    path = folder / RELEASE
    found = read_sealed(path, _MOVE) if path.exists() else {"files": {}, "pending": {}}
    for listed in ("files", "pending"):
        if odd := [name for name in found.get(listed, [None]) if not is_inside(name)]:
            raise PipelineError(f"{path}: {odd[0]!r} in {listed!r} is no name of a file beside it. {_MOVE}")
    return found


def is_inside(name: Any) -> bool:
    """Whether it names a file in a folder or in one of its folders, and no other place."""
    return isinstance(name, str) and all(map(is_plain, name.split("/")))


def is_plain(name: Any) -> bool:
    """Whether it names a file in a folder, and no other place."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
