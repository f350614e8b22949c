"""Put a built release into the release folder, where a user may have edited files and added others.

Guarantees: release.json lists the release's own files with their SHA-256, and only what it lists and is unchanged is
replaced or removed; everything else stays, and is reported. If the command is killed, the list names the old files and
the new ones, so that the same command completes it. The list is only for this folder and is not published.
"""

import os
from pathlib import Path

from pipeline.artifacts.reports import RELEASE, REPORT, read_release
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import flush_folder, sha256, write_sealed

CARD, NEW_CARD = "README.md", "README.new.md"  # the second: this release's card, next to one that the user edited


def install(built: Path, release: Path) -> list[str]:
    """Move the files of `built` into `release`, on the same disk; return notes for the user, a line each. Raise
    PipelineError for a folder that is no release, before anything in it is touched.
    """
    _require_release(release)
    flush_folder(built)
    old_list, notes = read_release(release), []
    files, pending = old_list["files"], old_list["pending"]
    known_sha256, listed = {*files.values(), *pending.values()}, files.keys() | pending.keys()

    def is_edited_by_user(name: str) -> bool:
        """Return whether there is a file of this name whose content is not in the list."""
        path = release / name
        is_file = path.is_file() and not path.is_symlink()
        return os.path.lexists(path) and not (is_file and sha256(path) in known_sha256)

    if is_edited_by_user(CARD):
        notes.append(f"{CARD} is your edited version and stays; this release's own is {NEW_CARD}")
        (built / CARD).replace(built / NEW_CARD)
    fresh = {name: sha256(built / name) for name in files_in(built)}
    release.mkdir(exist_ok=True)
    _write_list(built, release, files, pending | fresh)
    for inner in sorted({name.partition("/")[0] for name in {*fresh, *listed} if "/" in name}):
        if (release / inner).is_symlink() or (release / inner).is_file():
            notes.append(f"{inner} is a folder of the release; yours is now {_move_aside(release, inner)}")
    for name in sorted(listed - fresh.keys()):
        if not is_edited_by_user(name):
            (release / name).unlink(missing_ok=True)
        elif name != CARD:
            notes.append(f"{name} is no part of the release any more; your edited version stays, and belongs to you")
    for name in sorted(fresh, key=lambda name: name == REPORT):  # last: it marks the folder as a release
        if is_edited_by_user(name):
            notes.append(
                f"{name} is measured or written again; your edited version is now {_move_aside(release, name)}"
            )
        (release / name).parent.mkdir(exist_ok=True)
        (built / name).replace(release / name)
    _write_list(built, release, fresh, {})
    return notes


def files_in(folder: Path) -> list[str]:
    """Return the files of a folder and its subfolders, sorted by name."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _require_release(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise PipelineError(
            f"{folder} is a link or a file, expected a folder of this run's own: move it away and run again"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / RELEASE).is_file():
        raise PipelineError(
            f"{folder} holds {min(path.name for path in folder.iterdir())} and no {RELEASE}, so it is no release that "
            "this version made. Nothing in it was touched: move it away and run again"
        )


def _move_aside(release: Path, name: str) -> str:
    """Give the file an unused name; return it."""
    path, number = Path(name), 1
    while True:
        new_name = str(path.with_name(f"{path.stem}.edited{f'-{number}' if number > 1 else ''}{path.suffix}"))
        if not os.path.lexists(release / new_name):
            (release / name).rename(release / new_name)
            return new_name
        number += 1


def _write_list(built: Path, release: Path, files: dict[str, str], pending: dict[str, str]) -> None:
    """Write the list in `built`, then move it: no half-written file is ever in the release folder."""
    write_sealed(built / RELEASE, {"files": files, "pending": pending})
    (built / RELEASE).replace(release / RELEASE)
