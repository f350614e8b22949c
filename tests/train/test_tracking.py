"""metrics.jsonl is the record; trackers get the same numbers, and no private path."""

import json
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.artifacts.curves import read_metrics
from pipeline.basics.errors import PipelineError
from train.tracking import Metrics, open_tracker


class Recorded(types.ModuleType):
    """A stand-in for a tracker's package, which records its calls."""

    def __init__(self, name: str, runs=()):
        super().__init__(name)
        self.calls, self._runs = [], list(runs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **named):
            self.calls.append((name, arguments, named))
            return self._runs if name == "search_runs" else self

        return call


def tracked(recipe, kind: str):
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"tracker": kind})})


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_a_tracker_sees_what_metrics_jsonl_holds(tiny_recipe, tmp_path, monkeypatch, kind):
    package = Recorded(kind)
    monkeypatch.setitem(sys.modules, kind, package)
    recipe = tracked(tiny_recipe, kind)
    with Metrics(tmp_path, 0, open_tracker(recipe, "jakiro", tmp_path)) as metrics:
        metrics.write("train", 3, {"loss": 0.5, "trained_tokens": 70})
        metrics.write("left_out", 3, {"what": ["the stored features of dialogue x"]})
    logged = [(arguments, named) for name, arguments, named in package.calls if name in ("log", "log_metrics")]
    assert logged[0][0] == ({"train/loss": 0.5, "train/trained_tokens": 70},) and logged[0][1]["step"] == 3
    assert package.calls[-1][0] in ("finish", "end_run")
    calls_text = repr([call for call in package.calls if call[0] != "init"] + [
        {k: v for k, v in named.items() if k != "dir"} for name, _, named in package.calls if name == "init"
    ])  # fmt: skip
    assert str(tmp_path) not in calls_text and "tiny-jakiro" in calls_text
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"kind": "train", "step": 3, "loss": 0.5, "trained_tokens": 70}
    assert lines[1]["what"] == ["the stored features of dialogue x"]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(3, 0.5)]


def test_a_resumed_training_goes_on_in_the_same_run(tiny_recipe, tmp_path, monkeypatch):
    ids = []
    for _ in range(2):
        package = Recorded("wandb")
        monkeypatch.setitem(sys.modules, "wandb", package)
        open_tracker(tracked(tiny_recipe, "wandb"), "jakiro", tmp_path)
        (init_arguments,) = [named for name, _, named in package.calls if name == "init"]
        ids.append(init_arguments["id"])
    assert ids[0] == ids[1]
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    package = Recorded("mlflow", [run])
    monkeypatch.setitem(sys.modules, "mlflow", package)
    open_tracker(tracked(tiny_recipe, "mlflow"), "jakiro", tmp_path)
    assert ("start_run", (), {"run_id": "abc"}) in package.calls


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("wandb", ("finish", (), {"exit_code": 1})),
        ("trackio", ("finish", (), {})),
        ("mlflow", ("end_run", ("FAILED",), {})),
    ],
)
def test_a_tracker_is_told_when_an_error_ended_the_training(tiny_recipe, tmp_path, monkeypatch, kind, status):
    package = Recorded(kind)
    monkeypatch.setitem(sys.modules, kind, package)
    with (
        pytest.raises(PipelineError),
        Metrics(tmp_path, 0, open_tracker(tracked(tiny_recipe, kind), "jakiro", tmp_path)),
    ):
        raise PipelineError("no room")
    assert package.calls[-1] == status


def test_a_missing_package_is_named(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PipelineError, match=r"train.tracker='wandb' cannot be used .*: pip install wandb"):
        open_tracker(tracked(tiny_recipe, "wandb"), "jakiro", tmp_path)


def test_lines_beyond_the_resumed_step_and_what_cannot_be_read_are_dropped_by_training(tmp_path):
    """Drawing the curves refuses lines that cannot be read."""
    path, good = tmp_path / "metrics.jsonl", b'{"kind": "train", "step": 2}'
    for bad in (b'{"kind": "\xff"}', b"[" * 2000, b"[]", b'{"kind": "tr'):
        path.write_bytes(good + b"\n" + bad + b"\n" + good.replace(b"2", b"3") + b"\n")
        with pytest.raises(PipelineError, match=r"metrics\.jsonl, line 2 is (not|a) JSON"):
            read_metrics(path)
        with Metrics(tmp_path, 2, None):
            pass
        assert path.read_bytes() == good + b"\n"
