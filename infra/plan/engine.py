"""Memory and data rates of a vLLM engine by formula, as vLLM 0.32 divides a GPU, from a target's configuration.

memory    of one of its GPUs. Weights: their bytes / tensor_parallel, in target.dtype; of a quantised target as stored
          in its files. A step: the activations of max_num_batched_tokens tokens, by default 16,384, and 8,192 on a
          GPU of less than 70 GiB. The memory of CUDA, NCCL and CUDA graphs is not included
cache     of one GPU: the rest of gpu_memory_utilization (by default 0.92), or kv_cache_memory_bytes. A token takes
          the keys and values of this GPU's heads and, on every GPU, the states of all captured layers. The number of
          tokens that fit is unknown for a target with sliding layers, which share blocks with the others
states    bytes per second of one worker: in target.dtype to shared memory, then in the format of the shards
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from infra.plan.memory import gpu_bytes, states_per_token, values_per_token
from pipeline.basics.accelerator import current_accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.engines.vllm import find_version, python_of, require_even_split
from pipeline.features.schema import token_bytes
from pipeline.lm.attention import FULL, attention_windows, declared_positions
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import DTYPES, count_parameters, load_config, locate_target
from pipeline.recipe.recipe import Recipe

UTILISATION = 0.92
STEP_TOKENS, SMALL_STEP_TOKENS, SMALL_GPU = 16_384, 8_192, 70 << 30
FORMULA = "formula"


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one GPU, in bytes. None: unknown."""

    weights: float | None
    step: float
    cache: float | None
    keys_values: int  # per token
    states: int  # per token
    dense: bool  # no layer has a sliding window

    @property
    def capacity(self) -> int | None:
        """Return the number of tokens that fit the cache, over all texts that the engine works on at once."""
        return int(self.cache // (self.keys_values + self.states)) if self.cache is not None and self.dense else None

    def fits(self, length: int) -> bool:
        """Return whether the cache holds at least one text of `length` tokens."""
        return (self.cache or 0) > 0 if self.capacity is None else self.capacity >= length


def engine_memory(recipe: Recipe, gpu: float, parallel: int, stored: float | None) -> EngineMemory:
    """Divide `gpu` bytes as vLLM does, with `parallel` GPUs an engine. `stored`: the result of `weight_bytes`."""
    target, options, config = recipe.target, recipe.target.engine_options, load_config(recipe.target)
    shapes, size = draft_shapes(config), DTYPES[target.dtype].itemsize
    max_tokens = options.get("max_num_batched_tokens", STEP_TOKENS if gpu >= SMALL_GPU else SMALL_STEP_TOKENS)
    step = max_tokens * values_per_token(recipe, parallel) * size
    weights = stored and stored / parallel
    remaining = weights and max(options.get("gpu_memory_utilization", UTILISATION) * gpu - weights - step, 0)
    heads = max(shapes["num_key_value_heads"] // parallel, 1)  # with more GPUs than heads, several hold the same one
    keys_values = 2 * config.num_hidden_layers * heads * shapes["head_dim"] * size
    dense = set(attention_windows(config)) == {FULL}
    cache = options.get("kv_cache_memory_bytes", remaining)
    return EngineMemory(weights, step, cache, keys_values, captured_bytes(recipe), dense)


def captured_bytes(recipe: Recipe) -> int:
    """Return the bytes of one token's states as the engine keeps and hands them over."""
    config = load_config(recipe.target)
    layers = {config.num_hidden_layers, *recipe.auxiliary_layers(config.num_hidden_layers)}
    return len(layers) * config.hidden_size * DTYPES[recipe.target.dtype].itemsize


def weight_bytes(target: TargetConfig) -> float | None:
    """Return the bytes of the target's weights; None if it is quantised and the size of its files is unknown."""
    files = locate_target(target)
    config: Any = AutoConfig.from_pretrained(files.name, **files.options())
    if getattr(config, "quantization_config", None) is None:
        return count_parameters(target) * DTYPES[target.dtype].itemsize
    if index := files.file("model.safetensors.index.json"):
        return read_json(index).get("metadata", {}).get("total_size")
    single = Path(files.name) / "model.safetensors"  # a file on the Hub is not downloaded only for its size
    return single.stat().st_size if single.is_file() else None


def find_smallest_parallel(recipe: Recipe, gpu: float, stored: float | None) -> int | None:
    """Return the smallest tensor_parallel with room for the longest text of the engine, without which vLLM does not
    start; None if there is none, or it is unknown.
    """
    text = load_config(recipe.target)
    longest = recipe.target.engine_options.get("max_model_len", declared_positions(text))
    for parallel in range(1, text.num_attention_heads + 1):
        try:
            require_even_split(recipe.target.model_copy(update={"tensor_parallel": parallel}), text)
        except PipelineError:
            continue
        if engine_memory(recipe, gpu, parallel, stored).fits(longest):
            return parallel
    return None


def require_gpus(target: TargetConfig, other_machine: bool) -> None:
    """Raise PipelineError if the GPUs cannot share the target or, unless the plan is for another machine, if this
    machine has some GPUs, but too few.
    """
    require_even_split(target, load_config(target))
    gpus = torch.accelerator.device_count()
    if not other_machine and 0 < gpus < target.tensor_parallel:
        raise PipelineError(
            f"target.tensor_parallel={target.tensor_parallel}, but this machine has {gpus} GPUs, and an engine "
            "uses GPUs of one machine: lower it, or give --dump-speed to plan for a machine with enough of them"
        )


def is_available(target: TargetConfig) -> bool:
    """Return whether this machine has the engine and enough GPUs."""
    gpus = torch.accelerator.device_count() if current_accelerator() else 1
    return gpus >= target.tensor_parallel and find_version(python_of(target)) is not None


Row = tuple[str, float | None, str, str]  # label, figure, the figure as text, its source


def engine_rows(recipe: Recipe, speed: float | None) -> list[Row]:
    """Return an engine's rows of the table. `speed`: tokens per second of a worker, None if unknown."""
    on_cpu, gpu, stored = recipe.target.device == "cpu", gpu_bytes(), weight_bytes(recipe.target)
    usage = engine_memory(recipe, gpu, recipe.target.tensor_parallel, stored)
    need = usage.weights and usage.weights + usage.step
    text = "unknown: the target is quantised, and its files are not here"
    if need:
        text = f"{need / 1e9:,.1f} GB a {'process' if on_cpu else 'GPU'}, {usage.weights / 1e9:,.1f} of it weights"
    memory_row: Row = ("memory", need, text, FORMULA)
    return [
        *([] if on_cpu else [_engines_row(recipe, gpu, stored), _cache_row(usage)]),
        memory_row,
        _states_row(recipe, speed),
    ]


def _engines_row(recipe: Recipe, gpu: float, stored: float | None) -> Row:
    count, parallel, least = (
        recipe.features.workers,
        recipe.target.tensor_parallel,
        find_smallest_parallel(recipe, gpu, stored),
    )
    text = f"{count} of {parallel} GPUs, {count * parallel} in all"
    if least is None and stored is not None:
        text += "; the target fits no number of them"
    elif least is not None and least > parallel:
        text += f"; the target does not fit: from tensor_parallel={least} on it does"
    elif least is not None and least < parallel:
        text += f"; with tensor_parallel={least} {count * parallel // least} engines fit"
    origin = "of this machine" if current_accelerator() else "assumed"
    return "engines", count, text, f"GPUs of {gpu / 1e9:,.0f} GB, {origin}"


def _cache_row(usage: EngineMemory) -> Row:
    token = usage.keys_values + usage.states
    room = "how many tokens is not known (sliding layers)" if usage.capacity is None else f"{usage.capacity:,} tokens"
    text = "unknown" if usage.cache is None else f"{usage.cache / 1e9:,.1f} GB a GPU, {room}"
    return "cache", usage.cache, f"{text} of {token / 1e6:.3f} MB, {usage.states / token:.0%} of it states", FORMULA


def _states_row(recipe: Recipe, speed: float | None) -> Row:
    width = load_config(recipe.target).hidden_size
    shared, disk = captured_bytes(recipe), token_bytes(recipe.stored_dtype, width, states_per_token(recipe))
    if speed is None:
        return "states", None, "unknown", "tokens/s are not known"
    text = f"{speed * shared / 1e6:,.3f} MB/s a worker to shared memory, {speed * disk / 1e6:,.3f} MB/s to disk"
    return "states", speed * shared, text, "bytes a token x tokens/s"
