"""What training, the checkpoint and the card know of a draft that is trained: `TrainedDraft` and its settings.

    terms(step)         which losses it has, by name, the next token's first: horizon, weights, objective
    predictions(batch)  what it predicts for each of them, at every position

Input i of a batch is the pair (the target's states of t_i, t_{i+1}); a term of horizon h has its label at i + h.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import DraftOutput, DraftRequest, Draws, Frontier, Pool, RoundInput, Timer, untimed
from pipeline.decoding.grow import best_pool, grow
from pipeline.decoding.tree import Tree
from pipeline.drafts.parts.layers import initialise
from pipeline.drafts.parts.losses import (
    OwnHead,
    Prediction,
    Teacher,
    Term,
    Vocabulary,
    chunk_rows,
    renormalised,
    term_sums,
)
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.states import Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


NEVER = -1e4  # a logit whose probability is 0, and finite in every dtype


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Settings):
    """What every draft's settings have, beside the `kind` that names it in a recipe."""

    description: ClassVar[str]  # for the card: the paper and what it is
    trained: ClassVar[bool] = True
    may_be_secondary: ClassVar[bool] = False  # it takes no forwards, and its candidates can fill another draft's tree
    runs_the_target: ClassVar[bool] = False  # its forwards go through the target's own blocks

    @property
    def has_experts(self) -> bool:
        """Whether more than one expert predicts the next token."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the draft's own vocabulary, where that is not the target's. A draft that can have one makes this a
        key.
        """
        return None

    @property
    def corpus(self) -> str | None:
        """A text file that it copies from. A draft that can have one makes this a key."""
        return None

    def public(self) -> "DraftConfig":
        """Without what is of this machine alone: for artifacts."""
        return self

    @property
    def auxiliary(self) -> Sequence[int | str]:
        """What it says of the target's decoder layers whose outputs it wants: numbers from 1, or "default"."""
        return ()

    def needs(self, target_layers: int) -> Needs:
        """What it wants of a target with so many decoder layers."""
        return Needs()

    def levels_of(self, number: int) -> int:
        """How many levels its forward of this number in a round, from 0, can answer; 0: it makes no such forward."""
        return 1

    def parallels(self, depth: int) -> list[int]:
        """How many last levels of a tree of this depth may come from one forward, its own choice first; none where it
        grows no tree so deep.
        """
        made = list(takewhile(self.levels_of, range(depth)))
        return [depth - number for number in made if self.levels_of(number) >= depth - number]

    def reach(self, tree: TreeConfig) -> int:
        """The deepest level that its trees of these settings can have."""
        return tree.depth

    def most(self, tree: TreeConfig) -> int:
        """Nodes, the root included, that such a tree has candidates for."""
        return tree.nodes if tree.paths else 1 + tree.top_k + tree.top_k * tree.top_k * (tree.depth - 1)

    def resolve(self, tree: TreeConfig) -> TreeConfig:
        """The tree with all that it left to the draft. Raises ValueError where the draft cannot grow it."""
        if tree.nodes > self.most(tree):
            raise ValueError(
                f"nodes={tree.nodes}, but depth {tree.depth} with top_k {tree.top_k} scores at most {self.most(tree)}"
            )
        choices = self.parallels(tree.depth)
        if not choices:
            deepest = max(filter(self.parallels, range(1, tree.depth)))
            raise ValueError(f"tree.depth={tree.depth}: this draft guesses at most {deepest} tokens ahead")
        parallel = choices[0] if tree.parallel is None else tree.parallel
        if parallel not in choices:
            raise ValueError(
                f"tree.parallel={parallel} takes that many levels from one forward: of a tree of depth {tree.depth} "
                f"this draft can take {' or '.join(map(str, sorted(choices)))}"
            )
        if tree.candidates != "plain" and not self.has_experts:
            raise ValueError(
                f"tree.candidates={tree.candidates!r} needs several experts a token that expect the next one; this "
                "draft has them not: use 'plain'"
            )
        return replace(tree, parallel=parallel)


