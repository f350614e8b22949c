"""Memory of each stage, and disk of the dump, by formula: from a recipe and its target's configuration, without
weights. Of a training that is fed while it runs (features.keep = "window"), its order of shards is simulated, window by
window: the disk it takes, and how much of the dump it makes again.

The memory of Python and its libraries is not included.
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeline.basics.accelerator import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.drafts import DraftConfig, TrainedDraft, build, objective_of, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.parts.losses import chunk_rows
from pipeline.features.batch import Batch, Group, Positions
from pipeline.features.schema import FeatureSpec, arrow_schema, token_bytes
from pipeline.lm.embedding_head import EmbeddingAndHead, LMHead
from pipeline.lm.model import DTYPES, empty_decoder, load_config, parameter_count_of
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from preprocess.dump.task import in_flight
from train.input.order import WINDOW_BYTES, Reads

ASSUMED_GPU = 80 * 10**9  # bytes of memory, where none is here to be asked
TEXT_ROW_BYTES = 40  # of a text table's row: its id, and where its tokens end


def states_of(recipe: Recipe) -> int:
    """Hidden states that are stored of a token: the last one and each auxiliary layer's."""
    return 1 + len(recipe.auxiliary_layers(load_config(recipe.target).num_hidden_layers))


def disk_bytes(recipe: Recipe, rows: float, tokens: float) -> float:
    """Bytes of the dump: tokens x (5 + states x (hidden size x bytes of a word, + 4 for float8)), and frames."""
    width = load_config(recipe.target).hidden_size
    frame = frame_bytes(recipe.stored_dtype, states_of(recipe) - 1) + TEXT_ROW_BYTES
    return tokens * token_bytes(recipe.stored_dtype, width, states_of(recipe)) + rows * frame


def frame_bytes(stored_dtype: str, auxiliary: int) -> int:
    """Arrow's, of a shard's record batch with its entry in the footer: what a second, empty one adds to a file."""
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
    """Bytes of one worker of the dump: the target's weights; of each batch in flight 8 + states numbers of the hidden
    size and 3 of the MLP's a token.
    """
    batches = in_flight(recipe) * recipe.features.batch_tokens * batch_numbers(recipe)
    return (parameter_count_of(recipe.target) + batches) * DTYPES[recipe.target.dtype].itemsize


def batch_numbers(recipe: Recipe, parallel: int = 1) -> float:
    """Of a token of a batch that is forwarded, on one of the GPUs that share the MLP."""
    config = load_config(recipe.target)
    return (8 + states_of(recipe)) * config.hidden_size + 3 * config.intermediate_size / parallel


def gpu_bytes() -> float:
    """Memory of a GPU."""
    here = accelerator()
    return torch.accelerator.get_memory_info(here)[1] if here else ASSUMED_GPU


def evaluation_bytes(recipe: Recipe) -> float:
    """Bytes of one worker of evaluation: the target's weights, the cache of one answer, and all drafts. Where layers
    are packed, the plain ones live beside them until they are replaced.
    """
    config = load_config(recipe.target)
    shapes = shapes_of(config)
    length = recipe.data.max_length + recipe.eval.max_new_tokens
    cache = 2 * config.num_hidden_layers * shapes["num_key_value_heads"] * shapes["head_dim"] * length
    with torch.device("meta"):
        drafts = sum(parameter_count(build(recipe.draft[name], shapes)) for name in recipe.trained)
    drafts += sum(map(parameter_count_of, recipe.small_models.values()))
    target = parameter_count_of(recipe.target) * (2 if recipe.eval.pack_linears else 1)
    return (target + cache + drafts) * DTYPES[recipe.eval.dtype].itemsize


def rank_bytes(recipe: Recipe, draft: TrainedDraft, ranks: int) -> float:
    """Bytes of the first rank of training. The draft may be on the meta device.

    Weights, gradients and AdamW's moments (with a float32 copy of half-precision weights), shared as the ZeRO stage
    says, and its bucket; the target's frozen embedding and head; and what a step comes to need (`step_bytes`) or, where
    that is more, the target and its own copy of the draft, which decode at the end. With train.decode = "always" these
    stay beside the steps. Under ZeRO-3 come the whole weights that validations gather; elsewhere they use those that
    train.
    """
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
    embed_head = size * (borrowed + (parameter_count_of(recipe.target) if draft.config.runs_the_target else 0))
    gathered = size * parameters if config.zero_stage == 3 else 0  # for the estimate of tau; kept for the next one
    decoding = (parameter_count_of(recipe.target) + parameters) * DTYPES[recipe.target.dtype].itemsize
    beside = decoding if config.decode == "always" else 0
    at_the_end = decoding if config.decode == "last" else 0
    return states + bucket + embed_head + gathered + beside + max(step_bytes(recipe, draft), at_the_end)


