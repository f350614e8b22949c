"""Hydra and Hydra++ (arXiv 2402.05109): Medusa heads that also see the tokens guessed by earlier heads.

    head k    x_k = blocks_k([s_i; e(t_{i+1}); ...; e(t_{i+k})])   ->   t_{i+1+k}

s_i is the target's last hidden state f_i (Hydra) or a decoder layer's output over f_0 .. f_i (Hydra++, ``prefix``).
The released code repeats one residual block by multiplying a list; here each block has its own weights. Dropout, which
the paper's recipe has, is left out: training is a function of its seed and its batches.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from pipeline.basics.accelerator import to_device
from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.drafts.parallel.residual import ResBlock
from pipeline.drafts.parts.base import DenseConfig, ScaledConfig
from pipeline.drafts.parts.heads import HeadsConfig, HeadsDraft, make_lm_heads
from pipeline.drafts.parts.heads import facts as facts_of_heads
from pipeline.drafts.parts.layers import AttentionBlock, layer_config, norm, rotary, swiglu
from pipeline.drafts.parts.names import NO_OWN_VOCABULARY, PLUG_IN, Export, Facts, FileFormat, Names, llama_config
from pipeline.lm.attention import FULL, additive_mask, causal_mask, packed_masks
from pipeline.lm.cache import TreeCache

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class HydraConfig(ScaledConfig, DenseConfig, HeadsConfig):
    description: ClassVar = "Hydra ([2402.05109](https://arxiv.org/abs/2402.05109)), heads that see earlier guesses,"

    kind: Literal["hydra"] = "hydra"
    blocks: int = 4
    prefix: bool = True  # Hydra++: a decoder layer over the hidden states so far, `mlp_width` wide

    @property
    def decay(self) -> float:
        """The factor of the loss's weight for each token ahead; plain Hydra trains as Medusa does."""
        return 1.0 if self.prefix else super().decay

    def levels_of(self, number: int) -> int:
        return 1 if number < self.heads else 0


@dataclass
class HydraState:
    """One sequence's keys and values of the prefix layer."""

    cache: TreeCache = field(default_factory=TreeCache)
    verified: int = 0


