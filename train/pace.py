"""How long a training still takes: its steps and its validations, each at their mean pace so far."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Of a training of `steps` steps that validates every so many, and after the last; it goes on behind `step`."""

    def __init__(self, steps: int, every: int, step: int, clock: Callable[[], float] = time.monotonic):
        self._steps, self._every, self._clock = steps, every, clock
        self._first, self._begin = step, clock()
        self._validations, self._seconds = 0, 0.0  # behind it
        self._since: float | None = None  # when the validation that runs began
        self._share = 0.0  # of it that is done

    @contextmanager
    def validation(self, parts: int, show: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        """What runs in the block is one validation; it calls what it is given after each of its parts, which `show` is
        told of.
        """
        self._since, self._share, done = self._clock(), 0.0, 0

        def part() -> None:
            nonlocal done
            done += 1
            self._share = done / parts
            show(f"validation, {done} of {parts}")

        show(f"validation, 0 of {parts}")
        yield part
        self._seconds += self._clock() - self._since
        self._validations, self._since = self._validations + 1, None

    def left(self, step: int) -> float | None:
        """Seconds to the end, behind `step`; None where no step was timed yet. A validation counts as soon as a part of
        the first has been timed.
        """
        now = self._clock()
        running = 0.0 if self._since is None else now - self._since
        if step <= self._first:
            return None
        one_step = (now - self._begin - self._seconds - running) / (step - self._first)
        one_validation = self._seconds / self._validations if self._validations else 0.0
        if not self._validations and self._share:
            one_validation = running / self._share
        validations = self._steps // self._every - step // self._every + (self._steps % self._every > 0)
        rest = 0.0 if self._since is None else max(one_validation - running, 0.0)
        return (self._steps - step) * one_step + min(validations, self._steps - step) * one_validation + rest