def step_bytes(recipe: Recipe, draft: TrainedDraft) -> float:
    """What a forward and backward needs beside weights, their gradients and the optimizer: a micro-batch, the
    activations that its forward keeps, the loss's trained rows and its chunk of logits. The chunk goes by the GPU's
    memory; where none is here, by that of one of 80 GB.
    """
    config, width = recipe.train, draft.shapes["hidden_size"]
    branches = sum(not term.is_penalty for term in draft.config.terms(0))
    size = DTYPES[config.dtype].itemsize
    tokens = config.micro_batch * row_tokens(recipe)
    kept = activation_bytes(recipe, draft, recompute=False)
    if config.recompute:  # and one pass again
        kept = activation_bytes(recipe, draft, recompute=True) + kept / draft.training_forwards
    batch = (2 + len(draft.needs.auxiliary)) * tokens * width * size  # features, labels, auxiliary states
    positions = everywhere(draft.config, config.micro_batch, row_tokens(recipe))
    told = sum(len(positions[term.group]) for term in draft.config.terms(0) if not term.is_penalty)
    rows = width * (tokens * size + told * (2 * size + 4 * 2))  # labels; features, gradients and float32 of each
    here = accelerator()
    there = here or torch.device("cuda")  # of a machine with one, where this one has none
    device = torch.device("cpu") if recipe.target.device == "cpu" else there
    assumed = None if here else ASSUMED_GPU
    widest = max(draft.vocabulary_size * branches, draft.teacher_vocabulary)
    chunk = min(chunk_rows(widest, device, assumed), tokens)
    logits = chunk * (
        draft.teacher_vocabulary * 2 * (size + 4) + draft.vocabulary_size * branches * (2 * size + 4)
    )  # of the teacher, of each branch
    own = draft.own_head_parameters * (8 + size)  # its gradient while it is added up
    return batch + kept + rows + logits + own


def row_tokens(recipe: Recipe) -> int:
    return recipe.train.pack_tokens or recipe.data.max_length - 1


def activation_bytes(recipe: Recipe, draft: TrainedDraft, recompute: bool) -> int:
    """What a micro-batch's forward keeps for its backward: counted, with tensors that have no content."""
    config, dtype, shapes = recipe.train, DTYPES[recipe.train.dtype], draft.shapes
    positions = everywhere(draft.config, config.micro_batch, row_tokens(recipe))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a module without content cannot be cast
    try:
        with FakeTensorMode():
            decoder = empty_decoder(recipe.target, dtype) if draft.config.runs_the_target else None
            made = build(draft.config, shapes)
            made.recompute = recompute
            return _activation_bytes(config, made, decoder, row_tokens(recipe), positions)
    finally:
        torch.set_default_dtype(before)


def everywhere(config: DraftConfig, rows: int, count: int) -> dict[Group, Any]:
    """The trained positions of so many rows, each of a dialogue whose tokens are all the assistant's. They have
    content, and are therefore no tensors.
    """
    one = objective_of(config).positions(np.zeros(count + 1, np.int32), np.ones(count + 1, np.uint8))
    begins = count * np.arange(rows)[:, None]
    both = {group: (found.inputs.numpy(), found.labels.numpy() - 1) for group, found in one.items()}
    return {group: Positions(*((x + begins).ravel() for x in found)) for group, found in both.items()}


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
    packed_BT = tokens_BT if config.pack_tokens else None
    batch = Batch(hidden_BTD, tokens_BT, hidden_BTD, positions, {}, packed_BT, states_BTSD, tokens_BT)
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
        draft(batch)
    return sum(kept.values())


SIMULATED = 200  # shards; where there are more, several are taken as one


def stream(recipe: Recipe, rows: float, tokens: float, trained: float) -> tuple[float, float]:
    """(bytes of training's states that are on the disk at most, how often each of them is made) for so many dialogues,
    tokens, and tokens with a loss. Raises PipelineError where training could not have what it needs at once.
    """
    every, features = disk_bytes(recipe, rows, tokens), recipe.features
    shards = math.ceil(rows / features.rows_per_shard)
    size = every / shards
    together = math.ceil(shards / SIMULATED)
    count = math.ceil(shards / together)
    own = recipe.train.window or WINDOW_BYTES // size
    window = min(max(int(own / together), 1), count)
    windows = min(2 * (recipe.train.window * size if recipe.train.window else WINDOW_BYTES), every)
    now = min(2 * window, count)
    room = min(max(int((features.disk_bytes or 0) / (size * together)), now), count)
    needed = min(2 * max(int(own), 1), shards)
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
    made = Reads(reads[:steps], count).made(now, room, trainings)
    return min(features.disk_bytes or windows, every), made / count
