"""DFlash (arXiv 2602.06036): one forward guesses a whole block of tokens.

The context is c_i = norm(fc(outputs of several layers of the target at t_i)); every layer makes its keys and values of
it. The block stands behind the anchor t_a, the last token that is certain: B places at positions a .. a + B - 1, the
first with the anchor's embedding, the others with that of a mask token. Each place sees c_0 .. c_{a-1}, with a window
of W those at most W - 1 positions before it, and its whole block, in both directions; a causal block's place sees the
block up to itself. c_a is not there: the target has not read t_a yet. Place k answers

    logits of t_{a+k} = head(norm(h_k)),   k = 1 .. B - 1

The places are independent given the text: in a tree the chance of a node is the product of its places' probabilities,
and all nodes of a level have the same candidates. Tensor names are those that engines read.
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

from pipeline.basics.accelerator import sent
from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput, DraftRequest, RoundInput
from pipeline.drafts.parallel.anchors import decayed
from pipeline.drafts.parallel.mask import MASK, Masked, mask_fact
from pipeline.drafts.parts.base import DenseConfig, FusedConfig, MaskConfig, VocabularyConfig, WindowConfig
from pipeline.drafts.parts.layers import AttentionBlock, layer_config, norm, rotary, swiglu
from pipeline.drafts.parts.losses import LossKind, Term, named
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.names import AUXILIARY, IDS, LAYER_KEYS, UNSAID, Export, Facts, Form, Names, llama_of
from pipeline.drafts.parts.one_layer import DraftState
from pipeline.lm.attention import FULL, SLIDING, additive
from pipeline.lm.states import States

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

TOGETHER = 256  # places whose blocks share a mask in training: it grows with their square, the copies of keys shrink


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(FusedConfig, DenseConfig, MaskConfig, WindowConfig, VocabularyConfig):
    description: ClassVar = "DFlash ([2602.06036](https://arxiv.org/abs/2602.06036)), blocks of tokens in one forward,"
    trains_behind_gaps: ClassVar[bool] = True  # places of a block behind a user's turn in it

    kind: Literal["dflash"] = "dflash"
    layers: int = 5
    block: int = 16  # places; one forward guesses one token less
    anchors: int = 512  # blocks of a dialogue in one step, at most
    causal: bool = False  # a place sees its block up to itself, not all of it
    gamma: float = 7.0  # of the loss: place k weighs exp(-(k - 1) / gamma)
    dpace: float | None = None  # instead of it D-PACE's weights with this alpha, 0.5 in its paper
    objective: LossKind = "hard-ce"

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "layers", "anchors")
        self.at_least(2, "block")
        self.at_least(self.block, "window")
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
        """How many of a block's places, its last ones, answer."""
        return self.block - 1

    def levels_of(self, number: int) -> int:
        return 0 if number else self.levels

    def terms(self, step: int) -> list[Term]:
        """The k-th place that answers is the group k."""
        weights = [1.0] * self.levels if self.dpace is not None else decayed(self.gamma, self.levels)
        both = zip(named(1, self.levels), weights, strict=True)
        return [
            Term(name, k, {"classification": weight}, self.objective) for k, (name, weight) in enumerate(both, start=1)
        ]


