"""A pool of Ray actors that work on tasks: of the dump, of regeneration and of evaluation. The only file that imports
Ray; only drivers of Ray jobs import it. It imports no torch, so that the actor with the heartbeats starts at once.

Terms: a worker is an actor that loads a target with its first task; a task is what one call of a worker does; its items
are what it names in its heartbeats.

Guarantees: every task is finished, or the job ends with an error. A worker that dies, raises an exception, or gives no
heartbeat for `hang_seconds` is replaced, until too many fail in a row. Failures while loading are counted apart, since
the last worker that loaded: tasks that others finish do not reset that count. The next free worker takes the task of
one that failed, as `retry` returns it, or unchanged if the worker was still loading. (Ray's own `max_task_retries`
would keep a task at its actor, which may wait for room for ever.) A worker may wait for room on the cluster as long as
another one has some. A crew that works `all_at_once` does not go on with fewer workers: an exception while loading, or
a worker without room for `hang_seconds`, ends the job. Workers hand back small records, never tensors.
"""

import json
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, python_path
from pipeline.basics.public import public_text
from pipeline.running.cluster import ADDRESS, private_folder, ray_address, require_cluster
from pipeline.running.cores import require_few, workers_as_everyone
from pipeline.running.crew import (
    NO_GPUS,
    NOT_YET,
    PASSED_ON,
    Crew,
    Heartbeat,
    RetryPolicy,
    Task,
    Watch,
    Worker,
    WorkerFailure,
    room_for,
)
from pipeline.running.entry import kept_handlers

LOOK_SECONDS = 1.0  # between two looks at the heartbeats
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what a Ray job was submitted with, in the environment of its driver
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOADING, NAMED = "loading the target", 3  # so many tasks in work are named
LOADS = 3  # of a crew that works all at once: so many failures while loading end the job
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """A worker's last heartbeat."""

    count: int = 0  # of all so far
    doing: str = LOADING  # or the title of its task
    items: tuple[str, ...] = ()
    done: int = 0  # of that task


class Heartbeats:
    """The workers' signs of life, kept beside the driver: what a worker was busy with is known after it is gone."""

    def __init__(self):
        self._beats: dict[int, Beat] = {}

    def beat(self, number: int, *last: Any) -> None:
        self._beats[number] = Beat(self._beats.get(number, Beat()).count + 1, *last)

    def read(self) -> dict[int, Beat]:
        """By worker."""
        return self._beats


class WorkerActor:
    """What Ray runs: a worker whose heartbeats arrive before it does what they announce."""

    def __init__(self, make: Callable[[Heartbeat], Worker], number: int, heartbeats: Any):
        self._make, self._doing = make, LOADING
        self._worker: Worker | None = None
        self._heartbeat = lambda items, done=0: ray.get(heartbeats.beat.remote(number, self._doing, items, done))

    def work(self, task: Any) -> Any:
        if self._worker is None:
            self._heartbeat(())
            (worker := self._make(self._heartbeat)).ready()
            self._worker = worker
        self._doing = task.title
        self._heartbeat(())
        return self._worker.work(task)


@dataclass
class _Member:
    """An actor and its task."""

    number: int
    actor: Any
    reference: Any  # that answers when it has its room, or has done its task; None: it is free
    since: float  # when its last heartbeat was new, or it was spawned or given its task
    task: Task | None = None
    beat: Beat = Beat()


