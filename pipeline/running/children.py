"""Commands of this project that another one starts: each in a session of its own, and none outlives the one that
started it.
"""

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.running.signals import postponed

PATIENCE = 20  # seconds for a command that was asked to end
CHILD = "JAKIRO_CHILD"  # set for them: what ends them, whoever started them tells


def start(command: list[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen:
    return subprocess.Popen(command, env={**environment, CHILD: "1"}, start_new_session=True, **options)


def call(command: list[str], environment: Mapping[str, str], folder: Path) -> int:
    """The status of a command that ran in `folder`."""
    process = start(command, environment, cwd=folder)
    try:
        return process.wait()
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Whatever ends this process, no rank, actor or launcher of that one stays behind: it is asked to end, and made to
    in the end.
    """
    with postponed():
        _send(process, signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            _send(process, signal.SIGKILL)
            process.wait()


def _send(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
