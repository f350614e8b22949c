"""Speculative sampling with a small language model (arXiv 2302.01318), with trees and a cache like any draft.

``small-llama`` is trained here: a Llama of a few layers that reads only the text and learns the target's distribution.
The first token that it reads is t_1, since a batch pairs every token with the state before it. ``small-model`` is an
existing model with the target's tokenizer, and reads the full text.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.basics.errors import PipelineError
from pipeline.basics.public import public_name
from pipeline.decoding.contract import DraftOutput
from pipeline.drafts.parts.base import DraftConfig, Drafting, VocabularyConfig
from pipeline.drafts.parts.layers import UnregisteredModule
from pipeline.drafts.parts.losses import OwnHead, Term
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.names import NO_OWN_VOCABULARY, Export, FileFormat, Names
from pipeline.drafts.parts.reads_text import TextDrafting
from pipeline.lm.attention import FULL, GROUPED, packed_masks
from pipeline.lm.states import Needs, count_known_tokens
from pipeline.lm.verifier import Verifier

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


# -- trained here ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SmallLlamaConfig(VocabularyConfig):
    description: ClassVar = "Speculative sampling ([2302.01318](https://arxiv.org/abs/2302.01318)) with a small Llama,"

    kind: Literal["small-llama"] = "small-llama"
    layers: int = 2
    width: int = 256
    mlp_width: int = 768

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "layers", "width", "mlp_width")
        if self.width % (2 * self.attention_heads):
            raise ValueError(f"width={self.width} is no even multiple of its {self.attention_heads} attention heads")

    @property
    def attention_heads(self) -> int:
        """The number of attention heads: one per 64 numbers of the width, at least four."""
        return max(self.width // 64, 4)

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def terms(self, step: int) -> list[Term]:
        return [Term("next", 1, {"classification": 1.0}, self.objective)]


class SmallLlama(TextDrafting, TrainedDraft):
    config: SmallLlamaConfig
    skipped = 1

    def __init__(self, config: SmallLlamaConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        llama = LlamaConfig(
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.attention_heads,
            num_key_value_heads=config.attention_heads,
            vocab_size=shapes["vocab_size"],
            max_position_embeddings=shapes["max_position_embeddings"],
            rms_norm_eps=shapes["rms_norm_eps"],
            tie_word_embeddings=False,
        )
        llama._attn_implementation = GROUPED
        self.lm = LlamaForCausalLM(llama)
        self.lm.lm_head = OwnHead(config.width, self.vocabulary_size)
        rope: Any = self.lm.model.rotary_emb
        del self.lm.model.rotary_emb  # out of the module tree: a cast to bf16 must not change its frequencies
        self.lm.model.rotary_emb = UnregisteredModule(rope)
        self._reader: list[Verifier] = []

    def _share(self, draft_copy: Self) -> None:
        draft_copy.lm.model.rotary_emb = self.lm.model.rotary_emb

    @property
    def own_heads(self) -> list[OwnHead]:
        return [self.lm.lm_head]

    @property
    def borrowed(self) -> list[str]:
        return []

    def prepare(self) -> None:
        self._verifier()

    def _verifier(self) -> Verifier:
        if not self._reader or (self._reader[0].dtype, self._reader[0].device) != (self.dtype, self.device):
            self._reader = [Verifier(self.lm.eval(), self.lm.config, self.name)]
        return self._reader[0]

    def forward(self, batch: "Batch") -> tuple[list[Tensor], None]:
        mask, positions = packed_masks(batch.tokens_BT, batch.begins_BT, {FULL: None}, self.dtype)
        out = self.lm.model(input_ids=batch.tokens_BT, position_ids=positions, attention_mask=mask, use_cache=False)
        return [out.last_hidden_state], None

    def _read(self, tokens_N: Tensor, cache: Any, positions_N: Tensor | None, mask_NC: Tensor | None) -> Tensor:
        return self._verifier().forward(tokens_N, cache, positions_N, mask_NC).final_ND

    def _output(self, hidden_WD: Tensor) -> DraftOutput:
        return DraftOutput(hidden_WD, [self.logits(hidden_WD)])


def engine_config(draft: SmallLlama, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
    """Return the config of a language model."""
    return draft.lm.config.to_dict() | {"architectures": [export.architecture]}


NAMES = Names(
    {"vllm": FileFormat(lambda name, _: name.removeprefix("lm."), "LlamaForCausalLM", NO_OWN_VOCABULARY)},
    engine_config=engine_config,
    method={"method": "draft_model"},
)


# -- an existing model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SmallModelConfig(DraftConfig):
    description: ClassVar = (
        "Speculative sampling ([2302.01318](https://arxiv.org/abs/2302.01318)) with a smaller language model,"
    )
    trained: ClassVar = False

    kind: Literal["small-model"] = "small-model"
    model: str  # OWNER/NAME of the Hub, or a folder; with the target's tokenizer
    revision: str | None = None
    trust_remote_code: bool = False

    def public(self) -> "SmallModelConfig":
        return replace(self, model=public_name(self.model))

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)


class SmallModel(TextDrafting, Drafting):
    """A draft that is an existing small model. It guesses only tokens that both vocabularies have."""

    def __init__(self, config: SmallModelConfig, shapes: dict[str, Any]):
        self.config = config
        self.name: str = config.kind
        self.needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self.token_ids_U: Tensor | None = None
        self._reader: list[Verifier] = []

    def attach_model(self, reader: Verifier, tokenizer: Any, target_tokenizer: Any) -> None:
        """Attach the model, given both tokenizers. Raises PipelineError if these differ."""
        differ = set(tokenizer.get_vocab().items()) ^ set(target_tokenizer.get_vocab().items())
        if differ:
            token, number = min(differ, key=lambda entry: entry[1])
            raise PipelineError(
                f"draft {self.name!r}: {self.config.public().model} has another tokenizer than the target: they differ "
                f"in {len(differ)} tokens, the first is {token!r} ({number}). Name a model of the target's family"
            )
        self._reader = [reader]
        size = min(
            reader.head.linear.out_features, count_known_tokens(target_tokenizer)
        )  # either embedding may be padded
        if size < self.target_vocabulary:
            self.token_ids_U = torch.arange(size, device=reader.device)

    def _verifier(self) -> Verifier:
        if not self._reader:
            raise AssertionError("call read_by() before the first forward")
        return self._reader[0]

    def packable(self) -> list[nn.Module]:
        """Return the modules whose linear layers decoding may pack."""
        return [self._verifier().decoder, self._verifier().head]

    def _read(self, tokens_N: Tensor, cache: Any, positions_N: Tensor | None, mask_NC: Tensor | None) -> Tensor:
        return self._verifier().forward(tokens_N, cache, positions_N, mask_NC).final_ND

    def _output(self, hidden_WD: Tensor) -> DraftOutput:
        size = self.target_vocabulary if self.token_ids_U is None else len(self.token_ids_U)
        return DraftOutput(hidden_WD, [self._verifier().head(hidden_WD)[:, :size]])
