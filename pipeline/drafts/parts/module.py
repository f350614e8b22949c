"""The weights of a draft: `DraftModule`, which knows nothing of trees, losses or files; `TrainedDraft` drafts, too."""

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.drafts.parts.base import Drafting
from pipeline.drafts.parts.layers import initialise
from pipeline.drafts.parts.losses import OwnHead
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.states import Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

NEVER = -1e4  # a logit whose probability is 0, and finite in every dtype


class DraftModule(nn.Module):
    """A draft's weights and forward. Embedding and head are the target's, frozen, shared by reference and never in the
    state dict; a head of its own is.
    """

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__()
        self.config, self.shapes = config, shapes
        self.name: str = config.kind  # what messages call it; who loads it from a run's folder gives it that name
        self.needs: Needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self.recompute = False  # activations in the backward, instead of keeping them
        # A list keeps them out of the module tree: the target's own are neither trained nor saved.
        self._embed_head: list[EmbeddingAndHead] = []
        vocabulary = config.vocabulary
        if vocabulary and vocabulary > self.target_vocabulary:
            raise PipelineError(f"vocabulary={vocabulary} is more than the target's {self.target_vocabulary} tokens")
        self._guessed = self.vocabulary_size  # the first so many of its vocabulary: the tokenizer has no others
        ids_U = torch.zeros(vocabulary, dtype=torch.long) if vocabulary else None
        self.register_buffer("draft_token_ids", ids_U)

    @abstractmethod
    def forward(self, batch: "Batch") -> tuple[list[Tensor], Any]:
        """For training: its features, in the order of its objective's terms; and what penalties are formed from.

        A feature is (B, T, D), at every input, or (M, D), at the M positions of its term's group alone.
        """

    @property
    def own_heads(self) -> list[OwnHead]:
        """Its own LM heads, where it has some: `Term.head` says which is a term's."""
        return []

    @property
    def own_head_parameters(self) -> int:
        return sum(head.weight.numel() for head in self.own_heads)

    @property
    def borrowed(self) -> list[str]:
        """Which of the target's parts it uses."""
        return ["embedding"] if self.own_heads else ["embedding", "head"]

    def behind_attention(self) -> dict[str, Any]:
        """What engines' config.json says of what follows its attention, where that is no Llama's MLP."""
        return {}

    def normed(self, features: Tensor) -> Tensor:
        """What an own head takes."""
        return features

    @property
    def token_ids_U(self) -> Tensor | None:
        return self.draft_token_ids  # type: ignore[return-value]

    @property
    def vocabulary_size(self) -> int:
        return self.config.vocabulary or self.target_vocabulary

    @property
    def teacher_vocabulary(self) -> int:
        """Tokens of the target's head that its teacher takes in training."""
        return self.target_vocabulary if self.config.asks_whole_head else self.vocabulary_size

    @property
    def training_forwards(self) -> int:
        """How many forwards of the draft a training batch takes."""
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
        """What decodes."""
        return [self, self.embed_head.head]

    def prepare(self) -> None:
        """Builds what decoding needs beside the weights; after `bind`, before linear layers are packed."""

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Initialises what is copied from the target (Medusa's and Hydra's heads) or fitted to `texts` (a skipper's
        routers); before step 0, after `bind`.
        """

    def set_vocabulary(self, ids_U: Tensor) -> None:
        """The target ids that the reduced vocabulary stands for, ascending."""
        assert self.token_ids_U is not None and self.token_ids_U.shape == ids_U.shape
        self.token_ids_U.copy_(ids_U)

    def bind(self, embed_head: EmbeddingAndHead) -> None:
        """Gives the draft its target's embedding and head, of which it keeps the reduced vocabulary's part unless
        training asks for all of it; after weights and vocabulary are in place.
        """
        head = embed_head.head
        if self.token_ids_U is not None and not self.config.asks_whole_head:
            head = head.restricted(self.token_ids_U)
        self._embed_head = [replace(embed_head, head=head)]
        if (known := self.shapes.get("known_tokens")) is not None:
            self._guessed = known if self.token_ids_U is None else int((self.token_ids_U < known).sum())

    def move_embed_head(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the embedding and head that `bind` kept."""
        self._embed_head = [self.embed_head.to(device, dtype)]

    def validation_copy(self) -> Self:
        """Another draft of these shapes, in eval mode, that shares its target's parts and what else is not saved; its
        tensors have no content yet.
        """
        with torch.device("meta"):
            other = type(self)(self.config, self.shapes)
        other._embed_head, other.name, other._guessed = list(self._embed_head), self.name, self._guessed
        self._share(other)
        return other.eval()

    def _share(self, other: Self) -> None:
        """Gives a copy what is neither parameter nor buffer."""

    @property
    def embed_head(self) -> EmbeddingAndHead:
        if not self._embed_head:
            raise AssertionError("bind(embed_head) comes before the first forward")
        return self._embed_head[0]

    def logits(self, features: Tensor, head: int = 0) -> Tensor:
        """Over its vocabulary, to guess by."""
        return self._known(self.head(head)(self.normed(features)))

    def _known(self, found: Tensor) -> Tensor:
        """Logits that never guess what the target's tokenizer lacks, where its embedding is padded."""
        if self._guessed < self.vocabulary_size:
            found[..., self._guessed :] = NEVER
        return found

    def head(self, number: int) -> Any:
        """The LM head of that number: its own, or the target's."""
        return self.own_heads[number] if self.own_heads else self.embed_head.head


class TrainedDraft(Drafting, DraftModule):
    """A draft with weights, which drafts, too; what it is trained on stands apart (objective.py)."""
