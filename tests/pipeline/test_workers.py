"""Workers that die, hang, raise, or cannot load. Real Ray, real kills."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.running import cluster
from pipeline.running.cluster import private_folder
from pipeline.running.crew import PASSED_ON, Crew, Heartbeat, Loss
from pipeline.running.workers import Pool, start_ray
from tests.warm import PATIENCE, ROOT  # not of tests.kit: workers import this module

CREW = Crew(section="features", workers=2, cpus=1, gpus=None, device="cpu", hang_seconds=PATIENCE)


@dataclass(frozen=True)
class Task:
    title: str


class Faulty:
    """Fails on each task the first time, in the way that the task's title names; says "done" the second time. Or says
    what its environment says of the title.
    """

    def __init__(self, folder: Path, heartbeat: Heartbeat):
        self._folder, self._heartbeat = folder, heartbeat

    def ready(self) -> None:
        if (self._folder / "cannot load").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (self._folder / "is refused").exists():
            raise PipelineError("the target cannot be loaded")

    def work(self, task: Task) -> str:
        self._heartbeat((f"an item of {task.title}",))
        mark = self._folder / task.title
        if not mark.exists():
            mark.touch()
            while task.title == "slow" and not (self._folder / "noticed").exists():
                self._heartbeat(())
                time.sleep(0.1)
            if task.title == "hangs":
                time.sleep(PATIENCE)
            if task.title == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if task.title == "raises":
                raise ValueError("oh\nno")
            if task.title == "is refused":
                raise PipelineError("nothing helps")
        return os.environ.get(task.title, "done")


@dataclass
class Losses:
    folder: Path
    seen: list[tuple[str, Loss]] = field(default_factory=list)

    def retry(self, task: Task, loss: Loss) -> Task:
        self.seen.append((task.title, loss))
        if task.title == "hangs":
            (self.folder / "noticed").touch()
        return task


class Hasty(Pool):
    """While a worker hangs and nobody noticed, each look at the heartbeats comes most of `hang_seconds` after the last.
    Nobody waits, and no patience depends on how fast the machine is.
    """

    def __init__(self, folder: Path, crew: Crew, make: Callable = Faulty):
        self.losses, self._folder, self._ahead = Losses(folder), folder, 0.0
        super().__init__(crew, partial(make, folder), self.losses, clock=lambda: time.monotonic() + self._ahead)

    def _look_for_hangs(self) -> None:
        super()._look_for_hangs()
        if (self._folder / "hangs").exists() and not (self._folder / "noticed").exists():
            self._ahead += 0.7 * PATIENCE


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_every_task_is_done_once_whoever_dies_hangs_or_raises(tmp_path):
    """The slow worker, which gives heartbeats, is left alone while the other hangs."""
    crew = replace(CREW, tasks_each=1)  # what hangs must not wait behind what is slow
    pool, titles = Hasty(tmp_path, crew), ["slow", "hangs", "dies", "raises", "is sound"]
    found = list(pool.results(iter(map(Task, titles))))
    assert sorted(task.title for task, _ in found) == sorted(titles) and {record for _, record in found} == {"done"}
    lost = dict(pool.losses.seen)
    assert len(pool.losses.seen) == 3 and lost.keys() == {"hangs", "dies", "raises"}
    assert all(loss.busy == (f"an item of {title}",) for title, loss in lost.items())
    assert "no sign of life" in lost["hangs"].why and lost["raises"].why == "ValueError: oh"
    assert [title for title, loss in lost.items() if loss.raised] == ["raises"]


class Counting:
    """Says how much of its task is done, and goes on when that was seen."""

    def __init__(self, folder: Path, heartbeat: Heartbeat):
        self._folder, self._heartbeat = folder, heartbeat

    def ready(self) -> None:
        pass

    def work(self, task: Task) -> str:
        for done in (7, 11):
            self._heartbeat(("an item",), done)
            end = time.monotonic() + PATIENCE
            while not (self._folder / f"seen {done} of {task.title}").exists() and time.monotonic() < end:
                time.sleep(0.05)
        return "done"


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_what_is_done_of_a_task_is_seen_while_a_worker_is_at_it(tmp_path):
    seen = []

    def watch(done: int, doing: str) -> None:
        seen.append((done, doing))
        (tmp_path / f"seen {done} of {doing}").touch()

    pool = Hasty(tmp_path, replace(CREW, workers=1), Counting)
    assert [record for _, record in pool.results(iter([Task("one"), Task("two")]), watch)] == ["done", "done"]
    assert seen[0] == (0, "starting Ray") and (0, "loading the target") in seen
    assert {(done, title) for title in ("one", "two") for done in (7, 11)} <= set(seen)


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_an_error_for_the_user_ends_the_job(tmp_path):
    with pytest.raises(PipelineError, match=r"^is refused: nothing helps$"):
        list(Hasty(tmp_path, CREW).results(iter([Task("is refused")])))
    with pytest.raises(PipelineError, match=r"^loading the target: the target cannot be loaded$"):
        list(Hasty(tmp_path, CREW).results(iter([Task("is sound")])))  # the mark of the other has every worker refuse


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_what_the_drivers_environment_says_of_engines_reaches_a_clusters_workers(tmp_path, monkeypatch):
    """The cluster was started without it."""
    (name,), tasks = PASSED_ON, iter([Task(PASSED_ON[0])])
    monkeypatch.setenv(name, "1")
    assert [said for _, said in Hasty(tmp_path, replace(CREW, workers=1)).results(tasks)] == ["1"]


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


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_workers_that_die_while_they_load_are_given_up(tmp_path):
    (tmp_path / "cannot load").touch()
    with pytest.raises(PipelineError, match="4 workers were lost in a row"):
        list(Hasty(tmp_path, replace(CREW, workers=1)).results(iter([Task("is sound")])))


class Clumsy:
    """The first one loads. Of the others, every one "raises" or "hangs", or only the next "hangs once"."""

    def __init__(self, folder: Path, heartbeat: Heartbeat, how: str):
        self._folder, self._heartbeat, self._how = folder, heartbeat, how

    def ready(self) -> None:
        for number in count():
            with suppress(FileExistsError):
                (self._folder / f"load-{number}").touch(exist_ok=False)
                break
        if number and self._how == "raises":
            raise ValueError("no https://host/x?sig=hunter2\nat all")
        if number == 1 or (number and self._how == "hangs"):
            time.sleep(PATIENCE)
        if number:
            (self._folder / "noticed").touch()

    def work(self, task: Task) -> str:
        end = time.monotonic() + PATIENCE
        if self._how != "raises":
            (self._folder / "hangs").touch()
            while not (self._folder / "noticed").exists() and time.monotonic() < end:
                self._heartbeat(())
                time.sleep(0.1)
        time.sleep(0.1)
        return "done"


def clumsy(folder: Path, how: str, all_at_once: bool) -> list[str]:
    """The records, of tasks that go on being finished while a worker cannot load."""

    def tasks() -> Iterator[Task]:
        yield Task("first")
        while how == "raises" and len(list(folder.glob("load-*"))) < 12:
            yield Task("next")

    crew = replace(CREW, tasks_each=1, all_at_once=all_at_once)
    return [record for _, record in Hasty(folder, crew, partial(Clumsy, how=how)).results(tasks())]


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
@pytest.mark.parametrize(
    ("how", "all_at_once", "message"),
    [
        ("raises", True, r"^loading the target: ValueError: no https://host/x$"),
        ("hangs", True, r"^3 workers were lost in a row while they loaded .* no sign of life"),
        ("raises", False, r"^7 workers were lost in a row while they loaded .* ValueError: no https://host/x What"),
    ],
)
def test_workers_that_cannot_load_end_the_job_though_another_works(tmp_path, caplog, how, all_at_once, message):
    with pytest.raises(PipelineError, match=message):
        clumsy(tmp_path, how, all_at_once)
    assert "hunter2" not in caplog.text


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_a_worker_that_hangs_while_it_loads_is_replaced_though_another_works(tmp_path):
    assert clumsy(tmp_path, "hangs once", all_at_once=False) == ["done"]
    assert (tmp_path / "load-2").exists()


@pytest.mark.real
@pytest.mark.usefixtures("on_cluster")
def test_a_worker_alone_that_hangs_is_replaced(tmp_path):
    """None is ready while the next one loads."""
    tasks = iter([Task("hangs"), Task("is sound")])
    assert [record for _, record in Hasty(tmp_path, replace(CREW, workers=1)).results(tasks)] == ["done", "done"]


def test_the_pool_starts_without_what_takes_long_to_import():
    told = "import sys, pipeline.running.workers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], cwd=ROOT, check=False).returncode == 0


def test_without_a_task_nothing_is_started():
    assert list(Pool(CREW, None, None).results(iter([]))) == []


def test_nothing_in_flight_is_nothing_to_wait_for():
    """The last look may bring every result before the source is known to have no more."""
    assert list(Pool(CREW, None, None)._collect()) == []
