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
STALE = (
    f"the edited {CARD} does not hold this report's figures: the new card is {NEW_CARD}; merge the two, and remove it"
)


def install(built: Path, release: Path) -> list[str]:
    """Moves the files of `built` into `release`, on the same disk; returns what the user should know, a line each.
    Raises PipelineError for a folder that is no release, before anything in it is touched.
    """
    sync(built)
    fresh = {name: sha256(built / name) for name in files_in(built)}
    folder = _Folder(release)
    release.mkdir(exist_ok=True)
    notes = []
    if folder.is_users(CARD):
        notes.append(folder.keep_card(built, fresh))
    folder.write_list(built, folder.files, folder.pending | fresh)
    for inner in sorted({name.partition("/")[0] for name in {*fresh, *folder.files, *folder.pending} if "/" in name}):
        if (release / inner).is_symlink() or (release / inner).is_file():
            notes.append(f"{inner} is a folder of the release; yours is now {folder.move_aside(inner)}")
    for name in sorted({*folder.files, *folder.pending} - set(fresh)):
        if folder.is_users(name):
            notes.append(f"{name} is no part of the release any more; your edited version stays, and belongs to you")
        else:
            (release / name).unlink(missing_ok=True)
    for name in sorted(files_in(built), key=lambda name: name == REPORT):  # last: by it others know of a release
        if folder.is_users(name):
            notes.append(f"{name} is measured or made anew; your edited version is now {folder.move_aside(name)}")
        (release / name).parent.mkdir(exist_ok=True)
        (built / name).replace(release / name)
    folder.write_list(built, fresh, {})
    return notes


def files_in(folder: Path) -> list[str]:
    """Of a folder and those in it, sorted by name."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


class _Folder:
    """A release folder as it was found."""

    def __init__(self, release: Path):
        if release.is_symlink() or (release.exists() and not release.is_dir()):
            raise PipelineError(
                f"{release} is a link or a file, expected a folder of this run's own: move it away and run again"
            )
        others = sorted(path.name for path in release.iterdir()) if release.exists() else []
        if others and not (release / RELEASE).is_file():
            raise PipelineError(
                f"{release} holds {others[0]} and no {RELEASE}, so it is no release that this version made. Nothing "
                "in it was touched: move it away and run again"
            )
        self._release = release
        found = read_release(release)
        self.files, self.pending = found["files"], found["pending"]

    def is_users(self, name: str) -> bool:
        """Whether there is something of this name that the list does not know, or knows otherwise."""
        path = self._release / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            return True
        return path.exists() and sha256(path) not in (self.files.get(name), self.pending.get(name))

    def keep_card(self, built: Path, fresh: dict[str, str]) -> str:
        """Leaves the user's card where it is; what was to be there goes beside it, unless it is what the user's is made
        from.
        """
        kept = f"{CARD} is your edited version and stays"
        if fresh[CARD] != self.files.get(CARD):
            (built / CARD).replace(built / NEW_CARD)
            fresh[NEW_CARD] = fresh[CARD]
            return f"{kept}; {STALE}"
        (built / CARD).unlink()
        if (self._release / NEW_CARD).exists() and not self.is_users(NEW_CARD):
            fresh[NEW_CARD] = self.files[NEW_CARD]
        return f"{kept}; {STALE}" if (self._release / NEW_CARD).exists() else kept

    def move_aside(self, name: str) -> str:
        """Gives what lies there another name, which nothing has; returns it."""
        plain, number = Path(name), 1
        while True:
            other = str(plain.with_name(f"{plain.stem}.edited{f'-{number}' if number > 1 else ''}{plain.suffix}"))
            if not os.path.lexists(self._release / other):
                (self._release / name).rename(self._release / other)
                return other
            number += 1

    def write_list(self, built: Path, files: dict[str, str], pending: dict[str, str]) -> None:
        """Written in `built`: nothing half-written is ever in the release folder."""
        write_sealed(built / RELEASE, {"files": files, "pending": pending})
        (built / RELEASE).replace(self._release / RELEASE)
