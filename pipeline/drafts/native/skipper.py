"""The target as its own draft: at each block a small router lets the tokens that it finds unimportant skip the block.

The method follows FTP (arXiv 2412.11494), which prunes a model that way. Here the pruned target only guesses and the
complete one verifies, so decoding is lossless. With s_l the share of tokens that skip block l, and x a token's residual
stream:

    r_l = router_l(place, turn, passed, s_l)      x <- Block_l(x) where r_l > 0, x elsewhere

    place    log2(1 + position) / 16
    turn     log10(0.001 + 1 - cos(y, x)) of the last block that computed the token, from y to x: ShortGPT's influence
             of a block (arXiv 2403.03853), on one token; 0 before the first
    passed   the share of the blocks so far that the token skipped

A token has keys and values only in the blocks that compute it: in the others no token attends to it, and it takes no
memory. The first tokens of a text skip no block: they are attention sinks, and blocks turn them least of all. FTP's
router reads the attention that a token gets and its rank, instead of `turn` and `passed`; but no later token has
attended to a token that is being drafted, so the inputs here come from its own past. Training is distillation: only the
routers learn, with the gradient of r's sigmoid in place of the decision's. FTP's guide loss, which imitates a static
router, is left out: the routers are initialised as one, a threshold on `turn` + 10 `passed` for which a share s_l of
the tokens skips the block: among the tokens that have skipped fewest blocks, those that were turned least. (By `turn`
alone the same tokens would skip all blocks, because its last value stays.)
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import checkpoint

from pipeline.basics.accelerator import to_device
from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput
from pipeline.drafts.parts.base import TrainedConfig
from pipeline.drafts.parts.losses import Term
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.reads_text import TextDrafting, TextState
from pipeline.lm.attention import attention_windows, causal_mask, layer_masks, packed_masks
from pipeline.lm.cache import TreeCache
from pipeline.lm.states import Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

ROUTER_INPUTS, ROUTER_WIDTH = 4, 8  # a router's inputs, and its hidden neurons
SLOPE = 4.0  # of the static router, per unit of `turn`
PASSED_WEIGHT = 10.0  # the weight of `passed` in these units
FIRST_TOKENS = 4  # tokens of a text that every block computes


@dataclass(frozen=True, kw_only=True)
class SkipperConfig(TrainedConfig):
    description: ClassVar = (
        "The target, whose blocks some tokens pass by (after [2412.11494](https://arxiv.org/abs/2412.11494)),"
    )
    runs_the_target: ClassVar = True

    kind: Literal["skipper"] = "skipper"
    # Share of tokens that skip a block: on average over all blocks (the first and the last compute every token), or a
    # list with one share for each block.
    sparsity: float | list[float] = 0.5

    def __post_init__(self):
        shares = self.sparsity if isinstance(self.sparsity, list) else [0.0, self.sparsity]
        if not all(0 <= share <= 1 for share in shares) or not any(0 < share < 1 for share in shares):
            raise ValueError(
                f"sparsity={self.sparsity}: expected a share between 0 and 1, or one per block, some of them between"
            )
        if shares[0]:
            raise ValueError(
                f"sparsity={self.sparsity}: the first block has to compute every token, since its router would have no "
                "inputs; begin with 0"
            )

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def terms(self, step: int) -> list[Term]:
        next_term = Term("next", 1, {"classification": 1.0}, self.objective)
        return [next_term, Term("sparsity", 1, {"penalty": 1.0})]

    def shares(self, blocks: int) -> list[float]:
        """Return s_l of each block. Raises PipelineError for settings that do not fit the number of blocks."""
        if isinstance(self.sparsity, list):
            if len(self.sparsity) != blocks:
                raise PipelineError(
                    f"sparsity has {len(self.sparsity)} shares, but the target has {blocks} blocks: give one per block"
                )
            return self.sparsity
        between = blocks - 2
        if between < 1 or self.sparsity * blocks >= between:
            raise PipelineError(
                f"sparsity={self.sparsity}: the first and the last of {blocks} blocks compute every token; "
                f"expected less than {max(between, 0)}/{blocks}, or a list of shares"
            )
        return [0.0, *[self.sparsity * blocks / between] * between, 0.0]


class SkipCache(TreeCache):
    """The keys and values of the tokens that each block computed; `length` counts all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, Tensor] = {}  # block -> positions of these tokens, ascending

    def keep(self, prefix: int, path: Sequence[int] = ()) -> None:
        assert not path
        for block, places in self.places.items():
            self.places[block] = kept_places = places[: int(torch.searchsorted(places, prefix))]
            self.layers[block].keep(len(kept_places), None, 0)
        self.length = prefix


