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
WAIT, LONGEST = 1.0, 60.0  # seconds before the second try, doubled each time up to the last
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy, or about to be there again
REFUSED = (400, 413, 422)
KEY = "OPENAI_API_KEY"


def excerpt(reply: Any) -> str:
    """The beginning of a server's reply, for a message: without the key, which it may repeat."""
    return public_text(" ".join((reply if isinstance(reply, str) else json.dumps(reply)).split()))[:300]


class OpenAI:
    """One address, for any number of threads. A key, where the server wants one, is in the environment, as `KEY`."""

    def __init__(self, url: str, where: str, tries: int = 1):
        """`where` the address stands, for the message that refuses a credential in it; `tries`: of a request that finds
        the server busy or away.
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
        """The name of the one that it serves. Raises PipelineError for several; `choose` says what to do then."""
        listed = self.ask("GET", "/v1/models")
        try:
            found = [str(one["id"]) for one in listed["data"]]
        except (KeyError, TypeError) as error:
            raise PipelineError(
                f"{self.url}/v1/models lists no models, got {excerpt(listed)}: is it a server that speaks OpenAI's API?"
            ) from error
        if len(found) != 1:
            raise PipelineError(f"{self.url} serves {excerpt(found)}: {choose}")
        return found[0]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply's JSON. Raises NoAnswer where the server does not take the text; PipelineError where it is no such
        server, or stays busy or away.
        """
        for tried in range(1, self._tries + 1):
            try:
                got = self.client.request(method, self.url + path, json=body)
                got.raise_for_status()
                return got.json()
            except httpx2.HTTPStatusError as error:
                status = error.response.status_code
                if status in (401, 403):  # what it says may show the key, if only in part
                    remedy = f"{'Check' if os.environ.get(KEY) else 'Set'} {KEY}, the key that this server wants"
                else:
                    remedy = f"{excerpt(error.response.text)}. See the server's log"
                why, again = f"{self.url}{path} answers {status}: {remedy}", status in BUSY
                kind: type[PipelineError] = NoAnswer if status in REFUSED else PipelineError
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                why = f"{self.url}{path} cannot be read: {type(error).__name__}: {excerpt(str(error))}"
                why += ". Is it the address of a server that speaks OpenAI's API?"
                kind, again = PipelineError, isinstance(error, httpx2.TransportError)
            if not again:
                raise kind(why)
            if tried < self._tries:
                time.sleep(min(WAIT * 2 ** (tried - 1), LONGEST) * random.uniform(0.5, 1.0))
        raise kind(why + (f" ({self._tries} tries; what is finished is kept)" if self._tries > 1 else ""))
