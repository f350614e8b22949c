"""The drafts' losses as sums over trained positions; the caller, which knows the global batch, divides them.

A term's loss has up to two parts, each with a weight: "regression", Smooth L1 on features (beta 1, mean over D), and
"classification", of one of these kinds, p being the target's distribution and q the draft's:

    soft-ce      -sum p log q (EAGLE; Jakiro, section on training)
    hard-ce      -log q of the text's own token (Medusa-1); a token outside the draft's vocabulary has no loss
    acceptance   w KL(p || q) - (1 - w) log a, with a = sum min(p, q), a drawn token's probability of being accepted,
                 and w = exp(-3 a), through which no gradient goes (LK losses, arXiv 2602.23881; with a of a whole batch
                 in w, the loss would depend on how a global batch is cut)
    l1           0.9 sum |p - q| - 0.1 log q of the text's own token (DSpark); the sum is 2 (1 - a)

p is recomputed from the stored features: no logits are stored. Figures are sums without the loss's weights of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.basics.accelerator import compile_or_stay_eager
from pipeline.features.positions import Group

# Numbers of the largest tensor of a chunk, (rows x terms, U) in float32: bounds the memory of the vocabulary-wide part.
CHUNK_LOGITS = 1 << 25
CHUNK_ROWS_CPU = 128  # small enough that operations after the matrix product read from the CPU's cache
CHUNK_BYTES_GPU = 2 << 30  # of that tensor; all tensors of a chunk take three to five times as much
CHUNK_SHARE_GPU = 32  # on a GPU with less than 64 GiB, the tensor takes at most 1/32 of its memory
DECAY = 3.0  # of an acceptance's weight of KL
L1 = 0.9  # of |p - q|; the cross-entropy has the rest

LossKind = Literal["soft-ce", "hard-ce", "acceptance", "l1"]
# p (m, U), its argmax (m), and the mass of its rows (m, 1), or None if each is 1.
SoftLabels = tuple[Tensor, Tensor, Tensor | None]
Teacher = Callable[[Tensor], SoftLabels]  # of features (m, D)
Sums = dict[str, dict[str, Tensor]]  # by term, then by name


@dataclass(frozen=True)
class Term:
    """One loss of a draft."""

    name: str
    group: Group  # of its positions (pipeline/features/batch.py)
    weights: dict[str, float]  # of its parts: "regression" and "classification"; or "penalty" alone
    kind: LossKind = "soft-ce"
    head: int = 0  # index among the draft's own LM heads

    @property
    def is_penalty(self) -> bool:
        """Return whether the term has no labels: the objective computes it by itself."""
        return "penalty" in self.weights


def term_names(first: int, last: int) -> list[str]:
    """Return the names of terms for horizons `first` to `last`; the next token has horizon 1."""
    return [{1: "next", 2: "ahead"}.get(horizon, f"ahead_{horizon}") for horizon in range(first, last + 1)]


def chunk_rows(widest: int, device: torch.device, gpu_bytes: int | None = None) -> int:
    """Return how many of the teacher's rows are computed at a time, each of `widest` numbers.

    On a GPU this depends on its total memory (`gpu_bytes`, for a GPU of another machine), never on its free memory:
    the order of sums is the same in every run.
    """
    numbers = CHUNK_LOGITS
    if device.type not in ("cpu", "meta"):
        total_bytes = gpu_bytes or torch.accelerator.get_memory_info(device)[1]
        numbers = min(CHUNK_BYTES_GPU, total_bytes // CHUNK_SHARE_GPU) // 4
    rows = max(1, numbers // widest)
    return min(rows, CHUNK_ROWS_CPU) if device.type == "cpu" else rows


# -- teachers ---------------------------------------------------------------------------------------------------------


def renormalised_labels(logits: Tensor) -> SoftLabels:
    """Return the distribution over the tokens of the logits (m, U)."""
    logits = logits.float()
    return logits.softmax(-1), logits.argmax(-1), None


def full_vocabulary_labels(logits: Tensor, ids_U: Tensor, masked: bool) -> SoftLabels:
    """Return the distribution over the tokens `ids_U`, from logits (m, V) of more tokens.

    Its rows keep their mass, below 1. If `masked`, rows are renormalised where the likeliest of all tokens is among
    `ids_U`, and have no mass elsewhere.
    """
    full_logits = logits.float()
    logits = full_logits[:, ids_U]
    largest, best = logits.max(-1)
    has_best = largest >= full_logits.amax(-1)  # the likeliest token of all
    best = best.where(has_best, -1)  # -1 agrees with no draft token
    if masked:
        mass = has_best[:, None].float()
        return logits.softmax(-1) * mass, best, mass
    p = (logits - full_logits.logsumexp(-1, keepdim=True)).exp_()
    return p, best, p.sum(-1, keepdim=True)


def text_labels(text_m: Tensor, size: int, weights_m: Tensor | None = None) -> SoftLabels:
    """Return the soft labels of a teacher that predicts the text's own tokens with probability 1.

    Tokens are indices in a vocabulary of this size, -1 for a token that it does not have. A row's mass is its weight.
    """
    mass = (text_m[:, None] >= 0).float()
    if weights_m is not None:
        mass = mass * weights_m[:, None]
    p = torch.zeros(len(text_m), size, device=text_m.device)
    return p.scatter_(1, text_m[:, None].clamp_min(0), mass), text_m, mass


# -- classifications --------------------------------------------------------------------------------------------------


@dataclass
class TermBatch:
    """The rows one loss term is computed on."""

    term: Term
    feature_MD: Tensor  # the draft's
    rows_M: Tensor  # its labels, ascending
    offsets: list[int]  # number of these before each chunk, and in total
    share: float  # of its classification in the loss, up to a factor that all terms share
    weights_M: Tensor | None = None  # of each row under hard-ce; 1 by default
    loss_weights_M: Tensor | None = None  # of each row in the loss, not in the figures; 1 by default


@dataclass
class Labels:
    """Targets shared by all loss terms, in row chunks."""

    features_MD: Tensor  # the target's
    text_M: Tensor  # the text's own tokens after them, as indices in the draft's vocabulary; -1 outside
    teacher: Teacher
    vocabulary: int  # the draft's
    chunk: int  # rows
    compiled: bool = False  # the functions over vocabulary-wide rows

    def soft(self, batches: Sequence[TermBatch], number: int) -> list[tuple[slice, SoftLabels]]:
        """Return, for each term, the slice of its rows in chunk `number` and their labels. The teacher runs once."""
        chunk_slice = slice(number * self.chunk, (number + 1) * self.chunk)
        chunk_labels = (
            self.teacher(self.features_MD[chunk_slice])
            if any(batch.term.kind != "hard-ce" for batch in batches)
            else None
        )
        all_labels = []
        for batch in batches:
            place = slice(*batch.offsets[number : number + 2])
            rows = batch.rows_M[place] - chunk_slice.start
            term_labels: Any = None
            if batch.term.kind == "hard-ce":
                weights = None if batch.weights_M is None else batch.weights_M[place]
                term_labels = text_labels(self.text_M[chunk_slice][rows], self.vocabulary, weights)
            elif chunk_labels is not None:
                term_labels = (
                    chunk_labels
                    if len(rows) == len(chunk_labels[0])
                    else tuple(x if x is None else x[rows] for x in chunk_labels)
                )
                if batch.term.kind == "l1":
                    term_labels = (term_labels[0], self.text_M[chunk_slice][rows], term_labels[2])
            all_labels.append((place, term_labels))
        return all_labels


class OwnHead(nn.Linear):
    """A draft's own LM head. Its loss is computed inside its forward, where ZeRO-3 has gathered its weight."""

    def __init__(self, width: int, vocabulary: int, bias: bool = False):
        super().__init__(width, vocabulary, bias=bias)

    def forward(self, x: Any, loss: Callable[[Any, Tensor], Any] | None = None) -> Any:
        """Return logits of features `x`, or `loss(x, weight)`, where a bias is the last column of the weight."""
        if loss is None:
            return super().forward(x)
        bias: Any = self.bias
        return loss(x, self.weight if bias is None else torch.cat([self.weight, bias[:, None]], dim=1))


