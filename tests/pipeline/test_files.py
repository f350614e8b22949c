"""Files are whole or absent."""

import errno
import hashlib
import os

import pytest

from pipeline.errors import PipelineError
from pipeline.files import atomic_path, read_json, sha256, write_json, write_text


def test_a_file_appears_whole_and_alone_in_a_new_folder(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_when_the_block_fails(tmp_path, error):
    with pytest.raises(error), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_before_survives_a_failure(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("after")
        raise RuntimeError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with path.open() as open_before:
        write_text(path, "after")
        assert open_before.read() == "before"
    assert path.read_text() == "after"


def test_the_temporary_name_is_hidden_and_ends_as_leftovers_are_swept(tmp_path):
    with atomic_path(tmp_path / "file.json") as temporary:
        temporary.touch()
        assert list(tmp_path.glob(".*.tmp")) == [temporary]


def test_content_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    calls = []
    fsync, path = os.fsync, tmp_path / "file"
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append((path.exists(), os.fstat(fd).st_size)), fsync(fd)))
    write_text(path, "12345")
    assert calls[0] == (False, 5)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_to_the_user(tmp_path, number):
    path = tmp_path / "file"
    with pytest.raises(PipelineError, match=f"no space to write file in {tmp_path}"), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_the_system_pass_through(tmp_path):
    with pytest.raises(PermissionError), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise PermissionError(errno.EACCES, "no")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 5000])
def test_sha256_is_the_files(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert sha256(path) == hashlib.sha256(content).hexdigest()


def test_json_comes_back(tmp_path):
    value = {"b": [1, 2.5, None, True], "a": "é😀\u2028"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert list(read_json(tmp_path / "x.json")) == ["b", "a"]


def test_a_missing_json_file_is_named(tmp_path):
    with pytest.raises(PipelineError, match=r"absent\.json does not exist"):
        read_json(tmp_path / "absent.json")


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe{}"])
def test_what_is_not_json_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"x\.json is not JSON: "):
        read_json(path)
