"""Writing of resume states while training goes on. This module does not use DeepSpeed.

Guarantees: a state that resume.json names is whole, on every rank. One state is in flight at most. An error of the
writing is raised on all ranks, where training next looks.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import flush_folder, write_sealed
from train.engine.ranks import fail_together
from train.engine.resume import (
    BEST,
    FORMAT,
    RESUME,
    Digests,
    files_of_rank,
    format_tag,
    hash_files,
    remove_states_before,
)


def copy_to_host(state: Any) -> Any:
    """Return a copy of nested dictionaries and lists, with their tensors on the CPU. Training changes none of it."""
    return tree_map(
        lambda x: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else deepcopy(x),
        state,
    )


class StateWriter:
    """The writer of resume states into `folder`; `files`: the digests of the state that is there. All ranks take part
    in `start` and `finish`.
    """

    def __init__(self, folder: Path, train_hash: str, files: Digests, device: torch.device):
        self._folder, self._train_hash, self._files, self._device = folder, train_hash, files, device
        self._copies: list[tuple[Any, Path]] = []
        self._thread = ThreadPoolExecutor(1)
        self._pending: tuple[dict[str, Any], str | None, Future[Digests]] | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Copy the content of a file. It replaces the method by which DeepSpeed would write the file."""
        self._copies.append((copy_to_host(state_dict), Path(path)))

    def start(self, step: int, progress: dict[str, Any]) -> None:
        """Begin to write what was copied, as the state of this step."""
        assert self._pending is None, "one state is in flight at most"
        rank, ranks, tag = dist.get_rank(), dist.get_world_size(), format_tag(step)
        state = {
            "format": FORMAT,
            "tag": tag,
            "step": step,
            "ranks": ranks,
            "train_hash": self._train_hash,
            "progress": deepcopy(progress),
        }
        best = BEST.format(step=progress["best"]["step"]) if progress.get("best") else None
        best = best if best and (self._folder / best).exists() else None
        copies, self._copies = self._copies, []

        def write() -> Digests:
            while copies:  # each copy's memory is freed as soon as it is written
                torch.save(*copies.pop())
            flush_folder(self._folder / tag)
            digests = hash_files(self._folder, files_of_rank(self._folder / tag, rank, ranks))
            if best and rank == 0:
                is_hashed = best in self._files
                digests |= {best: self._files[best]} if is_hashed else hash_files(self._folder, [self._folder / best])
            return digests

        self._pending = state, best, self._thread.submit(write)

    def finish(self, wait: bool = True) -> None:
        """Make `resume.json` name the state in flight, if there is one, then remove the previous state; without `wait`,
        only if all ranks have written their files. Raise PipelineError if one cannot be written: the previous state is
        kept.
        """
        if self._pending is None or not (wait or self._is_written_on_all_ranks(self._pending[2])):
            return
        (state, best, written), self._pending = self._pending, None
        shares: list = [None] * dist.get_world_size()
        with fail_together():
            try:
                digests = written.result()
            except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
                raise PipelineError(
                    f"the resume state of step {state['step']} cannot be written to {self._folder}: {error}. The state "
                    "before it is kept: make room and run again"
                ) from None
        dist.all_gather_object(shares, digests)
        self._files = {name: digest for share in shares for name, digest in share.items()}
        if dist.get_rank() == 0:
            write_sealed(self._folder / RESUME, state | {"files": self._files})
            remove_states_before(self._folder, state["tag"], best)
        dist.barrier()

    def _is_written_on_all_ranks(self, written: Future[Digests]) -> bool:
        done = torch.tensor(int(written.done()), device=self._device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        return bool(done.item())
