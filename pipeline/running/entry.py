"""The end of every entry point. Each prints one message on stderr: bad input (a PipelineError) and a refusing file
system end with status 2, Ctrl-C with 130, SIGTERM with 143; any other error keeps its traceback. Addresses are printed
without their queries.
"""

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import FULL
from pipeline.basics.progress import set_record_path
from pipeline.basics.public import public_text

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RESULTS_KEPT, RUN_AGAIN = "what is finished is kept", "run the same command again to continue"
_OTHER_OUTPUT = "or give another place (the recipe's output)"
_BLOCKED_PATH = (errno.ENOTDIR, errno.EEXIST)
_REMEDIES = {  # by the error number of a file system's refusal
    **dict.fromkeys(FULL, f"Free some space, {_OTHER_OUTPUT}"),
    errno.EFBIG: f"Raise the limit on a file's size (ulimit -f), {_OTHER_OUTPUT}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"Change its permissions, {_OTHER_OUTPUT}"),
    errno.EROFS: f"Mount it for writing, {_OTHER_OUTPUT}",
    **dict.fromkeys(_BLOCKED_PATH, f"Move it away, for a folder has to be there, {_OTHER_OUTPUT}"),
    errno.EISDIR: "Move this folder away, for a file has to be there",
    errno.ENAMETOOLONG: "Give a shorter name (the recipe's output or name)",
    errno.ENOENT: "Check the path: nothing can be made there, or a file is missing",
}


def run(main: Callable[[], None], keeps: bool = False) -> None:
    """Run a command. The first Ctrl-C or SIGTERM raises KeyboardInterrupt, so that open files are closed; a second one
    ends the process at once. `keeps`: a later run continues from the finished results. The notes of a KeyboardInterrupt
    name results that are lost.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            interrupt()
        raise KeyboardInterrupt

    def interrupt(lost: str = "") -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _exit_interrupted([*received, signal.SIGINT][0], f": {RESULTS_KEPT}{lost}; {RUN_AGAIN}" if keeps else "")

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            sys.exit(report(error, keeps))
        notes = getattr(error, "__notes__", ())  # the signal may have caused any exception
        interrupt("".join(f", {note}" for note in notes))


def run_rank(main: Callable[[], None]) -> None:
    """Run one of several ranks. A signal ends it at once, without Python's teardown: a rank may wait for other ranks in
    a library that ignores signals, and destroying a process group waits for them, too. The first rank prints which
    results are kept. The launcher ends the remaining ranks when one fails.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    line = f": {RESULTS_KEPT}; {RUN_AGAIN}" if os.environ.get("RANK", "0") == "0" else None
    threading.Thread(target=lambda: _exit_interrupted(os.read(read_end, 1)[0], line), daemon=True).start()
    status = 0
    try:
        main()
    except Exception as error:
        status = report(error, keeps=True)
    _exit(status)


def run_job(stage: str, description: str | None, job: "Callable[[Recipe], Iterable[str]]") -> None:
    """Run a command that takes a recipe and nothing else, and print the lines that `job` returns."""
    from pipeline.recipe.load import add_recipe_arguments, load_recipe  # imports torch: --help need not wait for it

    def main() -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_recipe_arguments(parser)
        arguments = parser.parse_args()
        recipe = load_recipe(arguments.recipe, arguments.overrides, begin=True)
        set_record_path(recipe.paths.run, stage)
        for line in job(recipe):
            print(line)

    run(main, keeps=True)


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Restore this project's signal handlers after a library that sets its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def report(error: Exception, keeps: bool = False) -> int:
    """Write the error's message, and return the exit status. `keeps` as in `run`."""
    message = str(error) if isinstance(error, PipelineError) else describe_refusal(error, keeps)
    if message is None:
        sys.stderr.write(public_text("".join(traceback.format_exception(error))))
        return 1
    sys.stderr.write(f"error: {public_text(message)}\n")
    return 2


def describe_refusal(error: Exception, keeps: bool) -> str | None:
    """Describe what the file system refuses, and the remedy; return None for an error of another kind."""
    if not isinstance(error, OSError) or (remedy := _REMEDIES.get(error.errno or 0)) is None:
        return None
    if isinstance(error.filename, str | bytes):
        path = os.fsdecode(error.filename)
        if error.errno in _BLOCKED_PATH:
            places = (Path(path), *Path(path).parents)
            path = next((str(place) for place in places if place.exists() and not place.is_dir()), path)
    elif error.errno in FULL:  # an error of writing names no file
        path = "a file"
    else:
        return None
    return f"{path}: {os.strerror(error.errno or 0)}. {remedy}{f'; {RESULTS_KEPT}' if keeps else ''}"


def _exit_interrupted(number: int, line: str | None) -> None:
    """Print which results are kept, and end the process without Python's teardown: in that, another Ctrl-C would print
    a traceback.
    """
    if line is not None:
        prefix = "\n" if sys.stderr.isatty() else ""  # after the line of a progress bar
        event = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
        sys.stderr.write(f"{prefix}{event}{line}\n")
    _exit(128 + number)


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
