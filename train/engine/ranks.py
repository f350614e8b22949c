"""What the ranks of a training settle together: an error of one ends all of them with its words, not in a collective
that waits for it. Ranks of one machine meet where no other machine reaches them.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.basics.errors import PipelineError
from pipeline.running.entry import refusal

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}  # what a backend's sockets are bound to


@contextmanager
def fail_together() -> Iterator[None]:
    """Every rank enters it. Raises PipelineError on all of them where the block does so on one, or its file system
    refuses.
    """
    mine = ""
    try:
        yield
    except PipelineError as error:
        mine = str(error)
    except OSError as error:
        mine = refusal(error) or str(error) or type(error).__name__
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if said := next(filter(None, found), ""):
        raise PipelineError(said)


def by_rank_0(work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; an error of its own as `fail_together`'s."""
    found: list = [None]
    with fail_together():
        if dist.get_rank() == 0:
            found = [work()]
    dist.broadcast_object_list(found)
    return found[0]


def place_on_host() -> tuple[int, int]:
    """(number, count) of this rank among those that its launcher started on this machine; alone where it does not
    say.
    """
    count = int(
        os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
    )  # torch's and DeepSpeed's word for it
    return int(os.environ.get("LOCAL_RANK", "0")) % count, count


def meet_on_host(backend: str, device: torch.device | None, patience: timedelta) -> None:
    """Makes the process group of ranks that are all on this machine, whose sockets are the loopback's unless the user
    says otherwise; leaves those of several machines, and those whose launcher keeps their store, as they are. Raises
    PipelineError where the port is taken.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if place_on_host()[1] != ranks or backend not in _INTERFACES:
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        for variable in _INTERFACES.values():
            os.environ.setdefault(variable, loopback)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    port, descriptor = int(os.environ["MASTER_PORT"]) if ranks > 1 else 0, None
    if rank == 0:  # torch itself would listen on all addresses
        try:
            listening = socket.create_server((LOOPBACK, port))
        except OSError as error:
            raise PipelineError(
                f"MASTER_PORT={port}: {os.strerror(error.errno or 0)}, expected a port of this machine that nobody "
                "uses. Choose another (the launcher's --master_port)"
            ) from None
        port, descriptor = listening.getsockname()[1], listening.detach()
    store = dist.TCPStore(LOOPBACK, port, ranks, rank == 0, patience, master_listen_fd=descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience, device_id=device)