@dataclass(frozen=True)
class BiasedHead:
    """The target's head plus a bias head of the draft. Its input is the features of both, concatenated."""

    base: Callable[[Tensor], Tensor]
    bias_head: OwnHead  # without a bias

    def __call__(self, x: Any, loss: Callable[[Any, Tensor], Any] | None = None) -> Any:
        """Return logits of `x`, or the result of `loss`, like `OwnHead.forward`."""
        if loss is not None:
            return self.bias_head(x, loss)
        width = self.bias_head.in_features
        return self.base(x[..., :-width]) + self.bias_head(x[..., -width:])


def classify(
    logits: Tensor,
    kind: LossKind,
    p: Tensor,
    best: Tensor,
    mass: Tensor | None,
    differentiate: bool,
    weights_m: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the sums over rows of the loss (2), as `sum_rows` does, of agreeing rows and of acceptances; and the
    gradient of the weighted loss with respect to the logits (m, U).
    """
    log_q = logits.float().log_softmax(-1)
    agree = (log_q.argmax(-1) == best).sum()
    loss, accept = _KINDS[kind](log_q, (p, best, mass), weights_m, differentiate)  # log_q becomes the gradient
    if differentiate and weights_m is not None:
        log_q.mul_(weights_m[:, None])
    return loss, agree, accept, log_q.to(logits.dtype) if differentiate else None


def sum_rows(values: Tensor, weights_m: Tensor | None) -> Tensor:
    """Return the sum (2) of values (m, n): without and with the weights of the rows, 1 by default."""
    total = values.sum()
    return total.expand(2) if weights_m is None else torch.stack([total, (values.sum(1) * weights_m).sum()])


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function over vocabulary-wide rows, of any number, which fuses its passes over memory."""
    run = compile_or_stay_eager(function, f"the losses ({function.__name__})")

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.ndim and len(argument) > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return run(*arguments)

    return call


class _Classification(torch.autograd.Function):
    """The sums, per term, of the weighted loss, of the loss without weights, of agreeing rows and of acceptances.

    The gradient is computed in the forward, so that no logits outlive a chunk. The teacher's p is computed once for
    all terms, which share its rows.
    """

    @staticmethod
    def forward(ctx, labels: Labels, batches: Sequence[TermBatch], head, weight: Tensor | None, *features: Tensor):
        """Return the sums. `head`: the frozen head, or None if the draft's own head, of this `weight`, is the only one;
        with both, their logits are added. ``features`` are the terms' inputs of the head.
        """
        device, differentiate = labels.features_MD.device, any(x.requires_grad for x in features)
        sums = [[torch.zeros(shape, device=device) for _ in batches] for shape in (2, (), ())]
        slopes: list[Any] = [torch.empty_like(x) if differentiate else None for x in features]
        classify_rows = compiled(classify) if labels.compiled else classify
        weight_gradient = None
        if weight is not None and weight.requires_grad and differentiate:
            weight_gradient = torch.zeros(weight.shape, device=device)
        for number in range(-(-len(labels.features_MD) // labels.chunk)):
            soft = labels.soft(batches, number)
            parts = [x[place] for x, (place, _) in zip(features, soft, strict=True)]
            sizes = [len(part) for part in parts]
            with torch.enable_grad():  # one call of the head for all terms
                hidden = torch.cat(parts).detach().requires_grad_(differentiate)
                logits = _logits(hidden, head, weight)
            term_slopes: list[Any] = []
            terms = zip(batches, logits.detach().split(sizes), soft, strict=True)
            for n, (batch, term_logits, (place, term_labels)) in enumerate(terms):
                weights = None if batch.loss_weights_M is None else batch.loss_weights_M[place]
                *parts_sums, slope = classify_rows(term_logits, batch.term.kind, *term_labels, differentiate, weights)
                for total, part_sum in zip(sums, parts_sums, strict=True):
                    total[n] += part_sum
                term_slopes.append(slope)
            if not differentiate:
                continue
            slope = torch.cat(term_slopes) if len(term_slopes) > 1 else term_slopes[0]
            (hidden_gradient,) = torch.autograd.grad(logits, hidden, slope)
            for term_slope, (place, _), part in zip(slopes, soft, hidden_gradient.split(sizes), strict=True):
                term_slope[place] = part
            if weight_gradient is not None:
                shared = [batch.share * x for batch, x in zip(batches, term_slopes, strict=True)]
                weight_gradient += torch.cat(shared).T @ hidden.detach()[:, -weight_gradient.shape[1] :]
        ctx.shares, ctx.dtype = [batch.share for batch in batches], None if weight is None else weight.dtype
        ctx.save_for_backward(weight_gradient, *slopes)
        (raw, weighted), *counts = (torch.stack(totals, dim=-1) for totals in sums)
        ctx.mark_non_differentiable(raw, *counts)
        return weighted, raw, *counts

    @staticmethod
    def backward(ctx, upstream: Tensor, *_: Tensor):
        weight_gradient, *slopes = ctx.saved_tensors
        out = [None if g is None else (g.float() * up).to(g.dtype) for up, g in zip(upstream, slopes, strict=True)]
        # It contains the terms' shares; the factor common to their upstream gradients is left to multiply.
        if weight_gradient is not None:
            index = next(number for number, share in enumerate(ctx.shares) if share)
            weight_gradient = (weight_gradient * (upstream[index] / ctx.shares[index])).to(ctx.dtype)
        return None, None, None, weight_gradient, *out


def _logits(hidden: Tensor, head: Any, weight: Tensor | None) -> Tensor:
    if weight is None:
        return head(hidden)
    width = weight.shape[1]
    own_logits = F.linear(hidden[:, -width:], weight.detach())
    return own_logits if head is None else head(hidden[:, :-width]) + own_logits


def _soft_ce(log_q: Tensor, labels: SoftLabels, weights_m: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of -p.log q, and 0 as acceptances are not counted. `log_q` becomes the gradient with respect to
    the logits, q mass(p) - p.
    """
    p, _, mass = labels
    loss = sum_rows(-torch.einsum("mv,mv->m", p, log_q)[:, None], weights_m)
    if differentiate:
        log_q.exp_()
        if mass is not None:
            log_q.mul_(mass)
        log_q.sub_(p)
    return loss, torch.zeros((), device=p.device)


def _acceptance(
    log_q: Tensor, labels: SoftLabels, weights_m: Tensor | None, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Return the sums of w KL - (1 - w) log a and of a. `log_q` becomes the gradient of the first with respect to the
    logits. A row without mass has no loss.
    """
    p, _, mass = labels
    kl = (-torch.einsum("mv,mv->m", p, log_q) - torch.special.entr(p).sum(-1))[:, None]
    q = log_q.exp_()
    a = torch.minimum(p, q).sum(-1, keepdim=True)
    accepted, a = a.sum(), a.clamp_min(torch.finfo(torch.float32).tiny)
    w, has_mass = (-DECAY * a).exp(), 1.0 if mass is None else mass > 0
    loss = sum_rows(has_mass * (w * kl - (1 - w) * a.log()), weights_m)
    if differentiate:
        below = q * (q < p)  # tokens whose probability q would have to grow to raise the acceptance
        direct = (below - q * below.sum(-1, keepdim=True)) * (has_mass * (w - 1) / a)
        (q if mass is None else q.mul_(mass)).sub_(p).mul_(w).add_(direct)
    return loss, accepted


def _l1(log_q: Tensor, labels: SoftLabels, weights_m: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of 0.9 |p - q| - 0.1 log q(text) and of a. `log_q` becomes the gradient of the first with respect
    to the logits. A row without mass has no |p - q|; a text token outside the vocabulary has no log q.
    """
    p, text, mass = labels
    at, in_vocabulary = text.clamp_min(0)[:, None], (text >= 0).float()[:, None]
    ce = -sum_rows(log_q.gather(1, at) * in_vocabulary, weights_m)
    q = log_q.exp_()
    has_mass, difference = 1.0 if mass is None else (mass > 0).float(), q - p
    loss = L1 * sum_rows(has_mass * difference.abs(), weights_m) + (1 - L1) * ce
    accepted = torch.minimum(p, q).sum()
    if differentiate:
        sign = difference.sign_() * has_mass
        slope = L1 * (sign - (sign * q).sum(-1, keepdim=True)) + (1 - L1) * in_vocabulary
        q.mul_(slope).scatter_add_(1, at, in_vocabulary * (L1 - 1))
    return loss, accepted


_KINDS = {"soft-ce": _soft_ce, "hard-ce": _soft_ce, "acceptance": _acceptance, "l1": _l1}


def compute_term_sums(
    batches: Sequence[TermBatch],
    labels: Labels,
    head: Callable[[Tensor], Tensor],
    normed: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Sums, Sums]:
    """Return the losses and the figures: sums over positions by term name, the first with the rows' loss weights.

    Losses are "regression" (if it has a weight) and "classification". Figures are both, without a gradient, and "agree"
    (top-1 with the target's choice; under hard-ce and l1 with the text's token), "accept" (if acceptances are counted)
    and "positions".

    `head`: the frozen head, an `OwnHead` or a `BiasedHead`; `normed` is applied to its inputs.
    """
    inputs = [batch.feature_MD if normed is None else normed(batch.feature_MD) for batch in batches]
    if isinstance(head, BiasedHead):
        results = head(inputs, lambda x, weight: _Classification.apply(labels, batches, head.base, weight, *x))
    elif isinstance(head, OwnHead):
        if head.bias is not None:
            inputs = [F.pad(x, (0, 1), value=1.0) for x in inputs]
        results = head(inputs, lambda x, weight: _Classification.apply(labels, batches, None, weight, *x))
    else:
        results = _Classification.apply(labels, batches, head, None, *inputs)
    losses, figures = Sums(), Sums()
    for batch, weighted, raw, agree, accepted in zip(batches, *results, strict=True):
        term, label_MD = batch.term, labels.features_MD[batch.rows_M]
        loss = losses[term.name] = {"classification": weighted}
        figure = figures[term.name] = {}
        if term.weights.get("regression"):
            distance_MD = F.smooth_l1_loss(batch.feature_MD.float(), label_MD.float(), reduction="none")
            distance_M1 = distance_MD.mean(-1, keepdim=True)
            figure["regression"], loss["regression"] = sum_rows(distance_M1, batch.loss_weights_M)
        figure |= {"classification": raw, "agree": agree}
        if term.kind in ("acceptance", "l1"):
            figure["accept"] = accepted
        figure["positions"] = torch.full((), len(label_MD), device=label_MD.device)
    return losses, figures
