"""The end of commands: one message for bad input, for a file system that refuses, and for a signal."""

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
from pipeline.running.cores import check_process_count, read_omp_threads
from pipeline.running.stages import Stage, run_stage
from pipeline.running.state import train_state
from tests.kit import PATIENCE, command_environment, recipe_tree, wait_until, write_recipe
from tests.warm import Forked

KEPT_LINE = "what is finished is kept; run the same command again to continue"
# {keeps}, {interrupted}: what happens then, {cleaning}: seconds
WAITING = """
import time
from pipeline.running import entry
def main():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt as error:
        {interrupted}
    finally:
        print("closed", flush=True)
        time.sleep({cleaning})
entry.run(main, keeps={keeps})
"""
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
CALLING = """
import os, sys
from pipeline.running import children, entry
def main():
    with children.start_command([sys.executable, "-c", {inner!r}], os.environ) as process:
        process.wait()
children.TERMINATION_SECONDS = 1
entry.run(main)
"""
STAGE = """
import os, sys
from pipeline.recipe.load import load_recipe
from pipeline.running import entry
from pipeline.running.stages import Stage, run_stage
inner = '''
import os, sys, time
from pathlib import Path
from pipeline.basics.progress import Progress, set_record_path
from pipeline.running import entry
def main():
    set_record_path(Path(sys.argv[1]), "dump")
    with Progress("dump", 9000, "tokens") as progress:
        progress.reach(7000, in_work=4000)
        print(os.getpid(), flush=True)
        time.sleep(600)
entry.run(main, keeps=True)
'''
recipe = load_recipe(sys.argv[1])
(recipe.paths.run / "logs").mkdir(parents=True)
command = [sys.executable, "-c", inner, str(recipe.paths.run)]
entry.run(lambda: run_stage(recipe, Stage("preprocess", command, os.environ, None, [])), keeps=True)
"""


