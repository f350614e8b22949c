"""A draft that reads only the text, with the layers of a language model and its own cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.basics.accelerator import to_device
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.lm.attention import causal_mask
from pipeline.lm.cache import TreeCache


@dataclass
class TextState:
    """One sequence's cache: `read` tokens of the text, then the forwarded nodes of the current tree."""

    cache: TreeCache = field(default_factory=TreeCache)
    read: int = 0


class TextDrafting:
    """The methods `start` and `step`, built from `_read` and `_output`."""

    skipped = 0  # tokens at the beginning of a text that it does not read

    def _read(self, tokens_N: Tensor, cache: Any, positions_N: Tensor | None, mask_NC: Tensor | None) -> Tensor:
        """Append tokens to the cache and return their final states. None means the same as for `Verifier.forward`."""
        raise NotImplementedError

    def _output(self, hidden_WD: Tensor) -> DraftOutput:
        raise NotImplementedError

    def open(self) -> TextState:
        return TextState()

    @torch.inference_mode()
    def start(self, state: TextState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Read the new tokens of the text, the last one included."""
        past, device = state.read, inputs.states_TSD.device
        tokens = inputs.tokens[self.skipped + past :]
        state.cache.keep(past)
        mask = None
        if past and len(tokens) > 1:
            mask = causal_mask(past, len(tokens), device)
        hidden_ND = self._read(to_device(tokens, device), state.cache, None, mask)
        state.read = past + len(tokens)
        return self._output(hidden_ND[-places:])

    @torch.inference_mode()
    def step(self, state: TextState, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        prefix_W = frontier.prefix_W
        # prefix_W counts inputs, each a token with the state before it; there is no state before t_0.
        prefix_W = torch.full_like(frontier.tokens_W, state.read) if prefix_W is None else prefix_W + 1 - self.skipped
        prefix = torch.arange(state.read, device=prefix_W.device) < prefix_W[:, None]
        mask, positions_W = torch.cat([prefix, frontier.visible_WC], dim=1), prefix_W + (frontier.depth - 1)
        return self._output(self._read(frontier.tokens_W, state.cache, positions_W, mask))
