"""A client of a server that speaks OpenAI's API."""

import json
import os
import random
import time
from typing import Any

import httpx2

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.public import public_text, require_no_credential

TIMEOUT = httpx2.Timeout(600, connect=15)  # seconds without a byte: a busy server may let an answer wait
WAIT, MAX_WAIT = 1.0, 60.0  # seconds before the second try, doubled each time up to the last
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy or restarts: the request is tried again
REFUSED = (400, 413, 422)  # statuses of a server that refuses the text
KEY = "OPENAI_API_KEY"


def excerpt(reply: Any) -> str:
    """Return the beginning of a server's reply for a message, without the key, which the reply may repeat."""
    return public_text(" ".join((reply if isinstance(reply, str) else json.dumps(reply)).split()))[:300]


class OpenAI:
    """A client of one address, for any number of threads. If the server requires a key, it is in the environment
    variable `KEY`.
    """

    def __init__(self, url: str, where: str, tries: int = 1):
        """Open a client. `where` names the source of the address in the message that refuses a credential in it.
        `tries`: attempts of a request while the server is busy or unreachable.
        """
        require_no_credential(url, where)
        self.url, self._tries = url.rstrip("/").removesuffix("/v1"), tries
        key = os.environ.get(KEY)
        self.client = httpx2.Client(
            timeout=TIMEOUT,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=None),
        )

    def only_model(self, choose: str) -> str:
        """Return the name of the only model that the server serves. Raises PipelineError for several, with the text
        `choose` about what to do.
        """
        reply = self.ask("GET", "/v1/models")
        try:
            models = [str(entry["id"]) for entry in reply["data"]]
        except (KeyError, TypeError) as error:
            raise PipelineError(
                f"{self.url}/v1/models lists no models, got {excerpt(reply)}: is it a server that speaks OpenAI's API?"
            ) from error
        if len(models) != 1:
            raise PipelineError(f"{self.url} serves {excerpt(models)}: {choose}")
        return models[0]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the reply's JSON. Raises NoAnswer if the server refuses the text; PipelineError if it is not such a
        server, or stays busy or unreachable.
        """
        for attempt in range(1, self._tries + 1):
            try:
                response = self.client.request(method, self.url + path, json=body)
                response.raise_for_status()
                return response.json()
            except httpx2.HTTPStatusError as error:
                status = error.response.status_code
                if status in (401, 403):  # the reply may repeat the key or a part of it, so it is not shown
                    remedy = f"{'Check' if os.environ.get(KEY) else 'Set'} {KEY}, the key that this server requires"
                else:
                    remedy = f"{excerpt(error.response.text)}. See the server's log"
                reason, retry = f"{self.url}{path} answers {status}: {remedy}", status in BUSY
                error_type: type[PipelineError] = NoAnswer if status in REFUSED else PipelineError
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                reason = f"{self.url}{path} cannot be read: {type(error).__name__}: {excerpt(str(error))}"
                reason += ". Is it the address of a server that speaks OpenAI's API?"
                error_type, retry = PipelineError, isinstance(error, httpx2.TransportError)
            if not retry:
                raise error_type(reason)
            if attempt < self._tries:
                time.sleep(min(WAIT * 2 ** (attempt - 1), MAX_WAIT) * random.uniform(0.5, 1.0))
        raise error_type(reason + (f" ({self._tries} tries; what is finished is kept)" if self._tries > 1 else ""))
