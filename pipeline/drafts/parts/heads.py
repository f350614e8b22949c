"""Drafts with one head for each token ahead (Medusa, Hydra): their settings, and their own LM heads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeline.drafts.parts.base import VocabularyConfig
from pipeline.drafts.parts.losses import OwnHead, Term, term_names
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.names import Facts


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(VocabularyConfig):
    heads: int = 4
    blocks: int = 1  # residual blocks in each head
    own_head: bool = True  # each has its own LM head, initialised as the target's; or all share the target's
    head_bias: bool = False  # as in the released Hydra

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "heads", "blocks")
        if self.head_bias and not self.own_head:
            raise ValueError("head_bias=true requires own heads; set own_head=true")

    @property
    def decay(self) -> float:
        """The factor of the loss's weight for each token ahead, as in Medusa."""
        return 0.8

    def terms(self, step: int) -> list[Term]:
        """Return the terms. The head for t_{i+1+k} has horizon k and weight decay^k."""
        head_numbers = range(self.heads) if self.own_head else [0] * self.heads
        names = zip(term_names(1, self.heads), head_numbers, strict=True)
        return [
            Term(name, k, {"classification": self.decay**k}, self.objective, head)
            for k, (name, head) in enumerate(names, start=1)
        ]


def make_lm_heads(config: HeadsConfig, width: int, vocabulary: int) -> nn.ModuleList:
    count = config.heads if config.own_head else 0
    return nn.ModuleList(OwnHead(width, vocabulary, config.head_bias) for _ in range(count))


class HeadsDraft(TrainedDraft):
    """A draft with heads. Subclasses create `lm_heads` together with their heads."""

    config: HeadsConfig
    lm_heads: nn.ModuleList

    @property
    def own_heads(self) -> list[OwnHead]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Copy the target's head into each own head, with its scale and bias; own heads have no soft cap."""
        target = self.embed_head.head
        for head in self.own_heads:
            head.weight.data.copy_(target.linear.weight * target.scale)
            if head.bias is not None and target.linear.bias is not None:
                head.bias.data.copy_(target.linear.bias * target.scale)


def facts(draft: HeadsDraft, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
    """Return the numbers of heads and blocks, the file's and ours.

    The heads are counted by tensors: Medusa's released configs say two, but the weights have five. The blocks are read
    from the config, because a file may hold one block that its authors' code repeats.
    """
    heads = {at[1] for name in tensors if (at := re.match(r"(?:medusa_head\.|hydra_mlp\.|heads\.)?(\d+)\.", name))}
    if not heads:
        return {}
    head_tensors = [
        name
        for name in tensors
        if re.match(r"(hydra_)?lm_heads?\.|token_heads\.|(medusa_head\.)?\d+\.\d+\.(weight|bias)$", name)
    ]
    stated = {
        "heads": len(heads),
        "own_head": bool(head_tensors),
        "head_bias": any(name.endswith(".bias") for name in head_tensors),
    }
    layers = config_json.get("medusa_num_layers", config_json.get("hydra_num_layers"))
    stated |= {} if layers is None else {"blocks": layers}
    return {key: (value, getattr(draft.config, key)) for key, value in stated.items()}
