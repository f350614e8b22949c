"""The speeds that a plan is made of, measured on this machine: a dump worker's, training's, plain decoding's."""

import random
import time
from itertools import count
from pathlib import Path

import numpy as np
import torch

from eval.measure.packed import pack
from pipeline.artifacts.features import feature_spec
from pipeline.basics.accelerator import now
from pipeline.drafts import build, objective_of
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.batch import collate
from pipeline.features.schema import Row
from pipeline.lm.model import DTYPES, Target, load_config, load_embed_head, resolve_device
from pipeline.recipe.recipe import Recipe
from preprocess.dump.worker import Document, FeatureWorker

TOGETHER = 32  # documents of the dump that are timed together
CONTEXT = 256  # tokens before the plain ones that are timed


def dump_worker(recipe: Recipe, folder: Path = Path()) -> FeatureWorker:
    """A loaded worker of a dump to `folder`."""
    recipe = recipe.with_features(store=None)
    worker = FeatureWorker(recipe, folder, feature_spec(recipe))
    worker.ready()
    return worker


def dump_speed(recipe: Recipe, documents: list[Document]) -> float:
    """Tokens a second of a worker that is loaded for it."""
    worker = dump_worker(recipe)
    try:
        return worker_speed(worker, documents)
    finally:
        worker.close()


def worker_speed(worker: FeatureWorker, documents: list[Document], seconds: float = 20) -> float:
    """Tokens a second of a worker here, as it works but for the writing, for at least so many seconds."""
    mixed = random.Random(0).sample(documents, len(documents))  # of all lengths, in any part of it
    for _ in worker.rows(worker.batches(mixed[:1], {}), mixed[:1], {}):  # warms up
        pass
    tokens, first, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < seconds and first < len(mixed):
        part = mixed[first : first + TOGETHER]
        tokens += sum(row.tokens for row in worker.rows(worker.batches(part, {}), part, {}))
        first += TOGETHER
    return tokens / (time.perf_counter() - begin)


def training_speed(recipe: Recipe, name: str, length: int, seconds: float = 5) -> float:
    """Tokens a second of forward, backward and AdamW, on random features of dialogues of `length` tokens."""
    config, device, dtype = recipe.train, resolve_device(recipe.target.device), DTYPES[recipe.train.dtype]
    shapes = shapes_of(load_config(recipe.target))
    draft = build(recipe.draft[name], shapes)
    draft.initialise(recipe.seed)
    if draft.token_ids_U is not None:
        draft.set_vocabulary(torch.arange(len(draft.token_ids_U)))
    draft.bind(load_embed_head(recipe.target, dtype if draft.config.runs_the_target else None))
    draft = draft.to(device, dtype)
    draft.move_embed_head(device, dtype)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=config.learning_rate)
    generator, width = torch.Generator().manual_seed(0), shapes["hidden_size"]
    rows = [
        Row(
            str(number),
            torch.randint(shapes["vocab_size"], (length,), generator=generator).int().numpy(),
            (np.arange(length) > length // 4).astype(np.uint8),
            torch.randn(length, width, generator=generator).bfloat16(),
            torch.randn(length, len(draft.needs.auxiliary), width, generator=generator).bfloat16(),
        )
        for number in range(config.micro_batch)
    ]
    objective = objective_of(draft.config, config.mask)
    totals, auxiliary = dict.fromkeys(objective.groups, length), range(len(draft.needs.auxiliary))
    batch = collate(rows, objective, totals, auxiliary=auxiliary).to(device, dtype)
    tokens, begin = 0, 0.0
    for step in count():
        if step == 2:  # warm
            tokens, begin = 0, now(device)
        loss, _ = objective.loss(draft, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += length * config.micro_batch
        if step >= 4 and time.perf_counter() - begin > seconds:
            break
    return tokens / (now(device) - begin)


def plain_token(recipe: Recipe, tokens: int = 48) -> float:
    """Seconds of one plain token of the target, as evaluation runs it."""
    target = Target(recipe.target, recipe.eval.dtype)
    if recipe.eval.pack_linears:
        pack(target, {})
    cache = target.new_cache(CONTEXT + tokens + 4)
    target.forward(torch.zeros(CONTEXT, dtype=torch.long, device=target.device), cache)
    begin = 0.0
    for step in range(tokens + 4):
        if step == 4:
            begin = now(target.device)
        hidden_ND = target.forward(torch.ones(1, dtype=torch.long, device=target.device), cache).final_ND
        int(target.head(hidden_ND[-1]).argmax())  # waits
    return (now(target.device) - begin) / tokens
