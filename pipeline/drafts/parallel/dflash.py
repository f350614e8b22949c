"""DFlash (arXiv 2602.06036): one forward guesses a whole block of tokens.

The context is c_i = norm(fc(outputs of several layers of the target at t_i)); every layer computes keys and values from
it. The block starts at the anchor t_a, the last token that is certain: B places at positions a .. a + B - 1, the first
with the anchor's embedding, the others with that of a mask token. Each place attends to c_0 .. c_{a-1} (with a window
of W, to those at most W - 1 positions before it) and to its whole block, in both directions; in a causal block, to the
places up to itself. There is no c_a, because the target has not read t_a yet. Place k predicts

    logits of t_{a+k} = head(norm(h_k)),   k = 1 .. B - 1

The places are independent given the text: in a tree the probability of a node is the product of its places'
probabilities, and all nodes of a level have the same candidates. Tensor names are those that engines read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipeline.basics.accelerator import to_device
from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput, DraftRequest, RoundInput
from pipeline.drafts.parallel.anchors import decay_weights
from pipeline.drafts.parallel.mask import MASK_TOKEN_ID, MaskTokenDraft, mask_token_fact
from pipeline.drafts.parts.attention.ranges import RANGES, RangeMask, is_cpu, range_mask, text_begins
from pipeline.drafts.parts.base import DenseConfig, FusedConfig, MaskConfig, VocabularyConfig, WindowConfig
from pipeline.drafts.parts.layers import AttentionBlock, layer_config, norm, rotary, swiglu
from pipeline.drafts.parts.losses import LossKind, Term, term_names
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.names import (
    AUXILIARY,
    DRAFT_TOKEN_IDS,
    LAYER_KEYS,
    UNSET,
    Export,
    Facts,
    FileFormat,
    Names,
    llama_config,
)
from pipeline.drafts.parts.one_layer import DraftState
from pipeline.lm.attention import FULL, SLIDING, additive_mask

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

PLACES = 256  # on an accelerator, training's places are a multiple of about this: few shapes occur


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(FusedConfig, DenseConfig, MaskConfig, WindowConfig, VocabularyConfig):
    description: ClassVar = "DFlash ([2602.06036](https://arxiv.org/abs/2602.06036)), blocks of tokens in one forward,"
    trains_behind_gaps: ClassVar[bool] = True  # train places of a block after a user's turn in it

    kind: Literal["dflash"] = "dflash"
    layers: int = 5
    block: int = 16  # places; one forward guesses one token fewer
    anchors: int = 512  # blocks of a dialogue in one step, at most
    causal: bool = False  # a place attends to its block up to itself, not to all of it
    gamma: float = 7.0  # of the loss: place k has weight exp(-(k - 1) / gamma)
    dpace: float | None = None  # if set, D-PACE's weights with this alpha, 0.5 in its paper
    objective: LossKind = "hard-ce"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "layers", "anchors")
        self.require_at_least(2, "block")
        self.require_at_least(self.block, "window")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma}: expected more than 0")
        if self.dpace is not None and not (0 <= self.dpace <= 1 and self.objective == "hard-ce"):
            raise ValueError(f"dpace={self.dpace}: expected 0 to 1, with objective='hard-ce'")

    @property
    def auxiliary(self) -> Sequence[int | str]:
        return self.auxiliary_layers or [f"{self.layers} even"]

    def reference_layers(self, target_layers: int) -> list[int]:
        return even_layers(target_layers, self.layers)

    @property
    def levels(self) -> int:
        """The number of places of a block that predict a token, its last ones."""
        return self.block - 1

    def levels_of(self, number: int) -> int:
        return 0 if number else self.levels

    def terms(self, step: int) -> list[Term]:
        """Return the terms; group k is the k-th place that predicts a token."""
        weights = [1.0] * self.levels if self.dpace is not None else decay_weights(self.gamma, self.levels)
        named_weights = zip(term_names(1, self.levels), weights, strict=True)
        return [
            Term(name, k, {"classification": weight}, self.objective)
            for k, (name, weight) in enumerate(named_weights, start=1)
        ]


def even_layers(target_layers: int, count: int) -> list[int]:
    """Return the layers that the reference uses, but counted from 1.

    Counted from 0, they are `count` layers evenly spaced from 1 to L - 3; a small target has fewer distinct ones.
    """
    if count == 1:
        return [target_layers // 2 + 1]
    span = max(target_layers - 4, 0)
    layers = {round(1 + number * span / (count - 1)) + 1 for number in range(count)}
    return sorted({min(layer, target_layers) for layer in layers})


class ContextLayer(AttentionBlock):
    """A Qwen3 layer that also attends to a context, whose keys and values are put into the cache before."""

    def __init__(self, llama: Any, width: int, number: int):
        parts = {"mlp": swiglu(llama, width), "input_layernorm": norm(llama)}
        super().__init__(llama, parts, None, number, True)
        self.self_attn.is_causal = False  # without a mask, all places attend to each other

    def append_context(self, context_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Any) -> None:
        """Append the context's keys and values to the cache."""
        attention: Any = self.self_attn
        shape = (*context_BTD.shape[:2], -1, attention.head_dim)
        keys, values = (
            attention.k_norm(attention.k_proj(context_BTD).view(shape)),
            attention.v_proj(context_BTD).view(shape),
        )
        keys, _ = apply_rotary_pos_emb(keys, keys[:, :, :0], *rope, unsqueeze_dim=2)
        cache.update(keys.transpose(1, 2), values.transpose(1, 2), attention.layer_idx)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Any, cache: Any) -> Tensor:
        parts: Any = self
        x = x + self.attend(parts.input_layernorm(x), rope, mask, cache)
        return x + parts.mlp(self.post_attention_layernorm(x))


