"""A running server that speaks OpenAI's API (vLLM, SGLang, llama.cpp): a `FeatureSource` of answers only."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines.openai import OpenAI, excerpt
from pipeline.features.schema import Float8States, quantise_states
from pipeline.features.source import Answer, GenerationPrompt, SourceIdentity
from pipeline.lm.attention import declared_positions
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_stop_ids, load_tokenizer

TRIES = 8  # attempts of a request while the server is busy or unreachable
AT_ONCE = 64  # concurrent requests


class ServerSource:
    """A server's answers. Prompts go to ``/v1/completions`` as token ids, so that the recipe's own chat template
    applies. Answers come back as text; the target's tokenizer gives their tokens.
    """

    one_pass = False

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        """Connect to the server. Raises PipelineError if there is no such server at the address."""
        assert config.engine_url is not None
        self._server = OpenAI(config.engine_url, "target.engine_url", TRIES)
        self.identity, self.tokenizer = identity, load_tokenizer(config)
        self.positions = declared_positions(load_config(config))
        self.stop_ids = load_stop_ids(config, self.tokenizer)
        self._model = self._server.only_model("expected a server of the target alone")

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        raise PipelineError(
            "target.engine='server' gives answers, no hidden states: dump with target.engine='vllm' or 'transformers'"
        )

    def float8_states(self, batch: Sequence[Sequence[int]]) -> Iterator[Float8States]:
        return map(quantise_states, self.states(batch))

    def answers(
        self,
        prompts: Sequence[GenerationPrompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
        float8: bool = False,
    ) -> Iterator[Answer]:
        if capture:
            self.states([])
        with ThreadPoolExecutor(AT_ONCE) as threads:
            futures = [threads.submit(self._answer, prompt, sampling) for prompt in prompts]
            try:
                for future in futures:
                    yield future.result()
                    alive()
            finally:
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        self._server.client.close()

    def _answer(self, prompt: GenerationPrompt, sampling: Sampling) -> Answer:
        reply = self._server.ask("POST", "/v1/completions", self._body(prompt, sampling))
        try:
            choice = reply["choices"][0]
            text, finish_reason = str(choice["text"]), choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise PipelineError(
                f"{self._server.url} does not answer as /v1/completions should: {type(error).__name__}: {error}, got "
                f"{excerpt(reply)}"
            ) from None
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        stop = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in self.stop_ids else min(self.stop_ids)
        return Answer([*tokens, stop] if finish_reason == "stop" else tokens)

    def _body(self, prompt: GenerationPrompt, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt.tokens,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # a server takes omitted values from the model's generation_config.json or from its own defaults
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": prompt.seed % (1 << 31),  # some servers refuse larger seeds
            "stop_token_ids": sorted(sampling.stop_ids),
            "skip_special_tokens": False,  # the markers of reasoning and tool calls stay in the text
        }
