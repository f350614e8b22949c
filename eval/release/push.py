"""Uploads a release to the Hub: only the files that its list names. The same command completes an upload that was
broken off.
"""

from pathlib import Path

from eval.release.folder import CARD, NEW_CARD, STALE, files_in
from eval.release.hub import Repository
from pipeline.artifacts.reports import RELEASE, REPORT, read_release, read_report


def push(release: Path, repository: str, private: bool) -> list[str]:
    """Uploads what the release lists; returns lines for the user: where it is, who sees it, what stayed behind. A
    repository that exists is left as private or public as it is. Raises PipelineError.
    """
    names = sorted(set(read_release(release)["files"]) - {NEW_CARD})
    message = f"Release {read_report(release / REPORT)['name']}"
    again = f"The release stays in {release}: run the same command again, it measures nothing twice"
    there = Repository(repository, "model", again)
    seen = there.create(private, (release / CARD).read_text(encoding="utf-8"))
    found = there.commit(message, {name: release / name for name in names})
    lines = [f"uploaded: {found.commit_url}{seen}"]
    if (release / NEW_CARD).exists():
        lines.append(STALE)
    staying = _unlisted(release, names)
    return lines + ([f"not uploaded, for the release does not list them: {', '.join(staying)}"] if staying else [])


def _unlisted(release: Path, names: list[str]) -> list[str]:
    """What else lies there; of the release's own folders, the files."""
    own = {name.partition("/")[0] for name in names if "/" in name}
    inside = {name for name in files_in(release) if name.partition("/")[0] in own}
    outside = {path.name for path in release.iterdir()} - own
    return sorted((inside | outside) - {*names, RELEASE, NEW_CARD})