def even_layers(target_layers: int, count: int) -> list[int]:
    """The reference's, which counts from 0: `count` of them evenly from 1 to L - 3, of a small target as many as there
    are; here from 1.
    """
    if count == 1:
        return [target_layers // 2 + 1]
    span = max(target_layers - 4, 0)
    found = {round(1 + number * span / (count - 1)) + 1 for number in range(count)}
    return sorted({min(layer, target_layers) for layer in found})


class Layer(AttentionBlock):
    """Qwen3's, but for keys and values of a context, which are in the cache before it is called."""

    def __init__(self, llama: Any, width: int, number: int):
        parts = {"mlp": swiglu(llama, width), "input_layernorm": norm(llama)}
        super().__init__(llama, parts, None, number, True)
        self.self_attn.is_causal = False  # where no mask is given, all places see each other

    def remember(self, context_BTD: Tensor, rope: tuple[Tensor, Tensor], cache: Any, rows_C: Any = slice(None)) -> None:
        """Appends the context's keys and values; of each of a batch's `rows_C`, as often as it is there."""
        own: Any = self.self_attn
        shape = (*context_BTD.shape[:2], -1, own.head_dim)
        keys, values = own.k_norm(own.k_proj(context_BTD).view(shape)), own.v_proj(context_BTD).view(shape)
        keys, _ = apply_rotary_pos_emb(keys, keys[:, :, :0], *rope, unsqueeze_dim=2)
        cache.update(keys.transpose(1, 2)[rows_C], values.transpose(1, 2)[rows_C], own.layer_idx)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor:
        parts: Any = self
        x = x + self.attend(parts.input_layernorm(x), rope, mask, cache)
        return x + parts.mlp(self.post_attention_layernorm(x))


class DFlash(Masked, TrainedDraft):
    config: DFlashConfig
    layers: nn.ModuleList

    def __init__(self, config: DFlashConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        llama = layer_config(shapes)
        width = llama.hidden_size
        self.fc = nn.Linear(len(self.needs.auxiliary) * width, width, bias=False)
        self.hidden_norm, self.norm = norm(llama), norm(llama)
        mlp_width = config.mlp_width or llama.intermediate_size
        self.layers = nn.ModuleList(Layer(llama, mlp_width, number) for number in range(config.layers))
        self._add_mask_token()
        self._rope = [rotary(llama)]  # out of the module tree: a cast to bf16 must not touch its frequencies

    def _share(self, other: Self) -> None:
        other._rope = self._rope

    @property
    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    # -- one forward ----------------------------------------------------------------------------------------------

    def _context(self, states_TSD: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(states_TSD.flatten(-2)))

    def _angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rope[0].to(like.device)(like, positions)

    def _blocks(self, anchors_CA: Tensor, positions_CA: Tensor, like: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What goes into the first layer behind these tokens (C, A * B, D), and its places' angles."""
        places = torch.arange(self.config.block, device=anchors_CA.device)
        tokens_CAB = torch.where(places == 0, anchors_CA[..., None], self.mask_token_id)
        x = nn.functional.embedding(tokens_CAB.flatten(1), self.embed_head.embedding_VD).to(like.dtype)
        return x, self._angles(x, (positions_CA[..., None] + places).flatten(1))

    def _seen(self, first_CA: Tensor, last_CA: Tensor, count: int) -> Tensor:
        return seen(first_CA, last_CA, count, self.config.block, self.config.window, self.config.causal)

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        """By place a feature (M, D) of each block that is told a token there."""
        context_BTD = self._context(States(batch.hidden_BTD, batch.auxiliary_BTSD, self.needs.auxiliary).of(self.needs))
        (count, width), device = batch.tokens_BT.shape, batch.tokens_BT.device
        anchors = np.asarray(batch.positions[1].inputs)
        bundles_CA, slots = bundled(anchors, count, width, max(1, TOGETHER // self.config.block))
        inputs_CA = sent(torch.tensor(bundles_CA), device)
        rows_C, places_CA = inputs_CA[:, 0] // width, inputs_CA % width
        begins_BT = torch.zeros_like(batch.tokens_BT) if batch.begins_BT is None else batch.begins_BT
        begins_CA = begins_BT.flatten()[inputs_CA]
        x, rope = self._blocks(batch.tokens_BT.flatten()[inputs_CA], places_CA + 1 - begins_CA, context_BTD)
        mask = additive(self._seen(begins_CA, places_CA, width), x.dtype)[:, None]
        angles = self._angles(context_BTD, torch.arange(width, device=device) - begins_BT)
        for layer in self._layers:
            given = layer, x, context_BTD, angles, rows_C, rope, mask
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(_behind, *given, use_reentrant=False) if again else _behind(*given)
        levels = self.config.levels
        feature_ALD = self.norm(x).reshape(-1, self.config.block, x.shape[-1])[:, -levels:]
        found = []
        for level in range(levels):
            told = np.searchsorted(anchors, np.asarray(batch.positions[level + 1].inputs))
            found.append(feature_ALD[:, level].index_select(0, sent(torch.tensor(slots[told]), device)))
        return found, None

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> DraftState:
        return DraftState()

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        told_LAD = self._told(state, inputs, places)[: request.levels]
        return DraftOutput(told_LAD[0], list(self.logits(told_LAD)))

    def _told(self, state: DraftState, inputs: RoundInput, places: int) -> Tensor:
        """Drops the last block, takes in the context of T verified inputs, answers behind the last `places` tokens: the
        features (L, A, D) of all levels.
        """
        past, end, device = state.verified, state.verified + len(inputs.states_TSD), inputs.states_TSD.device
        state.drop_tree(self.config.window)
        context_BTD = self._context(inputs.states_TSD)[None]
        angles = self._angles(context_BTD, torch.arange(past, end, device=device)[None])
        for layer in self._layers:
            layer.remember(context_BTD, angles, state.cache)
        state.verified = end
        last_CA = torch.arange(end - places, end, device=device)[None]  # the last input that each sees
        x, rope = self._blocks(sent(inputs.tokens[-places:], device)[None], last_CA + 1, context_BTD)
        mask, here_CA = None, last_CA - state.gone  # in the cache
        if places > 1 or self.config.window or self.config.causal:
            mask = additive(self._seen(torch.zeros_like(here_CA), here_CA, end - state.gone), x.dtype)[:, None]
        for layer in self._layers:
            x = layer(x, rope, mask, state.cache)
        return self.norm(x[0]).unflatten(0, (places, -1))[:, -self.config.levels :].transpose(0, 1)


def _behind(
    layer: Layer, x: Tensor, context_BTD: Tensor, angles: Any, rows_C: Tensor, rope: Any, mask: Tensor
) -> Tensor:
    """A layer's answer with a cache of its own, since it may run twice."""
    cache = DynamicCache()
    layer.remember(context_BTD, angles, cache, rows_C)
    return layer(x, rope, mask, cache)


def seen(
    first_CA: Tensor, last_CA: Tensor, count: int, block: int, window: int | None = None, causal: bool = False
) -> Tensor:
    """Bool (C, A * B, count + A * B): what the places of A blocks see, each from its first to its last input of the
    context, of these the ones less than `window` before the place, and then its own block, of a causal one the places
    up to itself.
    """
    inputs = torch.arange(count, device=last_CA.device)
    context_CAT = (inputs >= first_CA[..., None]) & (inputs <= last_CA[..., None])
    context_CRT = context_CAT.repeat_interleave(block, dim=1)
    if window:
        places_CR = (last_CA[..., None] + 1 + torch.arange(block, device=last_CA.device)).flatten(1)
        context_CRT &= places_CR[..., None] - inputs < window
    number = torch.arange(last_CA.shape[1], device=last_CA.device).repeat_interleave(block)
    own = number[:, None] == number
    own = own.tril() if causal else own
    return torch.cat([context_CRT, own.expand(len(last_CA), -1, -1)], dim=2)


def bundled(anchors: np.ndarray, rows: int, width: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The anchors, ascending numbers below rows * width, in bundles (C, A) of one row and at most so many; each row's
    last one is filled up with its first input. And where each anchor stands, as a number below C * A. There is at
    least one bundle: every weight takes part in every batch.
    """
    row_A = anchors // width
    sizes = np.bincount(row_A, minlength=rows)
    size = max(1, min(most, int(sizes.max())))
    bundles = -(-sizes // size)
    bundles[0] = max(bundles[0], not len(anchors))
    filled = np.repeat(np.arange(rows) * width, bundles)[:, None].repeat(size, 1)
    before = np.cumsum(bundles) - bundles  # bundles of the rows above
    slots = before[row_A] * size + np.arange(len(anchors)) - (np.cumsum(sizes) - sizes)[row_A]
    filled.reshape(-1)[slots] = anchors
    return filled, slots


# -- what others call it -----------------------------------------------------------------------------------------------

TRANSFORMERS, MUSE = "transformers", "muse_glimmer_assistant"  # whose one block draft it is


def engine_config(draft: DFlash, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """The form of its authors' released weights; or transformers' own."""
    config, layers = draft.config, draft.needs.auxiliary
    own = {MASK: int(weights.pop(MASK)), "target_layer_ids": [number - 1 for number in layers]}
    llama = {"architectures": [export.architecture]} | llama_of(draft, weights) | {"block_size": config.block}
    if export.engine == TRANSFORMERS:
        return llama | {"model_type": MUSE, "layer_types": [FULL] * config.layers} | own
    llama |= {"model_type": "qwen3", "num_target_layers": draft.shapes["target_layers"]}
    llama |= {"is_causal": True} if config.causal else {}  # what SGLang reads; vLLM reads either
    return llama | {"dflash_config": own | {"causal": config.causal}}


def facts(draft: DFlash, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> Facts:
    layers = theirs.get(AUXILIARY) or UNSAID, list(draft.needs.auxiliary)
    return {"auxiliary_layers": layers, "causal": (is_causal(theirs), draft.config.causal)} | mask_fact(draft, theirs)


def is_causal(theirs: dict[str, Any]) -> bool:
    """Return whether a place sees its block up to itself alone. What a file says holds for all layers. One that says
    nothing means causal blocks where its layers slide, as SpecForge trains them and vLLM and SGLang serve them.

    Raises PipelineError where keys contradict each other, and where speculators' form does not say it of its sliding
    layers: speculators trains these as causal by default, and versions of vLLM serve them both ways.
    """
    stated = {key: bool(theirs[key]) for key in CAUSAL if key in theirs}
    slides = theirs.get("layer_types") == [SLIDING]
    if slides and BOTH_WAYS in theirs:
        stated[BOTH_WAYS] = not theirs[BOTH_WAYS]
    if len(set(stated.values())) > 1:
        both = ", ".join(f"{key}={theirs[key]!r}" for key in stated)
        raise PipelineError(f"config.json says {both}: whether blocks are causal is not known. Correct a copy of it")
    if slides and not stated and "speculators_model_type" in theirs:
        raise PipelineError(
            f"config.json has {SLIDING} layers and no {BOTH_WAYS}: whether blocks are causal is not known. Say it in a "
            "copy of the file, true or false, as the draft was trained"
        )
    return next(iter(stated.values()), slides)


IN_TRANSFORMERS = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
BOTH_WAYS = "sliding_window_non_causal"  # in speculators' form
CAUSAL = ("is_causal", "causal")
# How it was trained, and Domino's settings, which that form has at their defaults.
NOT_READ = (
    *("num_target_layers", "num_anchors", "max_anchors", "auf", "pure_draft_prefix_len"),
    *("emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start"),
)
NAMES = Names(
    forms={
        "vllm": Form(architecture="DFlashDraftModel"),
        "sglang": Form(architecture="DFlashDraftModel", lacks={"window": ""}),
        TRANSFORMERS: Form(
            lambda name, _: IN_TRANSFORMERS.get(name, name),
            "MuseGlimmerAssistantModel",
            {"window": "", "causal": ""},
        ),
    },
    engine_config=engine_config,
    method={"method": "dflash"},
    not_exported=(IDS,),  # engines guess with the target's whole head
    is_block=True,
    settings={"block": "block_size", "layers": "num_hidden_layers"},
    facts=facts,
    keys=dict.fromkeys((MASK, *LAYER_KEYS, *NOT_READ), ())
    | {
        **dict.fromkeys((*CAUSAL, BOTH_WAYS), (False, True)),
        "attention_mode": ("gqa", "mha"),
        "projector_type": ("dflash",),
        "sample_from_anchor": (False,),
        "shift_label": (False,),
        "speculators_model_type": ("dflash",),
    },
)
