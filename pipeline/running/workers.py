"""A pool of Ray actors that work on tasks: of the dump, of regeneration and of evaluation. This is the only file that
imports Ray; only drivers of Ray jobs import it. It does not import torch, so that the actor with the heartbeats starts
at once.

Terms: a worker is an actor that loads a target with its first task; a task is the work of one call of a worker; its
items are the names in its heartbeats.

Guarantees: every task is finished, or the job ends with an error. A worker that dies, raises an exception, or sends no
heartbeat for `hang_seconds` is replaced, until too many fail in a row. Failures while loading are counted separately,
since the last worker that loaded: finished tasks of other workers do not reset that count. The next free worker takes
the task of a failed one, as `retry` returns it, or unchanged if the worker was still loading. (Ray's own
`max_task_retries` would keep a task at its actor, which may wait for room for ever.) A worker may wait for room on the
cluster as long as another one has some. A crew that works `all_at_once` does not continue with fewer workers: an
exception while loading, or a worker without room for `hang_seconds`, ends the job. Workers return small records, never
tensors.
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
from pipeline.running.cores import check_process_count, set_worker_niceness
from pipeline.running.crew import (
    FORWARDED_VARIABLES,
    NO_GPUS,
    NO_TASK_YET,
    Crew,
    Heartbeat,
    RetryPolicy,
    Task,
    Watch,
    Worker,
    WorkerFailure,
    require_room,
)
from pipeline.running.entry import preserve_signal_handlers

POLL_SECONDS = 1.0  # between two reads of the heartbeats
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the settings that a Ray job was submitted with
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOADING, MAX_NAMED_TASKS = "loading the target", 3  # tasks in work that a progress line names
MAX_FAILED_LOADS = 3  # number of failures while loading that ends a job whose crew works all at once
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """A worker's last heartbeat."""

    count: int = 0  # number of all heartbeats so far
    doing: str = LOADING  # or the title of its task
    items: tuple[str, ...] = ()
    done: int = 0  # finished amount of that task


class Heartbeats:
    """The workers' last heartbeats, kept on the driver's node, so that a dead worker's items are still known."""

    def __init__(self):
        self._beats: dict[int, Beat] = {}

    def beat(self, number: int, *last: Any) -> None:
        self._beats[number] = Beat(self._beats.get(number, Beat()).count + 1, *last)

    def read(self) -> dict[int, Beat]:
        """Return the last heartbeat of each worker, by its number."""
        return self._beats


class WorkerActor:
    """The Ray actor of a worker, whose heartbeats arrive before it does what they announce."""

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
    reference: Any  # Ray object that is ready once the actor has its room, or its task is done; None: it is free
    since: float  # time of its last new heartbeat, of its start, or of its task's assignment
    task: Task | None = None
    beat: Beat = Beat()


