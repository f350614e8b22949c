"""How every entry point ends: a PipelineError is one line on stderr and status 2, anything else keeps its traceback."""

import sys
from collections.abc import Callable

from pipeline.errors import PipelineError


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except PipelineError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
