"""A resume state is the one that was saved, or it is refused by name. (Real ones: test_deepspeed.py,
test_training.py.)
"""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from tests.kit import change_sealed, flip, replace_once
from train.engine import writer
from train.engine.resume import FORMAT, RESUME, files_of_rank, hash_files, read_state, require_intact
from train.engine.writer import StateWriter

NAMES = ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3))]


@pytest.fixture
def state(tmp_path) -> Path:
    """A folder as two ranks left it, one of whom took over a third one's share."""
    folder = tmp_path / "step-0000012"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes(range(10 + number)))
    best = tmp_path / "best-0000008.safetensors"
    best.write_bytes(b"weights")
    files = hash_files(tmp_path, [*files_of_rank(folder, 0, 2), *files_of_rank(folder, 1, 2), best])
    progress = {"best": {"tau": 1.25, "step": 8}, "trained_tokens": 100}
    fields = {"tag": folder.name, "step": 12, "ranks": 2, "train_hash": "0" * 16, "progress": progress, "files": files}
    write_sealed(tmp_path / RESUME, {"format": FORMAT, **fields})
    return tmp_path


def alone(monkeypatch, rank: int = 0, size: int = 1) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_SIZE", str(size))


def test_every_file_is_listed_once_by_the_rank_that_wrote_it(state):
    files = read_state(state)["files"]
    assert set(files) == {*(f"step-0000012/{name}" for name in NAMES), "best-0000008.safetensors"}
    shares = [{path.name for path in files_of_rank(state / "step-0000012", rank, 2)} for rank in range(2)]
    assert shares == [{NAMES[0], NAMES[1], NAMES[3]}, {NAMES[2]}]


@pytest.mark.parametrize("name", [*(f"step-0000012/{name}" for name in NAMES), "best-0000008.safetensors"])
def test_a_flipped_byte_of_any_file_is_refused_by_name(state, monkeypatch, name):
    alone(monkeypatch)
    files = read_state(state)["files"]
    require_intact(state, files)
    flip(state / name)
    reason = "its SHA-256 is not resume.json's: .*to train this draft from the start"
    with pytest.raises(PipelineError, match=f"resume state {state / name}: {reason}"):
        require_intact(state, files)
    (state / name).unlink()
    with pytest.raises(PipelineError, match=f"resume state {state / name}: it is missing"):
        require_intact(state, files)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_ranks_of_a_host_read_every_file_once(state, monkeypatch, size):
    read = []
    monkeypatch.setattr("train.engine.resume.describe_difference", lambda path, *_: read.append(path))
    files = read_state(state)["files"]
    for rank in range(size):
        alone(monkeypatch, rank, size)
        require_intact(state, files)
    assert sorted(read) == sorted(state / name for name in files)


@pytest.mark.parametrize(("old", "new"), [('"step": 12', '"step": 2'), ('"tau": 1.25', '"tau": 9.25'), ("100", "900")])
def test_a_resume_json_that_was_changed_is_refused(state, old, new):
    replace_once(state / RESUME, old, new)
    with pytest.raises(PipelineError, match=r"resume.json was changed or damaged .*to train this draft from the start"):
        read_state(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"tag": "../../elsewhere"},
        {"tag": "step-0000002"},
        {"step": -12, "tag": "step--000012"},
        {"step": True},
        {"ranks": "2"},
        {"progress": []},
        {"files": {"../evil.pt": {}}},
        {"files": {"step-0000012/../../evil.pt": {}}},
        {"files": {"best-0000009.safetensors": {}}},
    ],
    ids=str,
)
def test_a_state_that_names_other_files_than_its_own_is_refused(state, changes):
    change_sealed(state / RESUME, lambda raw: raw.update(changes))
    with pytest.raises(PipelineError, match=r"resume.json: .* is (not what a training writes|no file of this state)"):
        read_state(state)


@pytest.mark.parametrize("change", [lambda raw: raw.pop("format"), lambda raw: raw.update(format=FORMAT + 1)])
def test_a_state_of_another_version_is_refused_before_deepspeed_reads_it(state, change):
    """A state of another format is refused: its parameters may have other names."""
    change_sealed(state / RESUME, change)
    with pytest.raises(
        PipelineError, match=rf"format (None|3), expected 2: it was made by another .*or remove {state} to train"
    ):
        read_state(state)


def test_without_one_there_is_no_state(tmp_path):
    assert read_state(tmp_path) is None


# -- writing while training goes on -----------------------------------------------------------------------------------


@pytest.fixture
def state_writer(state):
    """The writer of one rank, and the weights that it copies; DeepSpeed makes the folder."""
    was_initialized = dist.is_initialized()
    if not was_initialized:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (state / "step-0000014").mkdir()
    yield StateWriter(state, "0" * 16, read_state(state)["files"], torch.device("cpu"))
    if not was_initialized:
        dist.destroy_process_group()


def begin(state_writer: StateWriter, state: Path) -> torch.Tensor:
    """Save step 14, whose best weights are those of step 8, and go on training; better weights come with step 15."""
    weights = torch.zeros(1000)
    state_writer.save({"module": {"weight": weights}, "steps": [14]}, str(state / "step-0000014/model.pt"))
    state_writer.start(14, {"best": {"tau": 1.25, "step": 8}})
    (state / "best-0000007.safetensors").write_bytes(b"older")
    (state / "best-0000015.safetensors").write_bytes(b"newer")
    weights += 1
    return weights


def test_a_state_is_written_while_training_goes_on(state_writer, state, monkeypatch):
    """It holds what was there when it was saved, and counts when it is whole; newer weights stay."""
    may_write, write = threading.Event(), torch.save
    monkeypatch.setattr(writer.torch, "save", lambda *arguments: may_write.wait() and write(*arguments))
    begin(state_writer, state)
    state_writer.finish(wait=False)  # returns, although nothing is written
    assert read_state(state)["step"] == 12 and not (state / "step-0000014/model.pt").exists()
    may_write.set()
    state_writer.finish()
    assert read_state(state)["step"] == 14 and not (state / "step-0000012").exists()
    require_intact(state, read_state(state)["files"])
    assert set(read_state(state)["files"]) == {"step-0000014/model.pt", "best-0000008.safetensors"}
    loaded = torch.load(state / "step-0000014/model.pt", weights_only=True)
    assert not loaded["module"]["weight"].any() and loaded["steps"] == [14]
    assert sorted(path.name[5:12] for path in state.glob("best-*")) == ["0000008", "0000015"]


def test_a_state_that_cannot_be_written_is_an_error_and_the_one_before_it_is_kept(state_writer, state, monkeypatch):
    def refuse(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(writer.torch, "save", refuse)
    begin(state_writer, state)
    with pytest.raises(PipelineError, match=r"state of step 14 cannot be written to .*: No space left .* is kept"):
        state_writer.finish()
    require_intact(state, read_state(state)["files"])
    assert read_state(state)["step"] == 12 and (state / "best-0000007.safetensors").exists()
    state_writer.finish()  # none is in flight any more
