"""The MTP head that a target comes with, as a draft: measured as it is, or trained further on the user's data.

All its weights are read from the target's files (families.py); embedding and output layer are the target's. Training is
FastMTP's (arXiv 2509.18362): several steps over the draft's own features, step k with the weight decay^(k-1), the
weights normalised. Guesses after the first take the draft's own feature in place of the target's state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.basics.errors import PipelineError
from pipeline.drafts.native.families import HEADS, make_decoder
from pipeline.drafts.parts.attention.steps import Mask
from pipeline.drafts.parts.layers import ROPES, UnregisteredModule
from pipeline.drafts.parts.losses import Term
from pipeline.drafts.parts.names import NO_OWN_VOCABULARY, FileFormat, Names
from pipeline.drafts.parts.one_layer import FeatureDraft, Heads, OneLayerConfig
from pipeline.lm.states import Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class MtpConfig(OneLayerConfig):
    description: ClassVar = (
        "The target's own MTP head, trained as in FastMTP ([2509.18362](https://arxiv.org/abs/2509.18362)),"
    )
    window: ClassVar[None] = None  # type: ignore[misc]

    kind: Literal["mtp"] = "mtp"
    trained: bool = True  # type: ignore[misc]  # false: measured as the target's files hold it
    ttt_steps: int = 3  # forwards of a batch; from the second on, features are the draft's own
    before_norm: bool = False  # the head reads the target's states before its final norm, as MiMo's does
    decay: float = 0.6  # of a step's weight in the loss, for each earlier one

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "ttt_steps")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}: expected more than 0 and at most 1")
        if self.vocabulary and not self.trained:
            raise ValueError("vocabulary is chosen in training: leave it out, or set trained = true")

    @property
    def auxiliary(self) -> Sequence[int | str]:
        return ["last"] if self.before_norm else []

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False, auxiliary=(target_layers,)) if self.before_norm else Needs()

    @property
    def has_module(self) -> bool:
        return True

    def terms(self, step: int) -> list[Term]:
        weights = [self.decay**n for n in range(self.ttt_steps)]
        names = ["next", *(f"ttt_{n}" for n in range(2, self.ttt_steps + 1))]
        return [
            Term(name, 1, {"classification": weight / sum(weights)}, self.objective)
            for name, weight in zip(names, weights, strict=True)
        ]


class Mtp(FeatureDraft):
    config: MtpConfig
    has_target_layer = True
    merges_steps = False  # families have attentions of their own

    def __init__(self, config: MtpConfig, shapes: dict[str, Any]):
        """Raise PipelineError for a target whose family has no known head."""
        super().__init__(config, shapes)
        if "layer" not in shapes:
            raise PipelineError(
                "kind = 'mtp' reads a head out of the target's files, and no names of one are known for this target's "
                f"family: known are {', '.join(HEADS)}. Choose another kind of draft"
            )
        family = shapes["layer"]["family"]
        self.form = HEADS[family]
        if config.before_norm != self.form.before_norm:
            raise PipelineError(
                f"draft {self.name!r}: the MTP head of {family} reads the target's states "
                f"{'before' if self.form.before_norm else 'after'} its final norm: set before_norm = "
                f"{str(self.form.before_norm).lower()}"
            )
        kind = (shapes["layer"]["settings"].get("rope_parameters") or {}).get("rope_type", "default")
        if kind not in ROPES:
            raise PipelineError(f"draft {self.name!r}: RoPE of kind {kind!r} depends on a text's length; no tree fits")
        self.decoder = make_decoder(shapes["layer"])
        width, norm = self.decoder.config.hidden_size, self.decoder.norm
        self.norm, self.decoder.norm = norm if "norm" in self.form.parts else nn.Identity(), nn.Identity()
        self.enorm, self.hnorm = (type(norm)(width, eps=self.decoder.config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        del self.decoder.embed_tokens
        rope: Any = self.decoder.rotary_emb
        del self.decoder.rotary_emb  # out of the module tree: a cast to bf16 must not change its frequencies
        self.decoder.rotary_emb = UnregisteredModule(rope)

    def _share(self, draft_copy: Self) -> None:
        draft_copy.decoder.rotary_emb = self.decoder.rotary_emb

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the weights, but keep buffers in float32: routers choose experts by their small differences."""
        exact = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            owner, _, key = name.rpartition(".")
            module = self.get_submodule(owner)
            if module._buffers[key].dtype != torch.float32:  # type: ignore[union-attr]
                module._buffers[key] = buffer.to(module._buffers[key].device)  # type: ignore[union-attr]
        return self

    def initialise(self, seed: int) -> None:
        """Do nothing: all weights are the target's (`files.read_head`)."""

    def features(self, states_TSD: Tensor) -> Tensor:
        return states_TSD[..., 0, :]

    def trunk(self, features_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask, cache: Any) -> Tensor:
        embedded = self.embed(tokens_BT, features_BTD)
        if self.form.zeroes_first:
            embedded = embedded.masked_fill((positions_BT == 0)[..., None], 0.0)
        halves = [self.enorm(embedded), self.hnorm(features_BTD)]
        x_BTD = self.eh_proj(torch.cat(halves[::-1] if self.form.state_first else halves, dim=-1))
        return self.decoder(
            inputs_embeds=x_BTD,
            position_ids=positions_BT.expand(x_BTD.shape[:2]),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def new_cache(self, tensors: tuple[Tensor, ...]) -> DynamicCache:
        cache = DynamicCache(config=self.decoder.config)
        if tensors:
            cache.update(tensors[0], tensors[1], 0)
        for keys in tensors[2:]:
            cache.update_indexer(keys, 0)
        return cache

    def cached_tensors(self, cache: DynamicCache) -> tuple[Tensor, ...]:
        layer: Any = cache.layers[0]
        indexer_keys = [layer.indexer_keys] if hasattr(layer, "indexer_keys") else []
        return layer.keys, layer.values, *indexer_keys

    def heads(self, u: Tensor) -> Heads:
        return Heads([u])

    def head_input(self, features: Tensor) -> Tensor:
        return self.norm(features)

    def next_feature(self, feature: Tensor) -> Tensor:
        return self.norm(feature) if self.form.passes_normed else feature

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        """Return the features of each step, normed: the target's head takes them as they are."""
        features, _ = super().forward(batch)
        return [self.head_input(feature) for feature in features], None


# An engine loads the head in its target's files (pipeline/serving/head.py).
NAMES = Names(
    {"vllm": FileFormat(architecture="its target's", unsupported=NO_OWN_VOCABULARY)}, method={"method": "mtp"}
)
