"""Drafting in vLLM with fewer forwards than tokens, and with prompt lookup.

vLLM's proposer of EAGLE drafts runs one forward of the draft for each token. Ours asks it for the tokens that need a
forward, and the draft itself for the others: Jakiro's last token (arXiv 2502.06282, eq. 7), Gumiho's from its third on,
all but the first of Hydra. With prompt lookup, each request then gets the chain with the most expected tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import Counter
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_jakiro.lookup import Lookup

ROUNDS = Counter("jakiro_draft_rounds", "Rounds of a batch that drafted")
FORWARDS = Counter("jakiro_draft_forwards", "Forwards of the draft")


class FurtherTokens:
    """The methods that a draft adds to a model of vLLM, so that a `Proposer` drafts with it."""

    config: Any
    compute_logits: Callable[[Tensor], Any]
    place = 0  # the index in the chain of the token that `predict_next` predicts; 0 during the forwards

    def needs_proposer(self) -> bool:
        """Return whether the draft requires a `Proposer`: not where each token needs a forward and none is copied."""
        return bool(getattr(self.config, "prompt_lookup", None))

    def count_forwards(self, tokens: int) -> int:
        """Return the forwards that this many draft tokens need."""
        return tokens

    def predict_next(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the features (requests, D) of the next token. `rows`: each request's row of the last forward; `tokens`
        (requests, n): the draft tokens so far.
        """
        raise NotImplementedError

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """Return the likeliest tokens (requests). vLLM's own method, which `use_local_argmax_reduction` calls, does not
        know what these drafts' `compute_logits` add to the head's product.
        """
        return self.compute_logits(hidden_states).argmax(dim=-1)


class Proposer(EagleProposer):
    """A proposer of drafts with `FurtherTokens`."""

    def prepare(self) -> None:
        """Prepare for the model, which is loaded. Raise ValueError for settings that prompt lookup does not support."""
        self._draft = _unwrap(self.model)
        self._is_first = get_tensor_model_parallel_rank() == 0  # the rank that replies to vLLM's scheduler
        self._most_drafted = length = getattr(self._draft.config, "prompt_lookup", None)
        self._lookup = Lookup() if length and self._is_first else None
        if length and not self.speculative_config.disable_padded_drafter_batch:
            raise ValueError('prompt lookup requires "disable_padded_drafter_batch": true in --speculative-config')
        if length and self._enable_probabilistic_draft_probs:
            raise ValueError('prompt lookup requires "draft_sample_method": "greedy" in --speculative-config')

    def prepare_next_token_ids_cpu(self, sampled_token_ids: Any, requests: Any, batch: Any, *more: Any) -> Tensor:
        if self._lookup is not None:
            self._lookup.read(batch, requests, sampled_token_ids)
        return super().prepare_next_token_ids_cpu(sampled_token_ids, requests, batch, *more)

    def set_inputs_first_pass(self, *inputs: Any, **more: Any) -> Any:
        result = super().set_inputs_first_pass(*inputs, **more)
        self._rows = result[1]  # of the first forward: each request's last verified token
        return result

    def _greedy_sample(self, hidden_states: Tensor) -> Tensor:
        if self._lookup is None:
            return super()._greedy_sample(hidden_states)
        logits = self.model.compute_logits(hidden_states).float()
        best, tokens = logits.max(dim=-1)
        self._log_probs.append(best - logits.logsumexp(-1))
        return tokens

    def build_per_group_and_layer_attn_metadata(self, *inputs: Any, **more: Any) -> Any:
        if self._is_first:
            FORWARDS.inc()  # the base class calls this once for each forward of a round
        return super().build_per_group_and_layer_attn_metadata(*inputs, **more)

    def _draft_length(self, tokens: int) -> int:
        """Return how many of a chain's tokens the draft drafts."""
        return min(tokens, self._most_drafted or tokens)

    def dummy_run(self, *inputs: Any, **more: Any) -> None:
        """Run as many forwards as a round has: ranks without a request keep pace with the others."""
        tokens = self.num_speculative_tokens
        self.num_speculative_tokens = max(self._draft.count_forwards(self._draft_length(tokens)), 1)
        try:
            super().dummy_run(*inputs, **more)
        finally:
            self.num_speculative_tokens = tokens

    def propose(self, num_speculative_tokens: int, *inputs: Any, **more: Any) -> Tensor | list[list[int]]:
        """Return the draft tokens (requests, K); with prompt lookup a list for each request, empty except on the first
        rank. The probabilities that they were drawn with, if they were drawn, are kept as the base class keeps them.
        """
        self._log_probs: list[Tensor] = []
        self._draft.place = 0
        count = self._draft_length(num_speculative_tokens)
        forwards = self._draft.count_forwards(count)
        tokens = super().propose(forwards, *inputs, **more)
        rows = self._rows if forwards == 1 else self.arange[: len(tokens)]
        for place in range(forwards, count):
            self._draft.place = place
            features, probs = self._draft.predict_next(rows, tokens), self._last_draft_probs
            further, further_probs = self._sample_draft_tokens(features, more["sampling_metadata"])
            tokens = torch.cat([tokens, further.view(-1, 1).to(tokens.dtype)], dim=1)
            if probs is not None and further_probs is not None:
                self._last_draft_probs = torch.cat([probs, further_probs[:, None]], dim=1)
        self.num_speculative_tokens = num_speculative_tokens
        if self._is_first:
            ROUNDS.inc()
        if not self._most_drafted or not num_speculative_tokens:
            return tokens
        if self._lookup is None:
            return [[] for _ in tokens]
        return self._lookup.chains(tokens, torch.stack(self._log_probs, dim=1), num_speculative_tokens)


def _unwrap(model: Any) -> Any:
    """Return the model itself where vLLM has wrapped it for CUDA graphs."""
    return getattr(model, "unwrap", lambda: model)()


def install(vllm_config: Any) -> None:
    """Let vLLM's proposer become a `Proposer` if its model has `FurtherTokens`. vLLM makes the proposer before it loads
    the model, and calls `initialize_attn_backend` after that.

    Raise ValueError under vLLM's Model Runner V2, which has no such proposer.
    """
    if vllm_config.use_v2_model_runner:
        raise ValueError(
            "this draft requires vLLM's Model Runner V1: set VLLM_USE_V2_MODEL_RUNNER=0 in the server's environment"
        )
    if "initialize_attn_backend" in vars(EagleProposer):
        return

    def initialize_attn_backend(self: Any, *inputs: Any, **more: Any) -> Any:
        if type(self) is EagleProposer and isinstance(_unwrap(self.model), FurtherTokens):
            self.__class__ = Proposer
            self.prepare()
        return super(EagleProposer, self).initialize_attn_backend(*inputs, **more)

    EagleProposer.initialize_attn_backend = initialize_attn_backend
