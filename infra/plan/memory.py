"""Memory of each stage, and disk of the dump, by formula: from a recipe and its target's configuration, without
weights. For a training that is fed while it runs (features.keep = "window"), its order of shards is simulated, window
by window: the disk that it takes, and how much of the dump is computed again.

The memory of Python and its libraries is not included.
"""

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeline.basics.accelerator import current_accelerator
from pipeline.basics.errors import PipelineError
from pipeline.drafts import DraftConfig, TrainedDraft, build, make_objective, parameter_count
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.parts.losses import chunk_rows
from pipeline.features.batch import Batch
from pipeline.features.positions import Group, Positions
from pipeline.features.schema import FeatureSpec, arrow_schema, token_bytes
from pipeline.lm.ability import FORWARD_ERRORS, auto_class, cache_argument, find_decoder
from pipeline.lm.cache import STATE_COPIES, state_bytes
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import (
    DTYPES,
    count_parameters,
    empty_decoder,
    load_config,
    load_full_config,
    load_tree_obstacle,
)
from pipeline.lm.states import EmbeddingAndHead, LMHead
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from preprocess.dump.task import count_batches_in_flight
from train.input.order import WINDOW_BYTES, Reads

ASSUMED_GPU = 80 * 10**9  # bytes of memory, if this machine has no GPU
TEXT_ROW_BYTES = 40  # per row of a text table: its id, and the offset where its tokens end


def states_per_token(recipe: Recipe) -> int:
    """Return the hidden states stored per token: the final one and one of each auxiliary layer."""
    return 1 + len(recipe.auxiliary_layers(load_config(recipe.target).num_hidden_layers))


def disk_bytes(recipe: Recipe, rows: float, tokens: float) -> float:
    """Return the bytes of the dump: tokens x (5 + states x (hidden size x bytes of a word, + 4 for float8)), and
    frames.
    """
    width = load_config(recipe.target).hidden_size
    frame = frame_bytes(recipe.stored_dtype, states_per_token(recipe) - 1) + TEXT_ROW_BYTES
    return tokens * token_bytes(recipe.stored_dtype, width, states_per_token(recipe)) + rows * frame


def frame_bytes(stored_dtype: str, auxiliary: int) -> int:
    """Return Arrow's overhead of a shard's record batch and its footer entry: the bytes that a second, empty batch adds
    to a file.
    """
    layers = " ".join(map(str, range(1, auxiliary + 1)))
    schema = arrow_schema(FeatureSpec(1, stored_dtype, "", "", "", "", auxiliary_layers=layers))
    empty = pa.RecordBatch.from_pylist([{"row": 0} | {name: [] for name in schema.names[1:]}], schema)
    sizes = []
    for count in (1, 2):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            for _ in range(count):
                writer.write_batch(empty)
        sizes.append(sink.getvalue().size)
    return sizes[1] - sizes[0]


def worker_bytes(recipe: Recipe) -> float:
    """Return the bytes of one dump worker: the target's weights, and for each token of a batch in flight 8 + states
    values of the hidden size and 3 of the MLP's width.
    """
    batches = count_batches_in_flight(recipe) * recipe.features.batch_tokens * values_per_token(recipe)
    return (count_parameters(recipe.target) + batches) * DTYPES[recipe.target.dtype].itemsize


def values_per_token(recipe: Recipe, parallel: int = 1) -> float:
    """Values one token keeps on one GPU during the forward; `parallel` GPUs share the MLP."""
    config = load_config(recipe.target)
    return (8 + states_per_token(recipe)) * config.hidden_size + 3 * config.intermediate_size / parallel


def gpu_bytes() -> float:
    """Return the memory of a local GPU, or of an assumed one, in bytes."""
    device = current_accelerator()
    return torch.accelerator.get_memory_info(device)[1] if device else ASSUMED_GPU


