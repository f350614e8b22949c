"""P-EAGLE: EAGLE-3 whose guesses all come from one forward (vLLM's `parallel_drafting`).

Input i, with its fused state g_i and the token after it, is followed by inputs of depth s = 1, 2, ...: they have the
mask token's embedding, and a learned vector `mask_hidden` in place of the target's states. Such an input is at position
i + s; it attends to the text's inputs up to i and to those of the same i with smaller depth. Depth s predicts the token
of horizon s + 1. The first layer is EAGLE-3's; plain layers follow.

Training uses all of a text's inputs and, at depth s, a sampled share max(KEEP_RATE^s, LEAST) of them (PARD's
conditional drop, arXiv 2504.18583): an input that is sampled for a depth is also sampled for all smaller depths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.basics.accelerator import pad_width, to_device
from pipeline.decoding.contract import DraftOutput, DraftRequest, RoundInput
from pipeline.drafts.eagle3 import AUTHORS_FORMAT, DECAY, NUMBERED_FORMAT, Eagle3Frame, Eagle3FrameConfig
from pipeline.drafts.eagle3 import NAMES as EAGLE3_NAMES
from pipeline.drafts.eagle3 import engine_config as eagle3_config
from pipeline.drafts.parallel.mask import MASK_TOKEN_ID, MaskTokenDraft, mask_token_fact
from pipeline.drafts.parts.attention.ranges import RANGES, RangeMask, range_mask, text_begins
from pipeline.drafts.parts.base import DenseConfig, MaskConfig
from pipeline.drafts.parts.layers import AttentionBlock, norm
from pipeline.drafts.parts.losses import Term, term_names
from pipeline.drafts.parts.names import Export, Facts
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.one_layer import Dense, DraftState
from pipeline.features.positions import Group, Positions, Seed
from pipeline.lm.attention import additive_mask

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

STREAM = 0x70656167  # random stream, separate from others with the same seeds
KEEP_RATE, MIN_KEEP_RATE = 0.8, 0.2  # share of inputs that depth s is trained at: KEEP_RATE^s, at least LEAST


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(DenseConfig, MaskConfig, Eagle3FrameConfig):
    description: ClassVar = "P-EAGLE, EAGLE-3's layer and plain ones that guess several tokens in one forward,"

    kind: Literal["p-eagle"] = "p-eagle"
    layers: int = 4
    depths: int = 8  # tokens that a forward pass guesses

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "layers")
        self.require_at_least(2, "depths")

    @property
    def levels(self) -> int:
        return self.depths

    def levels_of(self, number: int) -> int:
        return 0 if number else self.depths

    def terms(self, step: int) -> list[Term]:
        """Return the terms; depth s has weight DECAY^s."""
        names = enumerate(term_names(1, self.depths))
        return [Term(name, s + 1, {"classification": DECAY**s}, self.objective) for s, name in names]

    def count_depths(self, drawn_N: np.ndarray) -> np.ndarray:
        """Return the number of depths of each input, from uniform random numbers in [0, 1)."""
        shares = [max(KEEP_RATE**s, MIN_KEEP_RATE) for s in range(1, self.depths)]
        return (drawn_N[:, None] < np.array(shares)).sum(1)


class PEagleObjective(Objective):
    """The objective that trains each depth at the inputs sampled for it; depth 0 at every trained input."""

    config: PEagleConfig

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        by_group = super().positions(ids, loss_mask, seed)
        uniform_N = np.random.default_rng((STREAM, *seed)).random(len(ids) - 1)
        deepest_N = torch.from_numpy(self.config.count_depths(uniform_N))
        drawn = {group: deepest_N[positions.inputs] >= int(group) - 1 for group, positions in by_group.items()}
        return {
            group: Positions(positions.inputs[drawn[group]], positions.labels[drawn[group]])
            for group, positions in by_group.items()
        }


class PEagle(MaskTokenDraft, Dense, Eagle3Frame):
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.llama._attn_implementation = RANGES
        width = self.llama.hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(self.needs.auxiliary) * width))
        self.layers = nn.ModuleDict()  # by number, as engines name them
        for number in range(1, config.layers):
            parts = self.mlp_modules(self.llama) | {"input_layernorm": norm(self.llama)}
            block = AttentionBlock(self.llama, parts, number=number, qk_norm=config.qk_norm)
            self.layers[str(number)] = block
        self._add_mask_token()

    @property
    def _masked_1SD(self) -> Tensor:
        """The vector in place of the target's states (1, S, D)."""
        return self.mask_hidden.view(1, len(self.needs.auxiliary), -1)

    def _mask(self, first_R: np.ndarray, layout_R2: np.ndarray, count: int, device: torch.device) -> RangeMask:
        """Return the mask of these inputs over `count` inputs of the text and the guesses.

        An input's layout is its place, which is its input of the text, and its depth. Guesses are last, and those of
        one input are successive. A text begins at `first_R`.
        """
        place_R, depth_R = layout_R2.T
        window, guesses = self.config.window, int((depth_R > 0).sum())
        number_R = count + guesses - len(depth_R) + np.arange(len(depth_R))  # of a guess, among all keys
        before_R = depth_R - 1  # guesses of the same input before this one
        if window:
            first_R = np.maximum(first_R, place_R + depth_R - window + 1)
            before_R = np.minimum(before_R, window - 1)
        ranges_R4 = np.stack([first_R, place_R, number_R - before_R, number_R - (depth_R == 0)], axis=1)
        return range_mask(ranges_R4, count, count + guesses, device)

    def _layers(self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Any, cache: Any = None) -> Tensor:
        """Return features (B, R, D) of rows (B, R), before the head's norm."""
        x_BRD, residual = self.inputs(features, self.embed(tokens, features))
        rope = self._rope[0].to(residual.device)(residual, positions)
        for number in range(self.config.layers):
            block: Any = self.layers[str(number)] if number else self.midlayer
            x_BRD = residual + block.attend(block.input_layernorm(residual) if number else x_BRD, rope, mask, cache)
            residual = x_BRD + block.mlp(block.post_attention_layernorm(x_BRD))
        return residual

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        """Return, for each depth, the features (M, D) at the inputs that are trained there."""
        features_BTD, device = self.features(batch.select(self.needs)), batch.tokens_BT.device
        features_ND, begins_N = features_BTD.flatten(0, 1), text_begins(batch)
        layout_R2, rows_by_depth = lay_out_inputs(batch)
        place_R, depth_R = layout_R2.T
        text_place_R = place_R.clip(0)
        begins_R, guesses = begins_N[text_place_R], len(place_R) - len(begins_N)
        masked_1D = self.features(self._masked_1SD.to(features_ND.dtype))
        features_RD = torch.cat([features_ND, masked_1D.expand(guesses, -1)])
        tokens_R = torch.cat([batch.tokens_BT.flatten(), self.mask_token_id.expand(guesses)])
        positions_R = to_device(text_place_R - begins_R + depth_R, device)
        mask = self._mask(begins_R, layout_R2, len(begins_N), device)
        arguments = features_RD[None], tokens_R[None], positions_R[None], mask
        recomputes = self.recompute and torch.is_grad_enabled()
        (f_RD,) = checkpoint(self._layers, *arguments, use_reentrant=False) if recomputes else self._layers(*arguments)
        return [f_RD.index_select(0, to_device(rows, device)) for rows in rows_by_depth], None

    # -- decoding -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        """Read T verified inputs and guess after each of the last `places`; the guesses are not cached."""
        count, device = len(inputs.states_TSD), inputs.states_TSD.device
        cached, further = state.drop_tree(self.config.window), request.levels - 1
        end = state.verified + count
        guessed = np.arange(end - places, end).repeat(further)
        place_R = np.concatenate([np.arange(state.verified, end), guessed])
        depth_R = np.concatenate([np.zeros(count, np.int64), np.tile(np.arange(1, request.levels), places)])
        layout_R2 = np.stack([place_R - state.dropped, depth_R], axis=1)  # in the cache
        mask = self._mask(np.zeros_like(place_R), layout_R2, cached + count, device)
        both_features = self.features(torch.cat([inputs.states_TSD, self._masked_1SD.to(inputs.states_TSD.dtype)]))
        features_RD = torch.cat([both_features[:count], both_features[count:].expand(places * further, -1)])
        tokens_R = torch.cat([to_device(inputs.tokens[-count:], device), self.mask_token_id.expand(places * further)])
        dense, positions_R = additive_mask(mask.dense(), features_RD.dtype), to_device(place_R + depth_R, device)
        f_RD = self._layers(features_RD[None], tokens_R[None], positions_R[None], dense[None, None], state.cache)[0]
        state.verified = end
        ahead_WSD = f_RD[count:].view(places, further, f_RD.shape[1])
        f_LWD = torch.cat([f_RD[count - places : count, None], ahead_WSD], dim=1).transpose(0, 1)
        return DraftOutput(f_LWD[0], list(self.logits(f_LWD)))


