"""Commands of this project that another one starts: each in a session of its own, and none outlives the one that
started it.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

PATIENCE = 20  # seconds for a command that was asked to end
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
_libc = ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have this process sent a signal when the one that started it has ended, however that was."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def started(command: list[str], environment: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen]:
    """Runs a command during the block, behind which no rank, actor or launcher of it stays: it is asked to end, and
    made to in the end.
    """
    options |= {"env": environment, "start_new_session": True, "preexec_fn": end_with_parent}
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        _send(process, signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            _send(process, signal.SIGKILL)
            process.wait()


def _send(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes that are started in this block never hear of Ctrl-C: who started them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