class ByLevels:
    """A draft that answers level by level: its trees grow from `start` and `step`."""

    stepwise = True

    def propose(
        self: Any, state: Any, seen: RoundInput, tree: TreeConfig, draws: Draws | None, timer: Timer = untimed
    ) -> Tree:
        return grow(self, state, seen, tree, draws, timer)

    def pool(self: Any, state: Any, seen: RoundInput, tree: TreeConfig, count: int, timer: Timer = untimed) -> Pool:
        return best_pool(self, state, seen, tree, count, timer)

    def accept_probability(self, depth: int, score: float) -> float:
        """Its own probability of the path: the score is that one's logarithm."""
        return math.exp(min(score, 0.0))


class TrainedDraft(ByLevels, nn.Module):
    """A draft with weights. Embedding and head are the target's, frozen, shared by reference and never in the state
    dict; a head of its own is.
    """

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__()
        self.config, self.shapes = config, shapes
        self.name: str = config.kind  # what messages call it; who loads it from a run's folder gives it that name
        self.needs: Needs = config.needs(shapes["target_layers"])
        self.target_vocabulary: int = shapes["vocab_size"]
        self.recompute = False  # in the backward, what the forward of a training pass kept
        # A list keeps them out of the module tree: the target's own are neither trained nor saved.
        self._embed_head: list[EmbeddingAndHead] = []
        vocabulary = config.vocabulary
        if vocabulary and vocabulary > self.target_vocabulary:
            raise PipelineError(f"vocabulary={vocabulary} is more than the target's {self.target_vocabulary} tokens")
        self._guessed = self.vocabulary_size  # of its vocabulary, ascending; the rest has no token
        ids_U = torch.zeros(vocabulary, dtype=torch.long) if vocabulary else None
        self.register_buffer("draft_token_ids", ids_U)

    # -- the subclass's part ------------------------------------------------------------------------------------

    @abstractmethod
    def terms(self, step: int) -> dict[str, Term]:
        """Its losses at this optimiser step, the next token's first."""

    @abstractmethod
    def predictions(self, batch: "Batch") -> dict[str, Prediction]:
        """One for each term, at every position."""

    def warning(self, validation: dict[str, float]) -> str | None:
        """What a validation's averages tell that went wrong in training, and what to do."""
        return None

    @abstractmethod
    def open(self) -> Any: ...

    @abstractmethod
    def start(self, state: Any, seen: RoundInput, wanted: DraftRequest, places: int = 1) -> DraftOutput: ...

    @abstractmethod
    def step(self, state: Any, frontier: Frontier, wanted: DraftRequest) -> DraftOutput: ...

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

    def normed(self, features: Tensor) -> Tensor:
        """What an own head takes."""
        return features

    # -- checkpoints that others released -----------------------------------------------------------------------

    # Of a released config, beside what says nothing of the computation: key -> the values that are computed; none: any.
    released_keys: ClassVar[dict[str, tuple]] = {}

    @classmethod
    def released_names(cls, names: Collection[str]) -> dict[str, str | None]:
        """Our name of each of a released checkpoint's tensors; None for one that its authors' code never reads."""
        return {name: name for name in names}

    def released_facts(self, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        """What a released config, or what tensors there are (by our names), says of the draft's settings: our key ->
        (its value, ours).
        """
        return {}

    # -- shared -------------------------------------------------------------------------------------------------

    @property
    def token_ids_U(self) -> Tensor | None:
        return self.draft_token_ids  # type: ignore[return-value]

    @property
    def vocabulary_size(self) -> int:
        return self.config.vocabulary or self.target_vocabulary

    @property
    def teacher_vocabulary(self) -> int:
        """Tokens of the target's head that its teacher takes in training."""
        return self.vocabulary_size

    @property
    def horizons(self) -> list[int]:
        return sorted({term.horizon for term in self.terms(0).values()})

    @property
    def trained_features(self) -> int:
        """How many features with logits all its terms have."""
        return sum(term.features for term in self.terms(0).values())

    @property
    def passes(self) -> int:
        """Forwards of a training batch."""
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
        """Makes what decoding wants beside the weights, before anything is packed; after `bind`."""

    def start_from_target(self, texts: list[list[int]]) -> None:
        """What begins as a part of the target, in the draft at step 0, or as some texts go through it; after `bind`."""

    def set_vocabulary(self, ids_U: Tensor) -> None:
        """The target ids that the reduced vocabulary stands for, ascending."""
        assert self.token_ids_U is not None and self.token_ids_U.shape == ids_U.shape
        self.token_ids_U.copy_(ids_U)

    def bind(self, embed_head: EmbeddingAndHead) -> None:
        """Gives the draft its target's embedding and head; after weights and vocabulary are in place."""
        head = embed_head.head if self.token_ids_U is None else embed_head.head.restricted(self.token_ids_U)
        self._embed_head = [replace(embed_head, head=head)]
        if (known := self.shapes.get("known_tokens")) is not None:
            self._guessed = known if self.token_ids_U is None else int((self.token_ids_U < known).sum())

    def move_embed_head(self, device: torch.device, dtype: torch.dtype) -> None:
        """Brings what the draft needs of its target to where it computes; of a head, the reduced vocabulary's
        part.
        """
        self._embed_head = [self.embed_head.to(device, dtype)]

    def validation_copy(self) -> Self:
        """Another draft of these shapes, in eval mode, that shares ends and what else is not saved; its tensors have no
        content yet.
        """
        with torch.device("meta"):
            other = type(self)(self.config, self.shapes)
        other._embed_head, other.name, other._guessed = list(self._embed_head), self.name, self._guessed
        self._share(other)
        return other.eval()

    def _share(self, other: Self) -> None:
        """Gives a twin what is neither parameter nor buffer."""

    @property
    def embed_head(self) -> EmbeddingAndHead:
        if not self._embed_head:
            raise AssertionError("bind(ends) comes before the first forward")
        return self._embed_head[0]

    def logits(self, features: Tensor, head: int = 0) -> Tensor:
        """Over its vocabulary, to guess by: never what the target's tokenizer lacks, where its embedding is padded."""
        found = self._head(head)(self.normed(features))
        if self._guessed < self.vocabulary_size:
            found[..., self._guessed :] = NEVER
        return found

    def _head(self, number: int) -> Any:
        return self.own_heads[number] if self.own_heads else self.embed_head.head

    def _teacher(self) -> Teacher:
        """The target's distribution over the draft's vocabulary."""
        return renormalised(self.embed_head.head)

    def loss(self, batch: "Batch") -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """The weighted loss, each sum over the GLOBAL batch's trained positions, and the raw sums by term."""
        terms, predictions = self.terms(batch.step), self.predictions(batch)
        device = batch.labels_BTD.device
        chunk = chunk_rows(max(self.vocabulary_size * self.trained_features, self.teacher_vocabulary), 1, device)
        normed = self.normed if self.own_heads else None
        sums: dict[str, dict[str, Tensor]] = {}
        for number in sorted({term.head for term in terms.values()}):
            mine = {name: term for name, term in terms.items() if term.head == number}
            own = Vocabulary(self.vocabulary_size, self.token_ids_U)
            sums |= term_sums(mine, predictions, batch, self._teacher(), chunk, self._head(number), normed, own)
        total = torch.zeros((), device=device)
        for name, term in terms.items():
            weighted = sum(weight * sums[name][part] for part, weight in term.weights.items())
            total = total + weighted / max(batch.totals[term.horizon], 1)
        return total, {name: {part: x.detach() for part, x in parts.items()} for name, parts in sums.items()}

    def forward(self, batch: "Batch"):
        """DeepSpeed calls the module; its forward is the loss."""
        return self.loss(batch)
