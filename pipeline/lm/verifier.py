"""A loaded causal language model as decoding wants it: its hidden states, its verdict on a token tree, its
embedding and head.

Works on any `AutoModelForCausalLM` of full or sliding attention through its own forward; holds no private copy of a
model.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.lm.attention import behind, masks, most_positions, require_tree, use_masks, windows
from pipeline.lm.cache import TreeCache
from pipeline.lm.embedding_head import EmbeddingAndHead, LMHead, head_effects
from pipeline.lm.states import States

CAPACITY_STEP = 512  # caches of a compiled target come in multiples of it: few shapes, few compilations


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """How far two ways to the same logits may part, over the largest: not at all in float32 on a CPU; elsewhere by a
    few steps of the dtype and, whatever it is, by sums in another order.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return 0.0
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)


class Verifier:
    """Hidden states are the decoder's output after its final norm."""

    def __init__(self, model: Any, text: Any, name: str):
        """`model` is in eval mode, `text` its text configuration, and `name` is for messages.

        Raises PipelineError when hidden state and head do not reproduce the model's own logits.
        """
        self.model, self.config, self.dtype = model, text, model.dtype
        self.compiled, self.filled = False, 1  # rows that a single one of packed layers is filled up to
        self._caches: dict[int, TreeCache] = {}  # of a compiled target, by capacity
        self._captured = threading.local()  # by thread: layer -> output
        self._hooks: dict[int, Any] = {}  # by layer
        use_masks(model)
        self.positions, self._windows = most_positions(text), windows(text)
        self.decoder = model.base_model
        output: Any = model.get_output_embeddings()
        self.device = (
            output.weight.device
        )  # of a spread target the last; its own hooks take inputs to where they belong
        self.head = LMHead(output.weight, output.bias, **head_effects(text))
        self.embedding_VD = model.get_input_embeddings().weight
        self._require_split(name)
        require_tree(self, name)

    def embed_head(self, fingerprint: str) -> EmbeddingAndHead:
        """The embedding and head for drafts, on the device where the hidden states arrive."""
        return EmbeddingAndHead(self.embedding_VD.to(self.device), self.head, fingerprint, self.model.get_decoder())

    def _require_split(self, name: str) -> None:
        probe = torch.arange(8, device=self.device)[None]
        with torch.inference_mode():
            whole = self.model(input_ids=probe).logits
            split = self.head(self.capture(probe))
            whole = whole.to(self.device)
        if not whole.isfinite().all():
            raise PipelineError(f"target {name!r}: its logits are not finite in {self.dtype}; use another dtype")
        apart, largest = (whole.float() - split.float()).abs().max().item(), whole.float().abs().max().item()
        if not apart <= rounding(self.dtype, self.device) * largest:
            raise PipelineError(
                f"target {name!r}: its logits are not head(last hidden state) (largest difference "
                f"{apart:.3g}); this architecture needs support in pipeline/lm/verifier.py"
            )

    @torch.inference_mode()
    def capture(self, tokens_BT: Tensor) -> Tensor:
        """``hidden_BTD`` of right-padded dialogues. Causality keeps padding out of every real position."""
        return self.decoder(input_ids=tokens_BT.to(self.device), use_cache=False).last_hidden_state.to(self.device)

    @torch.inference_mode()
    def capture_all(self, tokens_BT: Tensor, layers: list[int]) -> Tensor:
        """``states_BTSD``: what `capture` gives, then the outputs of the given decoder layers (counted from 1),
        unnormed.
        """
        if not layers:
            return self.capture(tokens_BT).unsqueeze(2)
        with self._capturing(layers) as found:
            hidden_BTD = self.capture(tokens_BT)
        return torch.stack([hidden_BTD, *(found[layer] for layer in layers)], dim=2)

    @torch.inference_mode()
    def states(self, tokens: list[int], layers: Iterable[int] = ()) -> States:
        """The states of one text, from one causal forward."""
        layers = tuple(sorted(set(layers)))
        states_TSD = self.capture_all(torch.tensor([tokens]), list(layers))[0]
        return States(states_TSD[:, 0], states_TSD[:, 1:] if layers else None, layers)

    @contextmanager
    def _capturing(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Fills the dictionary with the layers' outputs in a forward of this thread."""
        new = set(layers) - set(self._hooks)
        for layer in new:
            block = self.model.get_decoder().layers[layer - 1]
            self._hooks[layer] = block.register_forward_hook(partial(self._keep, layer))
        if new and self.compiled:
            torch.compiler.reset()  # what is compiled does not look for new hooks
        found: dict[int, Tensor] = {}
        self._captured.outputs = found
        try:
            yield found
        finally:
            del self._captured.outputs

    def unhook(self) -> None:
        """Leaves the model as it was found."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _keep(self, layer: int, _module, _inputs, output) -> None:
        """A hook sees the forwards of all threads; each keeps its own."""
        found = getattr(self._captured, "outputs", None)
        if found is not None:
            found[layer] = (output[0] if isinstance(output, tuple) else output).to(self.device)

    @torch.inference_mode()
    def new_cache(self, capacity: int) -> TreeCache:
        """A cache for up to `capacity` tokens. A compiled target uses the same memory every time, as CUDA graphs are
        bound to addresses: the cache that was given out before is void.
        """
        if not self.compiled:
            return TreeCache(expected=capacity)
        capacity = fixed_capacity(capacity)
        cache = self._caches.setdefault(capacity, TreeCache(self.config.num_hidden_layers, capacity))
        cache.keep(0)
        return cache

    def compile(self, backend: str = "inductor") -> None:
        """From now on forwards over a cache have fixed shapes and are compiled, on a GPU into CUDA graphs. Prompts are
        not.
        """
        torch._dynamo.config.recompile_limit = 256  # a compilation for every width and capacity; the tuner tries many
        graphs: Any = {"mode": "reduce-overhead"} if backend == "inductor" and self.device.type == "cuda" else {}
        self._compiled = torch.compile(self.decoder, backend=backend, dynamic=False, fullgraph=True, **graphs)
        self.compiled = True

    @torch.inference_mode()
    def forward(
        self,
        tokens_N: Tensor,
        cache: TreeCache,
        positions_N: Tensor | None = None,
        mask_NC: Tensor | None = None,
        width: int = 1,
        layers: tuple[int, ...] = (),
    ) -> States:
        """Appends N tokens to the cache and returns their states, with the outputs of these decoder layers.

        ``mask_NC`` (bool, C = cached + N) says what each token sees; without it tokens follow each other causally,
        which is right for a first prompt or a single token only. A compiled target fills up to `width` tokens.
        """
        past, count = cache.length, len(tokens_N)
        assert mask_NC is not None or past == 0 or count == 1
        if positions_N is None:
            positions_N = torch.arange(past, past + count, device=self.device)
        mask = None
        if self.compiled and mask_NC is None:
            mask_NC = behind(past, count, self.device)
        if mask_NC is not None:
            fixed = (width if past else count, cache.capacity) if self.compiled and cache.capacity else None
            mask = masks(self._windows, mask_NC, positions_N, self.dtype, fixed)
        decoder: Any = self.decoder
        if self.compiled and past:
            decoder = self._compiled
            tokens_N, positions_N = (F.pad(x, (0, width - count)) for x in (tokens_N, positions_N))
        capturing: Any = self._capturing(layers) if layers else nullcontext({})
        with capturing as found:
            out = decoder(
                input_ids=tokens_N[None],
                position_ids=positions_N[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        cache.length = past + count
        auxiliary_NSD = torch.stack([found[layer][0, :count] for layer in layers], dim=1) if layers else None
        return States(out.last_hidden_state[0, :count].to(self.device), auxiliary_NSD, layers)


def fixed_capacity(tokens: int) -> int:
    """The capacity of a compiled target's cache for so many tokens."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
