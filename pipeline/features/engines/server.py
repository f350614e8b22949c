"""A server that runs already and speaks OpenAI's API (vLLM, SGLang, llama.cpp): a `FeatureSource` of answers alone."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines.openai import OpenAI, excerpt
from pipeline.features.source import Answer, Prompt, SourceIdentity
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_tokenizer, stop_ids_of

TRIES = 8  # of a request that finds the server busy or away
AT_ONCE = 64  # requests


class ServerSource:
    """Prompts go to ``/v1/completions`` as token ids, so that the recipe's own chat template holds. Answers come back
    as text; their tokens are those that the target's tokenizer makes of it.
    """

    one_pass = False

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        """Raises PipelineError where the address is no such server's."""
        assert config.engine_url is not None
        self._server = OpenAI(config.engine_url, "target.engine_url", TRIES)
        self.identity, self.tokenizer = identity, load_tokenizer(config)
        self.positions = load_config(config).max_position_embeddings
        self.stop_ids = stop_ids_of(config, self.tokenizer)
        self._model = self._server.only_model("expected a server of the target alone")

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        raise PipelineError(
            "target.engine='server' gives answers, no hidden states: dump with target.engine='vllm' or 'transformers'"
        )

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
    ) -> Iterator[Answer]:
        if capture:
            self.states([])
        with ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [threads.submit(self._answer, prompt, sampling) for prompt in prompts]
            try:
                for future in asked:
                    yield future.result()
                    alive()
            finally:
                for future in asked:
                    future.cancel()

    def close(self) -> None:
        self._server.client.close()

    def _answer(self, prompt: Prompt, sampling: Sampling) -> Answer:
        found = self._server.ask("POST", "/v1/completions", self._body(prompt, sampling))
        try:
            choice = found["choices"][0]
            text, why = str(choice["text"]), choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise PipelineError(
                f"{self._server.url} does not answer as /v1/completions should: {type(error).__name__}: {error}, got "
                f"{excerpt(found)}"
            ) from None
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        stop = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in self.stop_ids else min(self.stop_ids)
        return Answer([*tokens, stop] if why == "stop" else tokens)

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt.tokens,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # what is left out a server takes from the model's generation_config.json, or from defaults of its own
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": prompt.seed % (1 << 31),  # more some servers do not take
            "stop_token_ids": sorted(sampling.stop_ids),
            "skip_special_tokens": False,  # marks of thoughts and tools stay
        }