class Prefix(nn.Module):
    """A Llama decoder layer with its input norm and the norm after it."""

    def __init__(self, llama: Any, width: int):
        super().__init__()
        parts = {"input_layernorm": norm(llama), "mlp": swiglu(llama, width)}
        self.layer = AttentionBlock(llama, parts)
        self.norm = norm(llama)

    def forward(self, f_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor:
        layer: Any = self.layer
        u = f_BTD + layer.attend(layer.input_layernorm(f_BTD), rope, mask, cache)
        return self.norm(u + layer.mlp(layer.post_attention_layernorm(u)))


class Hydra(HeadsDraft):
    config: HydraConfig

    def __init__(self, config: HydraConfig, shapes: dict):
        super().__init__(config, shapes)
        self.llama = layer_config(shapes)
        self._rope = [rotary(self.llama)]  # in a list, outside of the module tree: no cast changes its frequencies
        width = shapes["hidden_size"]
        if config.prefix:
            self.prefix = Prefix(self.llama, config.mlp_width or self.llama.intermediate_size)
        self.heads = nn.ModuleList(
            nn.Sequential(ResBlock((k + 1) * width, width), *(ResBlock(width, width) for _ in range(1, config.blocks)))
            for k in range(1, config.heads + 1)
        )
        self.lm_heads = make_lm_heads(config, width, self.vocabulary_size)

    def _share(self, draft_copy: Self) -> None:
        draft_copy._rope = self._rope

    def _embedded(self, tokens: Tensor, like: Tensor) -> Tensor:
        embedded = nn.functional.embedding(tokens, self.embed_head.embedding_VD) * self.config.embedding_scale
        return embedded.to(like.dtype)

    def _summary(self, f_BTD: Tensor, positions_BT: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Return s_i."""
        if not self.config.prefix:
            return f_BTD
        return self.prefix(f_BTD, self._rope[0].to(f_BTD.device)(f_BTD, positions_BT), mask, cache)

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        mask, positions = None, torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)[None]
        if batch.begins_BT is not None:
            mask, positions = packed_masks(batch.tokens_BT, batch.begins_BT, {FULL: None}, batch.hidden_BTD.dtype)
        inputs = [self._summary(batch.hidden_BTD, positions, mask, None)]
        embedded = self._embedded(batch.tokens_BT, batch.hidden_BTD)
        features = []
        for head in self.heads:
            inputs.append(embedded.roll(1 - len(inputs), 1))  # e(t_{i+k}) for head k; a row's end is not trained
            features.append(head(torch.cat(inputs, dim=-1)))
        return features, None

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> HydraState:
        return HydraState()

    def _output(self, input_WD: Tensor, number: int) -> DraftOutput:
        """Return the output of head `number`, from 0. The children's forward pass appends a token to the same input."""
        return DraftOutput(input_WD, [self.logits(self.heads[number](input_WD), number)])

    @torch.inference_mode()
    def start(self, state: HydraState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        f_TD, past, mask = inputs.states_TSD[:, 0], state.verified, None
        count, device = len(f_TD), f_TD.device
        if past and count > 1:
            visible = causal_mask(past, count, device)
            mask = additive_mask(visible, f_TD.dtype)[None, None]
        positions = torch.arange(past, past + count, device=device)[None]
        summary_TD = self._summary(f_TD[None], positions, mask, state.cache)[0]
        state.verified = past + count
        tokens_W = to_device(inputs.tokens[-places:], device)
        return self._output(torch.cat([summary_TD[-places:], self._embedded(tokens_W, f_TD)], dim=-1), 0)

    @torch.inference_mode()
    def step(self, state: HydraState, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        embedded_WD = self._embedded(frontier.tokens_W, frontier.carry_WD)
        return self._output(torch.cat([frontier.carry_WD, embedded_WD], dim=-1), frontier.depth)


# -- names in other software -------------------------------------------------------------------------------------------


def _hydra_name(name: str, _: Any) -> str:
    return re.sub(r"^(?:lm_)?heads\.", lambda at: "hydra_lm_head." if at[0] == "lm_heads." else "hydra_mlp.", name)


def _hydra_plus_name(name: str, _: Any) -> str:
    """Return the name in Hydra++: blocks and LM heads come after a dropout each, and the prefix is a full Llama."""
    if at := re.fullmatch(r"heads\.(\d+)\.(\d+)\.(.+)", name):
        return f"hydra_mlp.{at[1]}.{2 * int(at[2]) + 1}.{at[3]}"
    name = re.sub(r"^lm_heads\.(\d+)\.", r"hydra_lm_head.\1.1.", name)
    name = re.sub(r"^prefix\.layer\.", "prefix_embeding_layer.layers.0.", name)
    return re.sub(r"^prefix\.norm\.", "prefix_embeding_layer.norm.", name)


def facts(draft: Hydra, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
    """Return facts of heads and prefix. Raises PipelineError for heads that read the states of an earlier layer."""
    if offset := config_json.get("hidden_state_offset", 0):
        raise PipelineError(
            f"the checkpoint's heads read the states of an earlier layer (hidden_state_offset={offset}), but this "
            "implementation reads those of the last: only checkpoints of offset 0 can be imported"
        )
    head_facts = facts_of_heads(draft, config_json, tensors)
    prefix = any(name.startswith(("prefix.", "prefix_embeding_layer.", "layers.")) for name in tensors)
    return head_facts and head_facts | {"prefix": (prefix, draft.config.prefix)}


def _plug_in_name(name: str, _: Any) -> str:
    name = re.sub(r"^prefix\.(?:layer|(?=norm))", lambda at: "layers.0" if at[0] == "prefix.layer" else "", name)
    return re.sub(r"^lm_heads\.", "token_heads.", name)


def engine_config(draft: Hydra, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """Return the plug-in's config. Raise PipelineError for a draft without the prefix layer, which has no attention."""
    if not draft.config.prefix:
        raise PipelineError("prefix=false: vLLM requires a draft with a layer of attention; train with prefix=true")
    keys = {key: getattr(draft.config, key) for key in SETTINGS}
    return {"architectures": [export.architecture]} | llama_config(draft, weights) | keys


SETTINGS = ("heads", "blocks", "own_head", "head_bias", "embedding_scale")
FORM = FileFormat(_plug_in_name, "EagleHydraForCausalLM", NO_OWN_VOCABULARY, PLUG_IN)
NAMES = Names(
    {"vllm": FORM, "hydra": FileFormat(_hydra_name), "hydra++": FileFormat(_hydra_plus_name)},
    engine_config=engine_config,
    method={"method": "eagle"},
    settings={key: key for key in SETTINGS},
    facts=facts,
    ignored_tensors=r"prefix_embeding_layer\.embed_tokens\.weight",  # not read by any Hydra
)
