"""Puts a release that was built into the release folder, where a user may have edited files and laid others.

Guarantees: release.json lists the release's own files with their SHA-256, and only what it lists and is unchanged is
replaced or removed; everything else stays, and is told of. Killed anywhere, the list names what was there and what was
to come, so that the same command completes it. The list is this folder's book and is not published.
"""

import os
from pathlib import Path

from pipeline.artifacts.reports import RELEASE, REPORT, read_release
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256, sync, write_sealed

CARD, NEW_CARD = "README.md", "README.new.md"  # the second one: this release's, beside a first one that the user edited


def install(built: Path, release: Path) -> list[str]:
    """Moves the files of `built` into `release`, on the same disk; returns what the user should know, a line each.
    Raises PipelineError for a folder that is no release, before anything in it is touched.
    """
    _require_release(release)
    sync(built)
    before, notes = read_release(release), []
    files, pending = before["files"], before["pending"]
    ours, listed = {*files.values(), *pending.values()}, files.keys() | pending.keys()

    def is_users(name: str) -> bool:
        """Whether there is something of this name whose content the list does not know."""
        path = release / name
        is_file = path.is_file() and not path.is_symlink()
        return os.path.lexists(path) and not (is_file and sha256(path) in ours)

    if is_users(CARD):
        notes.append(f"{CARD} is your edited version and stays; this release's own is {NEW_CARD}")
        (built / CARD).replace(built / NEW_CARD)
    fresh = {name: sha256(built / name) for name in files_in(built)}
    release.mkdir(exist_ok=True)
    _write_list(built, release, files, pending | fresh)
    for inner in sorted({name.partition("/")[0] for name in {*fresh, *listed} if "/" in name}):
        if (release / inner).is_symlink() or (release / inner).is_file():
            notes.append(f"{inner} is a folder of the release; yours is now {_move_aside(release, inner)}")
    for name in sorted(listed - fresh.keys()):
        if not is_users(name):
            (release / name).unlink(missing_ok=True)
        elif name != CARD:
            notes.append(f"{name} is no part of the release any more; your edited version stays, and belongs to you")
    for name in sorted(fresh, key=lambda name: name == REPORT):  # last: by it others know of a release
        if is_users(name):
            notes.append(f"{name} is measured or made anew; your edited version is now {_move_aside(release, name)}")
        (release / name).parent.mkdir(exist_ok=True)
        (built / name).replace(release / name)
    _write_list(built, release, fresh, {})
    return notes


def files_in(folder: Path) -> list[str]:
    """Of a folder and those in it, sorted by name."""
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
    """Gives what lies there another name, which nothing has; returns it."""
    plain, number = Path(name), 1
    while True:
        other = str(plain.with_name(f"{plain.stem}.edited{f'-{number}' if number > 1 else ''}{plain.suffix}"))
        if not os.path.lexists(release / other):
            (release / name).rename(release / other)
            return other
        number += 1


def _write_list(built: Path, release: Path, files: dict[str, str], pending: dict[str, str]) -> None:
    """Written in `built`: nothing half-written is ever in the release folder."""
    write_sealed(built / RELEASE, {"files": files, "pending": pending})
    (built / RELEASE).replace(release / RELEASE)
