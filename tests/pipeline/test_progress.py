"""The progress of work, as people read it and as it is recorded, on a clock that the test controls."""

import fcntl
import io
import os
import select
import struct
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.basics import progress
from pipeline.basics.progress import EVERY, IDLE, Progress, Screen, format_duration, read_events, set_record_path


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """`now` may be set."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run's folder; where this process records ends with the test."""
    monkeypatch.setattr(progress, "_place", None)
    return tmp_path / "tiny"


def test_a_line_says_progress_speed_and_what_is_left(clock):
    with Progress("train eagle", 66, "steps") as shown:
        clock.now = 8.7
        shown.advance(6, loss="2.140")
    text = "train eagle: 6 of 66 steps (9%), 0.69 steps/s, about 87 s left, loss 2.140"
    assert shown.event.line() == shown.event.line("train") == text and shown.event.line("eval") == f"eval: {text}"
    clock.now += IDLE  # the part in work has its share of what is left
    idle = "train eagle: 6 of 66 steps (9%), 0.69 steps/s, about 27 s left, loss 2.140, nothing new for 60 s"
    assert shown.event.line() == idle


def test_loading_is_no_part_of_the_works_time(clock):
    with Progress("dump", 1000, "tokens", start=100) as shown:
        for clock.now, now in (1, "loading the target"), (280, "shard train-0"):
            shown.note(now)
        clock.now = 290
        shown.reach(200, now="shard train-0")
        clock.now = 295
        shown.note("shard train-1")
        assert shown.event.line() == (
            "dump: 200 of 1,000 tokens (20%), 10 tokens/s, about 75 s left, now shard train-1"
        )
        shown.reach(150)  # after a worker failure its part begins again: the finished work never falls
        assert shown.event.done == 200 and shown.event.in_work == 50


def test_work_without_a_known_end_has_no_share_and_nothing_left_until_it_is_known(clock):
    with Progress("dump", 0, "tokens") as shown:
        clock.now = EVERY
        shown.advance(60)
        assert shown.event.line() == "dump: 60 tokens, 2 tokens/s"
        shown.expect(100)
        assert shown.event.line() == "dump: 60 of 100 tokens (60%), 2 tokens/s"


def test_in_a_log_there_is_a_line_every_half_minute_and_every_minute_where_nothing_moves(clock):
    out = io.StringIO()
    screen, shown, event = Screen(out), Progress("dump", 1000, "tokens", quiet=True), None
    for clock.now in range(1, 4 * IDLE):
        if clock.now == IDLE + 1:
            shown.note("loading")
        if IDLE + 30 <= clock.now < IDLE + 50:
            shown.advance(10, now="shard 0")
        event = shown.event if clock.now > IDLE else None
        screen.show(event, "preprocess")
    screen.close()
    assert out.getvalue().splitlines() == [
        "preprocess: no progress to report yet",
        "preprocess: dump: 10 of 1,000 tokens (1%), 0.34 tokens/s, about 48 min left, now shard 0",
        "preprocess: dump: 200 of 1,000 tokens (20%), 4.2 tokens/s, about 3 min left, now shard 0",
        "preprocess: dump: 200 of 1,000 tokens (20%), 4.2 tokens/s, about 2 min left, now shard 0, "
        "nothing new for 71 s",
    ]


def test_on_a_terminal_a_line_stands_in_its_place_and_is_as_long_as_that_is_wide(clock):
    control, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 34, 0, 0))
    with os.fdopen(terminal, "w") as out:
        screen, shown = Screen(out), Progress("decode", 1000, "tokens", quiet=True)
        shown.advance(500)
        screen.show(shown.event, "eval")
        screen.write_line("a [line]")
        screen.show(None, "train")
        screen.close()
        text = b""
        while select.select([control], [], [], 0)[0]:
            text += os.read(control, 4096)
    lines = [line.strip() for line in text.decode().replace("\r", "\n").splitlines() if line.strip()]
    assert lines[0] == "eval: decode: 500 of 1,000 tokens"[:33] and lines.count("a [line]") == 1
    assert lines[-1] == "train: no progress to report yet" and text.endswith(b"\r")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (90_000, "25.0 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_the_newest_event_of_each_stage_is_in_the_runs_folder(run, clock):
    for stage in ("dump", "feed"):
        set_record_path(run, stage)
        with Progress("texts", 2, "files") as shown:
            shown.advance(2)
        with Progress(stage, 10, "tokens") as shown:
            clock.now += 1
            shown.advance(4, loss="2.1")
            shown.advance(1, loss="2.2")  # too soon to be written at once
            assert read_events(run)[stage].done == 4
    assert read_events(run) == {"dump": read_events(run)["dump"], "feed": shown.event}
    assert shown.event.done == read_events(run)["dump"].done == 5 and shown.event.figures == {"loss": "2.2"}


def test_what_is_being_done_is_recorded_at_once(run, clock):
    set_record_path(run, "dump")
    with Progress("dump", 10, "tokens") as shown:
        shown.note("loading the target")
        assert read_events(run)["dump"].figures == {"now": "loading the target"}
        with pytest.raises(KeyboardInterrupt) as caught, shown:
            shown.reach(1700, in_work=1200)
            raise KeyboardInterrupt
    assert caught.value.__notes__ == ["but the 1,200 tokens of what is in work, which are made again"]
    assert read_events(run)["dump"].lost in caught.value.__notes__


def test_who_is_quiet_has_not_said_where_or_cannot_write_stops_nobody(run):
    with Progress("dump", 3, "tokens") as shown:
        shown.advance(1)
    set_record_path(run, "train")
    with Progress("train", 3, "steps", quiet=True) as shown:
        shown.advance(1)
    assert not run.exists() and not read_events(run) and shown.event.done == 1
    run.write_text("a file is in the way")
    with Progress("dump", 3, "tokens") as shown:
        shown.advance(1)
