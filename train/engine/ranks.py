"""Errors and heartbeats of a training's ranks. An error of one rank ends all of them with its message, not in a
collective that waits for it. Ranks of one machine meet on its loopback address.

A collective waits for a rank whose host has gone as for a slow one, and half an hour is not too long for that. The
heartbeats tell the two apart in about a minute.
"""

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

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


BEAT, SILENCE = 5.0, 60.0  # seconds
_stopped = threading.Event()


def start_pulse() -> None:
    """Every rank calls it. From then on each tells the others every BEAT seconds that it lives, through the store of
    their process group (rank 0's), and ends its process, with one message, when it has not heard one of them for
    SILENCE of its own beats: none passes while it is suspended.
    """
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    keys = [f"pulse-{other}" for other in range(ranks)]
    hosts: list = [None] * ranks
    store.set(keys[rank], "begun")  # before all meet: reading a key waits for it
    dist.all_gather_object(hosts, socket.gethostname())
    silence = [0.0] * ranks  # seconds
    _stopped.clear()

    def talk() -> None:
        last, connection = [b""] * ranks, store.clone()  # nothing else waits on it
        with suppress(dist.DistError):  # it is lost: `listen` gives up
            for number in itertools.count():
                connection.set(keys[rank], str(number))
                for other, value in enumerate(connection.multi_get(keys)):
                    if value != last[other]:
                        last[other], silence[other] = value, 0.0
                if _stopped.wait(BEAT):
                    return

    def listen() -> None:
        while not _stopped.wait(BEAT):
            silence[:] = [seconds + BEAT for seconds in silence]
            lost = silence.index(max(silence)) if silence[rank] <= SILENCE else 0  # else its store is out of reach
            if silence[lost] > SILENCE and not _stopped.is_set():
                sys.stderr.write(
                    f"error: rank {lost} on {hosts[lost]} gave {hosts[rank]} no sign of life for {SILENCE:.0f} s: it "
                    "has ended, or its host or the network has gone. Look at what it said last; if it said nothing, "
                    "run the same command again: training goes on from its last saved state\n"
                )
                sys.stderr.flush()
                os._exit(1)

    for work in (talk, listen):
        threading.Thread(target=work, daemon=True, name=f"pulse-{work.__name__}").start()


def leave_distributed() -> None:
    """When this rank has done its work; waits for the others."""
    dist.barrier()
    _stopped.set()
    dist.destroy_process_group()
