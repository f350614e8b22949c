"""The content of resume.json: which files belong to a resume state, with their SHA-256, and the check that they are
unchanged.

This module does not use DeepSpeed: the files are checked before DeepSpeed gets them.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import describe_difference, read_sealed, sha256
from train.engine.ranks import local_rank_and_size

FORMAT = 2  # of a state: raised when older DeepSpeed files no longer fit, for example after a parameter is renamed
RESUME = "resume.json"  # the only record of which resume state is complete
BEST = "best-{step:07d}.safetensors"  # next to it: the weights with the largest estimated tau so far
_OWNER = re.compile(r"zero_pp_rank_(\d+)_")  # DeepSpeed: a file of one rank's share

Digests = dict[str, dict[str, Any]]  # by path in the resume folder: "bytes" and "sha256"


def format_tag(step: int) -> str:
    """Return the folder name of the state of a step."""
    return f"step-{step:07d}"


def hash_files(folder: Path, paths: list[Path]) -> Digests:
    """Return size and SHA-256 of files that were just written: this is the only time they are read, while they are
    cached.
    """
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }


def files_of_rank(folder: Path, rank: int, ranks: int) -> list[Path]:
    """Return the files of a state that this rank wrote: its share by name; rank 0 wrote the files without a rank in
    their name.
    """

    def owner(path: Path) -> int:
        match = _OWNER.search(path.name)
        return int(match[1]) % ranks if match else 0

    return sorted(path for path in folder.rglob("*") if path.is_file() and owner(path) == rank)


def remove_states_before(folder: Path, tag: str, best: str | None) -> None:
    """Remove all states but `tag`, and the best weights that are not newer than it, but for the file `best`."""
    for old in [*folder.glob("step-*"), *folder.glob("universal-*")]:
        if old.name != tag:
            shutil.rmtree(old)
    newest = BEST.format(step=int(tag.removeprefix("step-")))
    for old in folder.glob(BEST.replace("{step:07d}", "*")):
        if old.name != best and old.name <= newest:
            old.unlink()


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the content of resume.json, None without one. Raise PipelineError if it is not what training wrote."""
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
    wrong_keys = [key for key, kind in kinds.items() if type(state.get(key)) is not kind]
    if wrong_keys or state["step"] < 0 or state["tag"] != format_tag(state["step"]):
        raise PipelineError(
            f"{path}: {wrong_keys[0] if wrong_keys else 'tag'!r} is not what a training writes. {_remedy(folder)}"
        )
    best = state["progress"].get("best") or {}
    best_file = BEST.format(step=best["step"]) if type(best.get("step")) is int else None
    for name in state["files"]:
        is_in_state = name.startswith(f"{state['tag']}/") and ".." not in name.split("/")
        if not is_in_state and name != best_file:
            raise PipelineError(f"{path}: {name!r} is no file of this state. {_remedy(folder)}")
    return state


def require_intact(folder: Path, files: Digests) -> None:
    """Check this process's share of the files, so that every host reads all of them once. Raise PipelineError for the
    first that is not as saved.
    """
    number, size = local_rank_and_size()
    by_size = sorted(files, key=lambda name: (-files[name]["bytes"], name))
    for name in by_size[number::size]:
        if reason := describe_difference(folder / name, files[name]["sha256"], files[name]["bytes"], RESUME):
            raise PipelineError(f"resume state {folder / name}: {reason}. {_remedy(folder)}")


def require_safe_pickles(folder: Path, tag: str) -> None:
    """Check this process's share of the pickles of a state, listed or not. Raise PipelineError for one that calls what
    torch does not list as safe (`torch.serialization.add_safe_globals`).
    """
    number, size = local_rank_and_size()
    for path in sorted((folder / tag).rglob("*.pt"))[number::size]:
        try:
            unsafe = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
        except (RuntimeError, ValueError) as error:
            unsafe = f"no archive of torch ({error})"
        if unsafe:
            raise PipelineError(
                f"resume state {path} holds {unsafe}, expected tensors alone: no training of this project saved it. "
                f"It is not read. {_remedy(folder)}"
            )


def _remedy(folder: Path) -> str:
    return f"Restore {folder}, or remove it to train this draft from the start"