def lay_out_inputs(batch: "Batch") -> tuple[np.ndarray, list[np.ndarray]]:
    """Lay out the inputs of a forward, on the host.

    Returns each input's place among the B T inputs of the text, -1 for padding, to which no other attends, and its
    depth (R, 2), with the text's own inputs first; and, for each depth, the indices below R that are trained.
    """
    count, groups = batch.tokens_BT.numel(), sorted(batch.positions)
    trained = [np.asarray(batch.positions[group].inputs) for group in groups]
    deepest_N = np.zeros(count, dtype=np.int64)
    for depth, inputs in enumerate(trained):  # ascending: a guess needs all smaller depths, trained or not
        deepest_N[inputs] = depth
    place_M, depth_M = np.nonzero(np.arange(1, max(len(groups), 1)) <= deepest_N[:, None])
    rows = pad_width(count + len(place_M), batch.tokens_BT.device)
    layout_R2 = np.full((rows, 2), (-1, 1))  # padding
    layout_R2[:count] = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    layout_R2[count : count + len(place_M)] = np.stack([place_M, depth_M + 1], axis=1)
    number_of = np.full((max(len(groups), 1), count), -1)
    number_of[0] = np.arange(count)
    number_of[depth_M + 1, place_M] = count + np.arange(len(place_M))
    return layout_R2, [number_of[depth, inputs] for depth, inputs in enumerate(trained)]


# -- names in other software -------------------------------------------------------------------------------------------


def engine_config(draft: PEagle, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    return eagle3_config(draft, weights, export, {"pard_token": int(weights.pop(MASK_TOKEN_ID))})


def facts(draft: PEagle, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
    return EAGLE3_NAMES.facts(draft, config_json, tensors) | mask_token_fact(draft, config_json)


NAMES = replace(
    EAGLE3_NAMES,
    forms={"vllm": AUTHORS_FORMAT} | NUMBERED_FORMAT,
    engine_config=engine_config,
    method={"method": "eagle3", "parallel_drafting": True},
    facts=facts,
    keys={**EAGLE3_NAMES.keys, "pard_token": (), MASK_TOKEN_ID: (), "speculators_model_type": ("peagle",)},
)
