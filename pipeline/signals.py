"""SIGINT (Ctrl-C) and SIGTERM: how they reach the code of a command, and how they stay away from its helpers."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BOTH = (signal.SIGINT, signal.SIGTERM)


def raise_on_signals() -> list[int]:
    """From now on both raise KeyboardInterrupt in the main thread, so that what is open is closed. Returns the list in which
    the numbers of those that came will stand.
    """
    received: list[int] = []

    def interrupt(number: int, _frame) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in BOTH:
        signal.signal(number, interrupt)
    return received


def leave_on_signals(leave: Callable[[int], None]) -> None:
    """From now on both have `leave(number)` called by a thread of its own, at once: a rank's main thread may be waiting for other
    ranks, in a library that returns to Python when they answer.
    """
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    for number in BOTH:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    threading.Thread(target=lambda: leave(os.read(ears, 1)[0]), daemon=True).start()


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Around a library that sets handlers of its own: afterwards ours are back."""
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
