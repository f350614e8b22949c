"""Medusa-1 (arXiv 2401.10774): K heads on the target's last hidden state, each for one token further ahead.

    head k    logits_k = W_k (x_k),   x_k = blocks_k(f_i)   ->   t_{i+1+k}

The heads see no token after f_i, not even the one that the target has just chosen. All levels of the tree come from one
forward, and all nodes of a level have the same candidates.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.decoding.contract import DraftOutput, DraftRequest, RoundInput
from pipeline.drafts.parallel.residual import ResBlock
from pipeline.drafts.parts.heads import HeadsConfig, HeadsDraft, facts, make_lm_heads
from pipeline.drafts.parts.losses import LossKind
from pipeline.drafts.parts.names import NO_OWN_VOCABULARY, Export, FileFormat, Names

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadsConfig):
    description: ClassVar = "Medusa-1 ([2401.10774](https://arxiv.org/abs/2401.10774)), heads on one hidden state,"

    kind: Literal["medusa"] = "medusa"
    objective: LossKind = "hard-ce"

    def levels_of(self, number: int) -> int:
        return 0 if number else self.heads


class Medusa(HeadsDraft):
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, shapes: dict):
        super().__init__(config, shapes)
        width = shapes["hidden_size"]
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(width, width) for _ in range(config.blocks))) for _ in range(config.heads)
        )
        self.lm_heads = make_lm_heads(config, width, self.vocabulary_size)

    @property
    def borrowed(self) -> list[str]:
        return [] if self.own_heads else ["head"]

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        return [head(batch.hidden_BTD) for head in self.heads], None

    def open(self) -> None:
        return None

    @torch.inference_mode()
    def start(self, state: None, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        f_WD = inputs.states_TSD[-places:, 0]
        features = [head(f_WD) for head in list(self.heads)[: request.levels]]
        return DraftOutput(f_WD, [self.logits(x_WD, number) for number, x_WD in enumerate(features)])


# -- names in other software -------------------------------------------------------------------------------------------


def _medusa_name(name: str, config: MedusaConfig) -> str:
    """Return ``k.n.linear.weight`` for block n, ``k.N.weight`` for the LM head after N blocks."""
    return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{config.blocks}.", name.removeprefix("heads."))


def engine_config(draft: Medusa, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    config = draft.config
    keys = {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks, "medusa_fc_bias": True}
    shapes = {key: draft.shapes[key] for key in ("hidden_size", "vocab_size")}
    return {"architectures": [export.architecture], "model_type": "medusa", **keys, **shapes}


UNSUPPORTED = dict.fromkeys(("own_head", "head_bias"), "vLLM's heads are their own, without a bias")
NAMES = Names(
    forms={
        "vllm": FileFormat(_medusa_name, "MedusaModel", NO_OWN_VOCABULARY | UNSUPPORTED),
        "others": FileFormat(lambda name, config: f"medusa_head.{_medusa_name(name, config)}"),
    },
    engine_config=engine_config,
    method={"method": "medusa"},
    facts=facts,
    keys={"medusa_fc_bias": (True,)},
)
