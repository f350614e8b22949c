"""The processors of this machine: how many threads a process takes, and how many processes are too many."""

import os

from pipeline.basics.errors import PipelineError

CROWD = 4  # processes a core, from which on a number is taken for a mistake
ENOUGH = 32  # so many are no crowd anywhere


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def workers_as_everyone() -> None:
    """A local Ray's workers get their share of the cores: at Ray's own niceness of 15 a worker beside a few busy
    processes hardly runs at all, and takes half an hour to start. The user's RAY_worker_niceness wins.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")


def asked_threads() -> int | None:
    """The number in OMP_NUM_THREADS, which the user sets and, in a worker, Ray: to the worker's CPUs."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) or None if text.isdecimal() else None


def require_few(key: str, processes: int) -> None:
    """Raises PipelineError for more processes than this machine could ever serve."""
    most = max(CROWD * cores(), ENOUGH)
    if processes > most:
        raise PipelineError(
            f"{key}={processes}, but this machine has {cores()} cores: at most {most} processes of that kind are "
            "started on it"
        )