def evaluation_bytes(recipe: Recipe) -> float:
    """Return the bytes of one evaluation worker: the target's weights, the cache of one answer, and all drafts. If
    layers are packed, the plain ones stay in memory next to them until they are replaced. A target that verifies chains
    alone keeps three copies of its layers' states.
    """
    config = load_config(recipe.target)
    shapes = draft_shapes(config)
    length = recipe.data.max_length + recipe.eval.max_new_tokens
    cache = 2 * config.num_hidden_layers * shapes["num_key_value_heads"] * shapes["head_dim"] * length
    with torch.device("meta"):
        built = [build(draft, shapes) for draft in recipe.draft.values() if draft.has_module]
    drafts = sum(map(parameter_count, built))
    drafts += sum(map(count_parameters, recipe.small_models.values()))
    target = count_parameters(recipe.target) * (2 if recipe.eval.pack_linears else 1)
    states = count_state_bytes(recipe.target, recipe.eval.dtype) if load_tree_obstacle(recipe.target) else 0
    return (target + cache + drafts) * DTYPES[recipe.eval.dtype].itemsize + STATE_COPIES * states


def count_state_bytes(config: TargetConfig, dtype: str) -> int:
    """Return the most bytes of the states that layers without keys and values keep of a text. They are counted with
    fake tensors, which have no content, in bfloat16, as experts have no fake product in float32; 0 for a family whose
    forward requires content.
    """
    full, tokens = load_full_config(config), torch.zeros(1, 2, dtype=torch.long)
    options = {"trust_remote_code": config.trust_remote_code, "dtype": torch.bfloat16}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), suppress(*FORWARD_ERRORS):
        decoder = find_decoder(auto_class(full, config.model).from_config(full, **options).eval())
        states = decoder(input_ids=tokens, use_cache=True)[cache_argument(decoder)]
        return state_bytes(states) * DTYPES[dtype].itemsize // torch.bfloat16.itemsize
    return 0


def rank_bytes(recipe: Recipe, draft: TrainedDraft, ranks: int) -> float:
    """Return the bytes of the first rank of training. The draft may be on the meta device.

    The sum of weights, gradients and AdamW's moments (with a float32 copy of half-precision weights), shared as the
    ZeRO stage defines, and its bucket; the target's frozen embedding and head; and the memory of a step (`step_bytes`)
    or, if that is more, of the target and its copy of the draft, which decode at the end. With train.decode = "always"
    these stay in memory next to the steps. ZeRO-3 adds the full weights that validations gather; other stages validate
    with the weights that are trained.
    """
    config, parameters, width = recipe.train, parameter_count(draft), draft.shapes["hidden_size"]
    size = DTYPES[config.dtype].itemsize
    moments = 8 + (4 if size < 4 else 0)
    gradient = 4 if config.zero_stage else size  # from ZeRO-1 on they are summed in float32,
    if config.zero_stage == 1:
        gradient += size % 4  # next to those of half precision
    bucket = 0
    if config.zero_stage > 1 or (config.zero_stage == 1 and size == 4):
        sent = 4 if size < 4 else 0  # ZeRO-2 copies a bucket to float32 to send it; ZeRO-3 holds it in float32
        widths = {1: size, 2: size + sent, 3: 4}
        bucket = config.bucket_elements(parameters) * widths[config.zero_stage]
    shared = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[config.zero_stage]
    states = sum(part / share for part, share in zip((size, gradient, moments), shared, strict=True)) * parameters
    target_values = (draft.target_vocabulary + draft.teacher_vocabulary) * width
    embed_head = size * (target_values + (count_parameters(recipe.target) if draft.config.runs_the_target else 0))
    gathered = size * parameters if config.zero_stage == 3 else 0  # for the estimate of tau; kept for the next one
    decoding = (count_parameters(recipe.target) + parameters) * DTYPES[recipe.target.dtype].itemsize
    always_decoding = decoding if config.decode == "always" else 0
    last_decoding = decoding if config.decode == "last" else 0
    return states + bucket + embed_head + gathered + always_decoding + max(step_bytes(recipe, draft), last_decoding)


