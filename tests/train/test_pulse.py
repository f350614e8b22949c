"""Heartbeats of ranks: a healthy run is not ended, nor one that was suspended; a rank that lost the others reports it
and ends.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.kit import ROOT, free_port

RANK = """
import sys, time, torch.distributed as dist
from train.engine import ranks
rank, address, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
ranks.HEARTBEAT_SECONDS, ranks.SILENCE_SECONDS = 0.1, 2.0
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
ranks.start_heartbeats()
print("started", flush=True)
time.sleep(seconds)
ranks.leave_distributed()
print("left", flush=True)
"""


def ranks(seconds: float) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", RANK]
    processes = []
    for rank in (0, 1):
        more = [str(rank), address, str(seconds)]
        processes.append(
            subprocess.Popen(
                [*command, *more], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "started\n", process.stderr.read()
    return processes


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def test_a_run_longer_than_the_silence_that_was_suspended_goes_on():
    """A scheduler suspends a job, or the machine is suspended."""
    both = ranks(5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in both:
            process.send_signal(number)
        time.sleep(4)
    for process in both:
        assert ended(process) == (0, "left\n")


@pytest.mark.parametrize("lost", [0, 1])  # 0 has the store
def test_one_that_is_alone_ends_and_says_why(lost):
    both = ranks(600)
    both[lost].kill()
    status, words = ended(both[1 - lost])
    assert status == 1 and "for 2 s: it has ended, or its host or the network has gone" in words
    assert re.search(f"rank {lost} on .* no sign of", words)
    both[lost].communicate()


def test_one_that_is_silent_and_not_gone_is_as_good_as_lost():
    """Its host answers; the process does not."""
    both = ranks(600)
    both[1].send_signal(signal.SIGSTOP)
    status, words = ended(both[0])
    assert status == 1 and "rank 1 on " in words
    both[1].kill()
    both[1].communicate()
