"""Drafts of one decoder layer over the target's features: cache, forward passes, training-time test.

A frame (EAGLE's in eagle.py, EAGLE-3's in eagle3.py) computes the layer's input from features and embeddings. Each
draft defines what comes after the attention: a dense MLP (`Dense`), or experts (jakiro.py).
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from pipeline.basics.accelerator import to_device
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.decoding.fixed import FixedRounds
from pipeline.drafts.parts.attention.chains import ANCHORS, lay_out_chains, step_group
from pipeline.drafts.parts.attention.steps import Mask, StepCache, StepMask, ttt_mask
from pipeline.drafts.parts.base import VocabularyConfig, WindowConfig
from pipeline.drafts.parts.layers import AttentionBlock, layer_config, rotary, swiglu
from pipeline.drafts.parts.losses import Term, term_names
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.attention import additive_mask, causal_mask
from pipeline.lm.cache import TreeCache

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class OneLayerConfig(WindowConfig, VocabularyConfig):
    """The settings of both frames."""

    next_weights: ClassVar[dict[str, float]]
    ahead_weights: ClassVar[dict[str, float]]  # of the token after the next, if it is predicted

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(self.ttt_steps, "window")  # the draft's own features have to fit into it

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        if self.window and tree.depth > self.window:
            raise ValueError(f"tree.depth={tree.depth} is more than this draft's window={self.window}")
        return super().resolve(tree)

    @property
    def ttt_steps(self) -> int:
        """Training-time test (EAGLE-3): the number of forward passes over a training batch.

        From the second on, features are the draft's own. A draft with several passes overrides this with a recipe key.
        """
        return 1

    @property
    def anchors(self) -> int | None:
        """The number of drawn inputs of a dialogue after which later passes run; None: they run over all inputs.

        A draft that supports them overrides this with a recipe key.
        """
        return None

    @property
    def levels(self) -> int:
        """The number of tokens ahead that a forward pass predicts."""
        return 1

    def levels_of(self, number: int) -> int:
        return self.levels

    def terms(self, step: int) -> list[Term]:
        """Return the terms of the next token and of the tokens further ahead."""
        weights = [self.next_weights, *[self.ahead_weights] * (self.levels - 1)]
        named_weights = zip(term_names(1, self.levels), weights, strict=True)
        return [
            Term(name, h, dict(term_weights), self.objective)
            for h, (name, term_weights) in enumerate(named_weights, start=1)
        ]


@dataclass
class DraftState:
    """One sequence's draft cache: `verified` inputs with the target's features, without the first `dropped` of them,
    then the forwarded nodes of the current tree.
    """

    cache: TreeCache = field(default_factory=TreeCache)
    verified: int = 0
    dropped: int = 0

    def drop_tree(self, window: int | None) -> int:
        """Drop the tree's nodes and return how many inputs are still cached.

        With a window, also drop inputs that no later input attends to, once there are as many of them as the window.
        """
        cached = self.verified - self.dropped
        self.cache.keep(cached)
        if window and cached > 2 * window:
            self.cache.keep(0, range(cached - window + 1, cached))
            self.dropped, cached = self.verified - window + 1, window - 1
        return cached


@dataclass
class Heads:
    """The predictions of one forward pass, before the LM head."""

    ahead: list[Tensor]  # features (..., D) by horizon, from 1
    # the features of each of the K selected experts for horizon 1, best-routed first
    experts: list[Tensor] = field(default_factory=list)
    log_weights: Tensor | None = None  # (..., K)
    # the gate's scores (..., R), of all experts first, and the selected experts (..., K), best first
    routed: tuple[Tensor, Tensor] | None = None


class FeatureDraft(TrainedDraft):
    """A draft of one decoder layer, whose later guesses take its own features in place of the target's states."""

    config: OneLayerConfig
    merges_steps: ClassVar[bool]  # whether its attention takes a `StepMask`

    @abstractmethod
    def features(self, states_TSD: Tensor) -> Tensor:
        """Return the layer's feature (..., D) for the target's states (..., S, D)."""

    @abstractmethod
    def trunk(self, features_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask, cache: Any) -> Tensor:
        """Return what `heads` takes (B, T, D), for features and the tokens after them."""

    @abstractmethod
    def heads(self, u: Tensor) -> Heads:
        """Return the predictions for the trunk's output `u` (..., D)."""

    @abstractmethod
    def new_cache(self, tensors: tuple[Tensor, ...]) -> DynamicCache:
        """Return a training batch's cache, with the tensors of the steps so far."""

    @abstractmethod
    def cached_tensors(self, cache: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a cache of the steps so far."""

    def next_feature(self, feature: Tensor) -> Tensor:
        """Return the feature that the next forward pass takes, from a predicted one."""
        return feature

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return the tokens' embeddings, as the layer takes them."""
        return nn.functional.embedding(tokens, self.embed_head.embedding_VD).to(like.dtype)

    @property
    def training_forwards(self) -> int:
        return 1 if self.config.anchors else self.config.ttt_steps

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], Any]:
        """Return features of the next token, of those further ahead, of each later step; and `routed` of the first.

        In step s, the feature before position i is the one that step s - 1 predicted for it. The attention then sees
        the same as a tree node at depth s: the target's features up to i - s + 1, then one of the draft's own features
        for each step. If the batch has anchors, a later step's features are only at the inputs that are trained.
        """
        true_BTD = self.features(batch.select(self.needs))
        first, keys_values = self._ttt_step(1, batch, true_BTD, ())
        heads, features = first, [*first.ahead, *self.later_features(first, batch)]
        if ANCHORS in batch.positions:
            return [*features, *self._chain_features(batch, first.ahead[0], keys_values)], first.routed
        for number in range(2, self.config.ttt_steps + 1):
            before_BTD = torch.cat([true_BTD[:, :1], self.next_feature(heads.ahead[0])[:, :-1]], dim=1)
            if batch.begins_BT is not None:  # the first input of each dialogue keeps the target's feature
                begins = batch.begins_BT == torch.arange(batch.begins_BT.shape[1], device=before_BTD.device)
                before_BTD = torch.where(begins[:, :, None], true_BTD, before_BTD)
            heads, keys_values = self._ttt_step(number, batch, before_BTD, keys_values)
            features.append(heads.ahead[0])
        return features, first.routed

    def later_features(self, heads: Heads, batch: "Batch") -> list[Tensor]:
        """Return further features of the first step."""
        return []

    def _ttt_step(self, number: int, batch: "Batch", before_BTD: Tensor, keys_values: Tensors) -> tuple[Heads, Tensors]:
        """Run step `number` on the features `before_BTD`; return its heads, and keys and values of all steps so far."""
        tokens_BT, begins_BT = batch.tokens_BT, batch.begins_BT
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask: Mask = None
        if number > 1 or begins_BT is not None or self.config.window:
            if self.merges_steps:
                mask = StepMask(number, places, batch.spans, begins_BT, self.config.window)
            else:
                visible = ttt_mask(number, places, begins_BT, self.config.window)
                mask = additive_mask(visible, before_BTD.dtype)[:, None]

        positions_BT = places[None] if begins_BT is None else places - begins_BT
        return self._run_step(before_BTD, tokens_BT, positions_BT, mask, keys_values)

    def _run_step(
        self, before_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask, keys_values: Tensors
    ) -> tuple[Heads, Tensors]:
        """Run the layer; return its heads, and keys and values of all steps so far."""

        def run(before_BTD: Tensor, *keys_values: Tensor) -> tuple[Heads, Tensors]:
            # A new cache: `run` may run twice.
            cache = self.new_cache(keys_values) if self.config.ttt_steps > 1 else None
            u = self.trunk(before_BTD, tokens_BT, positions_BT, mask, cache)
            return self.heads(u), () if cache is None else self.cached_tensors(cache)

        if self.recompute and torch.is_grad_enabled():
            return checkpoint(run, before_BTD, *keys_values, use_reentrant=False)
        return run(before_BTD, *keys_values)

    def _chain_features(self, batch: "Batch", feature_BTD: Tensor, keys_values: Tensors) -> list[Tensor]:
        """Run the further steps after the batch's anchors alone; return, for each, the features (M, D) at the inputs
        that it is trained at. `feature_BTD` and `keys_values` are those of the first step.
        """
        device = feature_BTD.device
        chains = lay_out_chains(batch, device)
        feature_KD = feature_BTD.flatten(0, 1).index_select(0, to_device(chains.anchors_K, device))
        keys_values = tuple(x.transpose(0, 1).flatten(1, 2)[None] for x in keys_values)  # (1, G, B T, d)
        features = []
        for number in range(2, self.config.ttt_steps + 1):
            tokens_K = batch.tokens_BT.flatten().index_select(0, to_device(chains.inputs_K(number), device))
            positions_K = to_device(chains.positions_K(number), device)
            mask = chains.mask(number, self.config.window, device)
            before_KD = self.next_feature(feature_KD)
            heads, keys_values = self._run_step(before_KD[None], tokens_K[None], positions_K[None], mask, keys_values)
            feature_KD = heads.ahead[0][0]
            rows = to_device(chains.rows(number, batch.positions[step_group(number)]), device)
            features.append(feature_KD.index_select(0, rows))
        return features

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        return DraftState()

    def compile_rounds(self, backend: Any = "inductor") -> None:
        """Compile the rounds, if its forwards are those of this class, and its layer is a Llama layer."""
        kind = type(self)
        if kind.start is FeatureDraft.start and kind.step is FeatureDraft.step and self.merges_steps:
            self.rounds = FixedRounds(self, backend)

    def output(self, u_WD: Tensor, request: DraftRequest) -> DraftOutput:
        """Compute all logits that the tree requests of this forward pass in one call of the head."""
        heads = self.heads(u_WD)
        features, experts = heads.ahead[: request.levels], heads.experts if request.experts else []
        several = len(features) + len(experts) > 1
        logits = self.logits(torch.stack([*features, *experts])) if several else self.logits(features[0])[None]
        expert_logits = logits[len(features) :].transpose(0, 1) if experts else None
        weights = heads.log_weights if experts else None
        return DraftOutput(self.next_feature(heads.ahead[0]), list(logits[: len(features)]), expert_logits, weights)

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Drop the last tree from the cache and read T verified inputs (f_i, t_{i+1})."""
        past, count, device = state.verified, len(inputs.states_TSD), inputs.states_TSD.device
        cached, features_TD, mask = state.drop_tree(self.config.window), self.features(inputs.states_TSD), None
        if (past and count > 1) or self.config.window:
            visible = causal_mask(cached, count, device, self.config.window)
            mask = additive_mask(visible, features_TD.dtype)[None, None]
        positions = torch.arange(past, past + count, device=device)[None]
        tokens_T = to_device(inputs.tokens[-count:], device)
        u = self.trunk(features_TD[None], tokens_T[None], positions, mask, state.cache)
        state.verified = past + count
        return self.output(u[0, -places:], request)

    @torch.inference_mode()
    def step(self, state: DraftState, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        """Run a forward pass over the frontier's W nodes; each attends to its prefix, its ancestors and itself."""
        device, prefix_W = frontier.carry_WD.device, frontier.prefix_W
        if prefix_W is None:
            prefix_W = torch.full((len(frontier.tokens_W),), state.verified, device=device)
        places = torch.arange(state.dropped, state.verified, device=device)
        positions = (prefix_W + (frontier.depth - 1))[None]
        prefix = places < prefix_W[:, None]
        if self.config.window:  # the tree is less deep than the window
            prefix &= places > positions.T - self.config.window
        mask = additive_mask(torch.cat([prefix, frontier.visible_WC], dim=1), frontier.carry_WD.dtype)[None, None]
        u = self.trunk(frontier.carry_WD[None], frontier.tokens_W[None], positions, mask, state.cache)
        return self.output(u[0], request)


