"""Ray clusters whose workers start warm."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit import free_port, run_command

CPUS = 4  # of a node
RAY = "import sys; from ray.scripts.scripts import main; sys.executable = sys.argv.pop(1); main()"


@dataclass(frozen=True)
class Cluster:
    folder: str
    python: str  # interpreter of the workers
    address: str
    dashboard: str  # address of the dashboard, which takes jobs

    def start_node(self, *options: str) -> None:
        node = ["start", f"--num-cpus={CPUS}", "--disable-usage-stats", f"--dashboard-agent-listen-port={free_port()}"]
        environment = {"RAY_TMPDIR": self.folder, "RAY_worker_niceness": "0"}
        started = run_command([sys.executable, "-c", RAY, self.python, *node, *options], **environment)
        assert started.returncode == 0, started.stderr

    def raylets(self) -> list[int]:
        """Return the raylet of each node, in the order of their start."""
        pids = [pid for pid, words in self._processes() if words.partition(" ")[0].endswith("/raylet")]
        return sorted(pids, key=lambda pid: Path(f"/proc/{pid}").stat().st_ctime_ns)  # process ids are reused

    def stop(self) -> None:
        """Stop this cluster alone: `ray stop` would stop every cluster of the machine."""
        for pid, _ in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[tuple[int, str]]:
        """Return (pid, command line) of the cluster's processes."""
        processes = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if self.folder in words:
                    processes.append((int(entry.name), words))
        return processes


@contextlib.contextmanager
def started(python: str, dashboard: bool = False) -> Iterator[Cluster]:
    """A head node. `python` is `warm_workers`' script."""
    # A Unix socket's path has at most 107 characters, and Ray needs 60 of them.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port, page = free_port(), free_port()
        cluster = Cluster(folder, python, f"127.0.0.1:{port}", f"http://127.0.0.1:{page}")
        shown = [f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-port={page}"]
        try:
            cluster.start_node("--head", f"--port={port}", "--dashboard-host=127.0.0.1", *shown)
            yield cluster
        finally:
            cluster.stop()
