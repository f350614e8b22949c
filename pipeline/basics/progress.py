"""How far work is: one small record. People see it as a line (`Screen`); everything else reads it from the run's
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

METRICS = "metrics"  # of a run
OFTEN = 0.5  # seconds between two records of a stage
EVERY = 30  # seconds between two lines of a log
IDLE = 60  # the same where nothing moves
_place: Path | None = None  # of this process' records


def publish(run: Path, stage: str) -> None:
    """Have this process record how far it is in the run's folder."""
    global _place
    _place = run / METRICS / f"{stage}.json"


@dataclass(frozen=True)
class Event:
    what: str  # is done
    unit: str
    done: int
    total: int  # 0: nobody knows
    time: float  # when it moved, in seconds since 1970
    in_work: int = 0  # of what is done: made again after an interrupt
    rate: float | None = None  # of the unit, in a second
    left: float | None = None  # seconds to the end
    figures: dict[str, Any] = field(default_factory=dict)  # more to show: loss, tau, ...

    def line(self, stage: str = "") -> str:
        """Return what people read, with its stage where the work is not called after it."""
        idle = time.time() - self.time
        title = self.what if self.what.partition(" ")[0] == stage or not stage else f"{stage}: {self.what}"
        share = f" of {self.total:,} {self.unit} ({self.done / self.total:.0%})" if self.total else f" {self.unit}"
        words = [f"{title}: {self.done:,}{share}"]
        if self.rate is not None:
            words.append(f"{self.rate:,.0f} {self.unit}/s" if self.rate >= 10 else f"{self.rate:.2g} {self.unit}/s")
        if self.left is not None:
            words.append(f"about {duration(max(self.left - idle, 0))} left")
        words += [f"{name} {value}" for name, value in self.figures.items()]
        words += [f"nothing new for {duration(idle)}"] if idle >= IDLE else []
        return ", ".join(words)

    @property
    def lost(self) -> str:
        """Return what an interrupt loses; the empty text where that is nothing."""
        return f"but the {self.in_work:,} {self.unit} of what is in work, which are made again" if self.in_work else ""


def read_event(path: Path) -> Event | None:
    """Return what a stage recorded last; None where it has not yet."""
    return Event(**json.loads(path.read_text())) if path.exists() else None


def events(run: Path) -> dict[str, Event]:
    """Return what the stages of a run recorded last, by stage."""
    paths = sorted((run / METRICS).glob("*.json"))
    return {path.stem: event for path in paths if (event := read_event(path))}


class Progress:
    """Counts work done: ``with Progress("dump", total=1000, unit="tokens") as p: p.advance(17, loss=0.3)``."""

    def __init__(self, what: str, total: int, unit: str, start: int = 0, quiet: bool = False):
        self.event = Event(what, unit, start, total, time.time())
        self._first, self._began, self._moved = start, self.event.time, self.event.time  # what the speed is of
        self._screen, self._quiet, self._recorded = Screen(sys.stderr), quiet, 0.0
        self._tell(self.event)

    def advance(self, amount: int, **figures: Any) -> None:
        self.reach(self.event.done + amount, **figures)

    def reach(self, done: int, in_work: int = 0, **figures: Any) -> None:
        """Set the work that is done, which never falls: a worker that is lost begins its part anew."""
        before, now = self.event, time.time()
        done, in_work = max(done, before.done), in_work + max(before.done - done, 0)
        if (done, in_work, figures) == (before.done, before.in_work, before.figures):
            return
        rate = before.rate
        if done == self._first:  # loading is no part of the work's time
            self._began = now
        elif done > before.done and now > self._began:
            self._moved, rate = now, (done - self._first) / (now - self._began)
        # What is in work has its share in what is left.
        left = (before.total - done) / rate - (now - self._moved) if rate and before.total else None
        self._tell(replace(before, done=done, in_work=in_work, rate=rate, left=left, figures=figures, time=now))

    def note(self, now: str) -> None:
        """Show what is being done while nothing is counted, beside the last figures."""
        self.reach(self.event.done, self.event.in_work, **{**self.event.figures, "now": now})

    def expect(self, total: int) -> None:
        """The total turns out to be another."""
        if total != self.event.total:
            self._tell(replace(self.event, total=total, left=None))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._tell(self.event, end=True)
        self._screen.close()
        if isinstance(error, KeyboardInterrupt) and self.event.lost:
            error.add_note(self.event.lost)

    def _tell(self, event: Event, end: bool = False) -> None:
        """A record that cannot be written is no reason to stop: what the stage writes itself will say so."""
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


def duration(seconds: float) -> str:
    """As people say it: 40 s, 11 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Screen:
    """Where people read: a terminal has the newest line in its place, a log one every half minute, or every minute
    where nothing moves.
    """

    def __init__(self, out: TextIO):
        self._out, self._shown = out, time.time()
        self._bar: tqdm | None = None

    def say(self, line: str) -> None:
        tqdm.write(line, file=self._out)
        self._out.flush()

    def show(self, event: Event | None, stage: str = "") -> None:
        line, now = event.line(stage) if event else f"{stage}: no progress to report yet", time.time()
        if self._out.isatty():
            look = {"bar_format": "{desc} {bar}", "dynamic_ncols": True, "leave": False}
            self._bar = self._bar or tqdm(desc=line, file=self._out, **look)
            self._bar.n, self._bar.total = (event.done, event.total or None) if event else (0, None)
            self._bar.set_description_str(line)
        elif now - self._shown >= (EVERY if event and event.time > self._shown else IDLE):
            self._shown = now
            self.say(line)

    def close(self) -> None:
        """Erase the line of a terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
