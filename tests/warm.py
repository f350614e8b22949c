"""Commands that start warm: each a process of its own, forked from one that has imported what they import.

Importing torch, transformers, DeepSpeed and Ray takes a command several seconds, far longer than its work on a tiny
target. What a start itself does (the launcher, the environment, a first import) is shown by the tests that start cold.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORKS = get_context("forkserver")
# All that is slow to import, and nothing that starts a thread.
FORKS.set_forkserver_preload(
    ["datasets", "deepspeed", "ray", "eval.main", "preprocess.dump.driver", "preprocess.regenerate", "train.main"]
)


def run_forked(
    commands: list[tuple[list[str], dict[str, str]]], environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess:
    """Runs Python `commands` (arguments behind the interpreter: a script or `-m` and a module; variables of its own) at
    the same time, as ranks are. When one fails, the others are killed, as a launcher does. The status is the first
    failure's.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        running = [
            FORKS.Process(target=_become, args=(arguments, {**environment, **own}, list(map(str, streams))))
            for arguments, own in commands
        ]
        for process in running:
            process.start()
        statuses, deadline = [], time.monotonic() + seconds
        try:
            while running:
                assert connection.wait([process.sentinel for process in running], deadline - time.monotonic()), commands
                for process in [one for one in running if one.exitcode is not None]:
                    running.remove(process)
                    statuses.append(process.exitcode)
                if any(statuses):
                    break
        finally:
            for process in running:
                process.kill()
                process.join()
        status = next((status for status in statuses if status), 0)
        return subprocess.CompletedProcess(commands[0][0], status, *(stream.read_text() for stream in streams))


def _become(arguments: list[str], environment: dict[str, str], streams: list[str]) -> None:
    """The command itself, in the process that was forked for it."""
    for descriptor, path in zip((1, 2), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    module = arguments[0] == "-m"
    sys.argv = arguments[1:] if module else arguments
    sys.path.insert(0, str(ROOT) if module else str(Path(arguments[0]).resolve().parent))
    if module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")
