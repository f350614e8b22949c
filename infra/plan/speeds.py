"""The speeds that a plan uses, measured on this machine: of a dump worker, of training, of plain decoding."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eval.measure.packed import pack
from pipeline.artifacts.features import feature_spec
from pipeline.basics.accelerator import synchronized_time
from pipeline.drafts import build, make_objective
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow, row_dtype
from pipeline.lm.model import DTYPES, Target, load_config, load_embed_head, resolve_device
from pipeline.recipe.recipe import Recipe
from preprocess.dump.worker import EncodedDocument, FeatureWorker

MAX_PART = 32  # documents of the dump that are timed together
PROBE = 20  # seconds, after which a measurement ends with what it has
CONTEXT = 256  # tokens before the plain ones that are timed
# What a step takes more than bare micro-batches, as bytes of states per second: the mean of four trainings on two H200s
# (docs/results/gpu.md). Fitted to them; no other GPU was measured.
STATE_BYTES_PER_S = 3e9


def dump_worker(recipe: Recipe, folder: Path = Path()) -> FeatureWorker:
    """Return a loaded dump worker that writes to `folder`."""
    recipe = recipe.with_features(store=None)
    worker = FeatureWorker(recipe, folder, feature_spec(recipe))
    worker.ready()
    return worker


def dump_speed(recipe: Recipe, documents: list[EncodedDocument]) -> float:
    """Load a dump worker, and return its tokens per second."""
    worker = dump_worker(recipe)
    try:
        return worker_speed(worker, documents)
    finally:
        worker.close()


def worker_speed(worker: FeatureWorker, documents: list[EncodedDocument], seconds: float = PROBE) -> float:
    """Return the tokens per second of a local worker, without writing. Parts are whole batches, which grow until one
    more would take longer than `seconds`; the largest ones count.
    """
    left, size = random.Random(0).sample(documents, len(documents)), 1  # shuffled: each part has all lengths
    timed: dict[int, tuple[int, float]] = {}  # tokens and seconds, by the size of a part
    begin = time.perf_counter()
    while left:
        part, left = left[:size], left[size:]
        start = time.perf_counter()
        part_tokens = sum(row.tokens for row in worker.rows(worker.batches(part, {}), part, {}))
        end = time.perf_counter()
        tokens, took = timed.get(size, (0, 0.0))
        timed[size] = tokens + part_tokens, took + end - start
        size = min(2 * size, MAX_PART)
        if end - begin + (end - start) * size / len(part) > seconds:
            break
    tokens, took = timed[max(timed)]
    return tokens / took


@dataclass(frozen=True)
class MicroBatchTimes:
    """The seconds that a rank's micro-batch takes, and those that a step adds."""

    tokens: int  # of the micro-batch
    state_bytes: int  # that the host gives to an accelerator; 0 on a CPU
    forward_backward: float
    optimizer: float  # one step of AdamW

    @property
    def bare_speed(self) -> float:
        """Return the tokens per second of forward, backward and AdamW, on a batch that is on the device."""
        return self.tokens / (self.forward_backward + self.optimizer)

    def step_speed(self, accumulation: int) -> float:
        """Return the tokens per second of whole steps, each of `accumulation` micro-batches and one of AdamW. Reading,
        collating and copying states take time in proportion to their bytes, and overlap with nothing.
        """
        micro_batch = self.forward_backward + self.state_bytes / STATE_BYTES_PER_S
        return accumulation * self.tokens / (accumulation * micro_batch + self.optimizer)


def time_training(recipe: Recipe, name: str, length: int, seconds: float = 5) -> MicroBatchTimes:
    """Time forward and backward, and AdamW, on random features of `length` tokens a dialogue."""
    config, device, dtype = recipe.train, resolve_device(recipe.target.device), DTYPES[recipe.train.dtype]
    shapes = draft_shapes(load_config(recipe.target))
    draft = build(recipe.draft[name], shapes)
    draft.initialise(recipe.seed)
    draft.compiled = config.compile
    if draft.token_ids_U is not None:
        draft.set_vocabulary(torch.arange(len(draft.token_ids_U)))
    draft.bind(load_embed_head(recipe.target, dtype if draft.config.runs_the_target else None))
    draft = draft.to(device, dtype)
    draft.move_embed_head(device, dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=config.learning_rate)
    generator, width = torch.Generator().manual_seed(0), shapes["hidden_size"]
    rows = [
        TextRow(
            str(number),
            torch.randint(shapes["vocab_size"], (length,), generator=generator).int().numpy(),
            (np.arange(length) > length // 4).astype(np.uint8),
            torch.randn(length, width, generator=generator).bfloat16(),
            torch.randn(length, len(draft.needs.auxiliary), width, generator=generator).bfloat16(),
        )
        for number in range(config.micro_batch)
    ]
    objective = make_objective(draft.config)
    totals, auxiliary = dict.fromkeys(objective.groups, length), range(len(draft.needs.auxiliary))
    batch = collate(rows, objective, totals, auxiliary=auxiliary).to(device, dtype)

    def forward_backward() -> None:
        loss, _ = objective.loss(draft, batch)
        loss.backward()

    states = 0 if device.type == "cpu" else sum(states.numel() for states in batch.states)
    return MicroBatchTimes(
        length * config.micro_batch,
        states * row_dtype(recipe.stored_dtype).itemsize,
        mean_seconds(forward_backward, device, 2, seconds),
        mean_seconds(optimizer.step, device, 2, seconds / 5),
    )


def mean_seconds(
    work: Callable[[], object], device: torch.device, warm: int, seconds: float, calls: int | None = None
) -> float:
    """Return the mean seconds of a call, over at most `calls` calls within `seconds`. The first `warm` calls count only
    if they use up the whole `PROBE` time.
    """
    took: list[float] = []
    while len(took) != calls and sum(took) < PROBE and (len(took) < warm + 3 or sum(took[warm:]) < seconds):
        begin = synchronized_time(device)
        work()
        took.append(synchronized_time(device) - begin)
    timed = took[warm:] or took[-1:]
    return sum(timed) / len(timed)


def plain_token(recipe: Recipe, tokens: int = 48) -> float:
    """Return the seconds of one token of plain decoding, as evaluation runs it."""
    target = Target(recipe.target, recipe.eval.dtype, verify=False)
    if recipe.eval.pack_linears:
        pack(target, {})
    cache = target.new_cache(CONTEXT + tokens + 4)
    target.forward(torch.zeros(CONTEXT, dtype=torch.long, device=target.device), cache)

    def token() -> None:
        hidden_ND = target.forward(torch.ones(1, dtype=torch.long, device=target.device), cache).final_ND
        int(target.head(hidden_ND[-1]).argmax())  # waits

    return mean_seconds(token, target.device, 4, PROBE, calls=tokens + 4)
