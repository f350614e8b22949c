"""How a stage's progress is shown: by a tqdm bar where it was started by hand; by `pipeline run` as bars on a terminal,
else as lines, since a log keeps all that was ever drawn.

A stage that `pipeline run` started appends its reports, JSON lines, to a channel, which the parent reads and draws.
Without a terminal there is one line when a stage starts, one every half minute while it runs, and one when it ends.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich import progress as rich
from rich.console import Console
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


class Lines:
    """For a log. `clock` gives seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = out, clock
        self._stage, self._began, self._told = "", 0.0, 0.0
        self._first: dict[str, tuple[float, int]] = {}  # by kind of work: when it began, and what was done then
        self._done: dict[str, int] = {}
        self._newest: dict[str, Any] | None = None

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def begin(self, stage: str) -> None:
        self._stage, self._first, self._newest = stage, {}, None
        self._began = self._told = self._clock()

    def update(self, reports: TextIO) -> None:
        """Looks at what the stage reports, and says so when it is time."""
        now = self._clock()
        for report in new_reports(reports):
            what, done = report["what"], report["done"]
            if what not in self._first or done < self._done[what]:  # begun, or begun again: the next draft's
                self._first[what] = now, done
            self._done[what], self._newest = done, report
        if now - self._told >= EVERY:
            self._told = now
            self.say(f"{self._stage}: {self._progress(now)}")

    def end(self) -> None:
        """The stage has ended, well or not."""

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


class Bars:
    """For a terminal."""

    def __init__(self) -> None:
        columns = (
            rich.TextColumn("{task.description:<28}"),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[state]}"),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        )
        self._progress = rich.Progress(*columns, console=Console(), refresh_per_second=2)
        self._stage, self._bars = "", dict[str, rich.TaskID]()

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def begin(self, stage: str) -> None:
        self._stage = stage

    def update(self, reports: TextIO) -> None:
        for report in new_reports(reports):
            what, done, total = report["what"], report["done"], report["total"]
            if what not in self._bars:
                self._bars[what] = self._progress.add_task(f"{self._stage}: {what}", total=total or None, state="")
            shown = ", ".join(f"{key} {value}" for key, value in report["shown"].items())
            self._progress.update(
                self._bars[what], total=total or None, completed=done, state=f"{done:,}/{total:,} {shown}"
            )

    def end(self) -> None:
        for bar in self._bars.values():
            self._progress.remove_task(bar)
        self._bars.clear()


Display = Lines | Bars


def display() -> Display:
    """What fits the standard output."""
    return Bars() if sys.stdout.isatty() else Lines(sys.stdout)
