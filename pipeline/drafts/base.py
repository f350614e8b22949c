"""What every draft is: a plug-in of three methods that training, the tree and the checkpoint know.

    loss(batch)                   sums of each branch's losses, for training
    start(state, hidden, tokens)  consumes verified inputs, answers after the last one
    step(state, frontier)         one forward for one level of the token tree

A draft answers with branches: horizon 1 is the feature of the next position, horizon 2 the one after it.
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from pipeline.basics.errors import PipelineError
from pipeline.drafts.layers import AttentionBlock, initialise, layer_config, rotary
from pipeline.drafts.losses import Prediction, branch_sums
from pipeline.features.batch import Batch
from pipeline.recipe.sections import BranchLoss, DraftBase, TreeConfig
from pipeline.target.attention import additive
from pipeline.target.cache import TreeCache
from pipeline.target.ends import Ends

AHEAD = ("next", "ahead", "ahead_3", "ahead_4", "ahead_5")  # names of the branches, by horizon


@dataclass
class DraftState:
    """One sequence's draft cache: `verified` inputs with true features, then the current tree's forwarded nodes."""

    cache: TreeCache = field(default_factory=TreeCache)
    verified: int = 0


@dataclass
class Frontier:
    """The W nodes of one level that are forwarded together."""

    tokens_W: Tensor  # target ids
    hidden_WD: Tensor  # the feature that stands before each node: its parent's answer
    seen_WC: Tensor  # bool over the tree nodes forwarded so far and this level's own: ancestors and itself
    depth: int  # of these nodes; the root's children have depth 1
    prefix_W: Tensor | None = None  # how many verified inputs each sees, from the first on; all of them by default


@dataclass
class Answer:
    """A forward's answer for W nodes; logits are over the draft vocabulary."""

    hidden_WD: Tensor  # feature of the next position, fed to the next level
    next_WU: Tensor  # logits of the next token
    ahead_WU: list[Tensor] = field(default_factory=list)  # of the tokens after that, from a tree's last forward
    experts_WKU: Tensor | None = None  # the kept experts' own logits of the next token, where the tree wants them
    log_weights_WK: Tensor | None = None  # their routing weights

    def broken(self) -> Tensor:
        """Whether a logit is not finite: a bool on the device, so that nobody waits for it here."""
        logits = [self.next_WU, *self.ahead_WU, *([] if self.experts_WKU is None else [self.experts_WKU])]
        return ~torch.stack([part.sum(dtype=torch.float32) for part in logits]).isfinite().all()


@dataclass
class Heads:
    """What one forward predicts, before the LM head."""

    ahead: list[Tensor]  # features (..., D) by horizon, from 1
    experts: list[Tensor] = field(
        default_factory=list
    )  # the K kept experts' own features for horizon 1, best-routed first
    log_weights: Tensor | None = None  # (..., K)


