"""Checks before Ray is started or joined: a short folder for its sockets, a head that answers. Does not import Ray."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.basics.errors import PipelineError

ADDRESS = "RAY_ADDRESS"
MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path
SOCKET_SUFFIX = "/ray-12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"  # in `private_folder`
SHORT_FOLDER = "/tmp"
LAST_CLUSTER_FILE = "ray/ray_current_cluster"  # where `ray start` leaves the address that "auto" means
CONNECT_SECONDS = 5.0  # seconds that a head has to answer


def ray_address() -> str | None:
    """Return the address of the Ray cluster to join; None where Ray is started on this machine."""
    return os.environ.get(ADDRESS) or None


def require_cluster() -> None:
    """Raise PipelineError where Ray can be neither joined nor started: the head at RAY_ADDRESS does not answer, or no
    folder is short enough for its sockets.
    """
    if ray_address():
        require_head()
    else:
        find_socket_folder()


def require_head() -> None:
    """Raise PipelineError where nothing listens at the address that RAY_ADDRESS names."""
    address = ray_address() or "auto"
    if (head := _last_cluster() if address == "auto" else address) in (None, "local"):
        return  # Ray itself looks for a cluster, or starts one
    parts = urlsplit(head if "://" in head else f"ray://{head}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is no number
        host = port = None
    if parts.scheme != "ray" or not host or not port:
        raise PipelineError(f"{ADDRESS}={address!r}: expected HOST:PORT of Ray's head, or 'auto'")
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise PipelineError(
            f"{ADDRESS}={address!r}: no Ray answers at {host}:{port} ({error.strerror or error}). Start its head (ray "
            f"start --head), or unset {ADDRESS}: then Ray is started on this machine"
        ) from None


def _last_cluster() -> str | None:
    path = Path(os.environ.get("RAY_TMPDIR") or SHORT_FOLDER) / LAST_CLUSTER_FILE
    return path.read_text().strip() or None if path.is_file() else None


def find_socket_folder() -> str:
    """Return a folder for Ray's files. Raise PipelineError where there is none."""
    places = [os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), SHORT_FOLDER]
    for place in places:
        if len(os.fsencode(place + SOCKET_SUFFIX)) <= MAX_SOCKET_PATH and os.access(place, os.W_OK | os.X_OK):
            return place
    raise PipelineError(
        f"Ray has no place for its sockets: got {', '.join(filter(None, places))}, expected a writable folder with a "
        f"path of at most {MAX_SOCKET_PATH - len(SOCKET_SUFFIX)} bytes. Name one in RAY_TMPDIR"
    )


@contextmanager
def private_folder() -> Iterator[str]:
    """Yield a folder for Ray's sockets and logs. Ray lets everyone write to these, so it lies in a folder that no other
    user may enter. Raise PipelineError where there is no place for it.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir=find_socket_folder(), ignore_cleanup_errors=True) as folder:
        yield f"{folder}/r"
