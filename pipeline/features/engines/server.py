"""A server that runs already and speaks OpenAI's API (vLLM, SGLang, llama.cpp): a `FeatureSource` of answers alone."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from torch import Tensor

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.public import require_no_credential
from pipeline.decoding.generate import Sampling
from pipeline.features.source import Answer, Prompt, SourceIdentity
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_tokenizer, stop_ids_of

TIMEOUT = httpx2.Timeout(600, connect=15)  # seconds without a byte: a busy server may let an answer wait
TRIES, WAIT, LONGEST = 8, 1.0, 60.0  # of one request; seconds before the second try, doubled each time up to the last
AT_ONCE = 64  # requests
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy, or about to be there again
REFUSED = (400, 413, 422)


class ServerSource:
    """Prompts go to ``/v1/completions`` as token ids, so that the recipe's own chat template holds. Answers come back
    as text; their tokens are those that the target's tokenizer makes of it.
    """

    one_pass = False

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        """Raises PipelineError where the address is no such server's."""
        assert config.engine_url is not None
        require_no_credential(config.engine_url, "target.engine_url")
        self._url = config.engine_url.rstrip("/").removesuffix("/v1")
        self.identity, self.tokenizer = identity, load_tokenizer(config)
        self.positions = load_config(config).max_position_embeddings
        self.stop_ids = stop_ids_of(config, self.tokenizer)
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx2.Client(
            timeout=TIMEOUT,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=None),
        )
        models = self._asked("GET", "/v1/models").get("data") or []
        names = [one.get("id") for one in models if isinstance(one, dict)]
        if len(names) != 1:
            raise PipelineError(f"{self._url} serves {names or 'no model'}: expected a server of the target alone")
        self._model = names[0]

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
        self._client.close()

    def _answer(self, prompt: Prompt, sampling: Sampling) -> Answer:
        found = self._asked("POST", "/v1/completions", self._body(prompt, sampling))
        try:
            choice = found["choices"][0]
            text, why = str(choice["text"]), choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise PipelineError(
                f"{self._url}/v1/completions does not answer as it should ({type(error).__name__}: {error}), got "
                f"{json.dumps(found)[:300]}"
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

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's reply; tried again while it is busy or away. Raises NoAnswer where it does not take the text,
        PipelineError where it is no such server, or stays away.
        """
        for tried in range(1, TRIES + 1):
            try:
                got = self._client.request(method, self._url + path, json=body)
                status, said = got.status_code, " ".join(got.text.split())[:300]
                if got.is_success and isinstance(found := got.json(), dict):
                    return found
                if status in REFUSED:
                    raise NoAnswer(f"{self._url}{path} answers {status}: {said}")
                why = f"answers {status}: {said}"
                if status not in AGAIN:
                    help_ = "Set OPENAI_API_KEY" if status in (401, 403) else "Is it a server of OpenAI's API?"
                    raise PipelineError(f"{self._url}{path} {why}. {help_}")
            except httpx2.TransportError as error:
                why = f"cannot be reached ({type(error).__name__}: {error})"
            except (httpx2.HTTPError, httpx2.InvalidURL, json.JSONDecodeError) as error:
                raise PipelineError(
                    f"{self._url}{path} cannot be read ({type(error).__name__}: {error}). Does it speak OpenAI's API?"
                ) from None
            if tried < TRIES:
                time.sleep(min(WAIT * 2 ** (tried - 1), LONGEST) * random.uniform(0.5, 1.0))
        raise PipelineError(f"{self._url}{path} {why}, {TRIES} times: what is finished is kept, run the command again")
