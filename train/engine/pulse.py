"""The pulse of ranks on several hosts. A collective waits for a rank whose host has gone as for one that is slow, and
half an hour is not too long for that; a pulse tells them apart in about a minute.
"""

import itertools
import os
import socket
import sys
import threading
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

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
