"""Prompt lookup in vLLM: each request's best chain of the draft's tokens and of those that its text had before.

The texts are vLLM's own copies on the host. So it requires `"disable_padded_drafter_batch": true`: then a proposal
begins when the sampled tokens have arrived there.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from math import exp
from typing import Any

from prometheus_client import Counter
from torch import Tensor

from vllm_jakiro.pools import CandidatePool, SuffixIndex, copy_continuations, copy_probability, merge

PROPOSED = Counter("jakiro_proposed_tokens", "Verified draft tokens, by where they come from", ["source"])
ACCEPTED = Counter("jakiro_accepted_tokens", "Accepted draft tokens, by where they come from", ["source"])


@dataclass
class Text:
    """A request's verified tokens, and its last proposal with the tokens' sources. A token takes about 20 µs and 1.6 KB
    of the host when it is read.
    """

    tokens: list[int] = field(default_factory=list)
    index: SuffixIndex = field(default_factory=SuffixIndex)
    chain: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def count(self, verified: list[int], accepted: int) -> None:
        """Count the tokens that vLLM verified: it may drop a proposal, cut it, or replace it."""
        for place, (token, proposed, source) in enumerate(zip(verified, self.chain, self.sources, strict=False)):
            if token != proposed:
                break
            PROPOSED.labels(source).inc()
            ACCEPTED.labels(source).inc(place < accepted)

    def read(self, tokens: Any) -> None:
        """Read the tokens that are new in vLLM's copy, an array: a request's text only grows."""
        self.tokens += tokens[len(self.tokens) :].tolist()
        self.index.extend(self.tokens)


class Lookup:
    """The texts of a batch's requests."""

    def __init__(self) -> None:
        self._texts: dict[str, Text] = {}

    def read(self, batch: Any, requests: dict[str, Any], sampled: list[list[int]]) -> None:
        """Read the texts of vLLM's `batch` after it sampled these tokens for each request, none in a part of a
        prefill. Then the text is read up to that part.
        """
        self._texts = {name: text for name, text in self._texts.items() if name in requests}
        self._batch: list[Text | None] = []
        for row, (name, tokens) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            text = self._texts.setdefault(name, Text())
            if tokens:
                text.count(batch.spec_token_ids[row], len(tokens) - 1)
            length = (batch.num_tokens_no_spec if tokens else batch.num_computed_tokens_cpu)[row]
            text.read(batch.token_ids_cpu[row, :length])
            self._batch.append(text if tokens else None)

    def chains(self, tokens_BK: Tensor, log_probs_BK: Tensor, limit: int) -> list[list[int]]:
        """Return each request's chain of at most `limit` tokens; none in a part of a prefill. `tokens_BK`: those that
        the draft chose, with their log-probabilities.
        """
        drafts = zip(self._batch, tokens_BK.tolist(), log_probs_BK.tolist(), strict=True)
        return [[] if text is None else self._chain(text, *draft, limit) for text, *draft in drafts]

    def _chain(self, text: Text, tokens: list[int], log_probs: list[float], limit: int) -> list[int]:
        scores = list(accumulate(log_probs))
        drafted = CandidatePool(tokens, list(range(len(tokens))), scores)
        matches = [(text.tokens, *match) for match in text.index.matches(text.tokens)]
        copied = copy_continuations(matches)
        probabilities = [copy_probability(*at) for at in zip(copied.depths(), copied.scores, strict=True)]
        merged = merge([(drafted, [exp(min(score, 0.0)) for score in scores]), (copied, probabilities)])
        chain = merged.chain_tokens(limit)
        text.chain = chain
        text.sources = ["draft" if chain[: n + 1] == tokens[: n + 1] else "copy" for n in range(len(chain))]
        return chain
