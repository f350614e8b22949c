"""An engine's server as a child process: its start, its log, and the end of all its processes."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, BinaryIO

import httpx2

from pipeline.basics.errors import PipelineError
from pipeline.running.children import start_command

TAIL = 1 << 18  # last bytes of a log in which an error is looked for
POLL_INTERVAL = 0.2  # seconds between two requests of /health
HEALTH_TIMEOUT = 5.0  # seconds for its answer
DRAIN_SECONDS = 5.0  # seconds to read the rest of the log after the last process has ended
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # a terminal's
_ERROR = re.compile(r"(?:[\w.]*(?:Error|Exception)|\berror): \S.*")
_SECONDARY = "root cause"  # vLLM's last errors only point to an earlier one


class Server:
    """A server that runs, and the end of its log."""

    def __init__(self, process: subprocess.Popen, log: BinaryIO):
        """Copy the process's output to `log` from now on."""
        assert process.stdout is not None
        self._process, self._tail = process, b""
        self._copying = Thread(target=self._copy, args=(process.stdout.fileno(), log), daemon=True)
        self._copying.start()

    def _copy(self, source: int, log: BinaryIO) -> None:
        while part := os.read(source, 1 << 16):
            self._tail = (self._tail + part)[-TAIL:]
            with suppress(OSError, ValueError):  # the log is closed, but an unread pipe would stop the server
                log.write(part)
                log.flush()

    def wait_until_healthy(self, address: str, seconds: float) -> None:
        """Wait until /health answers 200. Raise PipelineError if the server ends before, or after `seconds`."""
        begin = time.monotonic()
        while True:
            if self._process.poll() is not None:
                raise PipelineError(f"the engine ended with status {self.wait()} before it answered: {self.error}")
            if _is_healthy(address):
                return
            if time.monotonic() - begin > seconds:
                raise PipelineError(f"{address}/health did not answer within {seconds:.0f} s: {self.error}")
            time.sleep(POLL_INTERVAL)

    def wait(self) -> int:
        """Wait until the server ends; return its status as a shell does: 128 + N after the signal N."""
        status = self._process.wait()
        self.close()
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        """Kill what is left of the server's processes, and read the rest of their output."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._copying.join(DRAIN_SECONDS)

    @property
    def error(self) -> str:
        """The last error of the log, or else its last line."""
        text = _COLOURS.sub("", self._tail.decode(errors="replace"))
        errors = [error for error in _ERROR.findall(text) if _SECONDARY not in error]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return ["it printed nothing", *lines, *errors][-1][:400]


def _is_healthy(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=HEALTH_TIMEOUT, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


@contextmanager
def start_server(
    command: list[str],
    environment: Mapping[str, str],
    address: str,
    log: BinaryIO,
    seconds: float = math.inf,
    **options: Any,
) -> Iterator[Server]:
    """Run a server during the block, which begins once it is healthy at `address`; its output goes to `log`, in binary.
    After the block none of its processes is left. `options`: of subprocess.Popen.

    Raise PipelineError if it does not start, or not within `seconds`.
    """
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    server = None
    try:
        with start_command(command, environment, **options) as process:
            server = Server(process, log)
            server.wait_until_healthy(address, seconds)
            yield server
    except OSError as error:
        if server is not None:
            raise
        raise PipelineError(f"{command[0]} does not start: {error.strerror}") from None
    finally:
        if server is not None:  # its first process has ended
            server.close()
