"""The weights of a draft: `DraftModule`, independent of trees, losses and files; and `TrainedDraft`, which drafts."""

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.drafts.parts.base import Drafting
from pipeline.drafts.parts.layers import initialise
from pipeline.drafts.parts.losses import OwnHead
from pipeline.lm.states import EmbeddingAndHead, Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

MASKED_LOGIT = -1e4  # a logit whose probability is 0, and finite in every dtype


class DraftModule(nn.Module):
    """A draft's weights and forward pass.

    Embedding and head are the target's: frozen, shared by reference, and never in the state dict. The draft's own
    head, if it has one, is in the state dict.
    """

    has_target_layer: ClassVar = False  # its layer is one of the target's family: it needs `shapes["layer"]`

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__()
        self.config = config
        self.shapes = {key: value for key, value in shapes.items() if self.has_target_layer or key != "layer"}
        # For messages; replaced by the recipe's name for drafts loaded from a run's folder.
        self.name: str = config.kind
        self.needs: Needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self.has_weights = False  # given before training, so that they are measured before it, too
        self.recompute = False  # recompute activations in the backward instead of keeping them
        self.compiled = False  # training's functions over the vocabulary
        # In a list, so outside of the module tree: the target's weights are neither trained nor saved.
        self._embed_head: list[EmbeddingAndHead] = []
        vocabulary = config.vocabulary
        if vocabulary and vocabulary > self.target_vocabulary:
            raise PipelineError(f"vocabulary={vocabulary} is more than the target's {self.target_vocabulary} tokens")
        self._guessable = self.vocabulary_size  # number of first tokens that the tokenizer has
        ids_U = torch.zeros(vocabulary, dtype=torch.long) if vocabulary else None
        self.register_buffer("draft_token_ids", ids_U)

    @abstractmethod
    def forward(self, batch: "Batch") -> tuple[list[Tensor], Any]:
        """Return features for training, in the order of the objective's terms, and the inputs of penalty terms.

        A feature is (B, T, D), at every input, or (M, D), only at the M positions of its term's group.
        """

    @property
    def own_heads(self) -> list[OwnHead]:
        """The draft's own LM heads, if it has any: `Term.head` is an index into them."""
        return []

    @property
    def own_head_parameters(self) -> int:
        return sum(head.weight.numel() for head in self.own_heads)

    @property
    def borrowed(self) -> list[str]:
        """The parts of the target that the draft uses: "embedding", "head", "blocks"."""
        return ["embedding"] if self.own_heads else ["embedding", "head"]

    def mlp_config(self) -> dict[str, Any]:
        """Return keys of an engine's config.json for the layers after the attention, if they are not a Llama MLP."""
        return {}

    def head_input(self, features: Tensor) -> Tensor:
        """Return the input of the draft's own head."""
        return features

    @property
    def token_ids_U(self) -> Tensor | None:
        return self.draft_token_ids  # type: ignore[return-value]

    @property
    def vocabulary_size(self) -> int:
        return self.config.vocabulary or self.target_vocabulary

    @property
    def teacher_vocabulary(self) -> int:
        """The number of tokens over which the teacher computes the target's distribution in training."""
        return self.target_vocabulary if self.config.needs_full_head else self.vocabulary_size

    @property
    def training_forwards(self) -> int:
        """The number of the draft's forward passes over all inputs of one training batch."""
        return 1

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(seed))

    def packable(self) -> list[nn.Module]:
        """Return the modules whose linear layers decoding may pack."""
        return [self, self.embed_head.head]

    def prepare(self) -> None:
        """Build what decoding needs in addition to the weights; after `bind`, before linear layers are packed."""

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Initialise weights that are copied from the target (Medusa's and Hydra's heads) or fitted to `texts` (a
        skipper's routers); after `bind`, before step 0.
        """

    def set_vocabulary(self, ids_U: Tensor) -> None:
        """Set the target ids of the reduced vocabulary, ascending."""
        assert self.token_ids_U is not None and self.token_ids_U.shape == ids_U.shape
        self.token_ids_U.copy_(ids_U)

    def bind(self, embed_head: EmbeddingAndHead) -> None:
        """Attach the target's embedding and head; after weights and vocabulary are in place.

        Only the reduced vocabulary's part of the head is kept, unless training needs all of it.
        """
        head = embed_head.head
        if self.token_ids_U is not None and not self.config.needs_full_head:
            head = head.restrict(self.token_ids_U)
        self._embed_head = [replace(embed_head, head=head)]
        if (known_tokens := self.shapes.get("known_tokens")) is not None:
            self._guessable = known_tokens if self.token_ids_U is None else int((self.token_ids_U < known_tokens).sum())

    def move_embed_head(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the embedding and head that `bind` attached."""
        self._embed_head = [self.embed_head.to(device, dtype)]

    def validation_copy(self) -> Self:
        """Return a second draft of these shapes in eval mode, whose tensors have no content yet.

        It shares the target's parts and whatever else is not saved.
        """
        with torch.device("meta"):
            draft_copy = type(self)(self.config, self.shapes)
        draft_copy._embed_head, draft_copy.name, draft_copy._guessable = (
            list(self._embed_head),
            self.name,
            self._guessable,
        )
        self._share(draft_copy)
        return draft_copy.eval()

    def _share(self, draft_copy: Self) -> None:
        """Share with a copy what is neither parameter nor buffer."""

    @property
    def embed_head(self) -> EmbeddingAndHead:
        if not self._embed_head:
            raise AssertionError("bind(embed_head) comes before the first forward")
        return self._embed_head[0]

    def logits(self, features: Tensor, head: int = 0) -> Tensor:
        """Return logits over the draft's vocabulary, for drafting."""
        return self._mask_padding(self.head(head)(self.head_input(features)))

    def _mask_padding(self, logits: Tensor) -> Tensor:
        """Mask, in place, the logits of tokens that the tokenizer lacks because the target's embedding is padded."""
        if self._guessable < self.vocabulary_size:
            logits[..., self._guessable :] = MASKED_LOGIT
        return logits

    def head(self, number: int) -> Any:
        """Return the draft's own LM head of this number, or else the target's."""
        return self.own_heads[number] if self.own_heads else self.embed_head.head


class TrainedDraft(Drafting, DraftModule):
    """A draft with weights and the drafting methods. Its training objective is separate (objective.py)."""
