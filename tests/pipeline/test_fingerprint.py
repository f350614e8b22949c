"""A target's identity covers every byte of its weights, each read once on a machine; and a target that is not there is
said so.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.basics import fingerprint as module
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.basics.fingerprint import cached_sha256
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import fingerprint, load_config, locate_target
from tests.kit import flip

OLD = 1_600_000_000


@pytest.fixture
def copied(tiny_target, tmp_path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "target")


def of(folder: Path) -> str:
    return fingerprint(TargetConfig(model=str(folder)))


def test_it_is_that_of_every_byte_of_the_weights_wherever_they_are(tiny_target, copied):
    assert of(copied) == of(tiny_target)
    weights = copied / "model.safetensors"
    for share in (0.3, 0.5, 0.999):
        flip(weights, int(weights.stat().st_size * share))
        assert of(copied) != of(tiny_target)
        flip(weights, int(weights.stat().st_size * share))


@pytest.fixture
def counted(monkeypatch, tmp_path) -> list[Path]:
    """The files that were read, with sums kept for small ones, too, and every file old enough."""
    read, compute = [], module._compute_sha256
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CACHED_FROM", 0)
    monkeypatch.setattr("pipeline.basics.files.SETTLE_SECONDS", -1e9)
    monkeypatch.setattr(module, "_compute_sha256", lambda path, quiet: read.append(path) or compute(path, quiet))
    return read


def test_a_file_is_read_once_until_it_changes(counted, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    assert cached_sha256(path) == cached_sha256(path) == sha256(path) and len(counted) == 1
    path.write_bytes(b"two")
    os.utime(path, (OLD, OLD))  # its time of change is another
    assert cached_sha256(path) == cached_sha256(path) == sha256(path) and len(counted) == 2
    path.with_name("new").write_bytes(b"six")
    path.with_name("new").replace(path)
    assert cached_sha256(path) == sha256(path) and len(counted) == 3


def test_several_at_once_read_it_once(counted, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights" * 100_000)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: cached_sha256(path), range(8))) == {sha256(path)}
    assert len(counted) == 1


def test_a_file_that_changed_a_moment_ago_is_read_again(counted, monkeypatch, tmp_path):
    """Its times are too coarse to show another change in the same moment."""
    monkeypatch.setattr("pipeline.basics.files.SETTLE_SECONDS", 1e9)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    assert cached_sha256(path) == cached_sha256(path) and len(counted) == 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"file": [], "sha256": "0"}'])
def test_a_damaged_note_is_no_sum(counted, tmp_path, damage):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    cached_sha256(path)
    (note,) = (tmp_path / "cache/sha256").glob("*.json")
    note.write_text(damage)
    assert cached_sha256(path) == sha256(path) and len(counted) == 2


def test_a_cache_folder_that_cannot_be_made_costs_time_only(counted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path / "file"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    assert cached_sha256(path) == sha256(path)


# -- a target that is not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["{}/absent", "./absent", "../absent/model", "~/absent-target", "absent", "a/b/c", "http://x/y"]
)
def test_a_folder_that_is_not_there_is_said_so_and_the_hub_is_not_asked(monkeypatch, tmp_path, model):
    def from_pretrained(*arguments, **_):
        raise AssertionError(arguments)

    monkeypatch.setattr("pipeline.lm.model.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(PipelineError, match=r"does not exist: expected a folder .* or OWNER/NAME of the Hub"):
        load_config(TargetConfig(model=model.format(tmp_path)))


def test_a_file_in_the_place_of_a_target_is_named(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(PipelineError, match=r"model\.gguf' is a file: expected a folder"):
        locate_target(TargetConfig(model=str(tmp_path / "model.gguf")))


def test_the_home_folder_is_found(copied, monkeypatch):
    monkeypatch.setenv("HOME", str(copied.parent))
    assert locate_target(TargetConfig(model="~/target")).name == str(copied)
    assert (
        json.loads((copied / "config.json").read_text())["hidden_size"]
        == load_config(TargetConfig(model="~/target")).hidden_size
    )


def test_a_name_of_the_hub_is_left_to_the_hub():
    assert locate_target(TargetConfig(model="Qwen/Qwen3-8B")).name == "Qwen/Qwen3-8B"