class OneLayer(FeatureDraft):
    """A draft of one Llama layer. Its frame defines `block`, `features` and `inputs`; the draft defines `heads`."""

    merges_steps = True

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.llama = layer_config(shapes)
        # In a list, so outside of the module tree: a cast to bf16 must not change RoPE's frequencies.
        self._rope = [rotary(self.llama)]

    @property
    @abstractmethod
    def block(self) -> AttentionBlock: ...

    @abstractmethod
    def inputs(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the attention, and the residual that is added to its output."""

    @abstractmethod
    def mlp_modules(self, llama: Any) -> dict[str, nn.Module]:
        """Return the modules after the attention by name."""

    def _share(self, draft_copy: Self) -> None:
        draft_copy._rope = self._rope

    def new_cache(self, tensors: tuple[Tensor, ...]) -> StepCache:
        return StepCache(tensors)

    def cached_tensors(self, cache: StepCache) -> tuple[Tensor, ...]:
        return *cache.keys, *cache.values

    def trunk(self, features_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask, cache: Any) -> Tensor:
        x, residual = self.inputs(features_BTD, self.embed(tokens_BT, features_BTD))
        rope = self._rope[0]
        if rope.inv_freq.device != x.device:  # compiled code has no `to`
            rope = rope.to(x.device)
        return residual + self.block.attend(x, rope(residual, positions_BT), mask, cache)


class Dense(OneLayer):
    """A draft with a SwiGLU after the attention."""

    def mlp_modules(self, llama: Any) -> dict[str, nn.Module]:
        width = self.config.mlp_width or llama.intermediate_size  # type: ignore[attr-defined]
        return {"mlp": swiglu(llama, width)}

    def heads(self, u: Tensor) -> Heads:
        block: Any = self.block
        return Heads([u + block.mlp(block.post_attention_layernorm(u))])
