"""What every draft is: a plug-in of three methods that training, the tree and the checkpoint know.

    loss(batch)                   sums of each branch's losses, for training
    start(state, hidden, tokens)  consumes verified inputs, answers after the last one
    step(state, frontier)         one forward for one level of the token tree

A draft answers with branches: horizon 1 is the feature of the next position, horizon 2 the one after it.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pipeline.batch import Batch
from pipeline.drafts.layers import AttentionBlock, initialise, layer_config, rotary
from pipeline.errors import PipelineError
from pipeline.losses import branch_sums
from pipeline.sections import BranchLoss, DraftBase
from pipeline.target import Ends, additive


@dataclass
class DraftState:
    """One sequence's draft cache: `verified` inputs with true features, then the current tree's forwarded nodes."""

    cache: DynamicCache = field(default_factory=DynamicCache)
    verified: int = 0


@dataclass
class Frontier:
    """The W nodes of one level that are forwarded together."""

    tokens_W: Tensor  # target ids
    hidden_WD: Tensor  # the feature that stands before each node: its parent's answer
    seen_WC: Tensor  # bool over the tree nodes forwarded so far and this level's own: ancestors and itself
    depth: int  # of these nodes; the root's children have depth 1


@dataclass
class Answer:
    """A forward's answer for W nodes."""

    hidden_WD: Tensor  # feature of the next position, fed to the next level
    next_WU: Tensor  # logits of the next token, over the draft vocabulary
    ahead_WU: Tensor | None  # logits of the token after that, where the draft has such a branch


class Draft(nn.Module):
    """EAGLE's frame: fc over [embedding; feature], one decoder layer; what follows the attention is the subclass's.

    Embedding and head are the target's, frozen, shared by reference and never in the state dict.
    """

    def __init__(self, config: DraftBase, shapes: dict[str, Any]):
        super().__init__()
        self.config, self.shapes = config, shapes
        llama = layer_config(shapes)
        width = llama.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([self.build_layer(llama)])
        # Lists keep these out of the module tree: a cast to bf16 must not touch RoPE's frequencies, and the target's
        # ends are neither trained nor saved.
        self._rope = [rotary(llama)]
        self._ends: list[Ends] = []
        if config.vocabulary:
            if config.vocabulary > llama.vocab_size:
                raise PipelineError(
                    f"vocabulary={config.vocabulary} is more than the target's {llama.vocab_size} tokens"
                )
            self.register_buffer("draft_token_ids", torch.zeros(config.vocabulary, dtype=torch.long))
        else:
            self.draft_token_ids = None

    # -- the subclass's part ------------------------------------------------------------------------------------

    @abstractmethod
    def build_layer(self, llama: Any) -> AttentionBlock: ...

    @abstractmethod
    def branches(self, u: Tensor) -> dict[int, Tensor]:
        """Horizon -> predicted feature, from the attention block's output."""

    @abstractmethod
    def branch_losses(self) -> dict[int, BranchLoss]:
        """Horizon -> the weights of its losses."""

    # -- shared -------------------------------------------------------------------------------------------------

    @property
    def horizons(self) -> list[int]:
        return sorted(self.branch_losses())

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(seed))

    def set_vocabulary(self, ids_U: Tensor) -> None:
        """The target ids that the reduced vocabulary stands for, ascending."""
        assert self.draft_token_ids is not None and self.draft_token_ids.shape == ids_U.shape
        self.draft_token_ids.copy_(ids_U)

    def bind(self, ends: Ends) -> None:
        """Gives the draft its target's ends; after weights and vocabulary are in place."""
        head = ends.head if self.draft_token_ids is None else ends.head.restricted(self.draft_token_ids)
        self._ends = [Ends(ends.embedding_VD, head, ends.fingerprint)]

    @property
    def ends(self) -> Ends:
        if not self._ends:
            raise AssertionError("bind(ends) comes before the first forward")
        return self._ends[0]

    @property
    def vocabulary_size(self) -> int:
        return self.config.vocabulary or self.shapes["vocab_size"]

    def _trunk(self, hidden_BTD: Tensor, tokens_BT: Tensor, positions_BT: Tensor, mask: Tensor | None, cache) -> Tensor:
        embedded = nn.functional.embedding(tokens_BT, self.ends.embedding_VD) * self.config.embedding_scale
        x = self.fc(torch.cat([embedded.to(hidden_BTD.dtype), hidden_BTD], dim=-1))
        rope = self._rope[0].to(x.device)
        return self.layers[0].attend(x, rope(x, positions_BT), mask, cache)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
        """The weighted loss, each sum over the GLOBAL batch's trained positions, and the raw sums by horizon."""
        positions = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)[None]
        u = self._trunk(batch.hidden_BTD, batch.tokens_BT, positions, None, None)
        all_sums = branch_sums(self.branches(u), batch, self.ends.head, self.vocabulary_size)
        total = torch.zeros((), device=u.device)
        for horizon, weights in self.branch_losses().items():
            sums = all_sums[horizon]
            weighted = weights.regression * sums["regression"] + weights.classification * sums["classification"]
            total = total + weighted / max(batch.totals[horizon], 1)
        return total, {h: {name: value.detach() for name, value in sums.items()} for h, sums in all_sums.items()}

    def forward(self, batch: Batch):
        """DeepSpeed calls the module; its forward is the loss."""
        return self.loss(batch)

    def _answer(self, u_WD: Tensor) -> Answer:
        branches = self.branches(u_WD)
        head = self.ends.head
        ahead = head(branches[2]) if 2 in branches and self.config.tree.hybrid else None
        return Answer(branches[1], head(branches[1]), ahead)

    @torch.inference_mode()
    def start(self, state: DraftState, hidden_TD: Tensor, tokens_T: Tensor) -> Answer:
        """Drops the last tree from the cache, consumes T verified inputs (f_i, t_{i+1}); answers after the last (W=1)."""
        past, count = state.verified, len(tokens_T)
        for layer in state.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :past], layer.values[:, :, :past]
        device = hidden_TD.device
        mask = None
        if past and count > 1:
            seen = torch.ones(count, past + count, dtype=torch.bool, device=device).tril(past)
            mask = additive(seen, hidden_TD.dtype)[None, None]
        positions = torch.arange(past, past + count, device=device)[None]
        u = self._trunk(hidden_TD[None], tokens_T[None], positions, mask, state.cache)
        state.verified = past + count
        return self._answer(u[0, -1:])

    @torch.inference_mode()
    def step(self, state: DraftState, frontier: Frontier) -> Answer:
        """One forward for the frontier's W nodes; each sees the verified prefix, its ancestors and itself."""
        device, width = frontier.hidden_WD.device, len(frontier.tokens_W)
        prefix = torch.ones(width, state.verified, dtype=torch.bool, device=device)
        mask = additive(torch.cat([prefix, frontier.seen_WC], dim=1), frontier.hidden_WD.dtype)[None, None]
        positions = torch.full((1, width), state.verified + frontier.depth - 1, device=device)
        u = self._trunk(frontier.hidden_WD[None], frontier.tokens_W[None], positions, mask, state.cache)
        return self._answer(u[0])