@dataclass
class RoutingState:
    """The routing state of a forward's tokens from block to block. All tensors are (B, T)."""

    place: Tensor
    first: Tensor  # whether the token is one of the first of its text
    turn: Tensor
    passed: Tensor  # number of skipped blocks
    computed: list[Tensor] = field(default_factory=list)  # by block: 1 if it computes the token, with r's gradient
    calibrates: bool = False  # set each router to the static one during the forward


class Router(nn.Module):
    """The router of a block: positive if the block computes the token."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(ROUTER_INPUTS, ROUTER_WIDTH), nn.Linear(ROUTER_WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the score (...) for router inputs (..., 4)."""
        return self.outer(F.silu(self.inner(numbers.to(self.outer.weight.dtype))))[..., 0].float()

    @torch.no_grad()
    def make_static(self, threshold: float) -> None:
        """Set the score to SLOPE (turn + PASSED_WEIGHT passed - threshold), as z = SiLU(z) - SiLU(-z).

        The output weights of the other neurons are set to 0.
        """
        self.outer.weight.zero_()
        self.outer.bias.zero_()
        for neuron, sign in enumerate((1.0, -1.0)):
            self.inner.weight[neuron] = sign * SLOPE * torch.tensor([0.0, 1.0, PASSED_WEIGHT, 0.0])
            self.inner.bias[neuron] = -sign * SLOPE * threshold
            self.outer.weight[0, neuron] = sign


