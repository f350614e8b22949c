"""The errors and heartbeats of a training's ranks. An error of one rank ends all of them with its message, so that no
collective waits for it. Ranks of one machine meet on its loopback address.

A collective waits for a rank whose host has died as it does for a slow one, up to half an hour. The heartbeats tell the
two apart in about a minute.
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
from pipeline.running.entry import describe_refusal

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
# The variable that sets the network interface of a backend's sockets.
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@contextmanager
def fail_together() -> Iterator[None]:
    """Raise PipelineError on all ranks if the block raises it on one, or if the file system of one refuses. Every rank
    enters it.
    """
    message = ""
    try:
        yield
    except PipelineError as error:
        message = str(error)
    except OSError as error:
        message = describe_refusal(error, keeps=True) or str(error) or type(error).__name__
    messages: list = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if first_message := next(filter(None, messages), ""):
        raise PipelineError(first_message)


def run_on_rank_0(work: Callable[[], T]) -> T:
    """Return the result of rank 0 on every rank. An error of rank 0 is raised on all ranks, as by `fail_together`."""
    result: list = [None]
    with fail_together():
        if dist.get_rank() == 0:
            result = [work()]
    dist.broadcast_object_list(result)
    return result[0]


def local_rank_and_size() -> tuple[int, int]:
    """Return (number, count) of this rank among those that its launcher started on this machine: (0, 1) if the launcher
    does not say.
    """
    # the names that torch and DeepSpeed use
    count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    return int(os.environ.get("LOCAL_RANK", "0")) % count, count


def join_on_loopback(backend: str, device: torch.device | None, timeout: timedelta) -> None:
    """Create the process group of ranks that are all on this machine, on loopback sockets unless the user sets others.
    Leave the ranks of several machines, and those whose launcher holds their store, as they are. Raise PipelineError if
    the port is taken.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if local_rank_and_size()[1] != ranks or backend not in _INTERFACES:
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
                f"MASTER_PORT={port}: {os.strerror(error.errno or 0)}, expected a free port of this machine. "
                "Choose another (the launcher's --master_port)"
            ) from None
        port, descriptor = listening.getsockname()[1], listening.detach()
    store = dist.TCPStore(LOOPBACK, port, ranks, rank == 0, timeout, master_listen_fd=descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device)


def decide_on_rank_0(value: bool, device: torch.device) -> bool:
    """Return rank 0's value, on every rank. All ranks take part."""
    decision = torch.tensor(int(value and dist.get_rank() == 0), device=device)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return bool(decision.item())


HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0  # seconds
_stopped = threading.Event()


def start_heartbeats() -> None:
    """Start this rank's heartbeats; every rank calls it. Each rank then writes a heartbeat every HEARTBEAT_SECONDS to
    the store of the process group (rank 0's), and ends its process, with one message, when another rank's has not
    changed for SILENCE_SECONDS of its own heartbeats: none is counted while the process is suspended.
    """
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    keys = [f"heartbeat-{number}" for number in range(ranks)]
    hosts: list = [None] * ranks
    store.set(keys[rank], "begun")  # before all ranks gather: reading a missing key blocks
    dist.all_gather_object(hosts, socket.gethostname())
    silence = [0.0] * ranks  # seconds
    _stopped.clear()

    def send_heartbeats() -> None:
        last_values, connection = [b""] * ranks, store.clone()  # no other call waits on this connection
        with suppress(dist.DistError):  # the store is lost: `check_heartbeats` ends the process
            for number in itertools.count():
                connection.set(keys[rank], str(number))
                for sender, value in enumerate(connection.multi_get(keys)):
                    if value != last_values[sender]:
                        last_values[sender], silence[sender] = value, 0.0
                if _stopped.wait(HEARTBEAT_SECONDS):
                    return

    def check_heartbeats() -> None:
        while not _stopped.wait(HEARTBEAT_SECONDS):
            silence[:] = [seconds + HEARTBEAT_SECONDS for seconds in silence]
            # a rank whose own heartbeats do not pass cannot reach the store of rank 0
            lost_rank = silence.index(max(silence)) if silence[rank] <= SILENCE_SECONDS else 0
            if silence[lost_rank] > SILENCE_SECONDS and not _stopped.is_set():
                sys.stderr.write(
                    f"error: rank {lost_rank} on {hosts[lost_rank]} gave {hosts[rank]} no sign of life for "
                    f"{SILENCE_SECONDS:.0f} s: it has ended, or its host or the network has gone. Look at its last "
                    "message; if there is none, run the same command again: training goes on from its last saved "
                    "state\n"
                )
                sys.stderr.flush()
                os._exit(1)

    for work in (send_heartbeats, check_heartbeats):
        threading.Thread(target=work, daemon=True, name=work.__name__).start()


def leave_distributed() -> None:
    """Wait for the other ranks, stop the heartbeats and leave the process group."""
    dist.barrier()
    _stopped.set()
    dist.destroy_process_group()
