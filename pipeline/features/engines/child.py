"""An engine of another environment as a child process: texts go in, tokens and states come out.

Parent and child exchange lines of JSON on the child's standard streams (infra/vllm_jakiro/vllm_jakiro/engine.py has the
messages). The child writes states as files to a folder in the node's shared memory. No port is opened.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline.basics.errors import NoAnswer, PipelineError

SHARED = Path("/dev/shm")
MIN_FREE_BYTES = 4 << 30  # free bytes that SHARED must have; otherwise states go to the temporary folder
LOG_LINES = 20  # last lines of the child's standard error that an error message shows
EXIT_TIMEOUT = 20  # seconds that the child has to exit before it is killed
POLL_INTERVAL = 0.5  # seconds between two checks for messages of the child
PYTHON_VARIABLES = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)  # variables that are not passed on: the child has its own Python


class EngineDied(RuntimeError):
    """The child process has ended. No request is at fault; the worker that owns the engine has to be replaced."""


@dataclass(frozen=True)
class Reply:
    """The engine's reply to one request."""

    tokens: list[int]
    states: dict[str, torch.Tensor] | None  # of `Conversion.convert` in infra/vllm_jakiro/vllm_jakiro/convert.py


class EngineProcess:
    """A child process with an engine; any number of threads may use it."""

    def __init__(
        self,
        command: Sequence[str],
        options: dict[str, Any],
        capture: dict[str, Any],
        norm_weights: dict[str, torch.Tensor],
    ):
        """Start the child and wait until it has loaded the target. Raises PipelineError if it does not load."""
        self._futures: dict[str, Future[dict[str, Any]]] = {}
        self._lock, self._count, self._log = threading.Lock(), 0, deque[str](maxlen=LOG_LINES)
        self.message_count = 0  # messages that the child has sent
        self._died: EngineDied | None = None
        self._ready: Future[dict[str, Any]] = Future()
        shared = SHARED if _free_bytes(SHARED) >= MIN_FREE_BYTES else None  # in containers it is often small
        self._folder = Path(tempfile.mkdtemp(prefix="jakiro-states-", dir=shared))  # readable by this user only
        pipe = subprocess.PIPE
        try:
            streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "errors": "replace"}
            self._child = subprocess.Popen(list(command), env=child_environment(), start_new_session=True, **streams)
        except OSError as error:
            shutil.rmtree(self._folder)
            raise PipelineError(
                f"target.engine_python={command[0]!r} does not start ({error.strerror}): expected the Python of the "
                "environment that vLLM and infra/vllm_jakiro are installed in"
            ) from None
        for read in (self._read_messages, self._read_log):
            threading.Thread(target=read, daemon=True).start()
        weights = self._folder / "norm.safetensors"
        save_file(norm_weights, weights)
        self._send({"options": options, "capture": {**capture, "weights": str(weights)}, "folder": str(self._folder)})
        try:
            ready = self._ready.result()
        except EngineDied as error:
            self.close()
            raise PipelineError(f"the target's engine does not load it: {error}") from None
        weights.unlink()
        self.version, self.positions = str(ready["version"]), int(ready["positions"])

    def submit(
        self, tokens: Sequence[int], sampling: dict[str, Any], states: str | None, float8: bool = False
    ) -> "Future[dict[str, Any]]":
        """Send a request; `reply` waits for its reply. `states`: "prompt", "all" (prompt and answer) or None. Raises
        EngineDied if the child has ended.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._died is not None:
                raise self._died
            self._count += 1
            name = str(self._count)
            self._futures[name] = future
        request = {"id": name, "tokens": [int(t) for t in tokens], "states": states, "float8": float8}
        self._send({**request, "sampling": sampling})
        return future

    def reply(self, future: "Future[dict[str, Any]]", alive: Callable[[], None] = lambda: None) -> Reply:
        """Wait for a reply; `alive` is called whenever the child has sent a message. Raises NoAnswer if the engine
        refuses the text, PipelineError if its states could not be written, EngineDied if the child has ended.
        """
        message_count = self.message_count
        while True:
            try:
                message = future.result(POLL_INTERVAL)
                break
            except FutureTimeout:
                if self.message_count != message_count:
                    message_count = self.message_count
                    alive()
        if "refused" in message:
            raise NoAnswer(f"the engine refuses this text: {message['refused']}")
        if "lost" in message:
            raise PipelineError(f"{self._folder}: states could not be written: {message['lost']}")
        states = None
        if (path := self._file(message)) is not None:
            states = load_file(path)  # memory-mapped, so they stay valid after the unlink
            path.unlink()
        return Reply(message["tokens"], states)

    def discard(self, future: "Future[dict[str, Any]]") -> None:
        """Discard the reply: its file is removed when it arrives."""

        def remove(finished: "Future[dict[str, Any]]") -> None:
            if finished.exception() is None and (path := self._file(finished.result())) is not None:
                path.unlink(missing_ok=True)

        future.add_done_callback(remove)

    def _file(self, message: dict[str, Any]) -> Path | None:
        return self._folder / Path(message["file"]).name if message.get("file") else None

    def close(self) -> None:
        """End the child: close its standard input, kill it after EXIT_TIMEOUT seconds, and remove its files."""
        assert self._child.stdin is not None
        # Closing blocks while another thread writes to a child that does not read.
        killing = threading.Timer(EXIT_TIMEOUT, self._kill)
        killing.start()
        with suppress(BrokenPipeError, ValueError):
            self._child.stdin.close()
        self._child.wait()
        killing.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        with (
            suppress(BrokenPipeError, ValueError),
            self._lock,
        ):  # a child that has ended is reported by `_read_messages`
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()

    def _read_messages(self) -> None:
        assert self._child.stdout is not None
        reason = ""
        for line in self._child.stdout:
            try:
                message = json.loads(line)
            except ValueError:  # not a message: a wrapper's output, or the last line of a child that was killed
                self._log.append(line.rstrip())
                continue
            if "ready" in message:
                self._ready.set_result(message["ready"])
            elif "id" in message:
                with self._lock:
                    future = self._futures.pop(message["id"])
                future.set_result(message)
            elif "failed" in message:
                reason = message["failed"]
            self.message_count += 1
        status = self._child.wait()
        died = EngineDied(f"the engine ended with status {status}{reason and ', ' + reason}. {self._tail()}")
        with self._lock:
            waiting, self._futures, self._died = list(self._futures.values()), {}, died
        for future in [*waiting, *([] if self._ready.done() else [self._ready])]:
            future.set_exception(died)

    def _read_log(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._log.append(line.rstrip())

    def _tail(self) -> str:
        return "The last lines of what it printed:\n" + "\n".join(self._log) if self._log else ""


def child_environment() -> dict[str, str]:
    """Return this process's environment variables, without those of its own Python."""
    return {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}


def _free_bytes(folder: Path) -> int:
    """Return the free bytes in a folder; 0 if it is not writable."""
    if not os.access(folder, os.W_OK):
        return 0
    return shutil.disk_usage(folder).free
