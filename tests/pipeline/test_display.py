"""What `pipeline run` prints of a stage, on a clock that the test holds."""

import io
import json
import os
import sys
from dataclasses import replace

import pytest

from pipeline.basics.progress import EVERY, IDLE, Display, duration, new_reports
from pipeline.running.stages import _run_stage, stages
from tests.kit import write_recipe


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def report(done: int, total: int = 1000, what: str = "dump", left: float | None = None, **shown) -> str:
    line = {"what": what, "done": done, "total": total, "unit": "tokens", "shown": shown, "left": left}
    return json.dumps(line) + "\n"


@pytest.fixture
def watched():
    """(lines, their clock, what they wrote, the channel that they read)"""
    clock, out, channel = Clock(), io.StringIO(), io.StringIO()
    lines = Display(out, clock)
    lines.begin("preprocess")
    return lines, clock, out, channel


def append(channel: io.StringIO, text: str) -> None:
    at = channel.tell()
    channel.seek(0, io.SEEK_END)
    channel.write(text)
    channel.seek(at)


def told(watched, *timed: tuple[int, str], until: int) -> list[str]:
    """The lines, of reports that come at these seconds."""
    lines, clock, out, channel = watched
    for second in range(1, until + 1):
        clock.seconds = second
        for at, text in timed:
            if at == second:
                append(channel, text)
        lines.update(channel)
    return out.getvalue().splitlines()


def test_a_line_every_half_minute_says_progress_speed_and_what_is_left(watched):
    """The speed is that of the time in which the parts were done; the part in work has its share of what is left."""
    assert told(watched, (1, report(100)), (21, report(300)), (41, report(500, shards=3)), until=60) == [
        "preprocess: dump: 300 of 1,000 tokens (30%), 10 tokens/s, about 61 s left",
        "preprocess: dump: 500 of 1,000 tokens (50%), 10 tokens/s, about 31 s left, shards 3",
    ]


def test_where_nothing_moves_a_line_a_minute_says_what_is_being_done(watched):
    """Loading is no part of the work's time: its speed and what is left are those of the shards."""
    loading, shard = report(0, now="loading the target"), report(0, now="shard train-0")
    lines = told(watched, (1, loading), (280, shard), (290, report(100, now="shard train-0")), until=5 * IDLE)
    assert lines == [
        "preprocess: dump: 0 of 1,000 tokens (0%), now loading the target",
        "preprocess: dump: 0 of 1,000 tokens (0%), now loading the target, nothing new for 89 s",
        "preprocess: dump: 0 of 1,000 tokens (0%), now loading the target, nothing new for 2 min",
        "preprocess: dump: 0 of 1,000 tokens (0%), now loading the target, nothing new for 3 min",
        "preprocess: dump: 0 of 1,000 tokens (0%), now loading the target, nothing new for 4 min",
        "preprocess: dump: 100 of 1,000 tokens (10%), 10 tokens/s, about 80 s left, now shard train-0",
    ]


def test_a_stage_that_knows_what_is_left_is_believed(watched):
    reports = (1, report(100)), (2, report(200)), (20, report(200, left=500, now="validation, 1 of 9"))
    assert told(watched, *reports, until=EVERY) == [
        "preprocess: dump: 200 of 1,000 tokens (20%), 100 tokens/s, about 8 min left, now validation, 1 of 9"
    ]


def test_work_that_begins_again_has_a_speed_of_its_own(watched):
    """Each draft is decoded under the same name."""
    lines, clock, out, channel = watched
    append(channel, report(0, what="decode") + report(1000, what="decode"))
    lines.update(channel)
    clock.seconds = EVERY - 10
    append(channel, report(0, what="decode"))
    lines.update(channel)
    append(channel, report(500, what="decode"))
    clock.seconds = EVERY
    lines.update(channel)
    assert out.getvalue() == "preprocess: decode: 500 of 1,000 tokens (50%), 50 tokens/s, about 10 s left\n"


def test_work_without_a_known_end_has_no_share_and_nothing_left(watched):
    lines, clock, out, channel = watched
    append(channel, report(0, total=0))
    lines.update(channel)
    append(channel, report(60, total=0))
    clock.seconds = EVERY
    lines.update(channel)
    assert out.getvalue() == "preprocess: dump: 60 tokens, 2 tokens/s\n"


def test_the_next_stage_starts_with_a_clean_slate(watched):
    lines, clock, out, channel = watched
    append(channel, report(500))
    lines.update(channel)
    lines.end()
    lines.begin("train")
    clock.seconds = IDLE
    lines.update(channel)
    assert out.getvalue() == f"train: no progress to report yet after {IDLE} s\n"


def test_a_report_written_in_part_waits_for_its_end():
    channel = io.StringIO()
    whole = report(1) + report(2)
    append(channel, whole[:-5])
    assert [found["done"] for found in new_reports(channel)] == [1]
    append(channel, whole[-5:])
    assert [found["done"] for found in new_reports(channel)] == [2]


def test_a_torn_line_is_passed_over():
    channel = io.StringIO()
    append(channel, report(1) + '{"what": "du\n3\n{}\n' + report(2))
    assert [found["done"] for found in new_reports(channel)] == [1, 2]


def test_two_reports_of_new_work_in_one_look_have_no_speed_yet(watched):
    lines, clock, out, channel = watched
    append(channel, report(0) + report(100))
    clock.seconds = EVERY
    lines.update(channel)
    assert "100 of 1,000 tokens (10%)" in out.getvalue() and "/s" not in out.getvalue()


def test_a_stages_own_progress_becomes_such_lines(tiny_recipe, tmp_path):
    """Through the channel that the stage is given; every look at the clock is half a minute after the last."""
    code = (
        "import time\nfrom pipeline.basics.progress import Progress\nwith Progress('train eagle', 4, 'steps') as "
        "progress:\n    progress.advance(1, loss='0.5')\n    time.sleep(1.5)\n"
    )
    out, ticks = io.StringIO(), iter(range(0, 1_000_000, EVERY))
    recipe_file = write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe")
    stage = replace(stages(str(recipe_file), [], tiny_recipe)[1], command=[sys.executable, "-c", code])
    _run_stage(tiny_recipe, stage, tmp_path / "train.log", Display(out, lambda: next(ticks)))
    said = out.getvalue().splitlines()
    assert any(line.startswith("train: train eagle: ") and " of 4 steps (" in line for line in said)
    assert not any("\r" in line or "\x1b" in line for line in said)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (90_000, "25.0 h")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_on_a_terminal_a_line_stands_in_its_place_each_second(monkeypatch):
    out, channel, clock = io.StringIO(), io.StringIO(), Clock()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda **_: os.terminal_size((34, 24)))
    shown = Display(out, clock)
    shown.begin("train")
    append(channel, report(1, total=0) + report(500, what="decode"))
    clock.seconds = 1
    shown.update(channel)
    shown.say("a [line]")
    shown.end()
    assert out.getvalue() == "\r\x1b[Ktrain: decode: 500 of 1,000 token\r\x1b[Ka [line]\n\r\x1b[K"
