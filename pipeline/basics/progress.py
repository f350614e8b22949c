"""The progress of a stage: one small record. People see it as a line (`Screen`); programs read it from the run's
folder, OUTPUT/metrics/STAGE.json: `jakiro run`, which started the stage, `jakiro status` and `jakiro metrics`.
"""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

METRICS = "metrics"  # folder of a run
OFTEN = 0.5  # seconds between two records of a stage
EVERY = 30  # seconds between two lines of a log
IDLE = 60  # the same while nothing advances
_place: Path | None = None  # file of this process's records


def set_record_path(run: Path, stage: str) -> None:
    """Set the run's folder as the place of this process's progress records."""
    global _place
    _place = run / METRICS / f"{stage}.json"


@dataclass(frozen=True)
class Event:
    """One progress record of a stage, as written to JSON."""

    what: str  # what is done, as "dump"
    unit: str
    done: int
    total: int  # 0: unknown
    time: float  # of the last advance, in seconds since 1970
    in_work: int = 0  # part of `done` that is repeated after an interrupt
    rate: float | None = None  # units per second
    left: float | None = None  # seconds to the end
    figures: dict[str, Any] = field(default_factory=dict)  # more to show: loss, tau, ...

    def line(self, stage: str = "") -> str:
        """Return the line that people read; it begins with the stage where the work is named otherwise."""
        idle = time.time() - self.time
        title = self.what if self.what.partition(" ")[0] == stage or not stage else f"{stage}: {self.what}"
        share = f" of {self.total:,} {self.unit} ({self.done / self.total:.0%})" if self.total else f" {self.unit}"
        words = [f"{title}: {self.done:,}{share}"]
        if self.rate is not None:
            words.append(f"{self.rate:,.0f} {self.unit}/s" if self.rate >= 10 else f"{self.rate:.2g} {self.unit}/s")
        if self.left is not None:
            words.append(f"about {format_duration(max(self.left - idle, 0))} left")
        words += [f"{name} {value}" for name, value in self.figures.items()]
        words += [f"nothing new for {format_duration(idle)}"] if idle >= IDLE else []
        return ", ".join(words)

    @property
    def lost(self) -> str:
        """Return what an interrupt loses; the empty text where that is nothing."""
        return f"but the {self.in_work:,} {self.unit} of what is in work, which are made again" if self.in_work else ""


def read_event(path: Path) -> Event | None:
    """Load the last record of a stage; None before the first."""
    return Event(**json.loads(path.read_text())) if path.exists() else None


def read_events(run: Path) -> dict[str, Event]:
    """Load the last records of a run's stages, by stage."""
    paths = sorted((run / METRICS).glob("*.json"))
    return {path.stem: event for path in paths if (event := read_event(path))}


class Progress:
    """A counter of work: ``with Progress("dump", total=1000, unit="tokens") as p: p.advance(17, loss=0.3)``."""

    def __init__(self, subject: str, total: int, unit: str, start: int = 0, quiet: bool = False):
        self.event = Event(subject, unit, start, total, time.time())
        self._first, self._start_time, self._last_advance = (
            start,
            self.event.time,
            self.event.time,
        )  # of the rate
        self._screen, self._quiet, self._recorded = Screen(sys.stderr), quiet, 0.0
        self._report(self.event)

    def advance(self, amount: int, **figures: Any) -> None:
        self.reach(self.event.done + amount, **figures)

    def reach(self, done: int, in_work: int = 0, **figures: Any) -> None:
        """Set the finished work, which never falls: after a worker failure, its part begins again."""
        before, now = self.event, time.time()
        done, in_work = max(done, before.done), in_work + max(before.done - done, 0)
        if (done, in_work, figures) == (before.done, before.in_work, before.figures):
            return
        rate = before.rate
        if done == self._first:  # the time of loading does not count
            self._start_time = now
        elif done > before.done and now > self._start_time:
            self._last_advance, rate = now, (done - self._first) / (now - self._start_time)
        # Work in progress counts as part of the remaining time.
        left = (before.total - done) / rate - (now - self._last_advance) if rate and before.total else None
        self._report(replace(before, done=done, in_work=in_work, rate=rate, left=left, figures=figures, time=now))

    def note(self, now: str) -> None:
        """Show what is being done while nothing is counted, next to the last figures."""
        self.reach(self.event.done, self.event.in_work, **{**self.event.figures, "now": now})

    def expect(self, total: int) -> None:
        """Correct the total."""
        if total != self.event.total:
            self._report(replace(self.event, total=total, left=None))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._report(self.event, end=True)
        self._screen.close()
        if isinstance(error, KeyboardInterrupt) and self.event.lost:
            error.add_note(self.event.lost)

    def _report(self, event: Event, end: bool = False) -> None:
        """Show and record an event. A record that cannot be written does not stop the stage: its own writes will report
        the problem.
        """
        news = event.done == event.total or event.figures.get("now") != self.event.figures.get("now")
        self.event = event
        if self._quiet or not (end or news or time.monotonic() - self._recorded > OFTEN):
            return
        self._recorded = time.monotonic()
        self._screen.show(event)
        if _place is not None:
            with suppress(OSError):
                _place.parent.mkdir(exist_ok=True, parents=True)
                temporary = _place.with_name(f".{_place.name}.{os.getpid()}.tmp")
                temporary.write_text(json.dumps(asdict(event)))
                temporary.replace(_place)


def format_duration(seconds: float) -> str:
    """Format seconds for people: 40 s, 11 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Screen:
    """A display of progress: a terminal has the newest line in place, a log one line every half minute, or every minute
    while nothing advances.
    """

    def __init__(self, out: TextIO):
        self._out, self._shown_time = out, time.time()
        self._bar: tqdm | None = None

    def write_line(self, line: str) -> None:
        tqdm.write(line, file=self._out)
        self._out.flush()

    def show(self, event: Event | None, stage: str = "") -> None:
        line, now = event.line(stage) if event else f"{stage}: no progress to report yet", time.time()
        if self._out.isatty():
            look = {"bar_format": "{desc} {bar}", "dynamic_ncols": True, "leave": False}
            self._bar = self._bar or tqdm(desc=line, file=self._out, **look)
            self._bar.n, self._bar.total = (event.done, event.total or None) if event else (0, None)
            self._bar.set_description_str(line)
        elif now - self._shown_time >= (EVERY if event and event.time > self._shown_time else IDLE):
            self._shown_time = now
            self.write_line(line)

    def close(self) -> None:
        """Erase the progress line of a terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
