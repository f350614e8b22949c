"""The release folder: what the release made is replaced, what the user did there stays, and a kill in between is
mended.
"""

from pathlib import Path

import pytest

from eval.release.folder import STALE, files_in, install
from pipeline.artifacts.reports import RELEASE, read_release
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from tests.kit import change_sealed, replace_once

FIRST = {"README.md": "the card", "config.json": "{}", "report.json": "first", "old.png": "a plot"}
SECOND = {"README.md": "another card", "config.json": "{ }", "report.json": "second", "new.png": "a plot"}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with its first release."""
    assert put(tmp_path, FIRST) == []
    return tmp_path


def build(run: Path, files: dict[str, str]) -> Path:
    built = run / ".built"
    built.mkdir(exist_ok=True)
    for old in files_in(built):
        (built / old).unlink()
    for name, text in files.items():
        (built / name).parent.mkdir(exist_ok=True)
        (built / name).write_text(text)
    return built


def put(run: Path, files: dict[str, str]) -> list[str]:
    return install(build(run, files), run / "release")


def held(run: Path) -> dict[str, str]:
    """Names and contents, without the list."""
    return {name: (run / "release" / name).read_text() for name in files_in(run / "release") if name != RELEASE}


def assert_list_is_true(run: Path, but: str = "") -> None:
    found = read_release(run / "release")
    assert found["pending"] == {}
    for name, mark in found["files"].items():
        assert name == but or sha256(run / "release" / name) == mark, name


def test_a_release_lists_its_files_and_the_next_one_replaces_them(run):
    assert held(run) == FIRST
    assert set(read_release(run / "release")["files"]) == set(FIRST)
    assert put(run, SECOND) == [] and held(run) == SECOND
    assert put(run, SECOND) == [] and held(run) == SECOND
    assert_list_is_true(run)


CODE = {"custom_generate/generate.py": "code", "custom_generate/part.py": "more"}


def test_a_folder_in_the_release_is_replaced_and_what_a_user_did_in_it_stays(run):
    assert put(run, FIRST | CODE) == [] and held(run) == FIRST | CODE
    inner = run / "release/custom_generate"
    (inner / "mine.py").write_text("mine")
    (inner / "part.py").write_text("edited")
    assert len(put(run, SECOND | {"custom_generate/generate.py": "other"})) == 1
    kept = {"custom_generate/mine.py": "mine", "custom_generate/part.py": "edited"}
    assert held(run) == SECOND | kept | {"custom_generate/generate.py": "other"}
    assert_list_is_true(run)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_in_a_folders_place_is_moved_aside_and_not_followed(run, tmp_path, kind):
    put(run, FIRST | CODE)
    inner, elsewhere = run / "release/custom_generate", tmp_path / "elsewhere"
    inner.rename(elsewhere)
    if kind == "link":
        inner.symlink_to(elsewhere)
    else:
        inner.write_text("mine")
    (said,) = put(run, SECOND | {"custom_generate/generate.py": "other"})
    assert "custom_generate is a folder of the release; yours is now custom_generate.edited" in said
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"generate.py": "code", "part.py": "more"}
    assert (inner / "generate.py").read_text() == "other" and not inner.is_symlink()
    assert_list_is_true(run)


def test_what_the_user_laid_there_stays(run):
    (run / "release/notes.txt").write_text("mine")
    (run / "release/pictures").mkdir()
    (run / "release/pictures/one.png").write_text("mine")
    assert put(run, SECOND) == []
    assert (run / "release/notes.txt").read_text() == (run / "release/pictures/one.png").read_text() == "mine"


def test_an_edited_card_stays_and_the_new_one_is_beside_it(run):
    replace_once(run / "release/README.md", "the card", "the card, and what I say")
    said = [f"README.md is your edited version and stays; {STALE}"]
    assert put(run, SECOND) == said
    edited = SECOND | {"README.md": "the card, and what I say", "README.new.md": "another card"}
    assert held(run) == edited
    assert_list_is_true(run, but="README.md")
    assert put(run, SECOND) == said  # in every run
    assert held(run) == edited
    (run / "release/README.new.md").unlink()
    assert put(run, SECOND) == ["README.md is your edited version and stays"]
    assert not (run / "release/README.new.md").exists()  # they threw it away: it is not forced on them again
    third = SECOND | {"README.md": "a third card"}
    assert put(run, third) == said
    assert held(run) == third | {"README.md": "the card, and what I say", "README.new.md": "a third card"}


def test_taking_the_new_card_ends_it(run):
    replace_once(run / "release/README.md", "the card", "mine")
    put(run, SECOND)
    (run / "release/README.new.md").replace(run / "release/README.md")
    assert put(run, SECOND) == [] and held(run) == SECOND
    assert_list_is_true(run)


def test_another_edited_file_goes_aside_and_the_releases_own_is_what_was_measured(run):
    replace_once(run / "release/config.json", "{}", "mine")
    assert put(run, SECOND) == ["config.json is measured or made anew; your edited version is now config.edited.json"]
    assert held(run) == SECOND | {"config.edited.json": "mine"}
    replace_once(run / "release/config.json", "{ }", "mine again")
    assert "config.edited-2.json" in put(run, SECOND)[0]
    assert held(run) == SECOND | {"config.edited.json": "mine", "config.edited-2.json": "mine again"}
    assert_list_is_true(run)
    assert put(run, SECOND) == []


def test_what_the_release_no_longer_holds_goes_unless_it_was_edited(run):
    put(run, SECOND)
    assert not (run / "release/old.png").exists()
    (run / "release/new.png").write_text("mine")
    assert put(run, FIRST) == [
        "new.png is no part of the release any more; your edited version stays, and belongs to you"
    ]
    assert held(run) == FIRST | {"new.png": "mine"}


def test_a_users_file_under_a_name_that_the_next_release_uses_goes_aside(run):
    (run / "release/new.png").write_text("mine")
    away = run / "away"
    away.write_text("first")
    (run / "release/report.json").unlink()
    (run / "release/report.json").symlink_to(away)
    assert len(put(run, SECOND)) == 2
    assert held(run) == SECOND | {"new.edited.png": "mine", "report.edited.json": "first"}
    assert away.read_text() == "first" and (run / "release/report.edited.json").is_symlink()


def test_a_listed_file_that_is_gone_is_written_again(run):
    (run / "release/config.json").unlink()
    assert put(run, FIRST) == [] and held(run) == FIRST


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["link", "file", "foreign", "damaged list", "list of other places"])
def test_what_is_no_release_is_refused_and_not_touched(run, kind):
    release, message = run / "release", "release is a link or a file"
    if kind == "link":
        release.rename(run / "elsewhere")
        release.symlink_to(run / "elsewhere")
    elif kind == "file":
        release.rename(run / "elsewhere")
        release.write_text("mine")
    elif kind == "foreign":
        (release / RELEASE).unlink()
        message = "holds README.md and no release.json.*move it away and run again"
    elif kind == "damaged list":
        replace_once(release / RELEASE, "old.png", "odd.png")
        message = r"release.json was changed or damaged .*Move the folder away"
    else:
        replace_once(release / RELEASE, "old.png", "../x.png")
        change_sealed(release / RELEASE, lambda raw: None)
        message = r"'../x.png' in 'files' is no name of a file beside it"
    built = build(run, SECOND)
    before = tree(run)
    for _ in range(2):
        with pytest.raises(PipelineError, match=message):
            install(built, release)
    assert tree(run) == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "release").mkdir()
    assert put(tmp_path, FIRST) == [] and held(tmp_path) == FIRST


class Killed(BaseException):
    """Nobody catches it."""


def kill_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Each renaming and removal is a step; the first one beyond `steps` does not happen, nor does anything after it."""
    left = [steps]

    def counted(function):
        def step(path, *arguments, **more):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(path, *arguments, **more)

        return step

    for name in ("replace", "rename", "unlink"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.parametrize("first", [False, True], ids=["over another", "the first one"])
def test_killed_anywhere_the_same_command_completes_it(tmp_path, monkeypatch, first):
    """What the user edited is there afterwards, under one name or the other."""
    expected = dict(SECOND)
    if not first:
        expected |= {"README.md": "my card", "config.edited.json": "mine", "README.new.md": "another card"}
    for steps in range(100):
        run = tmp_path / str(steps)
        run.mkdir()
        if not first:
            put(run, FIRST)
            (run / "release/config.json").write_text("mine")
            (run / "release/README.md").write_text("my card")
        built, ended = build(run, SECOND), True
        with monkeypatch.context() as patch:
            kill_after(steps, patch)
            try:
                install(built, run / "release")
            except Killed:
                ended = False
        put(run, SECOND)
        assert held(run) == expected
        assert_list_is_true(run, but="README.md")
        if ended:
            break
    assert ended and steps > 5
