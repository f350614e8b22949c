"""The drafts' losses as sums over trained positions; whoever knows the global batch forms the ratio.

A term's loss has up to two parts, each with a weight: "regression", Smooth L1 on features (beta 1, mean over D), and
"classification", of one of these kinds, p being the target's distribution and q the draft's:

    soft-ce      -sum p log q (EAGLE; Jakiro, section on training)
    hard-ce      -log q of the text's own token (Medusa-1); a token outside the draft's vocabulary has no loss
    acceptance   w KL(p || q) - (1 - w) log a, with a = sum min(p, q), a drawn token's probability of being accepted,
                 and w = exp(-3 a), through which no gradient goes (LK losses, arXiv 2602.23881; with a of a whole batch
                 in w, the loss would depend on how a global batch is cut)
    l1           0.9 sum |p - q| - 0.1 log q of the text's own token (DSpark); the sum is 2 (1 - a)

p is recomputed from the stored features: no logits are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.features.batch import Group

# Numbers of the largest tensor of a chunk, (rows x terms, U) in float32: bounds the memory of the vocabulary-wide part.
CHUNK_LOGITS = 1 << 25
CHUNK_ROWS_CPU = 128  # what comes after the matrix product finds its numbers in the cache
CHUNK_BYTES_GPU = 2 << 30  # of that tensor; all of a chunk take three to five times as much
CHUNK_SHARE_GPU = 32  # of a GPU with less than 64 GiB this part of its memory instead
DECAY = 3.0  # of an acceptance's weight of KL
L1 = 0.9  # of |p - q|; the cross-entropy has the rest

LossKind = Literal["soft-ce", "hard-ce", "acceptance", "l1"]
# p (m, U), its argmax (m), and its rows' mass (m, 1) where that may be another than 1.
SoftLabels = tuple[Tensor, Tensor, Tensor | None]
Teacher = Callable[[Tensor], SoftLabels]  # of features (m, D)


@dataclass(frozen=True)
class Term:
    """One loss of a draft."""

    name: str
    group: Group  # of its positions (pipeline/features/batch.py)
    weights: dict[str, float]  # of its parts: "regression" and "classification"; or "penalty" alone
    kind: LossKind = "soft-ce"
    head: int = 0  # which of the draft's own LM heads, where it has several

    @property
    def is_penalty(self) -> bool:
        """Whether it is told nothing: a number that the objective forms by itself."""
        return "penalty" in self.weights


def named(first: int, last: int) -> list[str]:
    """Terms of horizons `first` to `last`, the next token's being 1."""
    return [{1: "next", 2: "ahead"}.get(horizon, f"ahead_{horizon}") for horizon in range(first, last + 1)]


