"""Workers that die, hang, raise, or cannot load. Real Ray, real kills."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.running import cluster
from pipeline.running.cluster import private_folder
from pipeline.running.crew import NOT_YET, PASSED_ON, Crew, Heartbeat, Watch
from pipeline.running.workers import LOADING, Pool, start_ray
from tests.warm import PATIENCE, ROOT  # not of tests.kit: workers import this module

CREW = Crew(section="features", workers=2, cpus=1, gpus=None, device="cpu", hang_seconds=PATIENCE)
LOADS = ("hangs loading", "dies loading", "raises loading", "is refused loading")


@dataclass(frozen=True)
class Task:
    title: str


class Faulty:
    """Fails on each task the first time, in the way that its title names; then says what its environment says of the
    title, else "done". Where a file is called as one of LOADS, whoever loads second fails so, and removes it.
    """

    def __init__(self, folder: Path, heartbeat: Heartbeat):
        self._folder, self._heartbeat = folder, heartbeat

    def ready(self) -> None:
        loaded = self._folder / "loaded"
        while (self._folder / "seen 0, starting Ray").exists() and not (self._folder / f"seen 0, {LOADING}").exists():
            time.sleep(0.05)
        for fault in LOADS if loaded.exists() else ():
            if (self._folder / fault).exists():
                (self._folder / fault).unlink()
                self._fail(fault)
        loaded.touch()

    def work(self, task: Task) -> str:
        self._heartbeat((f"an item of {task.title}",))
        mark = self._folder / task.title
        if not mark.exists():
            mark.touch()
            self._fail(task.title)
        return os.environ.get(task.title, "done")

    def _fail(self, how: str) -> None:
        there = lambda *names: any((self._folder / name).exists() for name in names)  # noqa: E731
        while how == "slow" and (there(*LOADS) or not there("noticed")):
            self._heartbeat(())
            time.sleep(0.1)
        if how == "counts":
            for done in (7, 11):
                self._heartbeat(("an item",), done)
                while not there(f"seen {done}, counts"):
                    time.sleep(0.05)
        if how.startswith("hangs"):
            (self._folder / "hanging").touch()
            time.sleep(PATIENCE)
        if how.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("raises"):
            raise ValueError("no https://host/x?sig=hunter2\nat all")
        if how.startswith("is refused"):
            raise PipelineError("nothing helps")


class Hopeless(Faulty):
    def ready(self) -> None:
        self._fail("dies")


class Refused(Faulty):
    def ready(self) -> None:
        self._fail("is refused")


class Hasty(Pool):
    """While one worker hangs and nobody noticed, most of `hang_seconds` passes with each sign of life of the other.
    Nobody waits, and no patience depends on how fast the machine is.
    """

    def __init__(self, folder: Path, make: Callable = Faulty, **crew: float):
        self.lost: list[tuple[str, tuple[str, ...], str]] = []
        self._folder, self._ahead, self._seen = folder, 0.0, [0]
        clock = lambda: time.monotonic() + self._ahead  # noqa: E731
        super().__init__(replace(CREW, **crew), partial(make, folder), self._lost, clock)

    def _lost(self, task: Task, busy: tuple[str, ...], why: str) -> Task:
        self.lost.append((task.title, busy, why))
        if "no sign of life" in why:
            (self._folder / "noticed").touch()
        return task

    def _look_for_hangs(self, watch: Watch) -> None:
        super()._look_for_hangs(watch)
        beats = [member.beats for member in self._members]
        if (self._folder / "hanging").exists() and not (self._folder / "noticed").exists() and beats != self._seen:
            self._seen = beats
            self._ahead += 0.7 * PATIENCE

    def records(self, *titles: str, watch: Watch = lambda done, doing: None) -> dict[str, str]:
        """By title. The second worker is given a task, and loads, when the first works."""

        def tasks() -> Iterator[Task]:
            yield Task(titles[0])
            while titles[1:] and not (self._folder / titles[0]).exists():
                yield NOT_YET
            yield from map(Task, titles[1:])

        pairs = [(task.title, record) for task, record in self.results(tasks(), watch)]
        assert len(pairs) == len(titles)
        return dict(pairs)


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_every_task_is_done_once_whoever_dies_hangs_or_raises(tmp_path, monkeypatch, caplog):
    """The slow worker, which gives heartbeats, is left alone while the other hangs. What is done of a task is seen
    while a worker is at it. The cluster was started without what the driver's environment says of engines; Ray itself
    hides GPUs only from workers that take some.
    """
    monkeypatch.setenv(PASSED_ON[0], "1")
    pool = Hasty(tmp_path)

    def watch(done: int, doing: str) -> None:
        (tmp_path / f"seen {done}, {doing}").touch()

    faults, hidden = ("hangs", "dies", "raises"), dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    variables = {PASSED_ON[0]: "1"} | hidden
    records = pool.records("slow", *faults, "counts", "is sound", *variables, watch=watch)
    assert records == dict.fromkeys(["slow", *faults, "counts", "is sound"], "done") | variables
    why = {title: why for title, busy, why in pool.lost if busy == (f"an item of {title}",)}
    assert why.keys() == set(faults) and len(pool.lost) == 3
    assert "no sign of life" in why["hangs"] and why["raises"] == "ValueError: no https://host/x"
    assert "hunter2" not in caplog.text


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_a_worker_that_cannot_load_is_replaced_while_another_works_and_blames_no_item(tmp_path, caplog):
    for fault in LOADS:
        (tmp_path / fault).touch()
    pool = Hasty(tmp_path)
    assert pool.records("slow", "is sound") == {"slow": "done", "is sound": "done"}
    assert [(title, busy) for title, busy, _ in pool.lost] == [("is sound", ())] * len(LOADS)
    assert caplog.text.count("a worker was lost (loading the target): ") == len(LOADS)


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("make", "gpus", "message"),
    [
        (Faulty, 0, r"^is refused: nothing helps$"),
        (Refused, 0, r"^loading the target: nothing helps$"),
        (Hopeless, 0, r"^4 workers were lost in a row, the last one \(loading the target\) because: "),
        (Faulty, 1, r"^features.workers=1 want 1 CPUs and 1 GPUs each, but the nodes have .*, and room for 0"),
    ],
)
def test_an_error_for_the_user_too_many_losses_or_no_room_end_the_job(tmp_path, make, gpus, message):
    with pytest.raises(PipelineError, match=message):
        Hasty(tmp_path, make, workers=1, gpus=gpus).records("is refused")


def test_a_ray_that_the_job_starts_keeps_the_users_python_path(monkeypatch):
    given: dict = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setattr("pipeline.running.workers.ray.init", lambda **settings: given.update(settings))
    with start_ray(CREW):
        pass
    assert given["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "theirs"]


def test_rays_folder_lies_in_one_that_no_other_user_may_enter_and_is_removed(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        with pytest.raises(ValueError, match="of the job"), private_folder() as folder:
            Path(folder).mkdir()
            Path(folder).chmod(0o777)  # as Ray does
            assert Path(folder).parent.parent == Path(short) and Path(folder).parent.stat().st_mode & 0o777 == 0o700
            raise ValueError("of the job")
        assert not list(Path(short).iterdir())


def test_a_place_too_long_for_rays_sockets_is_passed_over_and_none_is_an_error(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 40)
    long.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder:
        assert folder.startswith("/tmp/ray-") and Path(folder).parent.stat().st_mode & 0o777 == 0o700
        assert len(folder) - len("/ray-12345678/r") + len(cluster.RAYS_SOCKET) <= 107
    monkeypatch.setattr(cluster, "SHORT", str(tmp_path / "none"))
    with pytest.raises(PipelineError, match=r"no place for its sockets: got .*, expected .* Name one in RAY_TMPDIR"):
        private_folder().__enter__()
    with pytest.raises(PipelineError, match="no place for its sockets"):
        Pool(CREW, None, None)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:{port}", r"RAY_ADDRESS='127.0.0.1:\d+': no Ray answers at 127.0.0.1:\d+ \(Connection refused\)"),
        ("ray://127.0.0.1:{port}", r"no Ray answers at 127.0.0.1:\d+"),
        ("auto", r"RAY_ADDRESS='auto': no Ray answers at 127.0.0.1:\d+ .*unset RAY_ADDRESS: then Ray is started"),
        ("somewhere", r"RAY_ADDRESS='somewhere': expected HOST:PORT of Ray's head, or 'auto'"),
        ("host:port", "expected HOST:PORT"),
        ("http://127.0.0.1:8265", "expected HOST:PORT"),
    ],
)
def test_a_head_that_is_gone_is_told_before_anything_begins(tmp_path, monkeypatch, address, message):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.socket() as silent:  # it is nobody else's, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.1:{port}")  # as a cluster that crashed leaves it
        monkeypatch.setenv("RAY_ADDRESS", address.format(port=port))
        with pytest.raises(PipelineError, match=message):
            Pool(CREW, None, None)


def test_a_head_that_answers_and_an_empty_address_are_no_fault(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        Pool(CREW, None, None)
    monkeypatch.setenv("RAY_ADDRESS", "")
    Pool(CREW, None, None)


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"], ids=["started", "joined"])
def test_a_ray_that_does_not_start_in_time_is_one_error(monkeypatch, address):
    def late(**_):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("pipeline.running.workers.ray.init", late)
    how = r"joined \(RAY_ADDRESS=.*\)" if address else "started on this machine"
    message = (
        rf"^Ray could not be {how}: Exception: The current node timed out during startup\. [^\n]*Run the command again"
    )
    with pytest.raises(PipelineError, match=message), start_ray(CREW):
        pass


def test_the_pool_starts_without_what_takes_long_to_import():
    told = "import sys, pipeline.running.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], cwd=ROOT, check=False).returncode == 0


def test_without_a_task_nothing_is_started():
    assert list(Pool(CREW, None, None).results(iter([]))) == []
