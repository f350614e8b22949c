"""A loaded causal language model as the stages require it: its hidden states, its verification of a token tree or a
chain, its embedding and head.

It works on transformers' own models by their own forward; it holds no private copy of a model.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.basics.accelerator import COMPILATIONS
from pipeline.basics.errors import PipelineError
from pipeline.lm.ability import (
    Shape,
    cache_argument,
    find_decoder,
    find_layers,
    find_tree_obstacle,
    require_chain,
    require_tree,
)
from pipeline.lm.attention import (
    attention_windows,
    causal_mask,
    layer_masks,
    max_positions,
    use_masked_attention,
)
from pipeline.lm.cache import MAX_PENDING, ChainCache, FixedCache, TreeCache
from pipeline.lm.states import EmbeddingAndHead, States, shared_parts

CAPACITY_STEP = 512  # capacities of a compiled target's caches are multiples of it: few shapes, few compilations


def rounding_bound(dtype: torch.dtype, device: torch.device) -> float:
    """Return how far two computations of the same logits may differ, relative to the largest: not at all in float32 on
    a CPU; elsewhere by a few steps of the dtype and, for any dtype, by sums in another order.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return 0.0
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)


class Verifier:
    """A causal language model that verifies token trees, or chains. Hidden states are the decoder's output after its
    final norm.
    """

    def __init__(self, model: Any, text: Any, name: str, verify: bool = True):
        """`model` is in eval mode, `text` its text configuration, and `name` is for messages. Without `verify` it is
        not proven that the model verifies draft tokens: it is to read texts.

        Raise PipelineError when hidden state and head do not reproduce the model's own logits.
        """
        self.model, self.config, self.dtype, self._name = model, text, model.dtype, name
        self.compiled, self.filled = False, 1  # `filled`: number of rows to which packed layers pad a single one
        self._caches: dict[int, FixedCache] = {}  # the caches of a compiled target, by capacity
        self._captured = threading.local()  # by thread: layer -> output
        self._hooks: dict[int, Any] = {}  # by layer
        use_masked_attention(model)
        self.positions, self._windows = max_positions(text), attention_windows(text)
        self.decoder = find_decoder(model)
        self.tree_obstacle = find_tree_obstacle(model.config)
        self._cache_name = cache_argument(self.decoder)
        self.embedding_VD, self.head = shared_parts(model, text)
        self.device = self.head.linear.weight.device  # of a spread target the last; its own hooks move the inputs
        self._require_split(name)
        if verify:
            (require_tree if self.verifies == "tree" else require_chain)(self, name)

    @property
    def verifies(self) -> Shape:
        """Return the draft tokens that one forward verifies."""
        return "chain" if self.tree_obstacle else "tree"

    @property
    def is_exact(self) -> bool:
        """Return whether a verification's logits are plain decoding's, bit for bit, or differ by less than a choice
        between two tokens can show: in float32 on a CPU, and without layers that round a chain's sums otherwise.
        """
        return self.verifies == "tree" and rounding_bound(self.dtype, self.device) == 0

    def embed_head(self, fingerprint: str) -> EmbeddingAndHead:
        """Return the embedding and head for drafts, on the device where the hidden states arrive."""
        return EmbeddingAndHead(self.embedding_VD.to(self.device), self.head, fingerprint, self.decoder)

    def _require_split(self, name: str) -> None:
        probe = torch.arange(8, device=self.device)[None]
        with torch.inference_mode():
            logits = self.model(input_ids=probe).logits
            split_logits = self.head(self.capture(probe))
            logits = logits.to(self.device)
        if not logits.isfinite().all():
            raise PipelineError(f"target {name!r}: its logits are not finite in {self.dtype}; use another dtype")
        difference, largest = (
            (logits.float() - split_logits.float()).abs().max().item(),
            logits.float().abs().max().item(),
        )
        if not difference <= rounding_bound(self.dtype, self.device) * largest:
            raise PipelineError(
                f"target {name!r}: its logits are not head(last hidden state) (largest difference "
                f"{difference:.3g}); this architecture needs support in pipeline/lm/verifier.py"
            )

    @torch.inference_mode()
    def capture(self, tokens_BT: Tensor) -> Tensor:
        """Return ``hidden_BTD`` of right-padded dialogues. Causality keeps padding out of every real position."""
        return self.decoder(input_ids=tokens_BT.to(self.device), use_cache=False).last_hidden_state.to(self.device)

    @torch.inference_mode()
    def capture_all(self, tokens_BT: Tensor, layers: list[int]) -> Tensor:
        """Return ``states_BTSD``: the states of `capture`, then the outputs of the given decoder layers (counted from
        1), not normed.
        """
        if not layers:
            return self.capture(tokens_BT).unsqueeze(2)
        with self._capture_layers(layers) as outputs:
            hidden_BTD = self.capture(tokens_BT)
        return torch.stack([hidden_BTD, *(outputs[layer] for layer in layers)], dim=2)

    @torch.inference_mode()
    def states(self, tokens: list[int], layers: Iterable[int] = ()) -> States:
        """Compute the states of one text, in one causal forward."""
        layers = tuple(sorted(set(layers)))
        states_TSD = self.capture_all(torch.tensor([tokens]), list(layers))[0]
        return States(states_TSD[:, 0], states_TSD[:, 1:] if layers else None, layers)

    @contextmanager
    def _capture_layers(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Fill the yielded dictionary with the layers' outputs during a forward of this thread."""
        new = set(layers) - set(self._hooks)
        for layer in new:
            block = find_layers(self.decoder, self._name)[layer - 1]
            self._hooks[layer] = block.register_forward_hook(partial(self._keep, layer))
        if new and self.compiled:
            torch.compiler.reset()  # compiled code ignores new hooks
        outputs: dict[int, Tensor] = {}
        self._captured.outputs = outputs
        try:
            yield outputs
        finally:
            del self._captured.outputs

    def unhook(self) -> None:
        """Remove the hooks, which leaves the model unchanged."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _keep(self, layer: int, _module, _inputs, output) -> None:
        """Store a layer's output. A hook is called in the forwards of all threads; each stores its own."""
        outputs = getattr(self._captured, "outputs", None)
        if outputs is None:
            return
        state = output[0] if isinstance(output, tuple) else output
        if state.ndim != 3 or state.shape[-1] != self.config.hidden_size:
            raise PipelineError(
                f"target {self._name!r}: the output of layer {layer} has the shape {tuple(state.shape)}, expected one "
                f"state of {self.config.hidden_size} values a token: leave features.auxiliary_layers out, and choose "
                "drafts that read the final state"
            )
        outputs[layer] = state.to(self.device)

    @torch.inference_mode()
    def new_cache(self, capacity: int) -> TreeCache | FixedCache | ChainCache:
        """Return a cache for up to `capacity` tokens. A compiled target uses the same memory every time, as CUDA graphs
        are bound to addresses: the cache returned before becomes invalid.
        """
        if self.verifies == "chain":
            return ChainCache()
        if not self.compiled:
            return TreeCache(expected=capacity)
        capacity = fixed_capacity(capacity)
        if capacity not in self._caches:
            self._caches[capacity] = FixedCache(self.config.num_hidden_layers, capacity)
        self._caches[capacity].keep(0)
        return self._caches[capacity]

    def compile(self, backend: str | None = "inductor") -> None:
        """Compile forwards over a cache, with fixed shapes, on a GPU into CUDA graphs. Prefills are not compiled.
        Without a backend shapes are fixed, but nothing is compiled. Raise PipelineError for a target that verifies
        chains, whose caches have other forms.
        """
        if self.verifies == "chain":
            raise PipelineError(
                f"eval.compile=true requires a target that verifies trees; this has {self.tree_obstacle}"
            )
        torch._dynamo.config.recompile_limit = COMPILATIONS
        graphs: Any = {"mode": "reduce-overhead"} if backend == "inductor" and self.device.type == "cuda" else {}
        compiled = torch.compile(self.decoder, backend=backend or "eager", dynamic=False, fullgraph=True, **graphs)
        self._compiled, self.compiled = compiled if backend else self.decoder, True

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Forward as if nothing were compiled, with caches that are made meanwhile."""
        compiled, self.compiled = self.compiled, False
        try:
            yield
        finally:
            self.compiled = compiled

    @torch.inference_mode()
    def forward(
        self,
        tokens_N: Tensor,
        cache: TreeCache | FixedCache | ChainCache,
        positions_N: Tensor | None = None,
        mask_NC: Tensor | None = None,
        width: int = 1,
        layers: tuple[int, ...] = (),
    ) -> States:
        """Append N tokens to the cache and return their states, with the outputs of these decoder layers.

        ``mask_NC`` (bool, C = cached + N) defines which tokens each token sees; without it attention is causal, which
        is right for a first prompt or a single token only. A compiled target pads to `width` tokens. A target that
        verifies chains takes any tokens as the next ones.
        """
        if isinstance(cache, ChainCache):
            return self._forward_chain(tokens_N, cache, layers)
        past, count = cache.length, len(tokens_N)
        assert mask_NC is not None or past == 0 or count == 1
        if positions_N is None:
            positions_N = torch.arange(past, past + count, device=self.device)
        mask = None
        if self.compiled and mask_NC is None:
            mask_NC = causal_mask(past, count, self.device)
        if mask_NC is not None:
            fixed = (width if past else count, cache.capacity) if self.compiled and cache.capacity else None
            mask = layer_masks(self._windows, mask_NC, positions_N, self.dtype, fixed)
        decoder: Any = self.decoder
        if self.compiled and past:
            decoder = self._compiled
            tokens_N, positions_N = (F.pad(x, (0, width - count)) for x in (tokens_N, positions_N))
        capturing: Any = self._capture_layers(layers) if layers else nullcontext({})
        with capturing as outputs:
            output = decoder(
                input_ids=tokens_N[None],
                position_ids=positions_N[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        cache.length = past + count
        if isinstance(cache, FixedCache):
            cache.stack()
        auxiliary_NSD = torch.stack([outputs[layer][0, :count] for layer in layers], dim=1) if layers else None
        return States(output.last_hidden_state[0, :count].to(self.device), auxiliary_NSD, layers)

    def _forward_chain(self, tokens_N: Tensor, cache: ChainCache, layers: tuple[int, ...]) -> States:
        if (pending_N := cache.take_pending(MAX_PENDING)) is not None:
            self._forward_chain(pending_N, cache, ())
        count, first = len(tokens_N), cache.length - cache.pending_count
        all_N = cache.begin(tokens_N)
        capturing: Any = self._capture_layers(layers) if layers else nullcontext({})
        with capturing as outputs:
            output = self.decoder(
                input_ids=all_N[None],
                position_ids=torch.arange(first, first + len(all_N), device=self.device)[None],
                use_cache=True,
                **{self._cache_name: cache.states},
            )
        cache.end(output[self._cache_name], count)
        auxiliary_NSD = torch.stack([outputs[layer][0, -count:] for layer in layers], dim=1) if layers else None
        return States(output.last_hidden_state[0, -count:].to(self.device), auxiliary_NSD, layers)


def fixed_capacity(tokens: int) -> int:
    """Return the capacity of a compiled target's cache for this number of tokens."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