def chunk_rows(widest: int, device: torch.device, gpu_bytes: int | None = None) -> int:
    """How many of the teacher's rows are worked on at a time, each of `widest` numbers. On a GPU that goes by how much
    memory it has, `gpu_bytes` where it is not here, never by what is free: the order of sums is the same in every run.
    """
    numbers = CHUNK_LOGITS
    if device.type not in ("cpu", "meta"):
        whole = gpu_bytes or torch.accelerator.get_memory_info(device)[1]
        numbers = min(CHUNK_BYTES_GPU, whole // CHUNK_SHARE_GPU) // 4
    rows = max(1, numbers // widest)
    return min(rows, CHUNK_ROWS_CPU) if device.type == "cpu" else rows


# -- teachers ---------------------------------------------------------------------------------------------------------


def renormalised(head: Callable[[Tensor], Tensor]) -> Teacher:
    """The distribution over the head's own tokens."""

    def soft_labels(labels_MD: Tensor) -> SoftLabels:
        logits = head(labels_MD).float()
        return logits.softmax(-1), logits.argmax(-1), None

    return soft_labels


def of_whole_vocabulary(head: Callable[[Tensor], Tensor], ids_U: Tensor, masked: bool) -> Teacher:
    """The distribution over the tokens `ids_U` of a head that knows more of them: with its own, lesser, mass; or
    `masked`, renormalised where the likeliest token of all is among them, and without mass elsewhere.
    """

    def soft_labels(labels_MD: Tensor) -> SoftLabels:
        whole = head(labels_MD).float()
        logits = whole[:, ids_U]
        largest, best = logits.max(-1)
        has = largest >= whole.amax(-1)  # the likeliest token of all
        best = best.where(has, -1)  # no draft token agrees with another
        if masked:
            mass = has[:, None].float()
            return logits.softmax(-1) * mass, best, mass
        p = (logits - whole.logsumexp(-1, keepdim=True)).exp_()
        return p, best, p.sum(-1, keepdim=True)

    return soft_labels


def of_text(text_m: Tensor, size: int, weights_m: Tensor | None = None) -> SoftLabels:
    """What a teacher would answer that expects the text's own tokens and nothing else: numbers in a vocabulary of this
    size, -1 for a token that it does not have. A row's mass is its weight.
    """
    mass = (text_m[:, None] >= 0).float()
    if weights_m is not None:
        mass = mass * weights_m[:, None]
    p = torch.zeros(len(text_m), size, device=text_m.device)
    return p.scatter_(1, text_m[:, None].clamp_min(0), mass), text_m, mass


# -- classifications --------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One term's rows."""

    term: Term
    feature_MD: Tensor  # the draft's
    rows_M: Tensor  # its labels, ascending
    ends: list[int]  # how many of these lie before each chunk, and before the end
    share: float  # of its classification in the loss, but for a factor that all terms have
    weights_M: Tensor | None = None  # of each row under hard-ce; 1 by default


@dataclass
class Labels:
    """What all terms are told, in chunks of rows."""

    features_MD: Tensor  # the target's
    text_M: Tensor  # the text's own tokens after them, as numbers of the draft's vocabulary; -1 outside
    teacher: Teacher
    vocabulary: int  # the draft's
    chunk: int  # rows

    def soft(self, asked: Sequence[Asked], number: int) -> list[tuple[slice, SoftLabels]]:
        """By term, which of its rows lie in chunk `number`, and what these are told. The teacher is asked once."""
        here = slice(number * self.chunk, (number + 1) * self.chunk)
        of_all = self.teacher(self.features_MD[here]) if any(one.term.kind != "hard-ce" for one in asked) else None
        found = []
        for one in asked:
            place = slice(*one.ends[number : number + 2])
            rows = one.rows_M[place] - here.start
            mine: Any = None
            if one.term.kind == "hard-ce":
                weights = None if one.weights_M is None else one.weights_M[place]
                mine = of_text(self.text_M[here][rows], self.vocabulary, weights)
            elif of_all is not None:
                mine = of_all if len(rows) == len(of_all[0]) else tuple(x if x is None else x[rows] for x in of_all)
                if one.term.kind == "l1":
                    mine = (mine[0], self.text_M[here][rows], mine[2])
            found.append((place, mine))
        return found


class OwnHead(nn.Linear):
    """A draft's own LM head. Its loss is formed inside its forward, where ZeRO-3 has gathered its weight."""

    def __init__(self, width: int, vocabulary: int, bias: bool = False):
        super().__init__(width, vocabulary, bias=bias)

    def forward(self, x: Any, loss: Callable[[Any, Tensor], Any] | None = None) -> Any:
        """Logits of features `x`; or what `loss` makes of `x` and the weight, a bias being its last column."""
        if loss is None:
            return super().forward(x)
        bias: Any = self.bias
        return loss(x, self.weight if bias is None else torch.cat([self.weight, bias[:, None]], dim=1))


@dataclass(frozen=True)
class BiasedHead:
    """The target's head, to whose logits an own one adds. It takes the features of both, side by side."""

    base: Callable[[Tensor], Tensor]
    own: OwnHead  # without a bias

    def __call__(self, x: Any, loss: Callable[[Any, Tensor], Any] | None = None) -> Any:
        """As an `OwnHead`'s."""
        if loss is not None:
            return self.own(x, loss)
        width = self.own.in_features
        return self.base(x[..., :-width]) + self.own(x[..., -width:])


class _Classification(torch.autograd.Function):
    """Per term, the sums of its loss, of agreeing rows and of acceptances. The gradient is formed in the forward: no
    logits outlive a chunk. The teacher's p is computed once for all terms, whose rows it shares.
    """

    @staticmethod
    def forward(ctx, labels: Labels, asked: Sequence[Asked], head, weight: Tensor | None, *features: Tensor):
        """`head`: the frozen one, None, or what the draft's own, of this `weight`, adds to. ``features`` are the
        terms', as the head takes them.
        """
        device, differentiate = labels.features_MD.device, any(x.requires_grad for x in features)
        sums = [[torch.zeros((), device=device) for _ in asked] for _ in range(3)]
        slopes: list[Any] = [torch.empty_like(x) if differentiate else None for x in features]
        of_weight = None
        if weight is not None and weight.requires_grad and differentiate:
            of_weight = torch.zeros(weight.shape, device=device)
        for number in range(-(-len(labels.features_MD) // labels.chunk)):
            soft = labels.soft(asked, number)
            parts = [x[place] for x, (place, _) in zip(features, soft, strict=True)]
            sizes = [len(part) for part in parts]
            with torch.enable_grad():  # one call of the head for all terms
                hidden = torch.cat(parts).detach().requires_grad_(differentiate)
                logits = _logits(hidden, head, weight)
            whole = logits.detach().float().log_softmax(-1)
            for n, (log_q, (_, (p, best, mass))) in enumerate(zip(whole.split(sizes), soft, strict=True)):
                sums[1][n] += (log_q.argmax(-1) == best).sum()
                loss, accept = _KINDS[asked[n].term.kind](log_q, p, best, mass, differentiate)  # log_q: its gradient
                sums[0][n] += loss
                sums[2][n] += accept
            if not differentiate:
                continue
            slope = whole.to(logits.dtype)
            (of_hidden,) = torch.autograd.grad(logits, hidden, slope)
            for kept, (place, _), part in zip(slopes, soft, of_hidden.split(sizes), strict=True):
                kept[place] = part
            if of_weight is not None:
                shared = [one.share * x for one, x in zip(asked, slope.split(sizes), strict=True)]
                of_weight += torch.cat(shared).T @ hidden.detach()[:, -of_weight.shape[1] :]
        ctx.shares, ctx.dtype = [one.share for one in asked], None if weight is None else weight.dtype
        ctx.save_for_backward(of_weight, *slopes)
        ctx.mark_non_differentiable(*sums[1], *sums[2])
        return (*sums[0], *sums[1], *sums[2])

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        of_weight, *slopes = ctx.saved_tensors
        out = [None if g is None else (g.float() * up).to(g.dtype) for up, g in zip(upstream, slopes, strict=False)]
        if of_weight is not None:  # the terms' shares are in it: what their upstreams have in common is left
            one = next(number for number, share in enumerate(ctx.shares) if share)
            of_weight = (of_weight * (upstream[one] / ctx.shares[one])).to(ctx.dtype)
        return None, None, None, of_weight, *out


def _logits(hidden: Tensor, head: Any, weight: Tensor | None) -> Tensor:
    if weight is None:
        return head(hidden)
    width = weight.shape[1]
    own = F.linear(hidden[:, -width:], weight.detach())
    return own if head is None else head(hidden[:, :-width]) + own


def _soft_ce(log_q: Tensor, p: Tensor, _: Tensor, mass: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """The sum of -p.log q; `log_q` becomes its gradient by the logits, q mass(p) - p. Acceptances are not counted."""
    loss = -torch.einsum("mv,mv->m", p, log_q).sum()
    if differentiate:
        log_q.exp_()
        if mass is not None:
            log_q.mul_(mass)
        log_q.sub_(p)
    return loss, torch.zeros((), device=p.device)


def _acceptance(log_q: Tensor, p: Tensor, _: Tensor, mass: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """The sums of w KL - (1 - w) log a and of a; `log_q` becomes the first one's gradient by the logits. A row without
    mass has no loss.
    """
    kl = (-torch.einsum("mv,mv->m", p, log_q) - torch.special.entr(p).sum(-1))[:, None]
    q = log_q.exp_()
    a = torch.minimum(p, q).sum(-1, keepdim=True)
    accepted, a = a.sum(), a.clamp_min(torch.finfo(torch.float32).tiny)
    w, some = (-DECAY * a).exp(), 1.0 if mass is None else mass > 0
    loss = (some * (w * kl - (1 - w) * a.log())).sum()
    if differentiate:
        below = q * (q < p)  # the tokens of which more is more acceptance
        direct = (below - q * below.sum(-1, keepdim=True)) * (some * (w - 1) / a)
        (q if mass is None else q.mul_(mass)).sub_(p).mul_(w).add_(direct)
    return loss, accepted


def _l1(log_q: Tensor, p: Tensor, text: Tensor, mass: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """The sums of 0.9 |p - q| - 0.1 log q(text) and of a; `log_q` becomes the first one's gradient by the logits. A row
    without mass has no |p - q|, a text's token outside the vocabulary no log q.
    """
    at, known = text.clamp_min(0)[:, None], (text >= 0).float()[:, None]
    ce = -(log_q.gather(1, at) * known).sum()
    q = log_q.exp_()
    some, apart = 1.0 if mass is None else (mass > 0).float(), q - p
    loss = L1 * (some * apart.abs()).sum() + (1 - L1) * ce
    accepted = torch.minimum(p, q).sum()
    if differentiate:
        sign = apart.sign_() * some
        slope = L1 * (sign - (sign * q).sum(-1, keepdim=True)) + (1 - L1) * known
        q.mul_(slope).scatter_add_(1, at, known * (L1 - 1))
    return loss, accepted


_KINDS = {"soft-ce": _soft_ce, "hard-ce": _soft_ce, "acceptance": _acceptance, "l1": _l1}


def term_sums(
    asked: Sequence[Asked],
    labels: Labels,
    head: Callable[[Tensor], Tensor],
    normed: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """By term's name, sums over its positions: "regression" (where it has a weight), "classification", "agree" (top-1,
    with the target's choice; under hard-ce and l1 with the text's token), "accept" (where acceptances are counted),
    "positions".

    `head`: the frozen one, an `OwnHead` or a `BiasedHead`; `normed` is what its inputs go through.
    """
    inputs = [one.feature_MD if normed is None else normed(one.feature_MD) for one in asked]
    if isinstance(head, BiasedHead):
        found = head(inputs, lambda x, weight: _Classification.apply(labels, asked, head.base, weight, *x))
    elif isinstance(head, OwnHead):
        if head.bias is not None:
            inputs = [F.pad(x, (0, 1), value=1.0) for x in inputs]
        found = head(inputs, lambda x, weight: _Classification.apply(labels, asked, None, weight, *x))
    else:
        found = _Classification.apply(labels, asked, head, None, *inputs)
    losses, agrees, accepted = (found[n * len(asked) :][: len(asked)] for n in range(3))
    sums: dict[str, dict[str, Tensor]] = {}
    for n, one in enumerate(asked):
        term, label_MD = one.term, labels.features_MD[one.rows_M]
        mine = {"regression": _regression(one.feature_MD, label_MD)} if term.weights.get("regression") else {}
        mine |= {"classification": losses[n], "agree": agrees[n]}
        if term.kind in ("acceptance", "l1"):
            mine["accept"] = accepted[n]
        sums[term.name] = mine | {"positions": torch.full((), len(label_MD), device=label_MD.device)}
    return sums


def _regression(feature_MD: Tensor, label_MD: Tensor) -> Tensor:
    return F.smooth_l1_loss(feature_MD.float(), label_MD.float(), reduction="none").mean(-1).sum()
