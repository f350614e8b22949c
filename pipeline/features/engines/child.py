"""An engine of another environment as a child process: texts go in, tokens and states come out.

The child speaks lines of JSON on its standard streams (infra/vllm_jakiro/vllm_jakiro/engine.py has the messages) and
leaves states as files in a folder of the node's shared memory. Nothing listens anywhere.
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
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pipeline.basics.errors import NoAnswer, PipelineError

SHARED = Path("/dev/shm")
ROOM = 4 << 30  # bytes free there, or else states go to the temporary folder
REMEMBERED = 20  # last lines of its standard error that an error shows
PATIENCE = 20  # seconds for a child that was told to end
POLL = 0.5  # seconds between two looks for a sign of life
NOT_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of this process's environment: the child has its own


class EngineDied(RuntimeError):
    """The child is no more: no fault of a request, so whoever owns the engine is to be replaced."""


@dataclass(frozen=True)
class Reply:
    """What the engine says to one request."""

    tokens: list[int]
    states_TSD: torch.Tensor | None  # in the rising order of the layers, none of them normed


class EngineProcess:
    """One child, for any number of threads."""

    def __init__(self, command: Sequence[str], options: dict[str, Any], layers: Sequence[int]):
        """Starts it, and waits until it has loaded the target. Raises PipelineError where it does not load."""
        self._futures: dict[str, Future[dict[str, Any]]] = {}
        self._lock, self._count, self._log = threading.Lock(), 0, deque[str](maxlen=REMEMBERED)
        self.beats = 0  # signs of life
        self._died: EngineDied | None = None
        self._ready: Future[dict[str, Any]] = Future()
        shared = SHARED if _room(SHARED) >= ROOM else None  # a container's is small
        self._folder = Path(tempfile.mkdtemp(prefix="jakiro-states-", dir=shared))  # for this user alone
        pipe = subprocess.PIPE
        try:
            streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "errors": "replace"}
            self._child = subprocess.Popen(list(command), env=own_environment(), start_new_session=True, **streams)
        except OSError as error:
            shutil.rmtree(self._folder)
            raise PipelineError(
                f"target.engine_python={command[0]!r} does not start ({error.strerror}): expected the Python of the "
                "environment that vLLM and infra/vllm_jakiro are installed in"
            ) from None
        for read in (self._read_messages, self._read_log):
            threading.Thread(target=read, daemon=True).start()
        self._send({"options": options, "layers": list(layers), "folder": str(self._folder)})
        try:
            ready = self._ready.result()
        except EngineDied as error:
            self.close()
            raise PipelineError(f"the target's engine does not load it: {error}") from None
        self.version, self.positions = str(ready["version"]), int(ready["positions"])

    def ask(self, tokens: Sequence[int], sampling: dict[str, Any], states: str | None) -> "Future[dict[str, Any]]":
        """`states`: "prompt", "all" (prompt and answer) or None. What it answers, `reply` waits for."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._died is not None:
                raise self._died
            self._count += 1
            name = str(self._count)
            self._futures[name] = future
        self._send({"id": name, "tokens": [int(t) for t in tokens], "states": states, "sampling": sampling})
        return future

    def reply(self, future: "Future[dict[str, Any]]", alive: Callable[[], None] = lambda: None) -> Reply:
        """Waits; `alive` is called whenever the child shows a sign of life. Raises NoAnswer where the engine does not
        take the text, PipelineError where its states could not be written, EngineDied where it is no more.
        """
        beats = self.beats
        while True:
            try:
                said = future.result(POLL)
                break
            except NotYet:
                if self.beats != beats:
                    beats = self.beats
                    alive()
        if "refused" in said:
            raise NoAnswer(f"the engine does not take this text: {said['refused']}")
        if "lost" in said:
            raise PipelineError(f"{self._folder}: states could not be written: {said['lost']}")
        states = None
        if (path := self._file(said)) is not None:
            states = load_file(path)["states"]  # mapped, so it outlives the file's name
            path.unlink()
        return Reply(said["tokens"], states)

    def drop(self, future: "Future[dict[str, Any]]") -> None:
        """Nobody wants this reply any more: its file goes when it comes."""

        def remove(done: "Future[dict[str, Any]]") -> None:
            if done.exception() is None and (path := self._file(done.result())) is not None:
                path.unlink(missing_ok=True)

        future.add_done_callback(remove)

    def _file(self, said: dict[str, Any]) -> Path | None:
        return self._folder / Path(said["file"]).name if said.get("file") else None

    def close(self) -> None:
        """Ends the child, which its input's end tells to; nothing of it stays."""
        assert self._child.stdin is not None
        # Closing waits for whoever is writing to a child that reads no more.
        killing = threading.Timer(PATIENCE, self._kill)
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
        ):  # it ended: `_read_messages` tells
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()

    def _read_messages(self) -> None:
        assert self._child.stdout is not None
        why = ""
        for line in self._child.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # no message: what a wrapper printed, or the last line of a child that was killed
                self._log.append(line.rstrip())
                continue
            if "ready" in said:
                self._ready.set_result(said["ready"])
            elif "id" in said:
                with self._lock:
                    future = self._futures.pop(said["id"])
                future.set_result(said)
            elif "failed" in said:
                why = said["failed"]
            self.beats += 1
        status = self._child.wait()
        died = EngineDied(f"the engine ended with status {status}{why and ', ' + why}. {self._tail()}")
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


def own_environment() -> dict[str, str]:
    """This process's, but for what belongs to its own Python."""
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _room(folder: Path) -> int:
    """Bytes that are free there; 0 where nothing can be written."""
    if not os.access(folder, os.W_OK):
        return 0
    return shutil.disk_usage(folder).free
