"""Drafts of one decoder layer over the target's features: cache, forwards, training-time test.

A frame (EAGLE's in eagle.py, EAGLE-3's in eagle3.py) makes the layer's input from features and embeddings. What follows
the attention is the draft's own: a dense MLP (`Dense`), or experts (jakiro.py).
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from pipeline.basics.accelerator import sent
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.drafts.parts.base import VocabularyConfig, WindowConfig
from pipeline.drafts.parts.layers import AttentionBlock, layer_config, rotary, swiglu
from pipeline.drafts.parts.losses import Term, named
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.attention import additive, behind
from pipeline.lm.cache import TreeCache
from pipeline.lm.states import States

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class OneLayerConfig(WindowConfig, VocabularyConfig):
    """What both frames have."""

    next_weights: ClassVar[dict[str, float]]
    ahead_weights: ClassVar[dict[str, float]]  # of the token after the next, where it is guessed

    def __post_init__(self):
        super().__post_init__()
        self.at_least(self.ttt_steps, "window")  # own features are in it

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        if self.window and tree.depth > self.window:
            raise ValueError(f"tree.depth={tree.depth} is more than this draft's window={self.window}")
        return super().resolve(tree)

    @property
    def ttt_steps(self) -> int:
        """Training-time test (EAGLE-3): forwards of a training batch; from the second on, features are the draft's
        own. A draft that has several makes this a key.
        """
        return 1

    @property
    def levels(self) -> int:
        """How many tokens ahead a forward predicts."""
        return 1

    def levels_of(self, number: int) -> int:
        return self.levels

    def terms(self, step: int) -> list[Term]:
        """Of the next token, and of those further ahead."""
        weights = [self.next_weights, *[self.ahead_weights] * (self.levels - 1)]
        both = zip(named(1, self.levels), weights, strict=True)
        return [Term(name, h, dict(given), self.objective) for h, (name, given) in enumerate(both, start=1)]


@dataclass
class DraftState:
    """One sequence's draft cache: `verified` inputs with true features, without the first `gone` of them, then the
    current tree's forwarded nodes.
    """

    cache: TreeCache = field(default_factory=TreeCache)
    verified: int = 0
    gone: int = 0

    def drop_tree(self, window: int | None) -> int:
        """And inputs that no later one sees, once they are as many as the window; returns how many are cached then."""
        cached = self.verified - self.gone
        self.cache.keep(cached)
        if window and cached > 2 * window:
            self.cache.keep(0, range(cached - window + 1, cached))
            self.gone, cached = self.verified - window + 1, window - 1
        return cached


@dataclass
class Heads:
    """What one forward predicts, before the LM head."""

    ahead: list[Tensor]  # features (..., D) by horizon, from 1
    # the K kept experts' own features for horizon 1, best-routed first
    experts: list[Tensor] = field(default_factory=list)
    log_weights: Tensor | None = None  # (..., K)
    # the gate's scores (..., R), of all experts first, and the kept experts (..., K), best first
    routed: tuple[Tensor, Tensor] | None = None


class OneLayer(TrainedDraft):
    """One decoder layer. In its frame: `block`, `features` and `inputs`; in the draft: `heads`."""

    config: OneLayerConfig

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.llama = layer_config(shapes)
        # Lists keep it out of the module tree: a cast to bf16 must not touch RoPE's frequencies.
        self._rope = [rotary(self.llama)]

    # -- the frame's and the draft's part ------------------------------------------------------------------------

    @property
    @abstractmethod
    def block(self) -> AttentionBlock: ...

    @abstractmethod
    def features(self, states_TSD: Tensor) -> Tensor:
        """The layer's own kind of feature (..., D) from the target's states (..., S, D)."""

    @abstractmethod
    def inputs(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the attention, and what is added to what comes out of it."""

    @abstractmethod
    def follow(self, llama: Any) -> dict[str, nn.Module]:
        """What follows the attention, by name."""

    @abstractmethod
    def heads(self, u: Tensor) -> Heads:
        """From the attention's output."""

    # -- shared ---------------------------------------------------------------------------------------------------

    def carried(self, feature: Tensor) -> Tensor:
        """What of a prediction is the next forward's feature."""
        return feature

    def embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Tokens as the layer takes them."""
        return nn.functional.embedding(tokens, self.embed_head.embedding_VD).to(like.dtype)

    def _share(self, other: Self) -> None:
        other._rope = self._rope

    def _trunk(
        self, features_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Tensor | None, cache
    ) -> Tensor:
        x, residual = self.inputs(features_BTD, self.embedded(tokens_BT, features_BTD))
        rope = self._rope[0].to(x.device)
        return residual + self.block.attend(x, rope(residual, positions_BT), mask, cache)

    @property
    def training_forwards(self) -> int:
        return self.config.ttt_steps

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], Any]:
        """Features of the next token and those ahead, then of each step on own features; and the first step's `routed`.

        In step s the feature before position i is what step s - 1 predicted for it, and the attention sees what a node
        at depth s sees: true features up to i - s + 1, then one own feature of each step.
        """
        given = States(batch.hidden_BTD, batch.auxiliary_BTSD, self.needs.auxiliary)
        true_BTD = self.features(given.of(self.needs))
        first, keys_values = self._ttt_step(1, batch, true_BTD, ())
        heads, found = first, [*first.ahead, *self.further(first, batch)]
        for number in range(2, self.config.ttt_steps + 1):
            before_BTD = torch.cat([true_BTD[:, :1], self.carried(heads.ahead[0])[:, :-1]], dim=1)
            if batch.begins_BT is not None:  # before the first input of each dialogue stands its true feature
                begins = batch.begins_BT == torch.arange(batch.begins_BT.shape[1], device=before_BTD.device)
                before_BTD = torch.where(begins[:, :, None], true_BTD, before_BTD)
            heads, keys_values = self._ttt_step(number, batch, before_BTD, keys_values)
            found.append(heads.ahead[0])
        return found, first.routed

    def further(self, heads: Heads, batch: "Batch") -> list[Tensor]:
        """More features of the first step."""
        return []

    def _ttt_step(
        self, number: int, batch: "Batch", before_BTD: Tensor, keys_values: tuple[Tensor, ...]
    ) -> tuple[Heads, tuple[Tensor, ...]]:
        """Step `number` on the features `before_BTD`: its heads, keys and values of all steps so far."""
        tokens_BT, begins_BT = batch.tokens_BT, batch.begins_BT
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask = None
        if number > 1 or begins_BT is not None or self.config.window:
            mask = additive(ttt_visible(number, places, begins_BT, self.config.window), before_BTD.dtype)[:, None]

        def run(before_BTD: Tensor, *keys_values: Tensor) -> tuple[Heads, tuple[Tensor, ...]]:
            cache = DynamicCache() if self.config.ttt_steps > 1 else None  # a new one: it may run twice
            if cache is not None and keys_values:
                cache.update(keys_values[0], keys_values[1], 0)
            positions = places[None] if begins_BT is None else places - begins_BT
            u = self._trunk(before_BTD, tokens_BT, positions, mask, cache)
            layer: Any = cache and cache.layers[0]
            return self.heads(u), (layer.keys, layer.values) if layer else ()

        if self.recompute and torch.is_grad_enabled():
            return checkpoint(run, before_BTD, *keys_values, use_reentrant=False)
        return run(before_BTD, *keys_values)

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        return DraftState()

    def _output(self, u_WD: Tensor, request: DraftRequest) -> DraftOutput:
        """One call of the head for all that the tree wants of this forward."""
        heads = self.heads(u_WD)
        features, experts = heads.ahead[: request.levels], heads.experts if request.experts else []
        several = len(features) + len(experts) > 1
        logits = self.logits(torch.stack([*features, *experts])) if several else self.logits(features[0])[None]
        own = logits[len(features) :].transpose(0, 1) if experts else None
        weights = heads.log_weights if experts else None
        return DraftOutput(self.carried(heads.ahead[0]), list(logits[: len(features)]), own, weights)

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Drops the last tree from the cache, consumes T verified inputs (f_i, t_{i+1})."""
        past, count, device = state.verified, len(inputs.states_TSD), inputs.states_TSD.device
        cached, features_TD, mask = state.drop_tree(self.config.window), self.features(inputs.states_TSD), None
        if (past and count > 1) or self.config.window:
            earlier = behind(cached, count, device, self.config.window)
            mask = additive(earlier, features_TD.dtype)[None, None]
        positions = torch.arange(past, past + count, device=device)[None]
        tokens_T = sent(inputs.tokens[-count:], device)
        u = self._trunk(features_TD[None], tokens_T[None], positions, mask, state.cache)
        state.verified = past + count
        return self._output(u[0, -places:], request)

    @torch.inference_mode()
    def step(self, state: DraftState, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        """One forward for the frontier's W nodes; each sees its verified prefix, its ancestors and itself."""
        device, prefix_W = frontier.carry_WD.device, frontier.prefix_W
        if prefix_W is None:
            prefix_W = torch.full((len(frontier.tokens_W),), state.verified, device=device)
        places = torch.arange(state.gone, state.verified, device=device)
        positions = (prefix_W + (frontier.depth - 1))[None]
        prefix = places < prefix_W[:, None]
        if self.config.window:  # the tree itself is less deep
            prefix &= places > positions.T - self.config.window
        mask = additive(torch.cat([prefix, frontier.visible_WC], dim=1), frontier.carry_WD.dtype)[None, None]
        u = self._trunk(frontier.carry_WD[None], frontier.tokens_W[None], positions, mask, state.cache)
        return self._output(u[0], request)


class Dense(OneLayer):
    """A SwiGLU behind the attention."""

    def follow(self, llama: Any) -> dict[str, nn.Module]:
        width = self.config.mlp_width or llama.intermediate_size  # type: ignore[attr-defined]
        return {"mlp": swiglu(llama, width)}

    def heads(self, u: Tensor) -> Heads:
        block: Any = self.block
        return Heads([u + block.mlp(block.post_attention_layernorm(u))])


def ttt_visible(number: int, places_T: Tensor, begins_BT: Tensor | None, window: int | None = None) -> Tensor:
    """Bool (B or 1, T, number * T): what position i sees in step `number`, over the keys of all steps so far; of its
    own dialogue only, where `begins_BT` says that a row holds several, and of the last `window` positions only.
    """
    behind = places_T[:, None] - places_T[None, :]  # i - j
    true = behind >= number - 1
    if window:
        true &= behind < window
    sees = torch.cat([true, *(behind == number - earlier for earlier in range(2, number + 1))], dim=1)[None]
    if begins_BT is None:
        return sees
    same = begins_BT[:, :, None] == begins_BT[:, None, :]
    return sees & same.repeat(1, 1, number)
