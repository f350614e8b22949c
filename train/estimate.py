"""What training a recipe's drafts will take, before it is started.

    python -m train.estimate RECIPE --rows N --tokens N [--validation-tokens N] [--tokens-per-second R]

Rows and tokens are those of the dump (`preprocess.estimate` prints them). The speed of one accelerator, or of this
whole machine's CPU, is measured here on random features, unless --tokens-per-second gives it.

    steps     epochs x whole global batches
    hours     (epochs x tokens + validations x validation tokens / 3) / speed; starting up, saving and waiting for data
    are not in it
    memory    of a rank, the first: weights, gradients and AdamW's moments (with a float32 copy of half-precision
    weights), shared as
              the ZeRO stage says, and its bucket; the target's frozen embedding and head; and what a step comes to
              need: a micro-batch, the activations that its forward keeps (counted in a forward of tensors without
              content), the loss's trained rows and its chunk of logits, which goes by the GPU's memory (where none is
              here, by that of one of 80 GB); or, where that is more, the target and its own copy of the draft, which
              decode at the end (with train.decode = "always" they stay beside the steps); under ZeRO-3 the whole
              weights that validations gather, too: elsewhere they use those that train
"""

import argparse
import json
import time
from itertools import count

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeline.basics.accelerator import accelerator, now
from pipeline.drafts import TrainedDraft, build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.parts.losses import chunk_rows
from pipeline.features.batch import Batch, collate
from pipeline.features.schema import Row
from pipeline.lm.embedding_head import EmbeddingAndHead, LMHead
from pipeline.lm.model import (
    DTYPES,
    empty_decoder,
    load_config,
    load_embed_head,
    parameter_count_of,
    resolve_device,
)
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.running import entry
from pipeline.running.expect import steps_of

VALIDATION = 1 / 3  # of a token's training
ASSUMED_GPU = 80 * 10**9  # bytes of memory, where none is here to be asked


def memory_bytes(recipe: Recipe, draft: TrainedDraft, ranks: int) -> float:
    """Of one rank. The draft may be on the meta device."""
    config, parameters, width = recipe.train, parameter_count(draft), draft.shapes["hidden_size"]
    size = DTYPES[config.dtype].itemsize
    moments = 8 + (4 if size < 4 else 0)
    gradient = 4 if config.zero_stage else size  # from ZeRO-1 on they add up in float32,
    if config.zero_stage == 1:
        gradient += size % 4  # beside those of half precision
    bucket = 0
    if config.zero_stage > 1 or (config.zero_stage == 1 and size == 4):
        bucket = config.bucket_elements(parameters) * size
    shared = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[config.zero_stage]
    states = sum(part / share for part, share in zip((size, gradient, moments), shared, strict=True)) * parameters
    borrowed = (draft.target_vocabulary + draft.teacher_vocabulary) * width
    embed_head = size * (borrowed + (parameter_count_of(recipe.target) if draft.needs.decoder else 0))
    gathered = size * parameters if config.zero_stage == 3 else 0  # for the estimate of tau; kept for the next one
    decoding = (parameter_count_of(recipe.target) + parameters) * DTYPES[recipe.target.dtype].itemsize
    beside = decoding if config.decode == "always" else 0
    at_the_end = decoding if config.decode == "last" else 0
    return states + bucket + embed_head + gathered + beside + max(step_bytes(recipe, draft), at_the_end)


def step_bytes(recipe: Recipe, draft: TrainedDraft) -> float:
    """What a forward and backward needs beside weights, their gradients and the optimizer."""
    config, width, branches = recipe.train, draft.shapes["hidden_size"], draft.trained_features
    size = DTYPES[config.dtype].itemsize
    tokens = config.micro_batch * row_tokens(recipe)
    kept = activation_bytes(recipe, draft, recompute=False)
    if config.recompute:  # and one pass again
        kept = activation_bytes(recipe, draft, recompute=True) + kept / draft.passes
    batch = (2 + len(draft.needs.auxiliary)) * tokens * width * size  # features, labels, auxiliary states
    rows = (
        tokens * width * (size * (1 + 2 * branches) + 4 * 2 * branches)
    )  # labels; features, gradients and float32 of each
    here = accelerator()
    there = here or torch.device("cuda")  # of a machine with one, where this one has none
    device = torch.device("cpu") if recipe.target.device == "cpu" else there
    assumed = None if here else ASSUMED_GPU
    widest = max(draft.vocabulary_size * branches, draft.teacher_vocabulary)
    chunk = min(chunk_rows(widest, 1, device, assumed), tokens)
    logits = chunk * (
        draft.teacher_vocabulary * 2 * (size + 4) + draft.vocabulary_size * branches * (2 * size + 4)
    )  # of the teacher, of each branch (a mixture of K features: K)
    own = draft.own_head_parameters * (8 + size)  # its gradient while it is added up
    return batch + kept + rows + logits + own


