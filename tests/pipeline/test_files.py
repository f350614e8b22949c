"""Files are whole or absent."""

import enum
import errno
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import (
    atomic_path,
    compute_seal,
    format_sealed_lines,
    parse_sealed,
    read_json,
    read_sealed,
    read_sealed_lines,
    write_json,
    write_sealed,
    write_text,
)


def test_a_file_appears_whole_and_alone_in_a_new_folder(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o007, 0o660)])
def test_a_files_mode_is_the_umasks_whoever_writes_it(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        for name, private in (("open", False), ("private", True)):
            with atomic_path(tmp_path / name, private) as temporary:
                save_file({"one": torch.ones(1)}, temporary)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "private")] == [mode, 0o600]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_when_the_block_fails_the_file_of_before_is_there_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(error), atomic_path(path) as temporary:
        temporary.write_text("half")
        assert list(tmp_path.glob(".*.tmp")) == [temporary]  # as leftovers are swept
        raise error
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with path.open() as open_before:
        write_text(path, "after")
        assert open_before.read() == "before"
    assert path.read_text() == "after"


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


def test_json_comes_back(tmp_path):
    value = {"b": [1, 2.5, None, True], "a": "é😀\u2028"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert list(read_json(tmp_path / "x.json")) == ["b", "a"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{'a': 1}", b"\xff\xfe{}", b'{"a": "\xe9"}', b"[]", b"3", b"null", b'"text"']
    + [b'{"a": ' + b"[" * depth for depth in (1_100, 200_000)],
    ids=lambda content: content[:12],
)
@pytest.mark.parametrize("read", [read_json, lambda path: read_sealed(path, "Do this.")], ids=["plain", "sealed"])
def test_what_is_no_json_object_is_one_clear_error(tmp_path, content, read):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(PipelineError, match=r"x\.json is (not|a) JSON") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(PipelineError, match=r"absent\.json does not exist"):
        read_json(tmp_path / "absent.json")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(PipelineError, match=r"x\.json cannot be read: Is a directory"):
        read_json(tmp_path / "x.json")


# -- seals -----------------------------------------------------------------------------------------------------------

VALUE = {"b": [1, 2.5, None, True, -0.0, 1e-05, float("inf")], "a": {"é😀\u2028": "x", "2": {"10": 1}}, "text": "line"}


def test_a_sealed_file_comes_back_without_its_seal(tmp_path):
    path = tmp_path / "x.json"
    write_sealed(path, VALUE | {"keys": {9: "a", 10: "b"}})  # JSON has no numbers as keys
    assert read_sealed(path, "") == VALUE | {"keys": {"9": "a", "10": "b"}}
    path.write_text(
        json.dumps(json.loads(path.read_text()), sort_keys=True, indent=7)
    )  # the same content otherwise set
    assert read_sealed(path, "") == VALUE | {"keys": {"9": "a", "10": "b"}}


@pytest.mark.parametrize("bit", [1, 4, 32])
def test_whichever_byte_is_flipped_the_content_is_the_same_or_refused(tmp_path, bit):
    write_sealed(tmp_path / "x.json", VALUE)
    content, refused = (tmp_path / "x.json").read_bytes(), 0
    for place in range(len(content)):
        flipped = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        try:
            assert repr(parse_sealed(flipped, "x.json", "Do this.")) == repr(VALUE), flipped
        except PipelineError as error:
            assert "x.json" in str(error) and str(error).endswith(". Do this.")
            refused += 1
    assert refused > len(content) / 2


KEYS = st.text(st.characters(categories=["L", "Cs", "So", "Co"]), max_size=3) | st.integers(-3, 12) | st.booleans()
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4)
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


class Number(enum.IntEnum):
    SEVEN = 7


def seal_of_the_round_trip(value: dict) -> str:
    rest = json.loads(json.dumps({key: item for key, item in value.items() if key != "seal"}))
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