class RoutedBlock(nn.Module):
    """A decoder block that some tokens skip. It is called like the block."""

    def __init__(self, block: nn.Module, number: int, draft: "Skipper"):
        super().__init__()
        self.block, self.number = block, number
        self._draft = [draft]  # in a list, outside of the module tree

    def __getattr__(self, name: str) -> Any:
        """Return attributes that a decoder reads from its blocks, such as their kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, past_key_values: Any = None, **arguments: Any
    ) -> Tensor:
        routing, draft = self._draft[0].routing, self._draft[0]
        score = self._score(draft, routing)
        keeps = score > 0
        routing.computed.append(keeps + (p := score.sigmoid()) - p.detach())
        if past_key_values is not None:
            out = self._compute_selected(hidden_states, attention_mask, past_key_values, keeps, arguments)
        else:
            out = self._compute_all(hidden_states, attention_mask, keeps, p, arguments)
        with torch.no_grad():
            distance = 1 - F.cosine_similarity(hidden_states.float(), out.float(), dim=-1)
            turn = (1e-3 + distance.clamp_min(0)).log10()
            routing.turn = torch.where(keeps, turn, routing.turn)
            routing.passed = routing.passed + ~keeps
        return out

    def _score(self, draft: "Skipper", routing: RoutingState) -> Tensor:
        share = draft.shares[self.number]
        if not 0 < share < 1:
            return torch.full_like(routing.turn, 1.0 - 2 * share)
        router: Any = draft.routers[str(self.number)]
        passed = routing.passed / max(self.number, 1)
        if routing.calibrates:
            static_scores = (routing.turn + PASSED_WEIGHT * passed)[~routing.first]
            router.make_static(
                static_scores.quantile(min(share * routing.turn.numel() / len(static_scores), 1.0)).item()
            )
        numbers = routing.place, routing.turn, passed, torch.full_like(routing.turn, share)
        return router(torch.stack(numbers, dim=-1)).masked_fill(routing.first, 1.0)

    def _compute_all(
        self, x_BTD: Tensor, mask: Tensor, keeps_BT: Tensor, p_BT: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Compute every token, and use the result only for the selected ones: for training."""
        # Each token attends at least to itself: a row that attends to nothing has no softmax.
        diagonal = torch.eye(x_BTD.shape[1], dtype=torch.bool, device=x_BTD.device)
        mask = mask.masked_fill(~(keeps_BT[:, None, None, :] | diagonal), torch.finfo(mask.dtype).min)

        def compute(x: Tensor) -> Tensor:
            return self.block(x, attention_mask=mask, past_key_values=None, **arguments)

        recomputes = self._draft[0].recompute and torch.is_grad_enabled()
        y_BTD = checkpoint(compute, x_BTD, use_reentrant=False) if recomputes else compute(x_BTD)
        out = torch.where(keeps_BT[..., None], y_BTD, x_BTD)
        return out + (p_BT - p_BT.detach()).to(out.dtype)[..., None] * (y_BTD - x_BTD).detach()

    def _compute_selected(
        self, x_BTD: Tensor, mask: Tensor, cache: SkipCache, keeps_BT: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Compute only the selected tokens, of one text."""
        selected = keeps_BT[0].nonzero()[:, 0]
        if not len(selected):
            return x_BTD
        columns = torch.cat([cache.places.get(self.number, selected[:0]), cache.length + selected])
        cache.places[self.number] = columns
        arguments = {name: _rows(value, selected, x_BTD.shape[1]) for name, value in arguments.items()}
        y = self.block(
            x_BTD[:, selected], attention_mask=mask[:, :, selected][..., columns], past_key_values=cache, **arguments
        )
        return x_BTD.index_copy(1, selected, y)


def _rows(value: Any, selected: Tensor, tokens: int) -> Any:
    """Return the selected tokens' rows of an argument that a decoder passes to its blocks: angles, positions."""
    if isinstance(value, tuple):
        return tuple(_rows(part, selected, tokens) for part in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens:
        return value[:, selected]
    return value


class Skipper(TextDrafting, TrainedDraft):
    config: SkipperConfig

    def __init__(self, config: SkipperConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.shares = config.shares(shapes["target_layers"])
        between = [number for number, share in enumerate(self.shares) if 0 < share < 1]
        self.routers = nn.ModuleDict({str(number): Router() for number in between})
        self.routing: RoutingState
        self._decoder: list[Any] = []  # the target's decoder with routed blocks, and the original

    def open(self) -> TextState:
        return TextState(SkipCache())

    @property
    def borrowed(self) -> list[str]:
        return ["embedding", "head", "blocks"]

    def packable(self) -> list[nn.Module]:
        assert self.embed_head.decoder is not None
        return [self.embed_head.decoder, self.embed_head.head]

    def _routed_decoder(self) -> Any:
        """Return the target's decoder, with shared weights, whose blocks tokens can skip."""
        if (decoder := self.embed_head.decoder) is None:
            raise AssertionError("the bound embedding and head have no decoder")
        if not self._decoder or self._decoder[1] is not decoder:
            blocks: Any = getattr(decoder, "layers", None)
            if not isinstance(blocks, nn.ModuleList):
                self._refuse("has no `layers`")
            if hasattr(decoder, "_hf_hook"):
                self._refuse("is spread over devices")
            routed: Any = copy.copy(decoder)
            routed._modules = dict(decoder._modules)
            # Without hooks: a user's hooks are meant for the target.
            routed._forward_hooks, routed._forward_pre_hooks = OrderedDict(), OrderedDict()
            routed.layers = nn.ModuleList(RoutedBlock(block, n, self) for n, block in enumerate(blocks))
            self._decoder = [routed.eval(), decoder]
            if not detect_fake_mode(self.embed_head.embedding_VD):
                self._try_out(decoder)
        return self._decoder[0]

    def _refuse(self, reason: str) -> NoReturn:
        name = type(self.embed_head.decoder).__name__
        raise PipelineError(f"draft {self.name!r}: tokens cannot skip blocks of its target, since its {name} {reason}")

    @torch.no_grad()
    def _try_out(self, decoder: Any) -> None:
        """Raise PipelineError if blocks are not called as `RoutedBlock` expects.

        A draft that computes every token has to give the target's states, in one forward and in two.
        """
        device = next(decoder.parameters()).device
        tokens = torch.arange(8, device=device) * (self.target_vocabulary // 8)
        shares, self.shares = self.shares, [0.0] * len(self.shares)
        try:
            want = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
            complete, cache = self.forward_texts(tokens[None], None)[0], SkipCache()
            blocks_called = len(self.routing.computed)
            parts = torch.cat([self._read(part, cache, None, None) for part in tokens.split(5)])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self._decoder.clear()
            self._refuse(f"takes its blocks otherwise ({type(error).__name__}: {error})")
        finally:
            self.shares = shares
        bound = torch.finfo(want.dtype).eps ** 0.5 * want.float().norm()
        if blocks_called != len(shares) or not all((got - want).float().norm() <= bound for got in (complete, parts)):
            self._decoder.clear()
            self._refuse("computes other states with these blocks than the target")

    def _begin_forward(self, positions: Tensor, calibrates: bool = False) -> None:
        """Reset the routing state for tokens at these positions (B, T)."""
        none = torch.zeros(positions.shape, device=positions.device)
        self.routing = RoutingState(
            torch.log2(1.0 + positions) / 16, positions < FIRST_TOKENS, none, none, calibrates=calibrates
        )

    # -- training -------------------------------------------------------------------------------------------------

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Fit the static routers to these texts."""
        device = next(self._routed_decoder().parameters()).device  # on a rank, the decoder is moved before the draft
        self.to(device)
        begins = list(accumulate(map(len, texts), initial=0))
        begins_T = torch.cat([torch.full((len(text),), begin) for text, begin in zip(texts, begins, strict=False)])
        with torch.no_grad():
            self.forward_texts(
                torch.tensor([[*chain(*texts)]], device=device), begins_T[None].to(device), calibrates=True
            )

    def forward_texts(self, tokens_BT: Tensor, begins_BT: Tensor | None, calibrates: bool = False) -> Tensor:
        """Return final hidden states (B, T, D) of complete texts."""
        decoder = self._routed_decoder()
        mask, positions_BT = packed_masks(tokens_BT, begins_BT, attention_windows(decoder.config), decoder.dtype)
        self._begin_forward(positions_BT, calibrates)
        out = decoder(input_ids=tokens_BT, position_ids=positions_BT, attention_mask=mask, use_cache=False)
        return out.last_hidden_state

    def forward(self, batch: "Batch") -> tuple[list[Tensor], Tensor]:
        """Return final states, and which blocks compute which tokens (B, T, L).

        The decoder reads t_i at i; its prediction of t_{i+2} is the state after t_{i+1}.
        """
        assert batch.before_BT is not None
        hidden_BTD = self.forward_texts(batch.before_BT, batch.begins_BT).roll(-1, 1)  # a row's end is not trained
        return [hidden_BTD], torch.stack(self.routing.computed, dim=-1).roll(-1, 1)

    # -- decoding ---------------------------------------------------------------------------------------------------

    def _read(self, tokens_N: Tensor, cache: Any, positions_N: Tensor | None, mask_NC: Tensor | None) -> Tensor:
        past, count = cache.length, len(tokens_N)
        if positions_N is None:
            positions_N = torch.arange(past, past + count, device=tokens_N.device)
        if mask_NC is None:
            mask_NC = causal_mask(past, count, tokens_N.device)
        decoder = self._routed_decoder()
        self._begin_forward(positions_N[None])
        out = decoder(
            input_ids=tokens_N[None],
            position_ids=positions_N[None],
            attention_mask=layer_masks(attention_windows(decoder.config), mask_NC, positions_N, decoder.dtype),
            past_key_values=cache,
            use_cache=True,
        )
        cache.length = past + count
        return out.last_hidden_state[0]

    def _output(self, hidden_WD: Tensor) -> DraftOutput:
        return DraftOutput(hidden_WD, [self.logits(hidden_WD)])


class SkipperObjective(Objective):
    def penalties(self, penalty_inputs: Tensor, batch: "Batch") -> list[Tensor]:
        """Return the squared difference of each block from its share, summed over blocks and dialogues."""
        sums_NL, positions_N = batch.sums_by_dialogue(penalty_inputs)
        shares_L = 1 - to_device(self.config.shares(penalty_inputs.shape[-1]), sums_NL.device)
        deviation_NL = sums_NL / positions_N[:, None].clamp_min(1) - shares_L
        return [(positions_N * deviation_NL.square().sum(-1)).sum()]
