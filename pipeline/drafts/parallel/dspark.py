"""DSpark (DeepSpec): DFlash's backbone, whose anchor also predicts a token, and a bias by the previous token.

Place k of the block at the anchor t_a predicts, from k = 0 on,

    logits of t_{a+k+1} = head(norm(h_k)) + w2 w1[t_{a+k}]

so a block of B places guesses B tokens. The bias has a low rank. The previous token is the text's in training, and the
parent in the tree in decoding: the layers and the head run once a round, and each further level is a lookup and one
small product. A node's score is the product of probabilities that are conditioned on the parent.

w1 has a row for each token of the target, w2 one for each token of the draft's vocabulary, as in vLLM's loader. The
paper's third part is left out: a head that is trained to predict sum min(p, q) at each place. It is not used here; vLLM
loads a draft without it and then estimates acceptance by itself.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.basics.accelerator import to_device
from pipeline.decoding.contract import DraftOutput, DraftRequest, Frontier, RoundInput
from pipeline.drafts.parallel.dflash import NAMES as DFLASH_NAMES
from pipeline.drafts.parallel.dflash import DFlash, DFlashConfig
from pipeline.drafts.parallel.dflash import engine_config as dflash_config
from pipeline.drafts.parts.losses import BiasedHead, LossKind, OwnHead
from pipeline.drafts.parts.names import NO_OWN_VOCABULARY, Export, FileFormat
from pipeline.drafts.parts.one_layer import DraftState

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

W1, W2 = "markov_w1", "markov_w2"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    description: ClassVar = "DSpark, blocks of tokens in one forward, each corrected by the token before,"
    trains_behind_gaps: ClassVar[bool] = False

    kind: Literal["dspark"] = "dspark"  # type: ignore[assignment]
    block: int = 7
    rank: int = 256  # of the bias
    gamma: float = 4.0
    objective: LossKind = "l1"

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "rank")

    @property
    def levels(self) -> int:
        return self.block

    def levels_of(self, number: int) -> int:
        return 1 if number < self.block else 0


@dataclass
class DSparkState(DraftState):
    """A draft cache with the logits of the current block."""

    base_LAU: Tensor | None = None  # the block's logits without a bias, by level and place


class DSpark(DFlash):
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        w1, w2 = nn.Embedding(self.target_vocabulary, config.rank), OwnHead(config.rank, self.vocabulary_size)
        self.markov_head = nn.ModuleDict({W1: w1, W2: w2})

    @property
    def own_heads(self) -> list[OwnHead]:
        return [self.markov_head[W2]]  # type: ignore[list-item]

    @property
    def borrowed(self) -> list[str]:
        return ["embedding", "head"]

    def head(self, number: int) -> BiasedHead:
        return BiasedHead(self.embed_head.head, *self.own_heads)

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        """Return DFlash's features, each row concatenated with w1 of the previous token."""
        tokens, features = batch.tokens_BT.flatten(), []
        for level, feature_MD in enumerate(super().forward(batch)[0], start=1):
            before_M = tokens[to_device(np.asarray(batch.positions[level].labels), tokens.device)]
            features.append(torch.cat([feature_MD, self.markov_head[W1](before_M)], dim=1))
        return features, None

    # -- decoding -------------------------------------------------------------------------------------------------

    def open(self) -> DSparkState:
        return DSparkState()

    @torch.inference_mode()
    def start(self, state: DraftState, inputs: RoundInput, request: DraftRequest, places: int = 1) -> DraftOutput:
        assert isinstance(state, DSparkState)
        state.base_LAU = self._mask_padding(self.embed_head.head(self._block_features(state, inputs, places)))
        return self._biased(state.base_LAU[0], to_device(inputs.tokens[-places:], state.base_LAU.device))

    @torch.inference_mode()
    def step(self, state: DSparkState, frontier: Frontier, request: DraftRequest) -> DraftOutput:
        assert state.base_LAU is not None
        return self._biased(state.base_LAU[frontier.depth], frontier.tokens_W)

    def _biased(self, base_AU: Tensor, tokens_W: Tensor) -> DraftOutput:
        """Return logits after these tokens, equally many for each place. The carry is only the token."""
        bias_WU = self.markov_head[W2](self.markov_head[W1](tokens_W))
        logits_WU = base_AU.repeat_interleave(len(tokens_W) // len(base_AU), dim=0) + bias_WU
        return DraftOutput(tokens_W[:, None], [logits_WU])


# -- names in other software -------------------------------------------------------------------------------------------


def engine_config(draft: DSpark, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    return dflash_config(draft, weights, export) | {"markov_rank": draft.config.rank, "markov_head_type": "vanilla"}


CONFIDENCE_KEYS = ("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha")
NAMES = replace(
    DFLASH_NAMES,
    # Not tried, since vLLM runs it only on GPUs.
    forms={"vllm": FileFormat(architecture="Qwen3DSparkModel", unsupported=NO_OWN_VOCABULARY, is_tried=False)},
    engine_config=engine_config,
    method={"method": "dspark"},
    settings={**DFLASH_NAMES.settings, "rank": "markov_rank"},
    keys={
        **DFLASH_NAMES.keys,
        **dict.fromkeys(CONFIDENCE_KEYS, ()),
        "markov_head_type": ("vanilla",),
        "projector_type": ("dspark",),
        "sample_from_anchor": (True,),
        "speculators_model_type": ("dspark",),
    },
    ignored_tensors=r"confidence_head\.",
)
