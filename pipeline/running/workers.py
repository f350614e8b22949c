"""A pool of Ray actors that work on tasks: of the dump, of regeneration and of evaluation. The only file that imports
Ray; only drivers of Ray jobs import it. It imports no torch, so that the actor with the heartbeats starts at once.

Terms: a worker is an actor with a loaded target; a task is what one call of a worker does; its items are what it names
in its heartbeats.

Guarantees: every task is finished, or the job ends with an error. A worker that dies, or gives no heartbeat for
`hang_seconds`, is replaced; what becomes of the task that it worked on is the caller's `Losses` to say, and a task that
only waited for it is given out again. A worker that cannot load is replaced, too, until too many in a row could not:
then the job ends. In a crew that works `all_at_once` an exception while loading ends the job. A worker that waits for
room on the cluster may wait as long as another one works. Workers hand back small records, never tensors.
"""

import json
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, python_path
from pipeline.basics.public import public_text
from pipeline.running.cluster import ADDRESS, private_folder, ray_address, require_cluster
from pipeline.running.cores import require_few, workers_as_everyone
from pipeline.running.crew import (
    NOT_YET,
    PASSED_ON,
    Crew,
    Heartbeat,
    Loss,
    Losses,
    Task,
    Watch,
    Worker,
    hide_gpus,
    room_for,
)
from pipeline.running.entry import kept_handlers

LOOK_SECONDS = 1.0  # between two looks at the heartbeats
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what a Ray job was submitted with, in the environment of its driver
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
IDLE, NAMED = "idle", 3  # a worker without a task; so many tasks in work are named
LOADS = 3  # so many workers of a crew that works all at once, lost in a row while they loaded, end the job
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """A worker's last heartbeat."""

    count: int = 0  # of all so far
    items: tuple[str, ...] = ()
    task: str = ""  # its title
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

    def __init__(self, make: Callable[[Heartbeat], Worker], number: int, heartbeats: Any, gpus: float):
        hide_gpus(gpus)
        self._make, self._task = make, ""
        self._heartbeat = lambda items, done=0: ray.get(heartbeats.beat.remote(number, items, self._task, done))

    def ready(self) -> None:
        self._heartbeat(())  # it has its room, and loads from now on
        self._worker = self._make(self._heartbeat)
        self._worker.ready()

    def work(self, task: Any) -> Any:
        self._task = task.title
        self._heartbeat(())
        return self._worker.work(task)


@dataclass
class _Member:
    """An actor and its tasks in the order in which they were given to it; it works on the first."""

    number: int
    actor: Any
    loading: Any  # the reference that answers when the target is loaded; None from then on
    since: float  # when its last heartbeat was new, or it was spawned
    tasks: dict[Any, Task] = field(default_factory=dict)  # by reference
    beats: int = 0  # seen


