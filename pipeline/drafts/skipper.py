"""The target as its own draft: a small router at each block lets the tokens that it finds unimportant pass by.

After FTP (arXiv 2412.11494), which prunes a model that way. Here the pruned target only guesses and the whole one
verifies, so nothing is lost. With s_l the share of tokens that is to pass block l by, and x a token's residual stream:

    r_l = router_l(place, turn, passed, s_l)      x <- Block_l(x) where r_l > 0, x elsewhere

    place    log2(1 + position) / 16
    turn     log10(0.001 + 1 - cos(y, x)) of the last block that computed the token, which made x of y: ShortGPT's
             influence of a block (arXiv 2403.03853), on one token; 0 before the first
    passed   the share of the blocks so far that it passed by

A token leaves keys and values only in the blocks that compute it: nobody sees it in the others, and it takes no memory
there. A text's first tokens pass none by: attention rests on them, and blocks turn them least of all. FTP's router sees
the attention that a token gets and its rank in place of `turn` and `passed`; nobody has looked at a token yet that is
just being drafted, so these are of its own past. Training distils: only the routers learn, with the gradient of r's
sigmoid where the decision has none. FTP's guide loss, which imitates a static router, is left out: the routers begin as
one, a threshold on `turn` + 10 `passed` that lets a share s_l pass by: of the tokens that have passed fewest blocks by,
those that were turned least. (By `turn` alone the same tokens would pass all blocks by: its last value stays.)
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

from pipeline.basics.accelerator import sent
from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import DraftOutput
from pipeline.drafts.parts.base import TrainedConfig
from pipeline.drafts.parts.losses import Term
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.reads_text import ReadsText, TextState
from pipeline.lm.attention import behind, masks, whole_texts, windows
from pipeline.lm.cache import TreeCache
from pipeline.lm.states import Needs

if TYPE_CHECKING:
    from pipeline.features.batch import Batch

NUMBERS, WIDTH = 4, 8  # a router's inputs, and its units
STEEP = 4.0  # of the static router, a unit of `turn`
AGAIN = 10.0  # what all of `passed` counts in these units
FIRST = 4  # tokens of a text that every block computes


@dataclass(frozen=True, kw_only=True)
class SkipperConfig(TrainedConfig):
    description: ClassVar = (
        "The target, whose blocks some tokens pass by (after [2412.11494](https://arxiv.org/abs/2412.11494)),"
    )
    runs_the_target: ClassVar = True

    kind: Literal["skipper"] = "skipper"
    sparsity: float | list[float] = 0.5  # shares of tokens that pass by: of all blocks' (the first and the last compute
    # every token), or each block's

    def __post_init__(self):
        shares = self.sparsity if isinstance(self.sparsity, list) else [0.0, self.sparsity]
        if not all(0 <= share <= 1 for share in shares) or not any(0 < share < 1 for share in shares):
            raise ValueError(
                f"sparsity={self.sparsity}: expected a share between 0 and 1, or one a block, some of them between"
            )
        if shares[0]:
            raise ValueError(
                f"sparsity={self.sparsity}: the first block has to compute every token, since nothing is known of one "
                "before; begin with 0"
            )

    def needs(self, target_layers: int) -> Needs:
        return Needs(final=False)

    def terms(self, step: int) -> list[Term]:
        found = Term("next", 1, {"classification": 1.0}, self.objective)
        return [found, Term("sparsity", 1, {"penalty": 1.0})]

    def shares(self, blocks: int) -> list[float]:
        """s_l of each block. Raises PipelineError."""
        if isinstance(self.sparsity, list):
            if len(self.sparsity) != blocks:
                raise PipelineError(
                    f"sparsity has {len(self.sparsity)} shares, but the target has {blocks} blocks: give one a block"
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
    """Keys and values of the tokens that each block computed; `length` counts all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, Tensor] = {}  # block -> which tokens, ascending

    def keep(self, prefix: int, path: Sequence[int] = ()) -> None:
        assert not path
        for block, places in self.places.items():
            self.places[block] = kept = places[: int(torch.searchsorted(places, prefix))]
            self.layers[block].keep(len(kept), None, 0)
        self.length = prefix