class Pool:
    """Iterate over `results(tasks)`: Ray starts with the first task and is shut down after the last."""

    def __init__(
        self,
        crew: Crew,
        make: Callable[[Heartbeat], Worker],
        retry: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ):
        require_cluster()  # before what takes long
        self._crew, self._make, self._retry, self._clock = crew, make, retry, clock
        self._heartbeats: Any = None
        self._gpus = 0.0  # of a worker; known when Ray's nodes are
        self._spawned = 0
        self._has_loaded = False  # any worker
        self._failures = self._failed_loads = 0  # since the last finished task; while loading, since one last loaded
        self._members: list[_Member] = []
        self._again: deque[Task] = deque()  # tasks whose worker failed

    def results(self, tasks: Iterator[Task], watch: Watch = lambda done, doing: None) -> Iterator[tuple[Any, Any]]:
        """(task, record) as they are finished, in any order. A source that yields NOT_YET is asked again and again.
        Each look at the workers is told to `watch`. Raises PipelineError; finished tasks stay finished.
        """
        task = next((task for task in tasks if task is not NOT_YET), None)
        if task is None:
            return
        watch(0, "starting Ray")
        with start_ray(self._crew):
            try:
                yield from self._results(task, tasks, watch)
            except RayError as error:
                raise PipelineError(
                    f"Ray failed: {_first_line(error)} Run the command again to continue: what is finished is kept"
                ) from None

    def _results(self, task: Task | None, tasks: Iterator[Task], watch: Watch) -> Iterator[tuple[Any, Any]]:
        """`task` is the next one, ready for the worker that is free first."""
        self._gpus = room_for(self._crew, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        beside: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
        self._heartbeats = ray.remote(**beside)(Heartbeats).remote()
        self._members = [self._spawn() for _ in range(self._crew.workers)]
        while task is not None or any(member.task for member in self._members):
            for member in self._members:
                if task not in (None, NOT_YET) and member.reference is None:
                    member.task, member.reference = task, member.actor.work.remote(task)
                    member.since, task = self._clock(), self._next(tasks)
            yield from self._collect()
            self._look_for_hangs(watch)
            task = self._next(tasks) if task in (None, NOT_YET) else task
        if waiting := sum(member.reference is not None for member in self._members):
            log.warning("%d of %d workers never had room", waiting, len(self._members))

    def _next(self, tasks: Iterator[Task]) -> Task | None:
        return self._again.popleft() if self._again else next(tasks, None)

    def _spawn(self) -> _Member:
        self._spawned += 1
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        if not self._gpus:  # Ray hides the other workers' GPUs only from one that takes some
            variables |= NO_GPUS
        options: dict[str, Any] = {"num_cpus": self._crew.cpus, "num_gpus": self._gpus}
        remote = ray.remote(runtime_env={"env_vars": variables}, **options)(WorkerActor)
        actor: Any = remote.remote(self._make, self._spawned, self._heartbeats)
        return _Member(self._spawned, actor, actor.__ray_ready__.remote(), self._clock())

    def _collect(self) -> Iterator[tuple[Any, Any]]:
        """Everything that has finished, or failed, by now; waits one look for something."""
        members = {member.reference: member for member in self._members if member.reference is not None}
        if members:
            ray.wait(list(members), timeout=LOOK_SECONDS)
            # All that is ready: what is finished but waits to be collected would seem to hang.
            for reference in ray.wait(list(members), num_returns=len(members), timeout=0)[0]:
                yield from self._answer(members[reference])

    def _answer(self, member: _Member) -> Iterator[tuple[Any, Any]]:
        try:
            record = ray.get(member.reference)
        except RayTaskError as error:
            self._read_heartbeats()
            cause, loading = error.cause, member.beat.doing == LOADING
            reason, for_user = f"{type(cause).__name__}: {_first_line(cause)}", isinstance(cause, PipelineError)
            if (for_user and not (loading and self._has_loaded)) or (loading and self._crew.all_at_once):
                raise PipelineError(f"{member.beat.doing}: {cause if for_user else reason}") from None
            self._replace(member, reason, cause)
        except (RayActorError, OutOfMemoryError) as error:
            self._replace(member, _first_line(error))
        else:
            task, member.task, member.reference = member.task, None, None
            if task is not None:
                self._failures = 0
                yield task, record

    def _read_heartbeats(self) -> None:
        beats: dict[int, Beat] = ray.get(self._heartbeats.read.remote())
        for member in self._members:
            beat = beats.get(member.number, member.beat)
            if beat.count != member.beat.count:
                member.since = self._clock()
            if member.beat.doing == LOADING != beat.doing:
                self._has_loaded, self._failed_loads = True, 0
            member.beat = beat

    def _look_for_hangs(self, watch: Watch) -> None:
        self._read_heartbeats()
        now, patience = self._clock(), self._crew.hang_seconds
        key = "features.hang_seconds"
        names, done = dict[str, None](), 0
        for member in self._members:
            if member.task is not None:
                names[member.beat.doing] = None
                done += member.beat.done if member.beat.doing == member.task.title else 0
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        watch(done, ", ".join(list(names)[:NAMED]) + more or "waiting for work")
        late = [member for member in self._members if member.reference is not None and now - member.since > patience]
        roomless = [member for member in late if member.task is None]
        if roomless and (self._crew.all_at_once or len(roomless) == len(self._members)):
            raise PipelineError(
                f"{len(roomless)} of {len(self._members)} workers did not start within {key}={patience}. Make room on "
                f"the cluster for {self._crew.cpus} CPUs and {self._gpus:g} GPUs each, or lower "
                f"{self._crew.section}.workers"
            )
        for member in late:
            if member.task is not None:
                self._replace(member, f"it gave no sign of life for {patience} s ({key})")

    def _replace(self, member: _Member, reason: str, exception: BaseException | None = None) -> None:
        """Replace a worker that died, hung or raised an exception; its task is tried again."""
        ray.kill(member.actor)  # one that only seemed dead must not go on writing
        self._read_heartbeats()
        beat, loading = member.beat, member.beat.doing == LOADING
        log.warning("a worker failed (%s): %s", beat.doing, reason)
        self._failures += 1
        self._failed_loads += loading
        self._require_few_failures(beat.doing, reason.rstrip("."))
        if member.task is not None:
            items = beat.items if beat.doing == member.task.title else ()
            failure = WorkerFailure(items, reason, exception)
            self._again.append(member.task if loading else self._retry(member.task, failure))
        self._members[self._members.index(member)] = self._spawn()

    def _require_few_failures(self, doing: str, reason: str) -> None:
        """Raise PipelineError after too many; the arguments are of the last one."""
        workers = self._crew.workers
        if self._failed_loads >= (LOADS if self._crew.all_at_once else 3 * workers + 1):
            failed = f"{self._failed_loads} workers failed while {LOADING}, the last one"
        elif self._failures > 3 * workers + 10:
            failed = f"{self._failures} workers failed in a row, the last one ({doing})"
        else:
            return
        raise PipelineError(
            f"{failed} because: {reason}. What is finished is kept: look at the nodes (memory, GPUs, disks), "
            "raise features.hang_seconds where loading takes longer, and run the command again to continue"
        )


def _first_line(error: BaseException) -> str:
    """Of a library's message, without what it tells of signed addresses."""
    return public_text(next(iter(str(error).splitlines()), "no message"))


# -- the cluster ---------------------------------------------------------------------------------------------------


def _brings_code() -> bool:
    """Whether this is a Ray job that was submitted with a copy of the code, or says itself where it is."""
    told = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    copied = "working_dir" in told and ROOT.is_relative_to(Path.cwd())
    return copied or "PYTHONPATH" in (told.get("env_vars") or {})


@contextmanager
def start_ray(crew: Crew) -> Iterator[None]:
    """Joins the cluster that RAY_ADDRESS names, as a job on it does, else starts Ray on this machine with all of its
    GPUs, behind a token and with files that this user alone reaches. Where the job brings no code, all nodes have it
    where it is here. Leaves it at the end.
    """
    here = {"env_vars": {"PYTHONPATH": python_path(os.environ)}}
    with ExitStack() as stack:
        if ray_address():
            settings: dict[str, Any] = {"runtime_env": {} if _brings_code() else here}
        else:
            require_few(f"{crew.section}.workers", crew.workers)
            workers_as_everyone()
            if not any(map(os.environ.get, TOKENS)):  # Ray would read or make a file, which others may read
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            settings = {
                "address": "local",
                "_node_ip_address": "127.0.0.1",  # this version binds to all addresses all the same, behind a token
                "_temp_dir": stack.enter_context(private_folder()),
                "num_cpus": max(crew.workers * crew.cpus, 1),
                "include_dashboard": False,
                "log_to_driver": False,
                "runtime_env": here,
            }
        stack.callback(ray.shutdown)
        _init(settings)
        yield


def _init(settings: dict[str, Any]) -> None:
    """Joins or starts Ray. Raises PipelineError where that fails, or takes longer than Ray waits for it."""
    try:
        with kept_handlers():
            ray.init(logging_level=logging.WARNING, **settings)
    except Exception as error:  # a late start is a bare one
        what = f"joined ({ADDRESS}={ray_address()!r})" if ray_address() else "started on this machine"
        remedy = (
            f"Its head has to run Ray {ray.__version__} with this Python"
            if ray_address()
            else "Is the machine overloaded, or short of memory or of /dev/shm? jakiro doctor says"
        )
        raise PipelineError(
            f"Ray could not be {what}: {type(error).__name__}: {_first_line(error)} {remedy}. Run the command again to "
            "continue: what is finished is kept"
        ) from None