class Pool:
    """Iterate over `results(tasks)`: Ray starts with the first task and is shut down after the last."""

    def __init__(
        self,
        crew: Crew,
        make: Callable[[Heartbeat], Worker],
        losses: Losses,
        clock: Callable[[], float] = time.monotonic,
    ):
        require_cluster()  # before what takes long
        self._crew, self._make, self._losses, self._clock = crew, make, losses, clock
        self._watch: Watch = lambda done, doing: None
        self._heartbeats: Any = None
        self._gpus = 0.0  # of a worker; known when Ray's nodes are
        self._spawned = 0
        self._members: list[_Member] = []
        self._again: deque[Task] = deque()  # tasks whose worker was lost
        self._ever_ready = False  # has one worker loaded its target? Else the first that cannot ends the job
        self._lost_in_a_row = 0  # workers lost since the last finished task
        self._not_loaded = 0  # workers lost while they loaded, since one last was ready

    def results(self, tasks: Iterator[Task], watch: Watch | None = None) -> Iterator[tuple[Any, Any]]:
        """(task, record) as they are finished, in any order. A source that yields NOT_YET is asked again and again.
        Each look at the workers is told to `watch`. Raises PipelineError; finished tasks stay finished.
        """
        self._watch = watch or self._watch
        first = next((task for task in tasks if task is not NOT_YET), None)
        if first is None:
            return
        self._again.append(first)
        self._watch(0, "starting Ray")
        with start_ray(self._crew):
            yield from self._results(tasks)

    def _results(self, tasks: Iterator[Task]) -> Iterator[tuple[Any, Any]]:
        try:
            self._gpus = room_for(self._crew, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            beside: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
            self._heartbeats = ray.remote(**beside)(Heartbeats).remote()
            self._members = [self._spawn() for _ in range(self._crew.workers)]
            more = True
            while more or self._again or any(member.tasks for member in self._members):
                more = self._hand_out(tasks, more)
                yield from self._collect()
            waiting = sum(member.loading is not None for member in self._members)
            if waiting:
                log.warning("%d of %d workers were never ready: no room, or no time", waiting, len(self._members))
        except ray.exceptions.RayError as error:
            raise PipelineError(
                f"Ray failed: {_first_line(error)} Run the command again to continue: what is finished is kept"
            ) from None

    def _spawn(self) -> _Member:
        self._spawned += 1
        told = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        more: dict[str, Any] = {"runtime_env": {"env_vars": told}} if told else {}
        remote = ray.remote(num_cpus=self._crew.cpus, num_gpus=self._gpus, **more)(WorkerActor)
        actor: Any = remote.remote(self._make, self._spawned, self._heartbeats, self._gpus)
        return _Member(self._spawned, actor, actor.ready.remote(), self._clock())

    def _hand_out(self, tasks: Iterator[Task], more: bool) -> bool:
        """Gives every ready worker its tasks; says whether the source has more."""
        for held in range(self._crew.tasks_each):
            for member in self._members:
                if member.loading is None and len(member.tasks) == held:
                    task = self._again.popleft() if self._again else next(tasks, None) if more else None
                    if task is None or task is NOT_YET:
                        return task is NOT_YET
                    if not member.tasks:
                        member.since = self._clock()
                    member.tasks[member.actor.work.remote(task)] = task
        return more

    def _collect(self) -> Iterator[tuple[Any, Any]]:
        """Everything that is finished, or lost, by now; waits one look for something."""
        references = [member.loading for member in self._members if member.loading is not None]
        references += [reference for member in self._members for reference in member.tasks]
        if not references:  # the last look brought everything, and the source turned out to have no more
            return
        ray.wait(references, num_returns=1, timeout=LOOK_SECONDS)
        # All that is ready: what is finished but waits to be collected would seem to hang.
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        for reference in done:
            member = next((m for m in self._members if reference == m.loading or reference in m.tasks), None)
            if member is not None:  # else of a worker lost a moment ago
                yield from self._answer(member, reference)
        self._look_for_hangs()

    def _answer(self, member: _Member, reference: Any) -> Iterator[tuple[Any, Any]]:
        try:
            record = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            loading, why = member.loading is not None, f"{type(cause).__name__}: {_first_line(cause)}"
            refused = isinstance(cause, PipelineError)
            if (loading and self._crew.all_at_once) or (refused and not (loading and self._ever_ready)):
                raise PipelineError(f"{_title(member)}: {cause if refused else why}") from None
            self._lose(member, why, raised=True)
            return
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            self._lose(member, _first_line(error))
            return
        if reference == member.loading:
            member.loading, self._ever_ready, self._not_loaded = None, True, 0
            return
        task = member.tasks.pop(reference)
        member.since, self._lost_in_a_row = self._clock(), 0
        yield task, record

    def _look_for_hangs(self) -> None:
        now, patience, beats = self._clock(), self._crew.hang_seconds, ray.get(self._heartbeats.read.remote())
        for member in self._members:
            count = beats.get(member.number, Beat()).count
            if count != member.beats:
                member.beats, member.since = count, now
        self._tell(beats)
        late = [member for member in self._members if now - member.since > patience]
        together = self._crew.all_at_once
        if not together and len(late) == len(self._members) and all(member.loading is not None for member in late):
            raise PipelineError(
                f"no worker became ready within {self._crew.section}.hang_seconds={patience}: is there room on the "
                f"cluster for {self._crew.cpus} CPUs and {self._gpus:g} GPUs? Does loading take longer?"
            )
        for member in late:
            # Without a heartbeat it may wait for room on the cluster; for a crew that works at once there was room.
            loads = member.loading is not None and (together or member.beats > 0)
            if member.tasks or loads:
                self._lose(member, f"it gave no sign of life for {patience} s ({self._crew.section}.hang_seconds).")

    def _tell(self, beats: dict[int, Beat]) -> None:
        titles = [_title(member) for member in self._members]
        known = (beats.get(member.number, Beat()) for member in self._members)
        done = sum(beat.done for beat, title in zip(known, titles, strict=True) if beat.task == title)
        names = list(dict.fromkeys(title for title in titles if title != IDLE))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        self._watch(done, ", ".join(names[:NAMED]) + more or "waiting for work")

    def _lose(self, member: _Member, why: str, raised: bool = False) -> None:
        """Replaces a worker that died, hung or failed; its tasks are given out again."""
        ray.kill(member.actor)  # one that only seemed dead must not go on writing
        log.warning("a worker was lost (%s): %s", _title(member), why)
        self._lost_in_a_row += 1
        self._not_loaded += member.loading is not None
        if self._not_loaded >= (LOADS if self._crew.all_at_once else 3 * self._crew.workers + 1):
            raise PipelineError(
                f"{self._not_loaded} workers were lost in a row while they loaded the target, the last one because: "
                f"{why} What is finished is kept: look at the nodes (memory, GPUs, disks), raise "
                f"{self._crew.section}.hang_seconds where loading takes longer, and run the command again to continue"
            )
        if self._lost_in_a_row > 3 * self._crew.workers + 10 * self._ever_ready:
            raise PipelineError(
                f"{self._lost_in_a_row} workers were lost in a row, the last one because: {why} What is finished is "
                "kept: look at the nodes (memory, GPUs) and run the command again to continue"
            )
        held = list(member.tasks.values())
        if held:
            beat = ray.get(self._heartbeats.read.remote()).get(member.number, Beat())
            held[0] = self._losses.retry(held[0], Loss(beat.items, why, raised))
        self._members[self._members.index(member)] = self._spawn()
        self._again.extend(held)


def _title(member: _Member) -> str:
    if member.loading is not None:
        return "loading the target"
    return next(iter(member.tasks.values())).title if member.tasks else IDLE


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
