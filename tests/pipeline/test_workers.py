"""Workers that die, hang, raise, or cannot load. Real Ray, real kills."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.running import cluster
from pipeline.running.cluster import private_folder
from pipeline.running.crew import FORWARDED_VARIABLES, NO_TASK_YET, Crew, Heartbeat, Watch, WorkerFailure
from pipeline.running.workers import LOADING, WorkerPool, start_ray
from tests.warm import PATIENCE, ROOT  # not of tests.kit: workers import this module

CREW = Crew(section="features", workers=2, cpus=1, gpus=None, device="cpu", hang_seconds=PATIENCE)
LOAD_FAULTS = ("hangs loading", "dies loading", "raises loading", "is refused loading")


@dataclass(frozen=True)
class Task:
    title: str


class FaultyWorker:
    """A worker that fails on each task the first time, with the fault that its title names; then it returns the
    environment variable of that title, else "done". Where a file has the name of one of LOAD_FAULTS, the second worker
    that loads fails so, and removes the file.
    """

    def __init__(self, folder: Path, heartbeat: Heartbeat):
        self._folder, self._heartbeat = folder, heartbeat

    def ready(self) -> None:
        loaded = self._folder / "loaded"
        while (self._folder / "seen 0, starting Ray").exists() and not (self._folder / f"seen 0, {LOADING}").exists():
            time.sleep(0.05)
        for fault in LOAD_FAULTS if loaded.exists() else ():
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

    def _fail(self, fault: str) -> None:
        exists = lambda *names: any((self._folder / name).exists() for name in names)  # noqa: E731
        while fault == "slow" and (exists(*LOAD_FAULTS) or not exists("noticed")):
            self._heartbeat(())
            time.sleep(0.1)
        if fault == "counts":
            for done in (7, 11):
                self._heartbeat(("an item",), done)
                while not exists(f"seen {done}, counts"):
                    time.sleep(0.05)
        if fault.startswith("hangs"):
            (self._folder / "hanging").touch()
            time.sleep(PATIENCE)
        if fault.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.startswith("raises"):
            raise ValueError("no https://host/x?sig=hunter2\nat all")
        if fault.startswith("is refused"):
            raise PipelineError("nothing helps")


class NeverLoads(FaultyWorker):
    def ready(self) -> None:
        self._fail("dies")


class LoadingRefused(FaultyWorker):
    def ready(self) -> None:
        self._fail("is refused")


class FirstLoads(FaultyWorker):
    """A worker that loads the first time; every later one fails with this fault."""

    def __init__(self, folder: Path, heartbeat: Heartbeat, fault: str):
        super().__init__(folder, heartbeat)
        self._fault = fault

    def ready(self) -> None:
        try:
            (self._folder / "loaded").touch(exist_ok=False)
        except FileExistsError:
            self._fail(self._fault)


class EveryThirdLoads(FaultyWorker):
    """A worker that dies in all loads but every third."""

    def ready(self) -> None:
        loads = len(list(self._folder.glob("load-*"))) + 1
        (self._folder / f"load-{loads}").touch()
        self._fail("loads" if loads % 3 == 0 else "dies")


class HastyPool(WorkerPool):
    """A pool whose clock jumps: while one worker hangs unnoticed, most of `hang_seconds` passes with each heartbeat of
    the other. So no test waits, and no limit depends on the machine's speed.
    """

    def __init__(self, folder: Path, make: Callable = FaultyWorker, **crew: float):
        self.failures: list[tuple[str, WorkerFailure]] = []
        self._folder, self._clock_offset, self._last_counts = folder, 0.0, [0]
        clock = lambda: time.monotonic() + self._clock_offset  # noqa: E731
        super().__init__(replace(CREW, **crew), partial(make, folder), self._record, clock)

    def _record(self, task: Task, failure: WorkerFailure) -> Task:
        self.failures.append((task.title, failure))
        return task

    def _check_hangs(self, watch: Watch) -> None:
        spawned = self._spawned
        super()._check_hangs(watch)
        if self._spawned > spawned:
            (self._folder / "noticed").touch()
        beats = [member.beat.count for member in self._members]
        is_hanging = (self._folder / "hanging").exists() and not (self._folder / "noticed").exists()
        if is_hanging and beats != self._last_counts:
            self._last_counts = beats
            self._clock_offset += 0.7 * PATIENCE

    def records(self, *titles: str, watch: Watch = lambda done, doing: None) -> dict[str, str]:
        """Return the records by title. The second worker gets a task, and loads, once the first works."""

        def tasks() -> Iterator[Task]:
            yield Task(titles[0])
            while titles[1:] and not (self._folder / titles[0]).exists():
                yield NO_TASK_YET
            yield from map(Task, titles[1:])

        pairs = [(task.title, record) for task, record in self.results(tasks(), watch)]
        assert len(pairs) == len(titles)
        return dict(pairs)


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_every_task_is_done_once_whoever_dies_hangs_or_raises(tmp_path, monkeypatch, caplog):
    """The slow worker sends heartbeats, so it is not replaced while the other hangs. The finished amount of a task is
    visible while a worker works on it. The cluster was started without the driver's environment variables for engines;
    Ray itself hides GPUs only from workers with GPUs.
    """
    monkeypatch.setenv(FORWARDED_VARIABLES[0], "1")
    pool = HastyPool(tmp_path)

    def watch(done: int, doing: str) -> None:
        (tmp_path / f"seen {done}, {doing}").touch()

    faults = ("hangs", "dies", "raises")
    variables = {FORWARDED_VARIABLES[0]: "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    records = pool.records("slow", *faults, "counts", "is sound", *variables, watch=watch)
    assert records == dict.fromkeys(["slow", *faults, "counts", "is sound"], "done") | variables
    failures = dict(pool.failures)
    assert failures.keys() == set(faults) and len(pool.failures) == 3
    assert all(failure.items == (f"an item of {title}",) for title, failure in pool.failures)
    assert "no heartbeat" in failures["hangs"].reason
    assert failures["raises"].reason == "ValueError: no https://host/x"
    assert {title: type(failure.exception) for title, failure in pool.failures if failure.exception} == {
        "raises": ValueError
    }
    assert "hunter2" not in caplog.text


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_a_worker_that_cannot_load_is_replaced_while_another_works_and_blames_no_task(tmp_path, caplog):
    for fault in LOAD_FAULTS:
        (tmp_path / fault).touch()
    pool = HastyPool(tmp_path)
    assert pool.records("slow", "is sound") == {"slow": "done", "is sound": "done"}
    assert not pool.failures and caplog.text.count("a worker failed (loading the target): ") == len(LOAD_FAULTS)


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("fault", "all_at_once", "message"),
    [
        ("raises", True, r"^loading the target: ValueError: no https://host/x$"),
        ("dies", True, r"^3 workers failed while loading the target, the last one because: "),
        ("raises", False, r"^7 workers failed while loading .* because: ValueError: no https://host/x\. What"),
    ],
)
def test_workers_that_never_load_end_the_job_though_another_one_finishes_tasks(tmp_path, fault, all_at_once, message):
    make, begin = partial(FirstLoads, fault=fault), time.monotonic()
    pool = HastyPool(tmp_path, make, all_at_once=all_at_once)

    def tasks() -> Iterator[Task]:
        while pool._spawned < 12 and time.monotonic() - begin < PATIENCE:
            yield Task("is sound")

    with pytest.raises(PipelineError, match=message):
        list(pool.results(tasks()))


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_failed_loads_count_since_the_last_worker_that_loaded(tmp_path):
    """Three end the job; here two precede the first task, and two the next try."""
    pool = HastyPool(tmp_path, EveryThirdLoads, workers=1, all_at_once=True)
    assert pool.records("dies") == {"dies": "done"} and len(list(tmp_path.glob("load-*"))) == 6


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_worker_without_room_ends_a_job_whose_workers_work_all_at_once(tmp_path, monkeypatch, caplog, all_at_once):
    monkeypatch.setattr("pipeline.running.workers.require_room", lambda crew, nodes: 0.0)  # a worker takes 3 of 4 CPUs
    (tmp_path / "hanging").touch()
    pool = HastyPool(tmp_path, cpus=3, all_at_once=all_at_once)

    def tasks() -> Iterator[Task]:
        while pool._clock_offset < 3 * PATIENCE:
            yield Task("is sound")

    message = rf"^1 of 2 workers did not start within .*={PATIENCE}\. Make room .*workers$"
    with pytest.raises(PipelineError, match=message) if all_at_once else nullcontext():
        list(pool.results(tasks()))
    assert ("1 of 2 workers never had room" in caplog.text) != all_at_once


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("make", "gpus", "message"),
    [
        (FaultyWorker, 0, r"^is refused: nothing helps$"),
        (LoadingRefused, 0, r"^loading the target: nothing helps$"),
        (NeverLoads, 0, r"^4 workers failed while loading the target, the last one because: "),
        (FaultyWorker, 1, r"^features.workers=1 require 1 CPUs and 1 GPUs each, but the nodes have .*, and room for 0"),
    ],
)
def test_an_error_for_the_user_too_many_failures_or_no_room_end_the_job(tmp_path, make, gpus, message):
    with pytest.raises(PipelineError, match=message):
        HastyPool(tmp_path, make, workers=1, gpus=gpus).records("is refused")


def test_a_ray_that_the_job_starts_keeps_the_users_python_path(monkeypatch):
    ray_settings: dict = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setattr("pipeline.running.workers.ray.init", lambda **settings: ray_settings.update(settings))
    with start_ray(CREW):
        pass
    assert ray_settings["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "theirs"]


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
        assert len(folder) - len("/ray-12345678/r") + len(cluster.SOCKET_SUFFIX) <= 107
    monkeypatch.setattr(cluster, "SHORT_FOLDER", str(tmp_path / "none"))
    with pytest.raises(PipelineError, match=r"no place for its sockets: got .*, expected .* Name one in RAY_TMPDIR"):
        private_folder().__enter__()
    with pytest.raises(PipelineError, match="no place for its sockets"):
        WorkerPool(CREW, None, None)


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
    with socket.socket() as silent:  # a reserved port on which nothing listens
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.1:{port}")  # as a cluster that crashed leaves it
        monkeypatch.setenv("RAY_ADDRESS", address.format(port=port))
        with pytest.raises(PipelineError, match=message):
            WorkerPool(CREW, None, None)


def test_a_head_that_answers_and_an_empty_address_are_no_fault(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        WorkerPool(CREW, None, None)
    monkeypatch.setenv("RAY_ADDRESS", "")
    WorkerPool(CREW, None, None)


@pytest.mark.parametrize("address", ["", "127.0.0.1:6379"], ids=["started", "joined"])
def test_a_ray_that_does_not_start_in_time_is_one_error(monkeypatch, address):
    def late(**_):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("pipeline.running.workers.ray.init", late)
    action = r"joined \(RAY_ADDRESS=.*\)" if address else "started on this machine"
    message = (
        rf"^Ray could not be {action}: Exception: The current node timed out during startup\. [^\n]*Run the command"
    )
    with pytest.raises(PipelineError, match=message), start_ray(CREW):
        pass


def test_the_pool_starts_without_what_takes_long_to_import():
    code = "import sys, pipeline.running.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_a_task_nothing_is_started():
    assert list(WorkerPool(CREW, None, None).results(iter([]))) == []
