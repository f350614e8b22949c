"""The pulse of ranks on several hosts. A collective waits for a rank whose host has gone as for one that is slow, and
half an hour is not too long for that; a pulse tells them apart within a minute.
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
    their process group, and ends its process, with one message, when it has not heard one of them for SILENCE.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = _get_default_store().clone()  # a connection of its own: nothing else waits on it
    keys = [f"pulse-{other}" for other in range(ranks)]
    hosts: list = [None] * ranks
    dist.all_gather_object(hosts, socket.gethostname())
    heard = [time.monotonic()] * ranks

    def beat() -> None:
        seen = [b""] * ranks
        for number in itertools.count():
            store.set(keys[rank], str(number))
            for other, value in enumerate(store.multi_get(keys)):
                if value != seen[other]:
                    seen[other], heard[other] = value, time.monotonic()
            if _stopped.wait(BEAT):
                return

    def talk() -> None:
        try:
            beat()
        except dist.DistError:  # the store's host has gone, or its process: nobody is heard any more
            _stopped.wait()

    def listen() -> None:
        while not _stopped.wait(BEAT):
            silent = [other for other in range(ranks) if time.monotonic() - heard[other] > SILENCE]
            if silent and not _stopped.is_set():
                # The store is rank 0's: without its host none is heard.
                lost = silent[0] if len(silent) < ranks else 0
                sys.stderr.write(
                    f"error: rank {lost} on {hosts[lost]} has given no sign of life for {SILENCE:.0f} s: its host or "
                    "the network has gone. Run the same command again: training goes on from its last saved state\n"
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