def row_tokens(recipe: Recipe) -> int:
    return recipe.train.pack_tokens or recipe.data.max_length - 1


def activation_bytes(recipe: Recipe, draft: TrainedDraft, recompute: bool) -> int:
    """What a micro-batch's forward keeps for its backward: counted, with tensors that have no content."""
    config, dtype, shapes = recipe.train, DTYPES[recipe.train.dtype], draft.shapes
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a module without content cannot be cast
    try:
        with FakeTensorMode():
            decoder = empty_decoder(recipe.target, dtype) if draft.needs.decoder else None
            made = build(draft.config, shapes)
            return _activation_bytes(config, made, decoder, dtype, row_tokens(recipe), recompute)
    finally:
        torch.set_default_dtype(before)


def _activation_bytes(
    config: TrainConfig,
    draft: TrainedDraft,
    decoder: torch.nn.Module | None,
    dtype: torch.dtype,
    count: int,
    recompute: bool,
) -> int:
    width, shape = draft.shapes["hidden_size"], (config.micro_batch, count)
    embedding = torch.empty(draft.shapes["vocab_size"], width)
    draft.bind(EmbeddingAndHead(embedding, LMHead(embedding), "", decoder))
    draft.recompute = recompute
    tokens_BT = torch.zeros(shape, dtype=torch.long)
    hidden_BTD = torch.empty(*shape, width)
    states_BTSD = torch.empty(*shape, len(draft.needs.auxiliary), width) if draft.needs.auxiliary else None
    trained = {1: torch.ones(shape, dtype=torch.bool)}
    packed_BT = tokens_BT if config.pack_tokens else None
    batch = Batch(hidden_BTD, tokens_BT, hidden_BTD, trained, {}, packed_BT, states_BTSD, tokens_BT)
    given = [] if decoder is None else [*decoder.parameters(), *decoder.buffers()]
    others = {
        x.untyped_storage()._cdata
        for x in (*draft.parameters(), *given, embedding, hidden_BTD, *([] if states_BTSD is None else [states_BTSD]))
    }
    kept: dict[int, int] = {}
    alive = []  # so that no storage is counted under another's address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage._cdata not in others:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        draft.predictions(batch)
    return sum(kept.values())


def measured_speed(recipe: Recipe, name: str, length: int, seconds: float = 5) -> float:
    """Tokens a second of forward, backward and AdamW on random features of dialogues of `length` tokens."""
    config, device, dtype = recipe.train, resolve_device(recipe.target.device), DTYPES[recipe.train.dtype]
    shapes = shapes_of(load_config(recipe.target))
    draft = build(recipe.draft[name], shapes)
    draft.initialise(recipe.seed)
    if draft.token_ids_U is not None:
        draft.set_vocabulary(torch.arange(len(draft.token_ids_U)))
    draft.bind(load_embed_head(recipe.target, draft.needs, dtype))
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
    totals, auxiliary = dict.fromkeys(draft.horizons, length), range(len(draft.needs.auxiliary))
    batch = collate(rows, draft.horizons, config.mask, totals, auxiliary=auxiliary).to(device, dtype)
    tokens, begin = 0, 0.0
    for step in count():
        if step == 2:  # warm
            tokens, begin = 0, now(device)
        loss, _ = draft(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += length * config.micro_batch
        if step >= 4 and time.perf_counter() - begin > seconds:
            break
    return tokens / (now(device) - begin)


def ranks_of(config: TrainConfig) -> int:
    return config.ranks or max(torch.accelerator.device_count(), 1)


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
    steps = steps_of(config, arguments.rows, arguments.tokens)
    validations = steps // config.validate_every + 1
    tokens = arguments.tokens * config.epochs + VALIDATION * validations * arguments.validation_tokens
    drafts, shapes = {}, shapes_of(load_config(recipe.target))
    for name in recipe.to_train:
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
            f"train  {name}: {facts['parameters']:,} parameters, {steps:,} steps, {facts['hours']:,.2f} h at "
            f"{whole:,.0f} tokens/s with {ranks} ranks, {facts['memory_bytes'] / 1e9:,.1f} GB a rank"
        )
    print(json.dumps({"steps": steps, "hours": round(sum(d["hours"] for d in drafts.values()), 6), "drafts": drafts}))


if __name__ == "__main__":
    entry.run(main)
