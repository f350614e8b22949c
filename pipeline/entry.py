"""How every entry point ends: a PipelineError is one line on stderr and status 2, anything else keeps its traceback."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable

from pipeline.errors import PipelineError
from pipeline.recipe import Recipe, add_recipe_arguments, load_recipe


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except PipelineError as error:
        _tell(error)
        sys.exit(2)


def run_rank(main: Callable[[], None]) -> None:
    """The same for one of several ranks, which leaves without Python's teardown: taking a process group apart waits for the other
    ranks, and those may be waiting for this one; and threads of process groups that outlive it have aborted ranks whose work was
    done. The launcher ends the others when one fails.
    """
    status = 0
    try:
        main()
    except PipelineError as error:
        _tell(error)
        status = 2
    except Exception:  # told as Python would tell it, which does so on the way to its teardown only
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _tell(error: PipelineError) -> None:
    sys.stderr.write(f"error: {error}\n")


def run_job(description: str | None, job: Callable[[Recipe], Iterable[str]]) -> None:
    """A command that takes a recipe and nothing else, and prints the lines that `job` returns."""

    def main() -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_recipe_arguments(parser)
        arguments = parser.parse_args()
        for line in job(load_recipe(arguments.recipe, arguments.overrides)):
            print(line)

    run(main)
