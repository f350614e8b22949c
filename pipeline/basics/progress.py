"""One progress display for a stage run by hand (a tqdm bar) and for `pipeline run` (lines that the parent draws)."""

import json
import os
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

CHANNEL = "JAKIRO_PROGRESS_FILE"  # set by `pipeline run`: a file that stages append JSON lines to


class Progress:
    """Counts work done: ``with Progress("dump", total=1000, unit="tokens") as p: p.advance(17, loss=0.3)``."""

    def __init__(self, what: str, total: int, unit: str, start: int = 0, quiet: bool = False):
        self._what, self._total, self._unit, self._done = what, total, unit, start
        self._last = 0.0
        channel = os.environ.get(CHANNEL)
        self._channel = Path(channel) if channel and not quiet else None
        self._bar = None
        if not quiet and self._channel is None:
            self._bar = tqdm(total=total, initial=start, desc=what, unit=f" {unit}", mininterval=1, dynamic_ncols=True)
        self._send({})

    def advance(self, amount: int, **shown: Any) -> None:
        self._done += amount
        if self._bar is not None:
            if shown:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() - self._last > 0.5 or self._done >= self._total:
            self._send(shown)

    def expect(self, total: int) -> None:
        """The total turns out to be another."""
        if total == self._total:
            return
        self._total = total
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()
        self._send({})

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar's line, so that an error's message starts on its own."""
        if self._bar is not None:
            self._bar.close()

    def _send(self, shown: dict) -> None:
        if self._channel is not None:
            self._last = time.monotonic()
            line = {"what": self._what, "done": self._done, "total": self._total, "unit": self._unit, "shown": shown}
            with self._channel.open("a") as file:
                file.write(json.dumps(line) + "\n")
