"""What training a recipe's drafts will take, before it is started.

    python -m train.estimate RECIPE --rows N --tokens N [--validation-tokens N] [--tokens-per-second R]

Rows and tokens are those of the dump (`preprocess.estimate` prints them). The speed of one accelerator, or of this whole
machine's CPU, is measured here on random features, unless --tokens-per-second gives it.

    steps     epochs x whole global batches
    hours     (epochs x tokens + validations x validation tokens / 3) / speed; starting up, saving and waiting for data are not in it
    memory    of a rank: weights, gradients and AdamW's moments (with a float32 copy of half-precision weights), shared as the
              ZeRO stage says; the target's frozen embedding and head; the loss's chunk of logits; activations of a micro-batch,
              taken as 40 numbers of the hidden size a token and pass of a roll-out
"""

import argparse
import json
import time
from itertools import count

import numpy as np
import torch

from pipeline import entry
from pipeline.batch import collate
from pipeline.drafts import Draft, build, parameter_count
from pipeline.drafts.layers import shapes_of
from pipeline.features.schema import Row
from pipeline.losses import CHUNK_LOGITS
from pipeline.recipe import Recipe, add_recipe_arguments, load_recipe
from pipeline.sections import TrainConfig
from pipeline.target import DTYPES, load_config, load_ends, resolve_device

ACTIVATIONS = 40  # numbers of the hidden size that a token's forward keeps for its backward
VALIDATION = 1 / 3  # of a token's training


def memory_bytes(recipe: Recipe, draft: Draft, ranks: int) -> float:
    """Of one rank. The draft may be on the meta device."""
    config, parameters, width = recipe.train, parameter_count(draft), draft.shapes["hidden_size"]
    size = DTYPES[config.dtype].itemsize
    moments = 8 + (4 if size < 4 else 0)
    shared = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[config.zero_stage]
    states = sum(part / share for part, share in zip((size, size, moments), shared, strict=True)) * parameters
    ends = (draft.shapes["vocab_size"] + draft.vocabulary_size) * width * size
    logits = CHUNK_LOGITS * 4 * 4  # teacher, student, slope and one more for the sums
    activations = config.micro_batch * recipe.data.max_length * width * ACTIVATIONS * size * draft.config.rollout
    return states + ends + logits + activations


def measured_speed(recipe: Recipe, name: str, length: int, seconds: float = 5) -> float:
    """Tokens a second of forward, backward and AdamW on random features of dialogues of `length` tokens."""
    config, device, dtype = recipe.train, resolve_device(recipe.target.device), DTYPES[recipe.train.dtype]
    shapes, ends = shapes_of(load_config(recipe.target)), load_ends(recipe.target)
    draft = build(recipe.draft[name], shapes)
    draft.initialise(recipe.seed)
    if recipe.draft[name].vocabulary:
        draft.set_vocabulary(torch.arange(recipe.draft[name].vocabulary))
    draft.bind(ends)
    draft = draft.to(device, dtype)
    draft.bind(ends.to(device, dtype))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=config.learning_rate)
    generator, width = torch.Generator().manual_seed(0), shapes["hidden_size"]
    rows = [
        Row(
            str(number),
            torch.randint(shapes["vocab_size"], (length,), generator=generator).int().numpy(),
            (np.arange(length) > length // 4).astype(np.uint8),
            torch.randn(length, width, generator=generator).bfloat16(),
        )
        for number in range(config.micro_batch)
    ]
    batch = collate(rows, draft.horizons, config.mask, dict.fromkeys(draft.horizons, length)).to(device, dtype)
    tokens, begin = 0, 0.0
    for step in count():
        if step == 2:  # warm
            _wait(device)
            tokens, begin = 0, time.perf_counter()
        loss, _ = draft(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += length * config.micro_batch
        if step >= 4 and time.perf_counter() - begin > seconds:
            break
    _wait(device)
    return tokens / (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ranks_of(config: TrainConfig) -> int:
    return config.ranks or max(torch.cuda.device_count(), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--rows", type=float, required=True, help="training dialogues of the dump")
    parser.add_argument("--tokens", type=float, required=True, help="their tokens")
    parser.add_argument("--validation-tokens", type=float, default=0)
    parser.add_argument("--tokens-per-second", type=float, help="of one accelerator, where it is known")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    config, ranks = recipe.train, ranks_of(recipe.train)
    measured_on_cpu = not arguments.tokens_per_second and resolve_device(recipe.target.device).type == "cpu"
    steps = int(arguments.rows // config.global_batch) * config.epochs
    validations = steps // config.validate_every + 1
    tokens = arguments.tokens * config.epochs + VALIDATION * validations * arguments.validation_tokens
    drafts, shapes = {}, shapes_of(load_config(recipe.target))
    for name in sorted(recipe.draft):
        with torch.device("meta"):
            draft = build(recipe.draft[name], shapes)
        speed = arguments.tokens_per_second or measured_speed(
            recipe, name, max(int(arguments.tokens / max(arguments.rows, 1)), 8)
        )
        whole = speed if measured_on_cpu else speed * ranks  # CPU ranks share the machine that was measured
        drafts[name] = {
            "parameters": parameter_count(draft),
            "hours": round(tokens / whole / 3600, 6),
            "memory_bytes": round(memory_bytes(recipe, draft, ranks)),
            "tokens_per_second": round(whole, 1),
        }
        facts = drafts[name]
        print(
            f"train  {name}: {facts['parameters']:,} parameters, {steps:,} steps, {facts['hours']:,.2f} h at {whole:,.0f} tokens/s "
            f"with {ranks} ranks, {facts['memory_bytes'] / 1e9:,.1f} GB a rank"
        )
    print(json.dumps({"steps": steps, "hours": round(sum(d["hours"] for d in drafts.values()), 6), "drafts": drafts}))


if __name__ == "__main__":
    entry.run(main)
