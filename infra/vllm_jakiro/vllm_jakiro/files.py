"""A request's file of states. A file that exists is complete; if it could not be written, a file of the same name plus
".error" has the reason.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SUFFIX = ".safetensors"


def write(path: Path, copy: Callable[[], tuple[dict[str, torch.Tensor], Any]]) -> None:
    """Write tensors under a temporary name when the event of their copy has come, if there is one, and rename."""
    temporary = path.with_suffix(".tmp")
    try:
        tensors, event = copy()
        if event is not None:
            event.synchronize()
        save_file(tensors, temporary)
        temporary.rename(path)
    except Exception as error:  # a full disk, a removed folder, ...: the reader waits for the file
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        with suppress(OSError):
            error_path(path).write_text(f"{type(error).__name__}: {error}")


def error_path(path: Path) -> Path:
    """Return the path of the error file, written if the file could not be."""
    return path.with_name(path.name + ".error")