class DFlash(MaskTokenDraft, TrainedDraft):
    config: DFlashConfig
    layers: nn.ModuleList

    def __init__(self, config: DFlashConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        llama = layer_config(shapes)
        llama._attn_implementation = RANGES
        width = llama.hidden_size
        self.fc = nn.Linear(len(self.needs.auxiliary) * width, width, bias=False)
        self.hidden_norm, self.norm = norm(llama), norm(llama)
        mlp_width = config.mlp_width or llama.intermediate_size
        self.layers = nn.ModuleList(ContextLayer(llama, mlp_width, number) for number in range(config.layers))
        self._add_mask_token()
        self._rope = [rotary(llama)]  # in a list, outside of the module tree: a cast to bf16 must not change it

    def _share(self, draft_copy: Self) -> None:
        draft_copy._rope = self._rope

    @property
    def _layers(self) -> list[ContextLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    # -- one forward ----------------------------------------------------------------------------------------------

    def _context(self, states_TSD: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(states_TSD.flatten(-2)))

    def _angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope[0].to(like.device)(like, positions)

    def _blocks(self, anchors_CA: Tensor, positions_CA: Tensor, like: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the first layer's input for the blocks of these anchors (C, A * B, D), and the places' RoPE angles."""
        places = torch.arange(self.config.block, device=anchors_CA.device)
        tokens_CAB = torch.where(places == 0, anchors_CA[..., None], self.mask_token_id)
        x = nn.functional.embedding(tokens_CAB.flatten(1), self.embed_head.embedding_VD).to(like.dtype)
        return x, self._angles(x, (positions_CA[..., None] + places).flatten(1))

    def _mask(self, first_A: np.ndarray, last_A: np.ndarray, count: int, device: torch.device) -> RangeMask:
        config = self.config
        ranges_R4 = block_ranges(first_A, last_A, count, config.block, config.window, config.causal)
        return range_mask(ranges_R4, count, count + len(ranges_R4), device)

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        """Return, for each place, the features (M, D) of the blocks that have a label there."""
        context_BTD, device = self._context(batch.select(self.needs)), batch.tokens_BT.device
        anchors = np.asarray(batch.positions[1].inputs)
        inputs_A, begins_N = pad_anchors(anchors, self.config.block, device), text_begins(batch)
        context_BTD, begins_A = context_BTD.flatten(0, 1)[None], begins_N[inputs_A]
        tokens_A = batch.tokens_BT.flatten()[to_device(inputs_A, device)]
        x, rope = self._blocks(tokens_A[None], to_device(inputs_A + 1 - begins_A, device)[None], context_BTD)
        mask = self._mask(begins_A, inputs_A, len(begins_N), device)
        angles = self._angles(context_BTD, to_device(np.arange(len(begins_N)) - begins_N, device)[None])
        for layer in self._layers:
            arguments = layer, x, context_BTD, angles, rope, mask
            recomputes = self.recompute and torch.is_grad_enabled()
            x = (
                checkpoint(_forward_layer, *arguments, use_reentrant=False)
                if recomputes
                else _forward_layer(*arguments)
            )
        levels = self.config.levels
        feature_ALD = self.norm(x).reshape(-1, self.config.block, x.shape[-1])[:, -levels:]
        features = []
        for level in range(levels):
            block_indices = np.searchsorted(anchors, np.asarray(batch.positions[level + 1].inputs))
            features.append(feature_ALD[:, level].index_select(0, to_device(block_indices, device)))
        return features, None

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        return DraftState()

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        feature_LAD = self._block_features(state, inputs, places)[: request.levels]
        return DraftOutput(feature_LAD[0], list(self.logits(feature_LAD)))

    def _block_features(self, state: DraftState, inputs: RoundInput, places: int) -> Tensor:
        """Drop the last block, add the context of T verified inputs, run a block at each of the last `places` tokens.

        Returns the features (L, A, D) of all levels.
        """
        past, end, device = state.verified, state.verified + len(inputs.states_TSD), inputs.states_TSD.device
        state.drop_tree(self.config.window)
        context_BTD = self._context(inputs.states_TSD)[None]
        angles = self._angles(context_BTD, torch.arange(past, end, device=device)[None])
        for layer in self._layers:
            layer.append_context(context_BTD, angles, state.cache)
        state.verified = end
        last_A = np.arange(end - places, end)  # the last input that each block attends to
        tokens_CA, positions_CA = to_device(np.array([inputs.tokens[-places:], last_A + 1]), device)[:, None]
        x, rope = self._blocks(tokens_CA, positions_CA, context_BTD)
        mask, cached_A = None, last_A - state.dropped  # in the cache
        if places > 1 or self.config.window or self.config.causal:
            ranges = self._mask(np.zeros_like(cached_A), cached_A, end - state.dropped, device)
            mask = additive_mask(ranges.dense(), x.dtype)[None, None]
        for layer in self._layers:
            x = layer(x, rope, mask, state.cache)
        return self.norm(x[0]).unflatten(0, (places, -1))[:, -self.config.levels :].transpose(0, 1)


def _forward_layer(
    layer: ContextLayer, x: Tensor, context_BTD: Tensor, angles: Any, rope: Any, mask: RangeMask
) -> Tensor:
    """Run a layer with a new cache, since it may run twice."""
    cache = DynamicCache()
    layer.append_context(context_BTD, angles, cache)
    return layer(x, rope, mask, cache)


def block_ranges(
    first_A: np.ndarray, last_A: np.ndarray, count: int, block: int, window: int | None = None, causal: bool = False
) -> np.ndarray:
    """Return the ranges of keys (A * block, 4) that the places of A blocks see, of `count` inputs of the context and
    A * block places.

    Each place attends to the context from its block's first to its last input, limited to those less than `window`
    before the place, and to its own block (if causal, to the places up to itself).
    """
    places_R, number_R = np.arange(len(last_A) * block), np.tile(np.arange(block), len(last_A))
    first_R, last_R = first_A.repeat(block), last_A.repeat(block)
    if window:
        first_R = np.maximum(first_R, last_R + 1 + number_R - window + 1)
    begins_R = places_R - number_R
    ends_R = places_R if causal else begins_R + block - 1
    return np.stack([first_R, last_R, count + begins_R, count + ends_R], axis=1)


def pad_anchors(anchors: np.ndarray, block: int, device: torch.device) -> np.ndarray:
    """Return the anchors, padded with the first input to at least one, so that every weight takes part in every batch;
    on an accelerator to a multiple.
    """
    multiple = 1 if is_cpu(device) else max(1, PLACES // block)
    return np.pad(anchors, (0, max(len(anchors), 1) + -max(len(anchors), 1) % multiple - len(anchors)))


# -- names in other software -------------------------------------------------------------------------------------------

TRANSFORMERS, MUSE = "transformers", "muse_glimmer_assistant"  # the only block draft of transformers


def engine_config(draft: DFlash, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """Return config.json in the format of its authors' released weights, or in that of transformers."""
    config, layers = draft.config, draft.needs.auxiliary
    block_keys = {MASK_TOKEN_ID: int(weights.pop(MASK_TOKEN_ID)), "target_layer_ids": [number - 1 for number in layers]}
    llama = {"architectures": [export.architecture]} | llama_config(draft, weights) | {"block_size": config.block}
    if export.engine == TRANSFORMERS:
        return llama | {"model_type": MUSE, "layer_types": [FULL] * config.layers} | block_keys
    llama |= {"model_type": "qwen3", "num_target_layers": draft.shapes["target_layers"]}
    llama |= {"is_causal": True} if config.causal else {}  # SGLang reads this key; vLLM reads either
    return llama | {"dflash_config": block_keys | {"causal": config.causal}}


def facts(draft: DFlash, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
    layers = config_json.get(AUXILIARY) or UNSET, list(draft.needs.auxiliary)
    return {"auxiliary_layers": layers, "causal": (is_causal(config_json), draft.config.causal)} | mask_token_fact(
        draft, config_json
    )


def is_causal(config_json: dict[str, Any]) -> bool:
    """Return whether a place attends to its block only up to itself.

    The file's value holds for all layers. Without one, blocks are causal if the layers have sliding attention, as
    SpecForge trains and as vLLM and SGLang serve them.

    Raises PipelineError if keys contradict each other, and if speculators' format has sliding layers without the key:
    speculators trains these as causal by default, and versions of vLLM serve them both ways.
    """
    stated = {key: bool(config_json[key]) for key in CAUSAL_KEYS if key in config_json}
    slides = config_json.get("layer_types") == [SLIDING]
    if slides and NON_CAUSAL_KEY in config_json:
        stated[NON_CAUSAL_KEY] = not config_json[NON_CAUSAL_KEY]
    if len(set(stated.values())) > 1:
        statements = ", ".join(f"{key}={config_json[key]!r}" for key in stated)
        raise PipelineError(
            f"config.json says {statements}: whether blocks are causal is not known. Correct a copy of it"
        )
    if slides and not stated and "speculators_model_type" in config_json:
        raise PipelineError(
            f"config.json has {SLIDING} layers and no {NON_CAUSAL_KEY}: whether blocks are causal is not known. "
            "Set it in a copy of the file, true or false, as the draft was trained"
        )
    return next(iter(stated.values()), slides)


IN_TRANSFORMERS = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
NON_CAUSAL_KEY = "sliding_window_non_causal"  # in speculators' format
CAUSAL_KEYS = ("is_causal", "causal")
# Training settings, and Domino's settings, which this format has at their defaults.
IGNORED_KEYS = (
    *("num_target_layers", "num_anchors", "max_anchors", "auf", "pure_draft_prefix_len"),
    *("emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start"),
)
NAMES = Names(
    forms={
        "vllm": FileFormat(architecture="DFlashDraftModel"),
        "sglang": FileFormat(architecture="DFlashDraftModel", unsupported={"window": ""}),
        TRANSFORMERS: FileFormat(
            lambda name, _: IN_TRANSFORMERS.get(name, name),
            "MuseGlimmerAssistantModel",
            {"window": "", "causal": ""},
        ),
    },
    engine_config=engine_config,
    method={"method": "dflash"},
    not_exported=(DRAFT_TOKEN_IDS,),  # engines guess with the target's full head
    is_block=True,
    settings={"block": "block_size", "layers": "num_hidden_layers"},
    facts=facts,
    keys=dict.fromkeys((MASK_TOKEN_ID, *LAYER_KEYS, *IGNORED_KEYS), ())
    | {
        **dict.fromkeys((*CAUSAL_KEYS, NON_CAUSAL_KEY), (False, True)),
        "attention_mode": ("gqa", "mha"),
        "projector_type": ("dflash",),
        "sample_from_anchor": (False,),
        "shift_label": (False,),
        "speculators_model_type": ("dflash",),
    },
)