class WorkerPool:
    """Iterate over `results(tasks)`: Ray starts with the first task and is shut down after the last."""

    def __init__(
        self,
        crew: Crew,
        make: Callable[[Heartbeat], Worker],
        retry: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ):
        require_cluster()  # before anything slow
        self._crew, self._make, self._retry, self._clock = crew, make, retry, clock
        self._heartbeats: Any = None
        self._gpus = 0.0  # of a worker; set once Ray's nodes are known
        self._spawned = 0
        self._has_loaded = False  # True once any worker has loaded the target
        self._failures = 0  # since the last finished task
        self._failed_loads = 0  # failures while loading, since a worker last loaded
        self._members: list[_Member] = []
        self._retried_tasks: deque[Task] = deque()  # tasks whose worker failed

    def results(self, tasks: Iterator[Task], watch: Watch = lambda done, doing: None) -> Iterator[tuple[Any, Any]]:
        """Yield (task, record) as tasks finish, in any order. A source that yields NOT_YET is asked again at each poll.
        Each poll of the workers calls `watch`. Raise PipelineError; finished tasks stay finished.
        """
        task = next((task for task in tasks if task is not NO_TASK_YET), None)
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
        """Yield (task, record) with Ray running. `task` is the next one, for the worker that is free first."""
        self._gpus = require_room(self._crew, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        same_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": same_node}
        self._heartbeats = ray.remote(**options)(Heartbeats).remote()
        self._members = [self._spawn() for _ in range(self._crew.workers)]
        while task is not None or any(member.task for member in self._members):
            for member in self._members:
                if task not in (None, NO_TASK_YET) and member.reference is None:
                    member.task, member.reference = task, member.actor.work.remote(task)
                    member.since, task = self._clock(), self._next_task(tasks)
            yield from self._collect()
            self._check_hangs(watch)
            task = self._next_task(tasks) if task in (None, NO_TASK_YET) else task
        if waiting := sum(member.reference is not None for member in self._members):
            log.warning("%d of %d workers never had room", waiting, len(self._members))

    def _next_task(self, tasks: Iterator[Task]) -> Task | None:
        return self._retried_tasks.popleft() if self._retried_tasks else next(tasks, None)

    def _spawn(self) -> _Member:
        self._spawned += 1
        variables = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
        if not self._gpus:  # Ray hides GPUs of other workers only from workers with GPUs
            variables |= NO_GPUS
        options: dict[str, Any] = {"num_cpus": self._crew.cpus, "num_gpus": self._gpus}
        remote = ray.remote(runtime_env={"env_vars": variables}, **options)(WorkerActor)
        actor: Any = remote.remote(self._make, self._spawned, self._heartbeats)
        return _Member(self._spawned, actor, actor.__ray_ready__.remote(), self._clock())

    def _collect(self) -> Iterator[tuple[Any, Any]]:
        """Yield everything that has finished, and handle failures; wait at most `POLL_SECONDS` for the first."""
        members = {member.reference: member for member in self._members if member.reference is not None}
        if members:
            ray.wait(list(members), timeout=POLL_SECONDS)
            # Collect everything that is ready: a finished task that waits to be collected would seem to hang.
            for reference in ray.wait(list(members), num_returns=len(members), timeout=0)[0]:
                yield from self._take_result(members[reference])

    def _take_result(self, member: _Member) -> Iterator[tuple[Any, Any]]:
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

    def _check_hangs(self, watch: Watch) -> None:
        self._read_heartbeats()
        now, patience = self._clock(), self._crew.hang_seconds
        key = "features.hang_seconds"
        names, done = dict[str, None](), 0
        for member in self._members:
            if member.task is not None:
                names[member.beat.doing] = None
                done += member.beat.done if member.beat.doing == member.task.title else 0
        other_tasks = f" and {len(names) - MAX_NAMED_TASKS} more" if len(names) > MAX_NAMED_TASKS else ""
        watch(done, ", ".join(list(names)[:MAX_NAMED_TASKS]) + other_tasks or "waiting for work")
        late = [member for member in self._members if member.reference is not None and now - member.since > patience]
        without_room = [member for member in late if member.task is None]
        if without_room and (self._crew.all_at_once or len(without_room) == len(self._members)):
            raise PipelineError(
                f"{len(without_room)} of {len(self._members)} workers did not start within {key}={patience}. Make room "
                f"on the cluster for {self._crew.cpus} CPUs and {self._gpus:g} GPUs each, or lower "
                f"{self._crew.section}.workers"
            )
        for member in late:
            if member.task is not None:
                self._replace(member, f"it sent no heartbeat for {patience} s ({key})")

    def _replace(self, member: _Member, reason: str, exception: BaseException | None = None) -> None:
        """Replace a worker that died, hung or raised an exception; its task is tried again."""
        ray.kill(member.actor)  # a worker that only seemed dead must not continue to write
        self._read_heartbeats()
        beat, loading = member.beat, member.beat.doing == LOADING
        log.warning("a worker failed (%s): %s", beat.doing, reason)
        self._failures += 1
        self._failed_loads += loading
        self._check_failure_count(beat.doing, reason.rstrip("."))
        if member.task is not None:
            items = beat.items if beat.doing == member.task.title else ()
            failure = WorkerFailure(items, reason, exception)
            self._retried_tasks.append(member.task if loading else self._retry(member.task, failure))
        self._members[self._members.index(member)] = self._spawn()

    def _check_failure_count(self, doing: str, reason: str) -> None:
        """Raise PipelineError after too many failures; the arguments describe the last one."""
        workers = self._crew.workers
        if self._failed_loads >= (MAX_FAILED_LOADS if self._crew.all_at_once else 3 * workers + 1):
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
    """Return the first line of a library's message, without the secrets of signed addresses."""
    return public_text(next(iter(str(error).splitlines()), "no message"))


# -- the cluster ---------------------------------------------------------------------------------------------------


def _job_ships_code() -> bool:
    """Return whether this Ray job was submitted with a copy of the code, or sets PYTHONPATH itself."""
    runtime_env = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    copied = "working_dir" in runtime_env and ROOT.is_relative_to(Path.cwd())
    return copied or "PYTHONPATH" in (runtime_env.get("env_vars") or {})


@contextmanager
def start_ray(crew: Crew) -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names, as a job on it does, else start Ray on this machine with all of its
    GPUs, protected by a token and with files that only this user can reach. A job without a copy of the code expects it
    at the same path on all nodes. Leave or stop Ray at the end.
    """
    runtime_env = {"env_vars": {"PYTHONPATH": python_path(os.environ)}}
    with ExitStack() as stack:
        if ray_address():
            settings: dict[str, Any] = {"runtime_env": {} if _job_ships_code() else runtime_env}
        else:
            check_process_count(f"{crew.section}.workers", crew.workers)
            set_worker_niceness()
            if not any(
                map(os.environ.get, TOKEN_VARIABLES)
            ):  # else Ray reads or makes a file that other users may read
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            settings = {
                "address": "local",
                "_node_ip_address": "127.0.0.1",  # this version still binds to all addresses, protected by the token
                "_temp_dir": stack.enter_context(private_folder()),
                "num_cpus": max(crew.workers * crew.cpus, 1),
                "include_dashboard": False,
                "log_to_driver": False,
                "runtime_env": runtime_env,
            }
        stack.callback(ray.shutdown)
        _init(settings)
        yield


def _init(settings: dict[str, Any]) -> None:
    """Join or start Ray. Raise PipelineError where that fails, or takes longer than Ray waits."""
    try:
        with preserve_signal_handlers():
            ray.init(logging_level=logging.WARNING, **settings)
    except Exception as error:  # Ray raises a bare Exception for a late start
        action = f"joined ({ADDRESS}={ray_address()!r})" if ray_address() else "started on this machine"
        remedy = (
            f"Its head has to run Ray {ray.__version__} with this Python"
            if ray_address()
            else "Is the machine overloaded, or short of memory or of /dev/shm? jakiro doctor checks that"
        )
        raise PipelineError(
            f"Ray could not be {action}: {type(error).__name__}: {_first_line(error)} {remedy}. Run the command again "
            "to continue: what is finished is kept"
        ) from None