@pytest.fixture
def interrupted(tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Return (status, stdout, stderr) of a process that gets these signals, each once it has printed another line."""

    def run(code: str, *numbers: int, **environment: str) -> tuple[int, str, str]:
        script, *streams = (tmp_path / name for name in ("command.py", "said", "error"))
        script.write_text(code)
        for stream in streams:
            stream.write_text("")
        output, error = streams
        process = Forked([sys.executable, str(script)], command_environment(**environment), error, output)
        for lines, number in enumerate(numbers, 1):
            wait_until(lambda lines=lines: output.read_text().count("\n") >= lines, process)
            os.kill(process.pid, number)
        return process.wait(PATIENCE), output.read_text(), error.read_text()

    return run


def waiting(keeps: bool = False, interrupted: str = "raise", cleaning: int = 0) -> str:
    return WAITING.format(keeps=keeps, interrupted=interrupted, cleaning=cleaning)


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
@pytest.mark.parametrize(("keeps", "suffix"), [(False, ""), (True, f": {KEPT_LINE}")])  # a plan, a status keep nothing
def test_a_signal_closes_what_is_open_and_is_told_in_one_line(interrupted, number, word, keeps, suffix):
    assert interrupted(waiting(keeps), number) == (128 + number, "ready\nclosed\n", f"{word}{suffix}\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("error.add_note('but this'); raise", KEPT_LINE.replace(" kept", " kept, but this")),
        ("raise RuntimeError('of a library')", KEPT_LINE),
    ],
)
def test_the_line_has_the_notes_and_not_what_an_interruption_leads_to(interrupted, code, expected):
    assert interrupted(waiting(True, code), signal.SIGINT) == (130, "ready\nclosed\n", f"interrupted: {expected}\n")


def test_a_second_ctrl_c_ends_it_at_once(interrupted):
    ended, out, error = interrupted(waiting(True, cleaning=600), signal.SIGINT, signal.SIGINT)
    assert (ended, out, error) == (130, "ready\nclosed\n", f"interrupted: {KEPT_LINE}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_of_several_ranks_the_first_tells_even_where_it_waits_in_a_library(interrupted, number, rank, lines):
    ended, _, error = interrupted(BLOCKED, number, RANK=rank)
    assert ended == 128 + number and error.count("\n") == lines and "Traceback" not in error


@pytest.mark.parametrize(
    ("numbers", "lines"),
    [
        ([signal.SIGINT], 1),  # the child gets SIGTERM alone, and continues: SIGKILL ends it
        ([signal.SIGINT, signal.SIGINT], 1),
        ([signal.SIGKILL], 0),
    ],
)
def test_whatever_ends_a_command_ends_what_it_started(interrupted, numbers, lines):
    handler = (
        "" if signal.SIGKILL in numbers else "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))"
    )
    inner = f"import os, signal, time\n{handler}\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(1)"
    code = CALLING.format(inner=inner)
    if len(numbers) == 2:
        code = code.replace("TERMINATION_SECONDS = 1", "TERMINATION_SECONDS = 600")
    ended, out, error = interrupted(code, *numbers)
    assert ended in (130, -signal.SIGKILL) and error.count("\n") == lines
    pid, *rest = out.splitlines()
    child = int(pid)
    assert set(rest) == ({"asked"} if handler else set())
    if len(numbers) == 2:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_a_run_with_its_stage_in_one_line_that_says_what_is_lost(tiny_target, tmp_path):
    recipe = write_recipe(recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run"), tmp_path / "recipe")
    (tmp_path / "command.py").write_text(STAGE)
    (tmp_path / "error").write_text("")
    command = [sys.executable, str(tmp_path / "command.py"), str(recipe)]
    process, log = Forked(command, command_environment(), tmp_path / "error"), tmp_path / "run/logs/preprocess.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), process)
    child = int(log.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130 and not is_running(child)
    expected = "what is finished is kept, but the 4,000 tokens of what is in work, which are made again"
    assert (tmp_path / "error").read_text() == f"interrupted: {expected}; run the same command again to continue\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('error: no such key\\n  at x\\nmore'); sys.exit(2)", r"error: no such key\n  at x$"),
        ("print('Traceback'); sys.exit(2)", "Traceback$"),  # without a message of its own, the end of its log
    ],
)
def test_a_failing_stage_stops_the_run_with_its_own_message(tiny_recipe, code, text):
    (logs := tiny_recipe.paths.run / "logs").mkdir(parents=True)
    stage = Stage("train", [sys.executable, "-c", "import sys; " + code], dict(os.environ), train_state, [])
    message = rf"stage train failed \(status 2\); the whole log is {logs}/train.log\n{text}"
    with pytest.raises(PipelineError, match=message):
        run_stage(tiny_recipe, stage)


# -- a file system that refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("number", "reason", "remedy"),
    [
        (errno.ENOSPC, "No space left on device", "Free some space, or give another place (the recipe's output)"),
        (errno.EDQUOT, "Disk quota exceeded", "Free some space, or give another place (the recipe's output)"),
        (errno.EFBIG, "File too large", "Raise the limit on a file's size (ulimit -f), or give another place (the"),
        (errno.EACCES, "Permission denied", "Change its permissions, or give another place (the recipe's output)"),
        (errno.EPERM, "Operation not permitted", "Change its permissions, or give another place (the recipe's output)"),
        (errno.EROFS, "Read-only file system", "Mount it for writing, or give another place (the recipe's output)"),
        (errno.EISDIR, "Is a directory", "Move this folder away, for a file has to be there"),
        (errno.ENAMETOOLONG, "File name too long", "Give a shorter name (the recipe's output or name)"),
        (errno.ENOENT, "No such file or directory", "Check the path: nothing can be made there"),  # as below /proc
    ],
)
def test_each_refusal_of_a_file_system_has_its_remedy(number, reason, remedy, keeps, capsys):
    assert entry.report(OSError(number, os.strerror(number), "/run/x"), keeps) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: /run/x: {reason}. {remedy}") and error.count("\n") == 1
    assert error.endswith("; what is finished is kept\n") == keeps and ("kept" in error) == keeps


def test_a_full_disk_is_reported_where_no_file_is_named(capsys):
    assert entry.report(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == 2
    assert capsys.readouterr().err.startswith("error: a file: No space left on device. Free some space")


@pytest.mark.parametrize("below", ["", "/run"])
def test_an_output_that_is_a_file_is_named(tmp_path, capsys, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        Path(f"{tmp_path}/file{below}/logs").mkdir(parents=True, exist_ok=True)
    assert entry.report(caught.value) == 2
    assert f"error: {tmp_path}/file: Not a directory. Move it away, for a folder has to be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [OSError(errno.ECONNRESET, "reset"), OSError(errno.ENOENT, "no file is named"), KeyError("x")]
)
def test_other_errors_keep_their_traceback(error, capsys):
    assert entry.report(error) == 1
    text = capsys.readouterr().err
    assert type(error).__name__ in text and not text.startswith("error: ")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_command_says_what_is_kept_of_what_it_keeps(interrupted, keeps):
    code = f"import os\nfrom pipeline.running import entry\nentry.run(lambda: os.rmdir('/proc/none'), keeps={keeps})"
    status, _, error = interrupted(code)
    assert status == 2 and error.endswith("; what is finished is kept\n") == keeps


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
    monkeypatch.setattr(cores, "count_cores", lambda: 2)
    check_process_count("features.workers", 32)
    with pytest.raises(PipelineError, match=r"features\.workers=33, but this machine has 2 cores: at most 32"):
        check_process_count("features.workers", 33)


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None), (None, None)]
)
def test_the_users_threads_are_those_of_omp_num_threads(monkeypatch, value, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert read_omp_threads() == threads
