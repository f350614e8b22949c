"""What a vLLM engine takes, by formula: as vLLM 0.32 divides a GPU's memory, from a target's configuration.

memory    of one of its GPUs. Weights: their bytes / tensor_parallel, in target.dtype; of a quantised target as its
          files hold them. A step: the activations of max_num_batched_tokens tokens, by default 16,384, and 8,192 on
          a GPU of less than 70 GiB. What CUDA, NCCL and CUDA graphs take is not in it
cache     of one GPU: what is left of gpu_memory_utilization (by default 0.92), or kv_cache_memory_bytes. A token
          takes the keys and values of this GPU's heads and, on every GPU, the states of all captured layers. How
          many tokens have room is not known for a target with sliding layers, which share blocks with the others
states    bytes a second, of one worker: in target.dtype to shared memory, then as the shards hold them
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from infra.plan.memory import batch_numbers, gpu_bytes, states_of
from pipeline.basics.accelerator import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.engines.vllm import asked_version, python_of, require_shares
from pipeline.features.schema import token_bytes
from pipeline.lm.attention import FULL, windows
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import DTYPES, load_config, parameter_count_of, source
from pipeline.recipe.recipe import Recipe

UTILISATION = 0.92
STEP_TOKENS, SMALL_STEP_TOKENS, SMALL_GPU = 16_384, 8_192, 70 << 30
FORMULA = "formula"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one GPU. None: not known."""

    weights: float | None
    step: float
    cache: float | None
    keys_values: int  # of a token
    states: int  # of a token
    dense: bool  # all layers see all tokens

    @property
    def tokens(self) -> int | None:
        """Of all texts that the engine works on at a time."""
        return int(self.cache // (self.keys_values + self.states)) if self.cache is not None and self.dense else None

    def fits(self, length: int) -> bool:
        """At least one text of that length."""
        return (self.cache or 0) > 0 if self.tokens is None else self.tokens >= length


def engine_memory(recipe: Recipe, gpu: float, parallel: int, stored: float | None) -> EngineMemory:
    """`stored`: `weight_bytes`."""
    target, options, config = recipe.target, recipe.target.engine_options, load_config(recipe.target)
    shapes, size = shapes_of(config), DTYPES[target.dtype].itemsize
    most = options.get("max_num_batched_tokens", STEP_TOKENS if gpu >= SMALL_GPU else SMALL_STEP_TOKENS)
    step = most * batch_numbers(recipe, parallel) * size
    weights = stored and stored / parallel
    rest = weights and max(options.get("gpu_memory_utilization", UTILISATION) * gpu - weights - step, 0)
    heads = max(shapes["num_key_value_heads"] // parallel, 1)  # where GPUs outnumber them, several keep the same one
    keys_values = 2 * config.num_hidden_layers * heads * shapes["head_dim"] * size
    dense = set(windows(config)) == {FULL}
    cache = options.get("kv_cache_memory_bytes", rest)
    return EngineMemory(weights, step, cache, keys_values, captured_bytes(recipe), dense)


def captured_bytes(recipe: Recipe) -> int:
    """Of a token's states as the engine keeps and hands them over."""
    config = load_config(recipe.target)
    layers = {config.num_hidden_layers, *recipe.auxiliary_layers(config.num_hidden_layers)}
    return len(layers) * config.hidden_size * DTYPES[recipe.target.dtype].itemsize


def weight_bytes(target: TargetConfig) -> float | None:
    """None: quantised, and the size of its files is not known here."""
    where = source(target)
    full: Any = AutoConfig.from_pretrained(where.name, **where.options())
    if getattr(full, "quantization_config", None) is None:
        return parameter_count_of(target) * DTYPES[target.dtype].itemsize
    if index := where.file("model.safetensors.index.json"):
        return read_json(index).get("metadata", {}).get("total_size")
    single = Path(where.name) / "model.safetensors"  # one of the Hub is not fetched for its size
    return single.stat().st_size if single.is_file() else None


def smallest(recipe: Recipe, gpu: float, stored: float | None) -> int | None:
    """The smallest tensor_parallel with room for the longest text that the engine is to take, without which vLLM does
    not start; None: there is none, or none is known.
    """
    text = load_config(recipe.target)
    longest = recipe.target.engine_options.get("max_model_len", text.max_position_embeddings)
    for parallel in range(1, text.num_attention_heads + 1):
        try:
            require_shares(recipe.target.model_copy(update={"tensor_parallel": parallel}), text)
        except PipelineError:
            continue
        if engine_memory(recipe, gpu, parallel, stored).fits(longest):
            return parallel
    return None


def require_gpus(target: TargetConfig, elsewhere: bool) -> None:
    """Raises PipelineError where they cannot share the target or, unless the plan is for another machine, are not on
    this one, which has some.
    """
    require_shares(target, load_config(target))
    seen = torch.accelerator.device_count()
    if not elsewhere and 0 < seen < target.tensor_parallel:
        raise PipelineError(
            f"target.tensor_parallel={target.tensor_parallel}, but this machine has {seen} GPUs, and an engine's are "
            "all of one: lower it; to plan for a machine that has them, give --dump-speed"
        )


def is_here(target: TargetConfig) -> bool:
    """Whether this machine has the engine and its GPUs."""
    gpus = torch.accelerator.device_count() if accelerator() else 1
    return gpus >= target.tensor_parallel and asked_version(python_of(target)) is not None


Row = tuple[str, float | None, str, str]  # what, its figure, the figure in words, where it comes from


def rows(recipe: Recipe, speed: float | None) -> list[Row]:
    """`speed` in tokens a second of a worker, where it is known."""
    on_cpu, gpu, stored = recipe.target.device == "cpu", gpu_bytes(), weight_bytes(recipe.target)
    found = engine_memory(recipe, gpu, recipe.target.tensor_parallel, stored)
    need = found.weights and found.weights + found.step
    said = "unknown: the target is quantised, and its files are not here"
    if need:
        said = f"{need / 1e9:,.1f} GB a {'process' if on_cpu else 'GPU'}, {found.weights / 1e9:,.1f} of it weights"
    memory: Row = ("memory", need, said, FORMULA)
    return [
        *([] if on_cpu else [_engines(recipe, gpu, stored), _cache(found)]),
        memory,
        _states(recipe, speed),
    ]


def _engines(recipe: Recipe, gpu: float, stored: float | None) -> Row:
    count, parallel, least = recipe.features.workers, recipe.target.tensor_parallel, smallest(recipe, gpu, stored)
    said = f"{count} of {parallel} GPUs, {count * parallel} in all"
    if least is None and stored is not None:
        said += "; the target fits no number of them"
    elif least is not None and least > parallel:
        said += f"; the target does not fit: from tensor_parallel={least} on it does"
    elif least is not None and least < parallel:
        said += f"; with tensor_parallel={least} {count * parallel // least} engines fit"
    where = "of this machine" if accelerator() else "assumed"
    return "engines", count, said, f"GPUs of {gpu / 1e9:,.0f} GB, {where}"


def _cache(found: EngineMemory) -> Row:
    token = found.keys_values + found.states
    room = "how many tokens is not known (sliding layers)" if found.tokens is None else f"{found.tokens:,} tokens"
    said = "unknown" if found.cache is None else f"{found.cache / 1e9:,.1f} GB a GPU, {room}"
    return "cache", found.cache, f"{said} of {token / 1e6:.3f} MB, {found.states / token:.0%} of it states", FORMULA


def _states(recipe: Recipe, speed: float | None) -> Row:
    width = load_config(recipe.target).hidden_size
    shared, disk = captured_bytes(recipe), token_bytes(recipe.stored_dtype, width, states_of(recipe))
    if speed is None:
        return "states", None, "unknown", "tokens/s are not known"
    said = f"{speed * shared / 1e6:,.3f} MB/s a worker to shared memory, {speed * disk / 1e6:,.3f} MB/s to disk"
    return "states", speed * shared, said, "bytes a token x tokens/s"
