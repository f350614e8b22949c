"""How every entry point ends, each time in one message on stderr: bad input (a PipelineError) or a file system that
refuses with status 2, Ctrl-C with 130, SIGTERM with 143; anything else keeps its traceback. Addresses are
printed without their queries.
"""

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import FULL
from pipeline.basics.progress import publish
from pipeline.basics.public import public_text
from pipeline.running.children import CHILD
from pipeline.running.signals import leave_on_signals, raise_on_signals

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

KEPT, AGAIN = "what is finished is kept", "run the same command again to continue"
_NO_PERMISSION = (
    "cannot be read or written ({why}): change its permissions, or give another place (the recipe's output)"
)
_IN_THE_WAY = "is in the way: a folder is wanted there. Move it away, or give another place (the recipe's output)"
_REFUSED = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NO_PERMISSION),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), _IN_THE_WAY),
    errno.EISDIR: "is a folder: a file is wanted there",
    errno.ENAMETOOLONG: "has a name too long for this file system. Give a shorter one (the recipe's output or name)",
    errno.ENOENT: "does not exist, and is not made there",
}


def run(main: Callable[[], None], keeps: bool = False) -> None:
    """Run a command. `keeps`: run again after a signal, it goes on from what is finished. A note on a KeyboardInterrupt
    says what is not.
    """

    def leave(number: int, lost: str = "") -> None:
        _interrupted(number, f": {KEPT}{lost}; {AGAIN}" if keeps else "")

    received = raise_on_signals(leave)
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        if not received and not isinstance(error, KeyboardInterrupt):
            sys.exit(told(error))
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        leave(received[0] if received else signal.SIGINT, notes)  # whatever it led to


def run_rank(main: Callable[[], None]) -> None:
    """The same for one of several ranks, which leaves without Python's teardown: taking a process group apart waits for
    the other ranks, and those may be waiting for this one; and threads of process groups that outlive it have aborted
    ranks whose work was done. The launcher ends the others when one fails. Of a signal the first rank tells.
    """

    rank = os.environ.get("RANK", "0")
    line = f": {KEPT}; {AGAIN}"
    leave_on_signals(lambda number: _interrupted(number, line, silent=rank != "0", begin="\n"))  # behind a bar
    status = 0
    try:
        main()
    except Exception as error:
        status = told(error)
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


def told(error: Exception) -> int:
    """Write the error's message, and return the status to end with."""
    refusal = str(error) if isinstance(error, PipelineError) else refused(error) if isinstance(error, OSError) else None
    if refusal is None:
        sys.stderr.write(public_text("".join(traceback.format_exception(error))))
        return 1
    sys.stderr.write(f"error: {public_text(refusal)}\n")
    return 2


def _interrupted(number: int, told: str, silent: bool = False, begin: str = "") -> None:
    """Say what is `told` behind the signal's word, and end the process without Python's teardown: another Ctrl-C would
    print a traceback in it.
    """
    if not silent and CHILD not in os.environ:
        what = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
        sys.stderr.write(f"{begin}{what}{told}\n")
    _leave(128 + number)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def refused(error: OSError) -> str | None:
    """What the file system refuses, and what to do; None for an error that is not of that kind."""
    why = os.strerror(error.errno or 0)
    if error.errno in FULL:  # met in writing, which names no file
        return (
            f"no space to write {error.filename or 'a file'} ({why}): free some, or point the recipe's output "
            "elsewhere, and run again; what is finished is kept"
        )
    if error.errno not in _REFUSED or not isinstance(error.filename, str | bytes):
        return None
    path = Path(os.fsdecode(error.filename))
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        path = next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), path)
    return f"{path} {_REFUSED[error.errno].format(why=why)}"
