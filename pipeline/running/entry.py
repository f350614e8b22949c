"""How every entry point ends, each time in one message on stderr: bad input (a PipelineError) or a file system that
refuses with status 2, Ctrl-C with 130, SIGTERM with 143; anything else keeps its traceback. Addresses are
printed without their queries.
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
from pipeline.basics.progress import publish
from pipeline.basics.public import public_text

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEPT, AGAIN = "what is finished is kept", "run the same command again to continue"
_ELSEWHERE = "or give another place (the recipe's output)"
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST)
_REMEDIES = {  # by what a file system refuses
    **dict.fromkeys(FULL, f"Free some space, {_ELSEWHERE}"),
    errno.EFBIG: f"Raise the limit on a file's size (ulimit -f), {_ELSEWHERE}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"Change its permissions, {_ELSEWHERE}"),
    errno.EROFS: f"Mount it for writing, {_ELSEWHERE}",
    **dict.fromkeys(_IN_THE_WAY, f"Move it away, for a folder has to be there, {_ELSEWHERE}"),
    errno.EISDIR: "Move this folder away, for a file has to be there",
    errno.ENAMETOOLONG: "Give a shorter name (the recipe's output or name)",
    errno.ENOENT: "Check the path: nothing can be made there, or a file is missing",
}


def run(main: Callable[[], None], keeps: bool = False) -> None:
    """Run a command. The first Ctrl-C or SIGTERM raises KeyboardInterrupt, so that what is open is closed; a second one
    ends it at once. `keeps`: run again, it goes on from what is finished. Notes of a KeyboardInterrupt say what is not.
    """
    received: list[int] = []

    def hear(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            leave()
        raise KeyboardInterrupt

    def leave(lost: str = "") -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _interrupted([*received, signal.SIGINT][0], f": {KEPT}{lost}; {AGAIN}" if keeps else "")

    for number in SIGNALS:
        signal.signal(number, hear)
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            sys.exit(report(error, keeps))
        leave("".join(f", {note}" for note in getattr(error, "__notes__", ())))  # whatever the signal led to


def run_rank(main: Callable[[], None]) -> None:
    """Run one of several ranks, which a signal ends at once, and which leaves without Python's teardown: a rank may be
    waiting for others in a library that hears no signal, and taking a process group apart waits for them, too. The
    first rank says what is kept. The launcher ends the others when one fails.
    """
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    line = f": {KEPT}; {AGAIN}" if os.environ.get("RANK", "0") == "0" else None
    threading.Thread(target=lambda: _interrupted(os.read(ears, 1)[0], line), daemon=True).start()
    status = 0
    try:
        main()
    except Exception as error:
        status = report(error, keeps=True)
    _leave(status)


def run_job(stage: str, description: str | None, job: "Callable[[Recipe], Iterable[str]]") -> None:
    """A command that takes a recipe and nothing else, and prints the lines that `job` returns."""
    from pipeline.recipe.load import add_recipe_arguments, load_recipe  # torch, which a message need not wait for

    def main() -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_recipe_arguments(parser)
        arguments = parser.parse_args()
        recipe = load_recipe(arguments.recipe, arguments.overrides, begin=True)
        publish(recipe.paths.run, stage)
        for line in job(recipe):
            print(line)

    run(main, keeps=True)


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restores our handlers behind a library that sets its own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def report(error: Exception, keeps: bool = False) -> int:
    """Write the error's message, and return the status to end with. `keeps` as in `run`."""
    message = str(error) if isinstance(error, PipelineError) else refusal(error, keeps)
    if message is None:
        sys.stderr.write(public_text("".join(traceback.format_exception(error))))
        return 1
    sys.stderr.write(f"error: {public_text(message)}\n")
    return 2


def refusal(error: Exception, keeps: bool) -> str | None:
    """Return what the file system refuses, and what to do; None for an error that is not of that kind."""
    if not isinstance(error, OSError) or (remedy := _REMEDIES.get(error.errno or 0)) is None:
        return None
    if isinstance(error.filename, str | bytes):
        path = os.fsdecode(error.filename)
        if error.errno in _IN_THE_WAY:
            places = (Path(path), *Path(path).parents)
            path = next((str(place) for place in places if place.exists() and not place.is_dir()), path)
    elif error.errno in FULL:  # met in writing, which names no file
        path = "a file"
    else:
        return None
    return f"{path}: {os.strerror(error.errno or 0)}. {remedy}{f'; {KEPT}' if keeps else ''}"


def _interrupted(number: int, line: str | None) -> None:
    """Say what is kept, and end the process without Python's teardown: another Ctrl-C would print a traceback in it."""
    if line is not None:
        begin = "\n" if sys.stderr.isatty() else ""  # behind the line of a progress
        what = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
        sys.stderr.write(f"{begin}{what}{line}\n")
    _leave(128 + number)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
