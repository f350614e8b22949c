"""How a stage's progress is shown: by a tqdm bar where it was started by hand, by `pipeline run` as lines.

A stage that `pipeline run` started appends its reports, JSON lines, to a channel, which the parent reads and shows.
Every stage tells Prometheus, too: OUTPUT/metrics/STAGE.prom, in its text format, is written anew every few seconds.
Node exporter's textfile collector reads such a folder, `jakiro metrics RECIPE` serves it, `jakiro status` tells it.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

CHANNEL = "JAKIRO_PROGRESS_FILE"  # set by `pipeline run`: a file that stages append JSON lines to


class Progress:
    """Counts work done: ``with Progress("dump", total=1000, unit="tokens") as p: p.advance(17, loss=0.3)``."""

    def __init__(self, what: str, total: int, unit: str, start: int = 0, quiet: bool = False):
        self._what, self._total, self._unit, self._done = what, total, unit, start
        self._last, self._quiet = 0.0, quiet
        self._shown: dict[str, Any] = {}
        self._left: float | None = None
        channel = os.environ.get(CHANNEL)
        self._channel = Path(channel) if channel and not quiet else None
        self._bar = None
        if not quiet and self._channel is None:
            every = 1 if sys.stderr.isatty() else EVERY
            self._bar = tqdm(
                total=total, initial=start, desc=what, unit=f" {unit}", mininterval=every, dynamic_ncols=True
            )
        self._send()

    @property
    def done(self) -> int:
        return self._done

    def advance(self, amount: int, **shown: Any) -> None:
        self.reach(self._done + amount, **shown)

    def reach(self, done: int, left: float | None = None, **shown: Any) -> None:
        """Set the work that is done, which never falls: a worker that is lost begins its part anew. `left`: seconds to
        the end, where the stage knows more than the mean speed.
        """
        amount, self._left, self._shown = max(done - self._done, 0), left, shown
        self._done += amount
        if not self._quiet:
            _tell(self._what, self._done, self._total, self._unit, shown)
        if self._bar is not None:
            if shown:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() - self._last > 0.5 or 0 < self._total <= self._done:
            self._send()

    def note(self, now: str, left: float | None = None) -> None:
        """Show what is being done while nothing is counted, beside the last figures."""
        self.reach(self._done, left, **{**self._shown, "now": now})

    def give_up(self, kept: int) -> str:
        """Say what is shown as done beyond `kept`, and is to be done again; the empty text where nothing is."""
        lost = self._done - kept
        told = f"but the {lost:,} {self._unit} of what is in work, which are made again" if lost > 0 else ""
        self._send(lost=told)
        return told

    def expect(self, total: int) -> None:
        """The total turns out to be another."""
        if total == self._total:
            return
        self._total = total
        if not self._quiet:
            _tell(self._what, self._done, total, self._unit)
        if self._bar is not None:
            self._bar.total = total
            self._bar.refresh()
        self._send()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar's line, so that an error's message starts on its own."""
        if self._bar is not None:
            self._bar.close()

    def _send(self, **more: str) -> None:
        if self._channel is not None:
            self._last = time.monotonic()
            line = {"what": self._what, "done": self._done, "total": self._total, "unit": self._unit}
            line |= {"shown": self._shown, "left": self._left, **more}
            with self._channel.open("a") as file:
                file.write(json.dumps(line) + "\n")


# -- what `pipeline run` shows of it ----------------------------------------------------------------------------------

EVERY = 30  # seconds between two lines of a log
IDLE = 60  # the same where nothing has moved
_KEYS = {"what", "done", "total", "unit", "shown", "left"}  # of a report


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


@dataclass
class _Work:
    """One kind of work: where its clock started, and its last movement."""

    began: float
    first: int  # done when it began
    moved: float
    done: int
    shown: dict[str, Any]