def step_bytes(recipe: Recipe, draft: TrainedDraft) -> float:
    """Return the bytes of a forward and backward without weights, gradients and optimizer: a micro-batch, the
    activations that its forward keeps, the loss's trained rows and its chunk of logits. The chunk's size depends on the
    GPU's memory; without a local GPU, 80 GB are assumed.
    """
    config, width = recipe.train, draft.shapes["hidden_size"]
    branches = sum(not term.is_penalty for term in draft.config.terms(0))
    size = DTYPES[config.dtype].itemsize
    tokens = config.micro_batch * row_tokens(recipe)
    activations = activation_bytes(recipe, draft, recompute=False)
    if config.recompute:  # and one pass again
        activations = activation_bytes(recipe, draft, recompute=True) + activations / draft.training_forwards
    # Final states; those with noise, of a draft that reads them; auxiliary ones.
    batch = (1 + draft.needs.final + len(draft.needs.auxiliary)) * tokens * width * size
    positions = all_positions(draft.config, config.micro_batch, row_tokens(recipe))
    trained_rows = sum(len(positions[term.group]) for term in draft.config.terms(0) if not term.is_penalty)
    rows = width * (
        tokens * size + trained_rows * (2 * size + 4 * 2)
    )  # labels; features, gradients and float32 of each
    local_gpu = current_accelerator()
    gpu = local_gpu or torch.device("cuda")  # the planned machine's, if this one has none
    device = torch.device("cpu") if recipe.target.device == "cpu" else gpu
    assumed = None if local_gpu else ASSUMED_GPU
    widest = max(draft.vocabulary_size * branches, draft.teacher_vocabulary)
    chunk = min(chunk_rows(widest, device, assumed), tokens)
    logits = chunk * (
        draft.teacher_vocabulary * 2 * (size + 4) + draft.vocabulary_size * branches * (2 * size + 4)
    )  # of the teacher, of each branch
    head_gradient = draft.own_head_parameters * (8 + size)  # of the draft's own head, while it is accumulated
    return batch + activations + rows + logits + head_gradient


def row_tokens(recipe: Recipe) -> int:
    return recipe.train.pack_tokens or recipe.data.max_length - 1


def activation_bytes(recipe: Recipe, draft: TrainedDraft, recompute: bool) -> int:
    """Count the bytes that a micro-batch's forward keeps for its backward, with fake tensors, which have no content."""
    config, dtype, shapes = recipe.train, DTYPES[recipe.train.dtype], draft.shapes
    positions = all_positions(draft.config, config.micro_batch, row_tokens(recipe))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a module without content cannot be cast
    try:
        with FakeTensorMode():
            decoder = empty_decoder(recipe.target, dtype) if draft.config.runs_the_target else None
            draft_copy = build(draft.config, shapes)
            draft_copy.recompute = recompute
            return _activation_bytes(config, draft_copy, decoder, row_tokens(recipe), positions)
    finally:
        torch.set_default_dtype(before)


def all_positions(config: DraftConfig, rows: int, count: int) -> dict[Group, Any]:
    """Return the trained positions of `rows` rows of `count` tokens, all of which are the assistant's. They are NumPy
    arrays, since fake tensors have no content.
    """
    ids, is_answer, seed = np.zeros(count + 1, np.int32), np.ones(count + 1, np.uint8), (0,)
    one_row = make_objective(config).positions(ids, is_answer, seed)
    row_begins = count * np.arange(rows)[:, None]
    arrays = {
        group: (group_positions.inputs.numpy(), group_positions.labels.numpy() - 1)
        for group, group_positions in one_row.items()
    }
    return {
        group: Positions(*((x + row_begins).ravel() for x in group_positions))
        for group, group_positions in arrays.items()
    }


