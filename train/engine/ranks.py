"""What the ranks of a training settle together: an error of one ends all of them with its words, not in a collective
that waits for it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from pipeline.basics.errors import PipelineError
from pipeline.running.entry import refused

T = TypeVar("T")


@contextmanager
def fail_together() -> Iterator[None]:
    """Every rank enters it. Raises PipelineError on all of them where the block does so on one, or its file system
    refuses.
    """
    mine = ""
    try:
        yield
    except PipelineError as error:
        mine = str(error)
    except OSError as error:
        mine = refused(error) or str(error) or type(error).__name__
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    if said := next(filter(None, found), ""):
        raise PipelineError(said)


def by_rank_0(work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; an error of its own as `fail_together`'s."""
    found: list = [None]
    with fail_together():
        if dist.get_rank() == 0:
            found = [work()]
    dist.broadcast_object_list(found)
    return found[0]


def place_on_host() -> tuple[int, int]:
    """(number, count) of this rank among those that its launcher started on this machine; alone where it does not
    say.
    """
    count = int(
        os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))
    )  # torch's and DeepSpeed's word for it
    return int(os.environ.get("LOCAL_RANK", "0")) % count, count