ODD = [
    {"a": {"\ud83d\ude00": 1, "\uffff": 2}},  # one character of two halves, which sorts behind the other
    {"a": {"\ud83d\ude00": 1, "😀": 2}},
    {"a": {9: "x", 10: "y", "9": "z"}},
    {"a": {None: 1, True: 2, 1.5: 3}, "b": ("x", [()])},
    {"a": Counter("aab"), "b": Number.SEVEN, "c": {Number.SEVEN: 1}, "d": {}, "e": [[], {}, ()]},
    {"seal": "x", "a": float("nan"), "b": -0.0, "c": 10**400},
]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=3), ITEMS, max_size=4))
@example(ODD[0])
@example(ODD[1])
@example(ODD[2])
@example(ODD[3])
@example(ODD[4])
@example(ODD[5])
def test_a_seal_is_that_of_the_round_trip_through_json(value):
    assert compute_seal(value) == seal_of_the_round_trip(value)
    content = json.dumps(value | {"seal": seal_of_the_round_trip(value)}).encode()  # written by an earlier version
    again = json.loads(content)
    assert again.pop("seal") and repr(parse_sealed(content, "x", "")) == repr(again)


@pytest.mark.parametrize("value", [VALUE, {"a": [], "b": {}, "c": [[1], {"d": 2}], 'e"\n': "é\n"}, {}, *ODD[2:]])
def test_a_wide_file_is_the_same_json_with_a_line_for_each_item(tmp_path, value):
    write_sealed(tmp_path / "x.json", value)
    write_sealed(tmp_path / "wide.json", value, wide=True)
    assert repr(read_sealed(tmp_path / "wide.json", "")) == repr(read_sealed(tmp_path / "x.json", ""))
    items = (max(len(item), 1) + 2 * (len(item) > 0) if isinstance(item, dict | list) else 1 for item in value.values())
    lines = (tmp_path / "wide.json").read_text().split("\n")
    assert len([line for line in lines if line and "seal" not in line]) <= 2 + sum(items)


def test_a_file_without_a_seal_is_refused(tmp_path):
    write_json(tmp_path / "x.json", VALUE)
    with pytest.raises(PipelineError, match=r"x\.json has no 'seal': .* Do this\.$"):
        read_sealed(tmp_path / "x.json", "Do this.")


def test_what_is_nested_as_deep_as_can_be_read_is_refused_as_well():
    """Somewhere here what could be read cannot be written again."""
    for depth in range(850, 1010):
        with pytest.raises(PipelineError, match=r"^x (was changed or damaged|is not JSON)"):
            parse_sealed(b'{"seal": "0", "a": ' + b"[" * depth + b"]" * depth + b"}", "x", "")


def test_sealed_lines_come_back_and_none_can_be_changed_added_or_lost(tmp_path):
    path, values = tmp_path / "lines", [{"number": number, "text": "a\nb\u2028c"} for number in range(5)]
    assert read_sealed_lines(path, "") == []
    for count in (0, 5):
        path.write_text(format_sealed_lines(values[:count]))
        assert read_sealed_lines(path, "") == values[:count]
    content = path.read_bytes()
    *lines, closing = content.splitlines(keepends=True)
    changed = [lines[0].replace(b'"number": 0', b'"number": 7'), *lines[1:], closing]
    damaged = {
        "line 1": b"".join(changed),
        "line 2": b"".join([lines[0], b"\n", *lines[2:], closing]),
        "line 3": b"".join([*lines[:2], lines[2].replace(b"number", b"n\xffmber"), *lines[3:], closing]),
    }
    for place, damaged_bytes in damaged.items():
        path.write_bytes(damaged_bytes)
        with pytest.raises(PipelineError, match=f"was changed or damaged .*: {place} is .*Do this"):
            read_sealed_lines(path, "Do this")
    lost = [content[:end] for end in range(len(content))]  # cut anywhere, at a line's end or emptied
    lost += [b"".join([*lines[:at], *lines[at + 1 :], closing]) for at in range(5)]
    lost += [content + lines[0], content + closing, b"".join([lines[1], lines[0], *lines[2:], closing])]
    for damaged_bytes in lost:
        path.write_bytes(damaged_bytes)
        with pytest.raises(PipelineError, match=r"was changed or damaged .*: its last line is .*Do this"):
            read_sealed_lines(path, "Do this")


def test_a_file_that_another_node_replaces_while_it_is_read_is_read_again(tmp_path):
    """NFS has no old content then."""
    with mock.patch.object(Path, "read_bytes", side_effect=[OSError(errno.ESTALE, ""), b'{"b": 2}']):
        assert read_json(tmp_path / "here.json") == {"b": 2}
    with (
        mock.patch.object(Path, "read_bytes", side_effect=OSError(errno.ESTALE, "")),
        pytest.raises(PipelineError, match="cannot be read: Stale file handle"),
    ):
        read_json(tmp_path / "here.json")
