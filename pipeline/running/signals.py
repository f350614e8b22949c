"""SIGINT (Ctrl-C) and SIGTERM: how they reach the code of a command, and how they stay away from its helpers."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BOTH = (signal.SIGINT, signal.SIGTERM)
GRACE = 10.0  # seconds for cleaning up, in which a hasty second Ctrl-C breaks nothing


def raise_on_signals(leave: Callable[[int], None]) -> list[int]:
    """From now on the first of them raises KeyboardInterrupt in the main thread, so that what is open is closed; those
    that follow are not heard, and from GRACE seconds on have `leave(number)` called at once. Returns the list in which
    the numbers of all will stand.
    """
    received: list[int] = []
    begin = 0.0

    def interrupt(number: int, _frame) -> None:
        nonlocal begin
        received.append(number)
        if len(received) == 1:
            begin = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - begin > GRACE:
            leave(received[0])

    for number in BOTH:
        signal.signal(number, interrupt)
    return received


@contextmanager
def postponed() -> Iterator[None]:
    """What comes in this block is heard at its end."""
    came: list[int] = []
    with kept_handlers():
        for number in BOTH:
            signal.signal(number, lambda number, _frame: came.append(number))
        yield
    if came:
        signal.raise_signal(came[0])


def leave_on_signals(leave: Callable[[int], None]) -> None:
    """From now on both have `leave(number)` called by a thread of its own, at once: a rank's main thread may be waiting
    for other ranks, in a library that returns to Python when they answer.
    """
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    for number in BOTH:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    threading.Thread(target=lambda: leave(os.read(ears, 1)[0]), daemon=True).start()


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restores our handlers behind a library that sets its own."""
    before = {number: signal.getsignal(number) for number in BOTH}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started in this block never hear of Ctrl-C: who started them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