class Draft(nn.Module):
    """EAGLE's frame: fc over [embedding; feature], one decoder layer; what follows the attention is the subclass's.

    Embedding and head are the target's, frozen, shared by reference and never in the state dict.
    """

    def __init__(self, config: DraftBase, shapes: dict[str, Any]):
        super().__init__()
        self.config, self.shapes = config, shapes
        self.name: str = config.kind  # what messages call it; who loads it from a run's folder gives it that name
        llama = layer_config(shapes)
        width = llama.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList([self.build_layer(llama)])
        # Lists keep these out of the module tree: a cast to bf16 must not touch RoPE's frequencies, and the target's
        # ends are neither trained nor saved.
        self._rope = [rotary(llama)]
        self._ends: list[Ends] = []
        self.recompute = False  # in the backward, what the forward of a training pass kept
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
    def heads(self, u: Tensor, depth: int) -> Heads:
        """From the attention block's output; `depth` counts the draft's own features among the inputs (0: a true
        one).
        """

    # -- shared -------------------------------------------------------------------------------------------------

    @property
    def horizons(self) -> list[int]:
        return list(range(1, self.config.horizons + 1))

    def branch_losses(self) -> dict[str, BranchLoss]:
        """Branch -> the weights of its losses, for every branch of `predictions`."""
        config = self.config
        losses = dict.fromkeys(AHEAD[: config.horizons], config.ahead) | {"next": config.next}
        return losses | {f"own_{number}": config.own for number in range(2, config.rollout + 1)}

    @property
    def trained_features(self) -> int:
        """How many features all branches of `predictions` have."""
        return len(self.branch_losses())

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(seed))

    def set_vocabulary(self, ids_U: Tensor) -> None:
        """The target ids that the reduced vocabulary stands for, ascending."""
        assert self.draft_token_ids is not None and self.draft_token_ids.shape == ids_U.shape
        self.draft_token_ids.copy_(ids_U)

    def with_tree(self, tree: TreeConfig) -> "Draft":
        """The same draft, its weights shared, that grows other trees."""
        other = copy.copy(self)
        other.config = self.config.with_tree(tree)
        return other

    def bind(self, ends: Ends) -> None:
        """Gives the draft its target's ends; after weights and vocabulary are in place."""
        head = ends.head if self.draft_token_ids is None else ends.head.restricted(self.draft_token_ids)
        self._ends = [Ends(ends.embedding_VD, head, ends.fingerprint)]

    def move_ends(self, device: torch.device, dtype: torch.dtype) -> None:
        """Brings what the draft needs of its target's ends to where it computes; of a head, the reduced vocabulary's
        part.
        """
        self._ends = [self.ends.to(device, dtype)]

    def twin(self) -> "Draft":
        """Another draft of these shapes, in eval mode, that shares ends and rotary frequencies; its tensors have no
        content yet.
        """
        with torch.device("meta"):
            other = type(self)(self.config, self.shapes)
        other._ends, other._rope = list(self._ends), self._rope
        other.name = self.name
        return other.eval()

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

    def predictions(self, batch: Batch) -> dict[str, Prediction]:
        """Every trained branch at every position.

        In pass s of a roll-out the feature before position i is what pass s - 1 predicted for it, and the attention
        sees what a node at depth s sees: true features up to i - s + 1, then one own feature of each pass.
        """
        heads, keys_values = self._pass(1, batch, batch.hidden_BTD, ())
        found = {name: Prediction(h, [f]) for h, (name, f) in enumerate(zip(AHEAD, heads.ahead, strict=False), start=1)}
        found |= self.expert_predictions(heads)
        for number in range(2, self.config.rollout + 1):
            before_BTD = torch.cat([batch.hidden_BTD[:, :1], heads.ahead[0][:, :-1]], dim=1)
            if batch.begins_BT is not None:  # before the first input of each dialogue stands its true feature
                first = batch.begins_BT == torch.arange(batch.begins_BT.shape[1], device=before_BTD.device)
                before_BTD = torch.where(first[:, :, None], batch.hidden_BTD, before_BTD)
            heads, keys_values = self._pass(number, batch, before_BTD, keys_values)
            found[f"own_{number}"] = Prediction(1, [heads.ahead[0]])
        return found

    def _pass(
        self, number: int, batch: Batch, before_BTD: Tensor, keys_values: tuple[Tensor, ...]
    ) -> tuple[Heads, tuple[Tensor, ...]]:
        """Pass `number` of a roll-out on the features `before_BTD`: its heads, and keys and values of all passes so
        far.
        """
        tokens_BT, begins_BT = batch.tokens_BT, batch.begins_BT
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask = None
        if number > 1 or begins_BT is not None:
            mask = additive(rollout_sees(number, places, begins_BT), before_BTD.dtype)[:, None]

        def run(before_BTD: Tensor, *keys_values: Tensor) -> tuple[Heads, tuple[Tensor, ...]]:
            cache = DynamicCache() if self.config.rollout > 1 else None  # a new one: it may run twice
            if keys_values:
                cache.update(*keys_values, 0)
            positions = places[None] if begins_BT is None else places - begins_BT
            u = self._trunk(before_BTD, tokens_BT, positions, mask, cache)
            seen = () if cache is None else (cache.layers[0].keys, cache.layers[0].values)
            return self.heads(u, number - 1), seen

        if self.recompute and torch.is_grad_enabled():
            return checkpoint(run, before_BTD, *keys_values, use_reentrant=False)
        return run(before_BTD, *keys_values)

    def expert_predictions(self, heads: Heads) -> dict[str, Prediction]:
        """Trained branches of the experts, where the draft has any."""
        return {}

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """The weighted loss, each sum over the GLOBAL batch's trained positions, and the raw sums by branch."""
        predictions = self.predictions(batch)
        all_sums = branch_sums(predictions, batch, self.ends.head, self.vocabulary_size)
        total = torch.zeros((), device=batch.tokens_BT.device)
        for name, weights in self.branch_losses().items():
            sums = all_sums[name]
            weighted = weights.regression * sums["regression"] + weights.classification * sums["classification"]
            total = total + weighted / max(batch.totals[predictions[name].horizon], 1)
        return total, {b: {name: value.detach() for name, value in sums.items()} for b, sums in all_sums.items()}

    def forward(self, batch: Batch):
        """DeepSpeed calls the module; its forward is the loss."""
        return self.loss(batch)

    def _answer(self, u_WD: Tensor, depth: int, last: bool) -> Answer:
        """One call of the head for all that the tree needs of this forward."""
        heads, tree, head = self.heads(u_WD, depth), self.config.tree, self.ends.head
        features = heads.ahead[: tree.parallel] if last else heads.ahead[:1]
        experts = [] if tree.candidates == "plain" else heads.experts
        logits = (
            head(torch.stack([*features, *experts])) if len(features) + len(experts) > 1 else head(features[0])[None]
        )
        own = logits[len(features) :].transpose(0, 1) if experts else None
        return Answer(
            heads.ahead[0], logits[0], list(logits[1 : len(features)]), own, heads.log_weights if experts else None
        )

    @torch.inference_mode()
    def start(
        self, state: DraftState, hidden_TD: Tensor, tokens_T: Tensor, last: bool = False, answers: int = 1
    ) -> Answer:
        """Drops the last tree from the cache, consumes T verified inputs (f_i, t_{i+1}); answers after the last W =
        `answers`.

        `last`: no `step` follows, so that the branches ahead are wanted.
        """
        past, count = state.verified, len(tokens_T)
        state.cache.keep(past)
        device = hidden_TD.device
        mask = None
        if past and count > 1:
            seen = torch.ones(count, past + count, dtype=torch.bool, device=device).tril(past)
            mask = additive(seen, hidden_TD.dtype)[None, None]
        positions = torch.arange(past, past + count, device=device)[None]
        u = self._trunk(hidden_TD[None], tokens_T[None], positions, mask, state.cache)
        state.verified = past + count
        return self._answer(u[0, -answers:], 0, last)

    @torch.inference_mode()
    def step(self, state: DraftState, frontier: Frontier, last: bool = False) -> Answer:
        """One forward for the frontier's W nodes; each sees its verified prefix, its ancestors and itself."""
        device, prefix_W = frontier.hidden_WD.device, frontier.prefix_W
        if prefix_W is None:
            prefix_W = torch.full((len(frontier.tokens_W),), state.verified, device=device)
        prefix = torch.arange(state.verified, device=device) < prefix_W[:, None]
        mask = additive(torch.cat([prefix, frontier.seen_WC], dim=1), frontier.hidden_WD.dtype)[None, None]
        positions = (prefix_W + (frontier.depth - 1))[None]
        u = self._trunk(frontier.hidden_WD[None], frontier.tokens_W[None], positions, mask, state.cache)
        return self._answer(u[0], frontier.depth, last)


def rollout_sees(number: int, places_T: Tensor, begins_BT: Tensor | None) -> Tensor:
    """Bool (B or 1, T, number * T): what position i sees in pass `number`, over the keys of all passes so far; of its
    own dialogue only, where `begins_BT` says that a row holds several.
    """
    behind = places_T[:, None] - places_T[None, :]  # i - j
    blocks = [behind >= number - 1, *(behind == number - earlier for earlier in range(2, number + 1))]
    sees = torch.cat(blocks, dim=1)[None]
    if begins_BT is None:
        return sees
    same = begins_BT[:, :, None] == begins_BT[:, None, :]
    return sees & same.repeat(1, 1, number)