def _activation_bytes(
    config: TrainConfig,
    draft: TrainedDraft,
    decoder: torch.nn.Module | None,
    count: int,
    positions: dict[Group, Any],
) -> int:
    width, shape = draft.shapes["hidden_size"], (config.micro_batch, count)
    embedding = torch.empty(draft.shapes["vocab_size"], width)
    draft.bind(EmbeddingAndHead(embedding, LMHead(embedding), "", decoder))
    tokens_BT = torch.zeros(shape, dtype=torch.long)
    hidden_BTD = torch.empty(*shape, width)
    states_BTSD = torch.empty(*shape, len(draft.needs.auxiliary), width) if draft.needs.auxiliary else None
    packed_BT, lengths = tokens_BT if config.pack_tokens else None, [[count]] * config.micro_batch
    batch = Batch(
        hidden_BTD, tokens_BT, positions, {}, packed_BT, states_BTSD, tokens_BT, noisy_BTD=hidden_BTD, lengths=lengths
    )
    decoder_weights = [] if decoder is None else [*decoder.parameters(), *decoder.buffers()]
    excluded = {
        x.untyped_storage()._cdata
        for x in (
            *draft.parameters(),
            *decoder_weights,
            embedding,
            hidden_BTD,
            *([] if states_BTSD is None else [states_BTSD]),
        )
    }
    sizes: dict[int, int] = {}
    storages = []  # keeps the storages alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages.append(storage)
        if storage._cdata not in excluded:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        draft(batch)
    return sum(sizes.values())


MAX_SHARDS = 200  # of the simulation; of more shards, several are merged into one


def count_shards_at_once(recipe: Recipe, rows: float, tokens: float) -> tuple[int, float, int]:
    """Return (the number of training's shards, the bytes of each, how many of them training may need at once: two
    windows).
    """
    shards = math.ceil(rows / recipe.features.rows_per_shard)
    size = disk_bytes(recipe, rows, tokens) / shards
    return shards, size, min(2 * max(int(recipe.train.window or WINDOW_BYTES // size), 1), shards)


def count_shards_ahead(recipe: Recipe, rows: float, tokens: float) -> int:
    """Return how many shards there may be at once while training is fed: two windows, or what features.disk_bytes
    holds. More workers of the feeder wait.
    """
    shards, size, needed = count_shards_at_once(recipe, rows, tokens)
    return min(max(needed, int((recipe.features.disk_bytes or 0) / size)), shards)


def simulate_window(recipe: Recipe, rows: float, tokens: float, trained: float) -> tuple[float, float]:
    """Return (the most bytes of training's states on the disk, how often each state is computed) for `rows` dialogues
    with `tokens` tokens, of which `trained` have a loss. Raise PipelineError if features.disk_bytes is less than
    training requires at once.
    """
    total_bytes, features = disk_bytes(recipe, rows, tokens), recipe.features
    shards, size, needed = count_shards_at_once(recipe, rows, tokens)
    merged = math.ceil(shards / MAX_SHARDS)
    count = math.ceil(shards / merged)
    window_shards = recipe.train.window or WINDOW_BYTES // size
    window = min(max(int(window_shards / merged), 1), count)
    windows = min(2 * (recipe.train.window * size if recipe.train.window else WINDOW_BYTES), total_bytes)
    at_once = min(2 * window, count)
    room = min(max(int((features.disk_bytes or 0) / (size * merged)), at_once), count)
    if features.disk_bytes and needed * size > features.disk_bytes:
        raise PipelineError(
            f"features.disk_bytes={features.disk_bytes:,}, but the {needed} shards that training may need at once take "
            f"up to about {needed * size:,.0f}: raise it, or lower train.window or features.rows_per_shard"
        )
    reads = []
    steps = math.ceil(recipe.train.passes(trained) * math.ceil(count / window))
    for epoch in range(math.ceil(recipe.train.passes(trained))):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(count).tolist()  # as train/input/order.py
        reads += [set(order[first : first + window]) for first in range(0, count, window)]
    trainings = 1 if recipe.train.together else len(recipe.to_train)
    made = Reads(reads[:steps], count).count_made_shards(at_once, room, trainings)
    return min(features.disk_bytes or windows, total_bytes), made / count