@dataclass
class Walk:
    """What a forward's tokens carry from block to block. All (B, T)."""

    place: Tensor
    first: Tensor  # whether it is one of its text's first tokens
    turn: Tensor
    passed: Tensor  # a number of blocks
    kept: list[Tensor] = field(default_factory=list)  # by block: 1 where it computes the token, with r's gradient
    calibrates: bool = False  # makes each router the static one on the way


class Router(nn.Module):
    """``router(numbers)``, positive where the token is to be computed."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(NUMBERS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """The score (...) for numbers (..., 4)."""
        return self.outer(F.silu(self.inner(numbers.to(self.outer.weight.dtype))))[..., 0].float()

    @torch.no_grad()
    def make_static(self, threshold: float) -> None:
        """STEEP (turn + AGAIN passed - threshold), where z = SiLU(z) - SiLU(-z). Other units begin without a say."""
        self.outer.weight.zero_()
        self.outer.bias.zero_()
        for unit, sign in enumerate((1.0, -1.0)):
            self.inner.weight[unit] = sign * STEEP * torch.tensor([0.0, 1.0, AGAIN, 0.0])
            self.inner.bias[unit] = -sign * STEEP * threshold
            self.outer.weight[0, unit] = sign


class Skipping(nn.Module):
    """A decoder's block, which some tokens pass by. It is called as the block is."""

    def __init__(self, block: nn.Module, number: int, draft: "Skipper"):
        super().__init__()
        self.block, self.number = block, number
        self._draft = [draft]  # out of the module tree

    def __getattr__(self, name: str) -> Any:
        """What a decoder asks its blocks for, such as their kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, past_key_values: Any = None, **more: Any
    ) -> Tensor:
        walk, draft = self._draft[0].walk, self._draft[0]
        score = self._score(draft, walk)
        keeps = score > 0
        walk.kept.append(keeps + (p := score.sigmoid()) - p.detach())
        if past_key_values is not None:
            out = self._some(hidden_states, attention_mask, past_key_values, keeps, more)
        else:
            out = self._all(hidden_states, attention_mask, keeps, p, more)
        with torch.no_grad():
            apart = 1 - F.cosine_similarity(hidden_states.float(), out.float(), dim=-1)
            turned = (1e-3 + apart.clamp_min(0)).log10()
            walk.turn = torch.where(keeps, turned, walk.turn)
            walk.passed = walk.passed + ~keeps
        return out

    def _score(self, draft: "Skipper", walk: Walk) -> Tensor:
        share = draft.shares[self.number]
        if not 0 < share < 1:
            return torch.full_like(walk.turn, 1.0 - 2 * share)
        router: Any = draft.routers[str(self.number)]
        passed = walk.passed / max(self.number, 1)
        if walk.calibrates:
            others = (walk.turn + AGAIN * passed)[~walk.first]
            router.make_static(others.quantile(min(share * walk.turn.numel() / len(others), 1.0)).item())
        numbers = walk.place, walk.turn, passed, torch.full_like(walk.turn, share)
        return router(torch.stack(numbers, dim=-1)).masked_fill(walk.first, 1.0)

    def _all(self, x_BTD: Tensor, mask: Tensor, keeps_BT: Tensor, p_BT: Tensor, more: dict[str, Any]) -> Tensor:
        """Computes every token, and takes what it gives where it was wanted: for training."""
        own = torch.eye(x_BTD.shape[1], dtype=torch.bool, device=x_BTD.device)  # a row that sees nothing has no softmax
        mask = mask.masked_fill(~(keeps_BT[:, None, None, :] | own), torch.finfo(mask.dtype).min)

        def compute(x: Tensor) -> Tensor:
            return self.block(x, attention_mask=mask, past_key_values=None, **more)

        again = self._draft[0].recompute and torch.is_grad_enabled()
        y_BTD = checkpoint(compute, x_BTD, use_reentrant=False) if again else compute(x_BTD)
        out = torch.where(keeps_BT[..., None], y_BTD, x_BTD)
        return out + (p_BT - p_BT.detach()).to(out.dtype)[..., None] * (y_BTD - x_BTD).detach()

    def _some(self, x_BTD: Tensor, mask: Tensor, cache: SkipCache, keeps_BT: Tensor, more: dict[str, Any]) -> Tensor:
        """Computes the tokens that are wanted, of one text."""
        chosen = keeps_BT[0].nonzero()[:, 0]
        if not len(chosen):
            return x_BTD
        columns = torch.cat([cache.places.get(self.number, chosen[:0]), cache.length + chosen])
        cache.places[self.number] = columns
        more = {name: _rows(value, chosen, x_BTD.shape[1]) for name, value in more.items()}
        y = self.block(x_BTD[:, chosen], attention_mask=mask[:, :, chosen][..., columns], past_key_values=cache, **more)
        return x_BTD.index_copy(1, chosen, y)


def _rows(value: Any, chosen: Tensor, tokens: int) -> Any:
    """The tokens' part of what a decoder gives its blocks beside the stream: angles, positions."""
    if isinstance(value, tuple):
        return tuple(_rows(one, chosen, tokens) for one in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == tokens:
        return value[:, chosen]
    return value


class Skipper(ReadsText, TrainedDraft):
    config: SkipperConfig

    def __init__(self, config: SkipperConfig, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.shares = config.shares(shapes["target_layers"])
        between = [number for number, share in enumerate(self.shares) if 0 < share < 1]
        self.routers = nn.ModuleDict({str(number): Router() for number in between})
        self.walk: Walk
        self._decoder: list[Any] = []  # the target's, with our blocks; and whose it is

    def open(self) -> TextState:
        return TextState(SkipCache())

    @property
    def borrowed(self) -> list[str]:
        return ["embedding", "head", "blocks"]

    def packable(self) -> list[nn.Module]:
        assert self.embed_head.decoder is not None
        return [self.embed_head.decoder, self.embed_head.head]

    def _with_routers(self) -> Any:
        """The target's decoder, its weights shared, with blocks that tokens can pass by."""
        if (decoder := self.embed_head.decoder) is None:
            raise AssertionError("its target's embedding and head come without the decoder")
        if not self._decoder or self._decoder[1] is not decoder:
            blocks: Any = getattr(decoder, "layers", None)
            if not isinstance(blocks, nn.ModuleList):
                self._refuse("has no `layers`")
            if hasattr(decoder, "_hf_hook"):
                self._refuse("is spread over devices")
            own: Any = copy.copy(decoder)
            own._modules = dict(decoder._modules)
            own._forward_hooks, own._forward_pre_hooks = OrderedDict(), OrderedDict()  # a user's are for the target
            own.layers = nn.ModuleList(Skipping(block, n, self) for n, block in enumerate(blocks))
            self._decoder = [own.eval(), decoder]
            if not detect_fake_mode(self.embed_head.embedding_VD):
                self._try_out(decoder)
        return self._decoder[0]

    def _refuse(self, why: str) -> NoReturn:
        name = type(self.embed_head.decoder).__name__
        raise PipelineError(f"draft {self.name!r}: blocks of its target cannot be passed by, since its {name} {why}")

    @torch.no_grad()
    def _try_out(self, decoder: Any) -> None:
        """Raises PipelineError where blocks are not called as `Skipping` is: what computes everything has to be the
        target, at once and in two parts.
        """
        device = next(decoder.parameters()).device
        tokens = torch.arange(8, device=device) * (self.target_vocabulary // 8)
        shares, self.shares = self.shares, [0.0] * len(self.shares)
        try:
            want = decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
            whole, cache = self.through(tokens[None], None)[0], SkipCache()
            met = len(self.walk.kept)
            parts = torch.cat([self._read(part, cache, None, None) for part in tokens.split(5)])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self._decoder.clear()
            self._refuse(f"takes its blocks otherwise ({type(error).__name__}: {error})")
        finally:
            self.shares = shares
        bound = torch.finfo(want.dtype).eps ** 0.5 * want.float().norm()
        if met != len(shares) or not all((got - want).float().norm() <= bound for got in (whole, parts)):
            self._decoder.clear()
            self._refuse("does not get from them what the target gets")

    def _walk(self, positions: Tensor, calibrates: bool = False) -> None:
        """Sets out with tokens at these positions, (B, T)."""
        none = torch.zeros(positions.shape, device=positions.device)
        self.walk = Walk(torch.log2(1.0 + positions) / 16, positions < FIRST, none, none, calibrates=calibrates)

    # -- training -------------------------------------------------------------------------------------------------

    def start_from_target(self, texts: list[list[int]]) -> None:
        """The static routers, of some texts."""
        device = next(self._with_routers().parameters()).device  # where a rank's decoder is, before its draft
        self.to(device)
        begins = list(accumulate(map(len, texts), initial=0))
        begins_T = torch.cat([torch.full((len(text),), begin) for text, begin in zip(texts, begins, strict=False)])
        with torch.no_grad():
            self.through(torch.tensor([[*chain(*texts)]], device=device), begins_T[None].to(device), calibrates=True)

    def through(self, tokens_BT: Tensor, begins_BT: Tensor | None, calibrates: bool = False) -> Tensor:
        """Final hidden states of whole texts."""
        decoder = self._with_routers()
        mask, positions_BT = whole_texts(tokens_BT, begins_BT, windows(decoder.config), decoder.dtype)
        self._walk(positions_BT, calibrates)
        out = decoder(input_ids=tokens_BT, position_ids=positions_BT, attention_mask=mask, use_cache=False)
        return out.last_hidden_state

    def forward(self, batch: "Batch") -> tuple[list[Tensor], Tensor]:
        """It reads t_i at i, and what it says of t_{i+2} is behind t_{i+1}. Beside it: which blocks compute which
        tokens (B, T, L).
        """
        assert batch.before_BT is not None
        hidden_BTD = self.through(batch.before_BT, batch.begins_BT).roll(-1, 1)  # a row's end is not trained
        return [hidden_BTD], torch.stack(self.walk.kept, dim=-1).roll(-1, 1)

    # -- decoding ---------------------------------------------------------------------------------------------------

    def _read(self, tokens_N: Tensor, cache: Any, positions_N: Tensor | None, mask_NC: Tensor | None) -> Tensor:
        past, count = cache.length, len(tokens_N)
        if positions_N is None:
            positions_N = torch.arange(past, past + count, device=tokens_N.device)
        if mask_NC is None:
            mask_NC = behind(past, count, tokens_N.device)
        decoder = self._with_routers()
        self._walk(positions_N[None])
        out = decoder(
            input_ids=tokens_N[None],
            position_ids=positions_N[None],
            attention_mask=masks(windows(decoder.config), mask_NC, positions_N, decoder.dtype),
            past_key_values=cache,
            use_cache=True,
        )
        cache.length = past + count
        return out.last_hidden_state[0]

    def _output(self, hidden_WD: Tensor) -> DraftOutput:
        return DraftOutput(hidden_WD, [self.logits(hidden_WD)])


class SkipperObjective(Objective):
    def penalties(self, aside: Tensor, batch: "Batch") -> list[Tensor]:
        """How far each block is from its share, in each dialogue."""
        sums_NL, positions_N = batch.sums_by_dialogue(aside)
        shares_L = 1 - sent(self.config.shares(aside.shape[-1]), sums_NL.device)
        apart_NL = sums_NL / positions_N[:, None].clamp_min(1) - shares_L
        return [(positions_N * apart_NL.square().sum(-1)).sum()]
