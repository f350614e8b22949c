"""How many GPUs a Ray worker takes: decided here for the dump's workers and evaluation's, where Ray's nodes are
known.
"""

import os

from pipeline.basics.errors import PipelineError


def gpus_each(section: str, asked: float | None, device: str, there: bool) -> float:
    """GPUs of one worker. Not asked for: one where a node has any (`there`) and the target is not to run on a CPU, else
    none.

    `section` is the recipe's, for the message; `device` is ``target.device``. Raises PipelineError where none were
    asked for and the target would take one all the same: Ray does not know that it is taken, so all workers of a node
    would share its first.
    """
    if device == "cpu":
        return asked or 0
    if asked is None:
        return 1 if there or device == "cuda" else 0
    if asked == 0 and (there or device == "cuda"):
        raise PipelineError(
            f"{section}.gpus_per_worker=0, but target.device={device!r} would have every worker of a node on its "
            "first GPU. Leave it out (one GPU a worker), or set target.device='cpu'"
        )
    return asked


def hide_gpus(each: float) -> None:
    """In a worker, before it asks for a device: Ray hides the other workers' GPUs only from one that takes some."""
    if not each:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
