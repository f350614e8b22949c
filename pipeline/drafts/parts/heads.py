"""Drafts of one head for each token ahead (Medusa, Hydra): their settings, and LM heads of their own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.drafts.parts.base import VocabularyConfig
from pipeline.drafts.parts.losses import OwnHead, Term, named
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.names import Facts


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(VocabularyConfig):
    heads: int = 4
    blocks: int = 1  # residual ones, in each head
    own_head: bool = True  # each has an LM head of its own, which begins as the target's; or all take the target's
    head_bias: bool = False  # as the released Hydra's

    def __post_init__(self):
        super().__post_init__()
        self.at_least(1, "heads", "blocks")
        if self.head_bias and not self.own_head:
            raise ValueError("head_bias=true is of heads of their own: set own_head=true")

    @property
    def decay(self) -> float:
        """Of the loss's weight, for each token ahead: Medusa's."""
        return 0.8

    def terms(self, step: int) -> list[Term]:
        """The head for t_{i+1+k} has horizon k and weight decay^k."""
        own = range(self.heads) if self.own_head else [0] * self.heads
        names = zip(named(1, self.heads), own, strict=True)
        return [
            Term(name, k, {"classification": self.decay**k}, self.objective, head)
            for k, (name, head) in enumerate(names, start=1)
        ]


def own_heads(config: HeadsConfig, width: int, vocabulary: int) -> nn.ModuleList:
    count = config.heads if config.own_head else 0
    return nn.ModuleList(OwnHead(width, vocabulary, config.head_bias) for _ in range(count))


class HeadsDraft(TrainedDraft):
    """Its `lm_heads` are made where its own heads are."""

    config: HeadsConfig
    lm_heads: nn.ModuleList

    @property
    def own_heads(self) -> list[OwnHead]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def start_from_target(self, texts: list[list[int]]) -> None:
        """With its scale and bias; a soft cap is not among what a head has."""
        target = self.embed_head.head
        for head in self.own_heads:
            head.weight.data.copy_(target.linear.weight * target.scale)
            if head.bias is not None and target.linear.bias is not None:
                head.bias.data.copy_(target.linear.bias * target.scale)


def facts(draft: HeadsDraft, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> Facts:
    """Heads by what tensors there are: Medusa's released configs say two, and its weights have five. Blocks by the
    config, since a file may hold those once that its authors' code repeats.
    """
    heads = {at[1] for name in names if (at := re.match(r"(?:medusa_head\.|hydra_mlp\.|heads\.)?(\d+)\.", name))}
    if not heads:
        return {}
    own = [name for name in names if re.match(r"(hydra_)?lm_heads?\.|(medusa_head\.)?\d+\.\d+\.(weight|bias)$", name)]
    stated = {"heads": len(heads), "own_head": bool(own), "head_bias": any(name.endswith(".bias") for name in own)}
    layers = theirs.get("medusa_num_layers", theirs.get("hydra_num_layers"))
    stated |= {} if layers is None else {"blocks": layers}
    return {key: (value, getattr(draft.config, key)) for key, value in stated.items()}
