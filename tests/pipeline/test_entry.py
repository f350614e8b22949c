"""How commands end: one message for bad input, for a file system that refuses, and for a signal."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.recipe.load import load_recipe
from pipeline.running import cores, entry
from pipeline.running.cores import asked_threads, require_few
from tests.kit import PATIENCE, command_environment, recipe_tree, wait_until, write_recipe
from tests.warm import Forked

WAITING = """
import sys, time
from pipeline.running import entry
from pipeline.running import signals
signals.GRACE = {grace}
def main():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("closed", flush=True)
        time.sleep({cleaning})
entry.run(main)
"""


@pytest.fixture
def interrupted(tmp_path) -> Callable[..., tuple[int, str, str]]:
    """(status, stdout, stderr) of a process that gets these signals, each when it has printed another line."""

    def run(code: str, *numbers: int, **environment: str) -> tuple[int, str, str]:
        script, *streams = (tmp_path / name for name in ("command.py", "said", "error"))
        script.write_text(code)
        for stream in streams:
            stream.write_text("")
        said, error = streams
        process = Forked([sys.executable, str(script)], command_environment(**environment), error, said)
        for lines, number in enumerate(numbers, 1):
            wait_until(lambda lines=lines: said.read_text().count("\n") >= lines, process)
            os.kill(process.pid, number)
        return process.wait(PATIENCE), said.read_text(), error.read_text()

    return run


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
@pytest.mark.parametrize(
    ("keeps", "told"),
    [
        (")", ""),  # as of a plan, a status: they keep nothing
        (", keeps=True)", ": what is finished is kept; run the same command again to continue"),
    ],
)
def test_a_signal_closes_what_is_open_and_is_told_in_one_line(interrupted, number, status, word, keeps, told):
    code = WAITING.format(cleaning=0, grace=9).replace("entry.run(main)", f"entry.run(main{keeps}")
    ended, out, error = interrupted(code, number)
    assert (ended, out, error) == (status, "ready\nclosed\n", f"{word}{told}\n")


def test_a_note_says_what_is_not_kept(interrupted):
    code = WAITING.format(cleaning=0, grace=9).replace("entry.run(main)", "entry.run(main, keeps=True)")
    code = code.replace(
        "finally:", "except KeyboardInterrupt as error:\n        error.add_note('but this')\n        raise"
    )
    ended, _, error = interrupted(code, signal.SIGINT)
    kept = "what is finished is kept, but this; run the same command again to continue"
    assert (ended, error) == (130, f"interrupted: {kept}\n")


@pytest.mark.parametrize(("grace", "cleaning", "out"), [(9, 1, "ready\nclosed\ndone\n"), (0, 60, "ready\nclosed\n")])
def test_a_second_ctrl_c_lets_the_cleaning_up_be_unless_it_takes_long(interrupted, grace, cleaning, out):
    code = WAITING.format(cleaning=f"{cleaning}); print('done'", grace=grace)
    ended, said, error = interrupted(code, signal.SIGINT, signal.SIGINT)
    assert (ended, said) == (130, out) and error.count("\n") == 1 and error.startswith("interrupted")


def test_what_an_interruption_leads_to_is_not_told(interrupted):
    """As of a library that makes an error of its own of it."""
    code = WAITING.format(cleaning=0, grace=9).replace(
        "finally:", "except KeyboardInterrupt:\n        raise RuntimeError('x')"
    )
    ended, _, error = interrupted(code, signal.SIGINT)
    assert ended == 130 and error.count("\n") == 1


BLOCKED = """
import ctypes
from pipeline.running import entry
def main():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)  # no signal makes it return
entry.run_rank(main)
"""


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_of_several_ranks_the_first_tells_even_where_it_waits_in_a_library(interrupted, rank, lines, number, status):
    ended, _, error = interrupted(BLOCKED, number, RANK=rank)
    assert ended == status and len(error.strip().splitlines()) == lines and "Traceback" not in error


def test_a_command_that_another_one_started_leaves_the_telling_to_it(interrupted):
    ended, _, error = interrupted(WAITING.format(cleaning=0, grace=9), signal.SIGTERM, JAKIRO_CHILD="1")
    assert (ended, error) == (143, "")


CALLING = """
import sys, time
from pathlib import Path
from pipeline.running import children
from pipeline.running import entry
def main():
    children.call([sys.executable, "-c", {inner!r}], {{}}, Path.cwd())
