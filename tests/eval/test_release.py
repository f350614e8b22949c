"""The release folder: what the release made is replaced, the user's files stay, and an interrupted installation is
completed.
"""

from pathlib import Path

import pytest

from eval.release.folder import files_in, install
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
    """Return names and contents, without the list."""
    return {name: (run / "release" / name).read_text() for name in files_in(run / "release") if name != RELEASE}


def assert_list_is_true(run: Path) -> None:
    listed = read_release(run / "release")
    assert listed["pending"] == {}
    assert {name: sha256(run / "release" / name) for name in listed["files"]} == listed["files"]


def test_a_release_lists_its_files_and_the_next_one_replaces_them(run):
    assert held(run) == FIRST
    assert set(read_release(run / "release")["files"]) == set(FIRST)
    for _ in range(2):
        assert put(run, SECOND) == [] and held(run) == SECOND
    assert_list_is_true(run)
    (run / "release/config.json").unlink()  # one that is gone is written again
    assert put(run, SECOND) == [] and held(run) == SECOND


CODE = {"custom_generate/generate.py": "code", "custom_generate/part.py": "more"}


def test_a_folder_in_the_release_is_replaced_and_what_a_user_did_in_it_stays(run):
    assert put(run, FIRST | CODE) == [] and held(run) == FIRST | CODE
    inner = run / "release/custom_generate"
    (inner / "mine.py").write_text("mine")
    (inner / "part.py").write_text("edited")
    assert len(put(run, SECOND | {"custom_generate/generate.py": "other"})) == 1
    user_files = {"custom_generate/mine.py": "mine", "custom_generate/part.py": "edited"}
    assert held(run) == SECOND | user_files | {"custom_generate/generate.py": "other"}
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
    (note,) = put(run, SECOND | {"custom_generate/generate.py": "other"})
    assert "custom_generate is a folder of the release; yours is now custom_generate.edited" in note
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"generate.py": "code", "part.py": "more"}
    assert (inner / "generate.py").read_text() == "other" and not inner.is_symlink()
    assert_list_is_true(run)


EDITED = "README.md is your edited version and stays; this release's own is README.new.md"


def test_what_the_user_laid_there_stays(run):
    (run / "release/pictures").mkdir()
    (run / "release/pictures/one.png").write_text("mine")
    assert put(run, SECOND) == [] and held(run) == SECOND | {"pictures/one.png": "mine"}


def test_an_edited_card_stays_and_the_new_one_is_beside_it(run):
    replace_once(run / "release/README.md", "the card", "mine")
    for release in (SECOND, SECOND, SECOND | {"README.md": "a third card"}):
        assert put(run, release) == [EDITED]
        assert held(run) == release | {"README.md": "mine", "README.new.md": release["README.md"]}
        assert_list_is_true(run)
    (run / "release/README.new.md").replace(run / "release/README.md")  # the user takes it
    assert put(run, SECOND) == [] and held(run) == SECOND
    assert_list_is_true(run)


def test_another_edited_file_goes_aside_and_the_releases_own_is_what_was_measured(run):
    replace_once(run / "release/config.json", "{}", "mine")
    [note] = put(run, SECOND)
    assert note == "config.json is measured or written again; your edited version is now config.edited.json"
    assert held(run) == SECOND | {"config.edited.json": "mine"}
    replace_once(run / "release/config.json", "{ }", "mine again")
    assert "config.edited-2.json" in put(run, SECOND)[0]
    assert held(run) == SECOND | {"config.edited.json": "mine", "config.edited-2.json": "mine again"}
    assert put(run, SECOND) == []
    assert_list_is_true(run)


def test_what_the_release_no_longer_holds_goes_unless_it_was_edited(run):
    put(run, SECOND)
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


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_a_link(release: Path) -> None:
    release.rename(release.with_name("elsewhere"))
    release.symlink_to(release.with_name("elsewhere"))


def is_a_file(release: Path) -> None:
    release.rename(release.with_name("elsewhere"))
    release.write_text("mine")


def lists_other_places(release: Path) -> None:
    replace_once(release / RELEASE, "old.png", "../x.png")
    change_sealed(release / RELEASE, lambda raw: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (is_a_link, "release is a link or a file"),
        (is_a_file, "release is a link or a file"),
        (lambda release: (release / RELEASE).unlink(), "holds README.md and no release.json.*move it away and run"),
        (
            lambda release: replace_once(release / RELEASE, "old.png", "odd.png"),
            r"release.json was changed or damaged .*Move the folder away",
        ),
        (lists_other_places, r"'../x.png' in 'files' is not the name of a file in its folder"),
    ],
)
def test_what_is_no_release_is_refused_and_not_touched(run, change, message):
    change(run / "release")
    built = build(run, SECOND)
    before = tree(run)
    for _ in range(2):
        with pytest.raises(PipelineError, match=message):
            install(built, run / "release")
    assert tree(run) == before


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "release").mkdir()
    assert put(tmp_path, FIRST) == [] and held(tmp_path) == FIRST


class Killed(BaseException):
    """An exception that no handler catches."""


def kill_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Stop after `steps` renamings and removals: the next one and everything after it do not happen."""
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
    """Files that the user edited still exist afterwards, under their own name or the new one."""
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
        assert_list_is_true(run)
        if ended:
            break
    assert ended and steps > 5
