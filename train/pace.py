"""Whether training steps take far longer than their arithmetic: then something else has the cores, or too many threads
share them.
"""

import statistics
from collections import deque

import torch

from pipeline.basics.accelerator import now
from pipeline.drafts import TrainedDraft, build, parameter_count
from pipeline.features.batch import Batch

LOOKED_AT = 5  # steps in a row, of which the median counts
FACTOR = 10  # times the arithmetic of one thread (of the GPU) are far too long
OVERHEAD = 0.5  # seconds of a step that no arithmetic explains: small drafts have little of it


class Pace:
    """Of one rank. The arithmetic's speed is measured in a moment, when this is made."""

    def __init__(self, draft: TrainedDraft, device: torch.device, dtype: torch.dtype):
        self._token_operations = operations(draft)
        self._speed = matrix_speed(device, dtype)
        self._device, self._last = device, deque(maxlen=LOOKED_AT)
        self._steps, self._told = 0, False

    def looked_at(self, batches: list[Batch], seconds: float) -> str | None:
        """What to say after a step that took so long; once."""
        self._steps += 1
        if self._told or self._steps == 1:  # the first one warms up
            return None
        tokens = sum(batch.tokens_BT.numel() for batch in batches)
        bare = tokens * self._token_operations / self._speed
        self._last.append((seconds / (FACTOR * bare + OVERHEAD), seconds, bare))
        over, seconds, bare = statistics.median_low(self._last)
        if len(self._last) < LOOKED_AT or over <= 1:
            return None
        self._told = True
        if self._device.type == "cpu":
            whose = f"one thread's; this rank has {torch.get_num_threads()}"
            remedy = "set OMP_NUM_THREADS lower, and see what else runs here (uptime)"
        else:
            whose, remedy = "this GPU's", "see what else runs on it (nvidia-smi)"
        return f"a step takes {seconds:.2f} s, its bare arithmetic {bare:.2f} s ({whose}): {remedy}"


def operations(draft: TrainedDraft) -> float:
    """Floating-point operations of a token's training: forward and backward through the draft in each pass, and the
    frozen head on the target's state and on each branch's (forward, and back to the state).
    """
    with torch.device("meta"):  # ZeRO-3 has taken the draft's own tensors apart
        parameters = parameter_count(build(draft.config, draft.shapes))
    width, features = draft.shapes["hidden_size"], draft.trained_features
    teacher, heads = 2 * draft.teacher_vocabulary * width, 4 * features * draft.vocabulary_size * width
    own = draft.own_head_parameters  # counted with the heads
    beside = 0
    if draft.needs.decoder:  # frozen: forward, and back to what goes in
        assert draft.embed_head.decoder is not None
        beside = 4 * (
            sum(weight.numel() for weight in draft.embed_head.decoder.parameters()) - draft.target_vocabulary * width
        )
    return 6 * (parameters - own) * draft.passes + teacher + heads * (1.5 if own else 1) + beside


def matrix_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of large products, on a CPU with one thread: that is not slowed down by other
    threads.
    """
    size = 512 if device.type == "cpu" else 4096
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        matrix, best = torch.ones(size, size, device=device, dtype=dtype), 0.0
        for _ in range(5):
            begin = now(device)
            (matrix @ matrix)[0, 0].item()  # waits for it
            best = max(best, 2 * size**3 / (now(device) - begin))
        return best
    finally:
        torch.set_num_threads(threads)
