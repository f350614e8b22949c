"""The pulse of ranks on several hosts. A collective waits for a rank whose host has gone as for one that is slow, and
half an hour is not too long for that; a pulse tells them apart in about a minute.
"""

import itertools
import os
import socket
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

BEAT, SILENCE = 5.0, 60.0  # seconds
_stopped = threading.Event()


def start_pulse() -> None:
    """Every rank calls it. From then on each tells the others every BEAT seconds that it lives, through the store of
    their process group (rank 0's), and ends its process, with one message, when it has not heard one of them for
    SILENCE. Time in which this process was itself suspended does not count.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = _get_default_store()
    keys = [f"pulse-{other}" for other in range(ranks)]
    hosts: list = [None] * ranks
    store.set(keys[rank], "begun")  # before all meet: reading a key waits for it
    dist.all_gather_object(hosts, socket.gethostname())
    heard = [time.monotonic()] * ranks
    _stopped.clear()

    def talk() -> None:
        seen = [b""] * ranks
        own = None
        for number in itertools.count():
            try:
                own = own or store.clone()  # a connection of its own: nothing else waits on it
                own.set(keys[rank], str(number))
                for other, value in enumerate(own.multi_get(keys)):
                    if value != seen[other]:
                        seen[other], heard[other] = value, time.monotonic()
            except dist.DistError:  # the connection is lost: a new one is tried until `listen` gives up
                own = None
            if _stopped.wait(BEAT):
                return

    def listen() -> None:
        looked = time.monotonic()
        while not _stopped.wait(BEAT):
            now = time.monotonic()
            if now - looked > 2 * BEAT + 1:  # this process was suspended, and maybe they were, too
                heard[:] = [now] * ranks
            looked = now
            silent = [other for other in range(ranks) if now - heard[other] > SILENCE]
            if silent and not _stopped.is_set():
                _leave(_said(silent, rank, hosts))

    for work in (talk, listen):
        threading.Thread(target=work, daemon=True, name=f"pulse-{work.__name__}").start()


def _said(silent: list[int], rank: int, hosts: list[str]) -> str:
    if rank in silent:  # not even itself: the store is out of reach
        lost = f"rank 0 on {hosts[0]} cannot be reached from {hosts[rank]}"
    else:
        lost = f"rank {silent[0]} on {hosts[silent[0]]} has given no sign of life"
    return (
        f"{lost} for {SILENCE:.0f} s: it has ended, or its host or the network has gone. Look at what it said last; if "
        "it said nothing, run the same command again: training goes on from its last saved state"
    )


def _leave(why: str) -> None:
    sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    os._exit(1)


def leave_distributed() -> None:
    """When this rank has done its work; waits for the others."""
    dist.barrier()
    _stopped.set()
    dist.destroy_process_group()
