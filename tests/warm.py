"""Commands and Ray workers that start warm: each a process of its own, forked from one that has imported what it needs.

Importing torch, transformers, DeepSpeed and Ray takes a command several seconds, far longer than its work on a tiny
target. What a start itself does (the launcher, the environment, a first import) is shown by the tests that start cold.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 3600  # seconds; it ends what hangs, on however slow a machine, and no test that is sound waits for its end
RAYS_PYTHON = "TESTS_RAYS_PYTHON"  # the variable that has a command's own Ray start warm workers: `warm_workers`
FORKS = get_context("forkserver")
# All that is slow to import, and nothing that starts a thread.
FORKS.set_forkserver_preload(
    ["datasets", "deepspeed", "ray", "eval.main", "preprocess.dump.driver", "preprocess.regenerate", "train.main"]
)


def run_forked(
    commands: list[tuple[list[str], dict[str, str]]], environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess:
    """Run Python `commands` (the interpreter's arguments: a script or `-m` and a module; variables of its own) at the
    same time, as ranks are. When one fails, the others are killed, as a launcher does. The status is the first
    failure's.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        running = [
            FORKS.Process(target=_command, args=(arguments, {**environment, **variables}, list(map(str, streams))))
            for arguments, variables in commands
        ]
        for process in running:
            process.start()
        statuses, deadline = [], time.monotonic() + seconds
        try:
            while running:
                assert connection.wait([process.sentinel for process in running], deadline - time.monotonic()), commands
                for process in [candidate for candidate in running if candidate.exitcode is not None]:
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


class Forked:
    """A Python command in a session of its own: what tests need of a `subprocess.Popen`."""

    def __init__(
        self, command: list[str], environment: dict[str, str], error: Path | None = None, output: Path | None = None
    ):
        streams = [str(path or os.devnull) for path in (output, error)]
        self._process = FORKS.Process(
            target=_command, args=(command[1:], environment, streams), kwargs={"session": True}
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        self._process.join(seconds)
        return self.poll()

    returncode = property(poll)


def _command(arguments: list[str], environment: dict[str, str], streams: list[str], session: bool = False) -> None:
    if session:
        os.setsid()
    for descriptor, path in zip((1, 2), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    sys.executable = environment.get(RAYS_PYTHON, sys.executable)
    _become(arguments, environment)


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    """The command itself, in the process that was forked for it."""
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


# -- Ray's workers ---------------------------------------------------------------------------------------------------

WORKER = "default_worker.py"  # Ray's script
# What Ray is told is Python. Only workers start warm, and no worker of a Ray job, which has a folder of its own.
LAUNCHER = """#!{python} -SE
import json, os, socket, sys
words = sys.argv[1:]
serialized = [word.partition("=")[2] for word in words if word.startswith("--serialized-runtime-env-context=")]
contexts = [json.loads(context) for context in serialized]
if not any(word.endswith({worker!r}) for word in words) or any(one.get("command_prefix") for one in contexts):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
environment = dict(os.environ)
for one in contexts:
    environment.update(one.get("env_vars") or {{}})
socket.send_fds(server, [json.dumps([words, environment]).encode()], [0, 1, 2])
server.recv(1)  # until the worker has ended
"""


@contextmanager
def warm_workers() -> Iterator[str]:
    """The path of the script that Ray is to start its workers with; `sys.executable`, it thinks."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        launcher, address = Path(folder) / "python", f"{folder}/socket"
        launcher.write_text(LAUNCHER.format(python=sys.executable, worker=WORKER, address=address))
        launcher.chmod(0o700)
        listening.bind(address)
        listening.listen()
        number = listening.fileno()
        command = [sys.executable, "-m", "tests.warm", str(number)]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[number], stdin=subprocess.PIPE):
            yield str(launcher)  # after this the server's input ends


def fork_workers(listening: socket.socket) -> None:
    """One for every launcher that connects, until the input of this process ends."""
    for module in ("preprocess.dump.interview", "preprocess.dump.worker", "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    assert "ray" not in sys.modules, "when it is imported, it reads from the environment what a worker is for"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        launcher, _ = listening.accept()
        message, streams, _, _ = socket.recv_fds(launcher, 1 << 20, 3)
        if os.fork() == 0:
            break
        launcher.close()
        for descriptor in streams:
            os.close(descriptor)
    else:
        return
    listening.close()
    os.setsid()  # Ray kills the group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    words, environment = json.loads(message)
    script = next(number for number, word in enumerate(words) if word.endswith(WORKER))
    _become([word for word in words[script:] if not word.startswith(("--language=", "--serialized-"))], environment)


if __name__ == "__main__":
    fork_workers(socket.socket(fileno=int(sys.argv[1])))