class Display:
    """The stage's newest report as a line: on a terminal in its place, each second; in a log every half minute where
    something has moved, else every minute. `clock` gives seconds.
    """

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic):
        self._out, self._clock = out, clock
        self._erase, self._every = ("\r\x1b[K", 1) if out.isatty() else ("", EVERY)
        self._stage, self._began, self._told = "", 0.0, 0.0
        self._works: dict[str, _Work] = {}  # by kind
        self._newest: dict[str, Any] | None = None
        self._came = self._changed = 0.0  # when the newest report came, and when it last brought news
        self.seen: dict[str, str] = {}  # of the stage, what was shown last under each name
        self.lost = ""  # of what was shown as done, by a stage that a signal ended

    def say(self, line: str) -> None:
        self._write(f"{line}\n")

    def begin(self, stage: str) -> None:
        self._stage, self._works, self._newest, self.seen = stage, {}, None, {}
        self._began = self._told = self._came = self._changed = self._clock()

    def update(self, reports: TextIO) -> None:
        """Looks at what the stage reports, and says so when it is time."""
        now = self._clock()
        for report in new_reports(reports):
            self._take(report, now)
        due = self._every if self._erase or self._changed > self._told else max(self._every, IDLE)
        if now - self._told >= due:
            self._told, line = now, f"{self._stage}: {self._progress(now)}"
            if self._erase:
                self._write(line[: shutil.get_terminal_size().columns - 1])
            else:
                self.say(line)

    def _take(self, report: dict[str, Any], now: float) -> None:
        """Work begins when its first part does: while nothing of it is done, the clock starts anew with what is being
        done (loading, then the first shard).
        """
        before, what, done, shown = self._newest, report["what"], report["done"], report["shown"]
        work = self._works.get(what)
        if work is None or done < work.done or (done == work.first and shown != work.shown):
            work = self._works[what] = _Work(now, done, now, done, shown)
        if done > work.done:
            work.moved = now
        work.done, work.shown = done, shown
        self._newest, self._came, self.lost = report, now, report.get("lost", "")
        self.seen |= shown
        if before is None or any(before[key] != report[key] for key in ("what", "done", "total", "shown")):
            self._changed = now

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
        work, left = self._works[report["what"]], report["left"]
        if work.moved > work.began:
            speed = (done - work.first) / (work.moved - work.began)
            words.append(f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s")
            if left is None and total > done:
                left = (total - done) / speed - (now - work.moved)
            elif left is not None:
                left -= now - self._came
            if left is not None:
                words.append(f"about {duration(max(left, 0))} left")
        words += [f"{key} {value}" for key, value in report["shown"].items()]
        words += [f"nothing new for {duration(now - self._changed)}"] if now - self._changed >= IDLE else []
        return ", ".join(words)


# -- what Prometheus reads of it --------------------------------------------------------------------------------------

METRICS = "metrics"  # of a run
TELL_EVERY = 5.0  # seconds
SHARES = {"waiting"}  # figures that people read in percent
_place: Path | None = None  # of this process, which is one stage's
_told = 0.0
_works: dict[str, tuple[int, int, str, dict[str, Any]]] = {}  # of the stage, each as it was last told


def publish(run: Path, stage: str) -> None:
    """From now on this process tells how far it is."""
    global _place
    _place = run / METRICS / f"{stage}.prom"
    _works.clear()


def _tell(what: str, done: int, total: int, unit: str, shown: dict[str, Any] | None = None) -> None:
    """`shown`: figures as people read them, by default the last ones; those that are no numbers are left out. A file
    that cannot be written is no reason to stop: what the stage writes itself will say so.
    """
    global _told
    now = time.monotonic()
    before = _works[what][3] if what in _works else {}
    _works[what] = done, total, unit, before if shown is None else shown
    if _place is None or (now - _told < TELL_EVERY and done != total):
        return
    _told = now
    registry, stage = CollectorRegistry(), {"run": _place.parent.parent.name, "stage": _place.stem}

    def gauge(name: str, about: str, *labels: str) -> Callable[..., Gauge]:
        made = Gauge(f"jakiro_{name}", about, [*stage, *labels], registry=registry)
        return lambda **more: made.labels(**stage, **more)

    gauge("heartbeat_seconds", "when the stage last told something, in seconds since 1970")().set(time.time())
    work = gauge("done", "work done by the stage", "what", "unit")
    whole = gauge("total", "all of that work; 0 where nobody knows", "what", "unit")
    figures = gauge("shown", "what the stage shows beside: loss, tau, tokens/s, waiting, ...", "what", "name")
    for one, (did, of, in_units, beside) in _works.items():
        work(what=one, unit=in_units).set(did)
        whole(what=one, unit=in_units).set(of)
        for name, value in beside.items():
            if (number := _number(str(value))) is not None:
                figures(what=one, name=name).set(number)
    with suppress(OSError):
        _place.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(_place), registry)


def _number(text: str) -> float | None:
    """0.346, "1,234", "12%"."""
    try:
        return float(text.removesuffix("%").replace(",", "")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def told_by(run: Path) -> Iterator[Metric]:
    """What the stages of a run last told, each metric once."""
    found: dict[str, Metric] = {}
    for path in sorted((run / METRICS).glob("*.prom")):
        for family in text_string_to_metric_families(path.read_text()):
            kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            kept.samples += family.samples
    yield from found.values()


def lines_of(run: Path) -> Iterator[str]:
    """A line for each work that a stage has told of and that is not done."""
    beats: dict[str, float] = {}
    works: dict[tuple[str, str], dict[str, Any]] = {}
    for metric in told_by(run):
        for sample in metric.samples:
            label = sample.labels
            if metric.name == "jakiro_heartbeat_seconds":
                beats[label["stage"]] = sample.value
                continue
            work = works.setdefault((label["stage"], label["what"]), {"shown": {}})
            if metric.name == "jakiro_shown":
                work["shown"][label["name"]] = sample.value
            else:
                work |= {metric.name.removeprefix("jakiro_"): sample.value, "unit": label["unit"]}
    for (stage, what), work in works.items():
        done, total, unit = work["done"], work["total"], work["unit"]
        if done == total:
            continue
        share = f" of {total:,.0f} {unit} ({done / total:.0%})" if total else f" {unit}"
        shown = "".join(f", {name} {_words(name, value)}" for name, value in work["shown"].items())
        title = what if what.partition(" ")[0] == stage else f"{stage}: {what}"
        yield f"{title}: {done:,.0f}{share}{shown}; told {duration(time.time() - beats[stage])} ago"


def _words(name: str, value: float) -> str:
    return f"{value:.0%}" if name in SHARES else f"{value:,.4g}"
