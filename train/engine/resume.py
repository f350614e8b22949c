"""What resume.json says of a resume state: which files belong to it, with their SHA-256, and whether they are still
those.

Knows no DeepSpeed: that its files are whole is asked before it is given them.
"""

import re
from pathlib import Path
from typing import Any

import torch

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import difference, read_sealed, sha256
from train.engine.ranks import place_on_host

FORMAT = 2  # of a state: goes up when DeepSpeed's files do not fit any more, as when a parameter's name changes
RESUME = "resume.json"  # the only truth about which resume state is whole
BEST = "best-{step:07d}.safetensors"  # beside it: the weights with the largest estimated tau so far
_OWNER = re.compile(r"zero_pp_rank_(\d+)_")  # DeepSpeed: a file of one rank's share

Digests = dict[str, dict[str, Any]]  # by path in the resume folder: "bytes" and "sha256"


def tag_of(step: int) -> str:
    """The folder of a state."""
    return f"step-{step:07d}"


def digests(folder: Path, paths: list[Path]) -> Digests:
    """Of files that were just written: while they are in memory, this is their one reading."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }


def written_by(folder: Path, rank: int, ranks: int) -> list[Path]:
    """The files of a state that this rank wrote: its share by name, what has no rank in its name by rank 0."""

    def owner(path: Path) -> int:
        found = _OWNER.search(path.name)
        return int(found[1]) % ranks if found else 0

    return sorted(path for path in folder.rglob("*") if path.is_file() and owner(path) == rank)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What resume.json says, None without one. Raises PipelineError where that is not what a training wrote."""
    path = folder / RESUME
    if not path.exists():
        return None
    state = read_sealed(path, _remedy(folder))
    if state.get("format") != FORMAT:
        raise PipelineError(
            f"{path}: format {state.get('format')!r}, expected {FORMAT}: it was made by another version of this "
            f"project. Finish it with that one, or remove {folder} to train this draft from the start"
        )
    kinds = {"tag": str, "step": int, "ranks": int, "train_hash": str, "progress": dict, "files": dict}
    wrong = [key for key, kind in kinds.items() if type(state.get(key)) is not kind]
    if wrong or state["step"] < 0 or state["tag"] != tag_of(state["step"]):
        raise PipelineError(
            f"{path}: {wrong[0] if wrong else 'tag'!r} is not what a training writes. {_remedy(folder)}"
        )
    best = state["progress"].get("best") or {}
    ours = BEST.format(step=best["step"]) if type(best.get("step")) is int else None
    for name in state["files"]:
        inside = name.startswith(f"{state['tag']}/") and ".." not in name.split("/")
        if not inside and name != ours:
            raise PipelineError(f"{path}: {name!r} is no file of this state. {_remedy(folder)}")
    return state


def require_whole(folder: Path, files: Digests) -> None:
    """Reads this process's share of the files, so that every host reads all of them once. Raises PipelineError for the
    first that is not the one that was saved.
    """
    number, size = place_on_host()
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    for name in by_size[number::size]:
        if reason := difference(folder / name, files[name]["sha256"], files[name]["bytes"], RESUME):
            raise PipelineError(f"resume state {folder / name}: {reason}. {_remedy(folder)}")


def require_tensors_alone(folder: Path, tag: str) -> None:
    """Looks into this process's share of the pickles of a state, listed or not. Raises PipelineError for one that calls
    what torch does not know as safe (`torch.serialization.add_safe_globals`).
    """
    number, size = place_on_host()
    for path in sorted((folder / tag).rglob("*.pt"))[number::size]:
        try:
            odd = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
        except (RuntimeError, ValueError) as error:
            odd = f"no archive of torch ({error})"
        if odd:
            raise PipelineError(
                f"resume state {path} holds {odd}, expected tensors alone: no training of this project saved it. It is "
                f"not read. {_remedy(folder)}"
            )


def _remedy(folder: Path) -> str:
    return f"Restore {folder}, or remove it to train this draft from the start"
