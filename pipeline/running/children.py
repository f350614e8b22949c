"""Child commands of this project: each runs in a session of its own, and none outlives the process that started it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

TERMINATION_SECONDS = 20  # seconds that a command has to end after SIGTERM
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
_libc = ctypes.CDLL(None)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process the signal `number` when its parent ends, for whatever reason."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


@contextmanager
def start_command(command: list[str], environment: Mapping[str, str], **options: Any) -> Iterator[subprocess.Popen]:
    """Run a command during the block. After it, none of its ranks, actors or launchers is left: it gets SIGTERM, and
    SIGKILL after `TERMINATION_SECONDS`.
    """
    options |= {"env": environment, "start_new_session": True, "preexec_fn": end_with_parent}
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        _send(process, signal.SIGTERM)
        try:
            process.wait(TERMINATION_SECONDS)
        except subprocess.TimeoutExpired:
            _send(process, signal.SIGKILL)
            process.wait()


def _send(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def ignore_sigint_in_children() -> Iterator[None]:
    """Block SIGINT, so that processes started in this block ignore Ctrl-C: their parent ends them."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