entry.run(main)
"""


def test_ctrl_c_ends_what_a_command_started_and_is_told_once(interrupted):
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    ended, out, error = interrupted(CALLING.format(inner=inner), signal.SIGINT)
    assert ended == 130 and error.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)


def test_who_does_not_end_when_asked_is_made_to(interrupted):
    inner = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print(os.getpid(), flush=True)\nwhile True: time.sleep(1)"
    )
    code = CALLING.format(inner=inner).replace("def main", "children.PATIENCE = 1\ndef main")
    ended, out, error = interrupted(code, signal.SIGINT, signal.SIGINT)
    assert ended == 130 and error.count("\n") == 1 and out.splitlines()[1:] == ["asked"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(out.split()[0]), 0)


STAGE = """
import sys, time
from pathlib import Path
from pipeline.running import entry
from pipeline.running.stages import Stage, _run_stage
from pipeline.basics.progress import Display
from pipeline.recipe.load import load_recipe
inner = '''
import json, os, signal, sys, time


def leave(*_):
    report = {"what": "dump", "done": 7, "total": 9, "unit": "tokens", "shown": {}, "left": None, "lost": "but four"}
    with open(os.environ["JAKIRO_PROGRESS_FILE"], "a") as file:
        print(json.dumps(report), file=file)
    sys.exit(143)


signal.signal(signal.SIGTERM, leave)
print(os.getpid(), flush=True)
time.sleep(60)
'''
def main():
    recipe = load_recipe(sys.argv[1])
    stage = Stage("dump", [sys.executable, "-c", inner], {}, None)
    _run_stage(recipe, stage, Path(sys.argv[2]), Display(sys.stdout))
entry.run(main, keeps=True)
"""


def test_ctrl_c_ends_a_run_with_its_stage_in_one_line(tiny_target, tmp_path):
    recipe = write_recipe(recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run"), tmp_path / "recipe")
    (tmp_path / "command.py").write_text(STAGE)
    command = [sys.executable, *map(str, (tmp_path / "command.py", recipe, tmp_path / "log"))]
    (tmp_path / "error").write_text("")
    process = Forked(command, command_environment(), tmp_path / "error")
    wait_until(lambda: _text(tmp_path / "log").endswith("\n"), process)
    said = _text(tmp_path / "log")
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    status, error = process.wait(PATIENCE), _text(tmp_path / "error")
    assert (
        status == 130
        and error.count("\n") == 1
        and error.startswith("interrupted: what is finished is kept, but four;")
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(said), 0)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# -- a file system that refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EACCES, "cannot be read or written (Permission denied): change its permissions"),
        (errno.EROFS, "cannot be read or written (Read-only file system)"),
        (errno.EPERM, "cannot be read or written (Operation not permitted)"),
        (errno.EISDIR, "is a folder: a file is wanted there"),
        (errno.ENAMETOOLONG, "a name too long"),
        (errno.ENOENT, "does not exist, and is not made there"),  # as below /proc
        (errno.ENOSPC, "no space to write"),
    ],
)
def test_what_a_file_system_refuses_is_one_message_with_the_path(number, message, capsys):
    assert entry.told(OSError(number, os.strerror(number), "/run/x")) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "/run/x" in told and message in told and told.count("\n") == 1


def test_a_full_disk_is_told_where_no_file_is_named(capsys):
    assert entry.told(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == 2
    assert "no space to write a file" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(capsys):
    assert entry.told(OSError(errno.ECONNRESET, "reset")) == 1
    assert entry.told(KeyError("x")) == 1
    assert capsys.readouterr().err.count("Error") >= 2


@pytest.mark.parametrize("below", ["", "/run"])
def test_an_output_that_is_a_file_is_named(tmp_path, capsys, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        Path(f"{tmp_path}/file{below}/logs").mkdir(parents=True, exist_ok=True)
    assert entry.told(caught.value) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/file is in the way: a folder is wanted there.")


# -- recipes that name what no machine has ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("output=", "output: '' names no folder"),
        ('output="a\\nb"', "names no folder"),
        ("name=", "name: a name is letters, digits"),
        ("name=../../x", "name: a name is letters, digits"),
        ("features.workers=1000000", "features.workers: Input should be less than or equal to 4096 (got 1000000)"),
        ("eval.workers=1000000", "eval.workers"),
        ("train.ranks=1000000", "train.ranks"),
    ],
)
def test_what_cannot_be_is_refused_by_the_recipe(tiny_target, tmp_path, override, message):
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    with pytest.raises(PipelineError) as caught:
        load_recipe(write_recipe(tree, tmp_path / "recipe"), [override])
    assert message in str(caught.value)


def test_a_recipe_that_is_a_folder_is_said_to_be_one(tmp_path):
    with pytest.raises(PipelineError, match="is a folder: expected a TOML file"):
        load_recipe(tmp_path)


def test_more_processes_than_a_machine_could_serve_are_refused(monkeypatch):
    monkeypatch.setattr(cores, "cores", lambda: 2)
    require_few("features.workers", 32)
    with pytest.raises(PipelineError, match=r"features\.workers=33, but this machine has 2 cores: at most 32"):
        require_few("features.workers", 33)


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "asked"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None), (None, None)]
)
def test_the_users_threads_are_those_of_omp_num_threads(monkeypatch, given, asked):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert asked_threads() == asked
