"""How a stage's progress is shown: by a tqdm bar where it was started by hand, by `pipeline run` as lines.

A stage that `pipeline run` started appends its reports, JSON lines, to a channel, which the parent reads and shows.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

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


# -- what `pipeline run` shows of it ----------------------------------------------------------------------------------

EVERY = 30  # seconds between two lines
_KEYS = {"what", "done", "total", "unit", "shown"}  # of a report


def new_reports(reports: TextIO) -> Iterator[dict[str, Any]]:
    """What a stage has appended to its channel since the last look; a line written in
    part waits, and one that is no report (torn by whoever was ended in writing it) is passed over.
    """
    while line := reports.readline():
        if not line.endswith("\n"):
            reports.seek(reports.tell() - len(line.encode()))
            return
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict) and report.keys() >= _KEYS:
            yield report


def duration(seconds: float) -> str:
    """As people say it: 40 s, 11 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Display:
    """The stage's newest report as a line: in a log one every half minute, on a terminal in its place, each second.

    `clock` gives seconds.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = out, clock
        self._erase, self._every = ("\r\x1b[K", 1) if out.isatty() else ("", EVERY)
        self._stage, self._began, self._told = "", 0.0, 0.0
        self._first: dict[str, tuple[float, int]] = {}  # by kind of work: when it began, and what was done then
        self._done: dict[str, int] = {}
        self._newest: dict[str, Any] | None = None
        self.seen: dict[str, str] = {}  # of the stage, what was shown last under each name

    def say(self, line: str) -> None:
        self._write(f"{line}\n")

    def begin(self, stage: str) -> None:
        self._stage, self._first, self._newest, self.seen = stage, {}, None, {}
        self._began = self._told = self._clock()

    def update(self, reports: TextIO) -> None:
        """Looks at what the stage reports, and says so when it is time."""
        now = self._clock()
        for report in new_reports(reports):
            what, done = report["what"], report["done"]
            if what not in self._first or done < self._done[what]:  # begun, or begun again: the next draft's
                self._first[what] = now, done
            self._done[what], self._newest = done, report
            self.seen |= report["shown"]
        if now - self._told >= self._every:
            self._told, line = now, f"{self._stage}: {self._progress(now)}"
            if self._erase:
                self._write(line[: shutil.get_terminal_size().columns - 1])
            else:
                self.say(line)

    def end(self) -> None:
        """The stage has ended, well or not."""
        self._write("")

    def _write(self, text: str) -> None:
        print(self._erase + text, end="", file=self._out, flush=True)

    def _progress(self, now: float) -> str:
        report = self._newest
        if report is None:
            return f"no progress to report yet after {duration(now - self._began)}"
        done, total, unit = report["done"], report["total"], report["unit"]
        share = f" of {total:,} {unit} ({done / total:.0%})" if total else f" {unit}"
        words = [f"{report['what']}: {done:,}{share}"]
        began, before = self._first[report["what"]]
        if done > before and now > began:
            speed = (done - before) / (now - began)
            words.append(f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s")
            if total > done:
                words.append(f"about {duration((total - done) / speed)} left")
        return ", ".join([*words, *(f"{key} {value}" for key, value in report["shown"].items())])
