"""How every entry point ends: a PipelineError is one line on stderr and status 2, anything else keeps its traceback."""

import argparse
import sys
from collections.abc import Callable, Iterable

from pipeline.errors import PipelineError
from pipeline.recipe import Recipe, add_recipe_arguments, load_recipe


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def run_job(description: str | None, job: Callable[[Recipe], Iterable[str]]) -> None:
    """A command that takes a recipe and nothing else, and prints the lines that `job` returns."""

    def main() -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_recipe_arguments(parser)
        arguments = parser.parse_args()
        for line in job(load_recipe(arguments.recipe, arguments.overrides)):
            print(line)

    run(main)
