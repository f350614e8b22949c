"""Gumiho (arXiv 2503.10135): early tokens from a serial draft of two layers, later ones from MLPs in parallel.

The serial part is EAGLE's with a second decoder layer, and makes the first two forwards of a round. Let a and b be the
tokens that these guess, F_1 and F_2 their predictions of f_{i+1} and f_{i+2}, and fc EAGLE's:

    MLP j    x_j = blocks_j(SiLU(W_j [fc(a, F_1); fc(b, F_2)]))   ->   f_{i+3+j}, j = 0, 1, ...

All MLPs run in one forward, so the first two levels of the tree come one at a time and the others all at once. In
training both F are predicted by the serial part from the target's features. The released code lets a node attend to
nodes under other ancestors ("full tree attention") and sets no tree mask in the second forward; neither is done here.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.drafts.eagle import NAMES as EAGLE_NAMES
from pipeline.drafts.eagle import NO_BIAS, EagleFrame, EagleFrameConfig
from pipeline.drafts.parallel.residual import ResBlock
from pipeline.drafts.parts.attention.steps import Mask
from pipeline.drafts.parts.base import DenseConfig
from pipeline.drafts.parts.layers import AttentionBlock, norm
from pipeline.drafts.parts.losses import Term, term_names
from pipeline.drafts.parts.names import PLUG_IN, Export, FileFormat, Names
from pipeline.drafts.parts.one_layer import Dense, Heads

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

SERIAL = 2  # forward passes of the serial part, and its layers
MLPS, BLOCKS = 5, 5  # residual blocks of each
MLP_WEIGHTS = {
    "regression": 1 / 9,
    "classification": 0.1 / 9,
}  # weights of the first MLP's prediction, before the decay
DECAY = 0.8  # factor of the weights for each MLP, the first included


@dataclass(frozen=True, kw_only=True)
class GumihoConfig(DenseConfig, EagleFrameConfig):
    description: ClassVar = "Gumiho ([2503.10135](https://arxiv.org/abs/2503.10135)), two layers and parallel MLPs,"

    kind: Literal["gumiho"] = "gumiho"
    regression_steps: int = 0  # first optimiser steps without the MLPs' classification loss

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(0, "regression_steps")

    def levels_of(self, number: int) -> int:
        return 1 if number < SERIAL else MLPS if number == SERIAL else 0

    def terms(self, step: int) -> list[Term]:
        terms = super().terms(step)
        for number, name in enumerate(term_names(SERIAL + 1, SERIAL + MLPS), start=1):
            weights = {part: weight * DECAY**number for part, weight in MLP_WEIGHTS.items()}
            if step < self.regression_steps:
                weights |= {"classification": 0.0}
            terms.append(Term(name, SERIAL + number, weights, self.objective))
        return terms


class ParallelMLPs(nn.Module):
    """The MLPs, all on the same input."""

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.Sequential(nn.Linear(SERIAL * width, width), nn.SiLU()),
                *(ResBlock(width, width) for _ in range(BLOCKS)),
            )
            for _ in range(MLPS)
        )

    def forward(self, pairs: Tensor, count: int) -> list[Tensor]:
        return [mlp(pairs) for mlp in list(self.mlp)[:count]]


class Gumiho(Dense, EagleFrame):
    config: GumihoConfig

    def __init__(self, config: GumihoConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        for number in range(1, SERIAL):
            parts = self.mlp_modules(self.llama) | {"input_layernorm": norm(self.llama)}
            self.layers.append(AttentionBlock(self.llama, parts, number=number))
        self.mlp = ParallelMLPs(self.llama.hidden_size)

    @property
    def block(self) -> AttentionBlock:
        return self.layers[-1]  # type: ignore[return-value]

    def trunk(self, features_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Mask, cache: Any) -> Tensor:
        x = self._join(features_BTD, tokens_BT)
        rope = self._rope[0].to(x.device)(x, positions_BT)
        for number, layer in enumerate(self.layers):
            block: Any = layer
            x = x + block.attend(block.input_layernorm(x) if number else x, rope, mask, cache)
            if number < len(self.layers) - 1:
                x = x + block.mlp(block.post_attention_layernorm(x))
        return x

    def _join(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return fc of tokens and the features before them."""
        return self.inputs(features, self.embed(tokens, features))[0]

    # -- training -------------------------------------------------------------------------------------------------

    def later_features(self, heads: Heads, batch: "Batch") -> list[Tensor]:
        """Return the MLPs' features, at i from the pairs (F for f_{i+1}, t_{i+2}) and (F for f_{i+2}, t_{i+3})."""
        joined_BTD = self._join(heads.ahead[0], batch.tokens_BT.roll(-1, 1))  # a row's end is not trained
        return self.mlp(torch.cat([joined_BTD, joined_BTD.roll(-1, 1)], dim=-1), MLPS)

    # -- decoding: a carry is F followed by fc of the node that was forwarded ---------------------------------------

    @torch.inference_mode()
    def start(self, state: Any, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        output = super().start(state, inputs, replace(request, levels=1), places)
        return replace(output, carry_WD=nn.functional.pad(output.carry_WD, (0, output.carry_WD.shape[1])))

    @torch.inference_mode()
    def step(self, state: Any, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        feature_WD, before_WD = frontier.carry_WD.chunk(2, dim=-1)
        joined_WD = self._join(feature_WD, frontier.tokens_W)
        if frontier.depth < SERIAL:
            output = super().step(state, replace(frontier, carry_WD=feature_WD), replace(request, levels=1))
            return replace(output, carry_WD=torch.cat([output.carry_WD, joined_WD], dim=-1))
        features = self.mlp(torch.cat([before_WD, joined_WD], dim=-1), request.levels)
        return DraftOutput(frontier.carry_WD, list(self.logits(torch.stack(features))))


# -- names in other software -------------------------------------------------------------------------------------------


def _name_in_files(name: str, _: Any) -> str:
    """Return the name in files: ``mlp.j`` for MLP j, whose first part is ``linear``."""
    return re.sub(r"^mlp\.mlp\.(\d+\.)(0\.0\.)?", lambda at: f"mlp.{at[1]}{'0.linear.' if at[2] else ''}", name)


def _name_in_memory(name: str, _: Any) -> str:
    """Return the name in the authors' code, which adds another ``mlp`` before it."""
    return re.sub(r"^mlp\.", "mlp.mlp.", _name_in_files(name, None))


def engine_config(draft: Gumiho, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """Return the plug-in's config."""
    keys = {"num_hidden_layers": SERIAL, "mlps": MLPS, "mlp_blocks": BLOCKS}
    return EAGLE_NAMES.engine_config(draft, weights, export) | keys | {"reduced_vocabulary": draft.config.vocabulary}


def _plug_in_name(name: str, _: Any) -> str:
    return name.removeprefix("mlp.") if name.startswith("mlp.mlp.") else name


ARCHITECTURE = "EagleGumihoForCausalLM"
NAMES = Names(
    {
        "vllm": FileFormat(_plug_in_name, ARCHITECTURE, NO_BIAS, PLUG_IN, ARCHITECTURE),
        "files": FileFormat(_name_in_files),
        "memory": FileFormat(_name_in_memory),
    },
    engine_config=engine_config,
    method=EAGLE_NAMES.method,
    keys={**EAGLE_NAMES.keys, "mlps": (MLPS,), "mlp_blocks": (BLOCKS,)},
)
