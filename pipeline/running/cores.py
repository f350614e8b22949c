"""The processors of this machine: threads of a process, and the limit on the number of processes."""

import os

from pipeline.basics.errors import PipelineError

MAX_PER_CORE = 4  # processes a core; a larger number is taken for a mistake
ALWAYS_ALLOWED = 32  # processes that may be started on any machine, however few cores it has


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def set_worker_niceness() -> None:
    """Let the workers of a local Ray run at niceness 0. At Ray's default of 15 a worker hardly runs next to a few busy
    processes, and takes half an hour to start. The user's RAY_worker_niceness takes precedence.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")


def read_omp_threads() -> int | None:
    """Return the number in OMP_NUM_THREADS. The user sets it, or, in a worker, Ray: to the worker's CPUs."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) or None if text.isdecimal() else None


def check_process_count(key: str, processes: int) -> None:
    """Raise PipelineError for more processes than this machine can serve. `key`: the recipe key that requests them."""
    limit = max(MAX_PER_CORE * count_cores(), ALWAYS_ALLOWED)
    if processes > limit:
        raise PipelineError(
            f"{key}={processes}, but this machine has {count_cores()} cores: at most {limit} processes of that kind "
            "are started on it"
        )
