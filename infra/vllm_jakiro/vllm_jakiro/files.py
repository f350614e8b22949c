"""A request's file of states, from whoever computes them to whoever reads them: one that is there is whole, and where
it could not be written stands a file of the same name with ".error" behind it, which says why.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SUFFIX = ".safetensors"


def write(path: Path, states_TSD: torch.Tensor, tokens_T: torch.Tensor, event: Any = None) -> None:
    """Waits for the copy's event, where there is one; writes under a temporary name, and renames."""
    temporary = path.with_suffix(".tmp")
    try:
        if event is not None:
            event.synchronize()
        save_file({"states": states_TSD.contiguous(), "tokens": tokens_T}, temporary)
        temporary.rename(path)
    except Exception as error:  # a full disk, a folder that is gone, ...: whoever waits for the file has to know
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        with suppress(OSError):
            failed(path).write_text(f"{type(error).__name__}: {error}")


def failed(path: Path) -> Path:
    """What stands in place of a file that could not be written."""
    return path.with_name(path.name + ".error")
