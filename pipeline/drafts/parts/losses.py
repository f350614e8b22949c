"""The drafts' losses as sums over trained positions; whoever knows the global batch forms the ratio.

A term's loss has up to two parts, each with a weight: "regression", Smooth L1 on features (beta 1, mean over D), and
"classification", with one of these objectives, p being the target's distribution and q the draft's:

    soft-ce      -sum p log q (EAGLE; Jakiro, section on training)
    hard-ce      -log q of the text's own token (Medusa-1); a token outside the draft's vocabulary has no loss
    acceptance   w KL(p || q) - (1 - w) log a, with a = sum min(p, q), a drawn token's probability of being accepted,
                 and w = exp(-3 a), through which no gradient goes (LK losses, arXiv 2602.23881; with a of a whole batch
                 in w, the loss would depend on how a global batch is cut)

p is recomputed from the stored features: no logits are stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


# Numbers of the largest tensor of a chunk, (rows x branches, U) in float32: bounds the memory of the vocabulary-wide
# part.
CHUNK_LOGITS = 1 << 25
CHUNK_ROWS_CPU = 128  # what comes after the matrix product finds its numbers in the cache
CHUNK_BYTES_GPU = 2 << 30  # of that tensor; all of a chunk take three to five times as much
CHUNK_SHARE_GPU = 32  # of a GPU with less than 64 GiB this part of its memory instead


def chunk_rows(vocabulary: int, branches: int, device: torch.device, gpu_bytes: int | None = None) -> int:
    """How many of the teacher's rows are worked on at a time. On a GPU that goes by how much memory it has, `gpu_bytes`
    where it is not here, never by what is free: the order of sums is the same in every run.
    """
    numbers = CHUNK_LOGITS
    if device.type not in ("cpu", "meta"):
        whole = gpu_bytes or torch.accelerator.get_memory_info(device)[1]
        numbers = min(CHUNK_BYTES_GPU, whole // CHUNK_SHARE_GPU) // 4
    rows = max(1, numbers // (vocabulary * branches))
    return min(rows, CHUNK_ROWS_CPU) if device.type == "cpu" else rows


Objective = Literal["soft-ce", "hard-ce", "acceptance"]
# Features (m, D) -> p (m, U), its argmax (m), and its rows' mass (m, 1) where that may be less than 1.
Teacher = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
DECAY = 3.0  # of an acceptance's weight of KL


@dataclass(frozen=True)
class Term:
    """One loss of a draft: what it is told of a prediction of the same name."""

    horizon: int  # its label is at i + horizon
    weights: dict[str, float]  # of its parts: "regression", "classification", "penalty"
    objective: Objective = "soft-ce"
    features: int = 1  # so many features have logits; a penalty has none
    head: int = 0  # which of the draft's own LM heads, where it has several


def named(first: int, last: int) -> list[str]:
    """Terms of horizons `first` to `last`, the next token's being 1."""
    return [{1: "next", 2: "ahead"}.get(horizon, f"ahead_{horizon}") for horizon in range(first, last + 1)]


@dataclass
class Prediction:
    """What a draft says for a term at every position: a feature, or a penalty."""

    features: list[Tensor] = field(default_factory=list)  # (B, T, D)
    penalty: Tensor | None = None  # a sum over trained positions; nothing else then


@dataclass(frozen=True)
class Vocabulary:
    """The draft's: `size` tokens, `ids_U` among the target's, ascending, where it is not the target's own."""

    size: int
    ids_U: Tensor | None = None

    def numbers(self, tokens_M: Tensor) -> Tensor:
        """The tokens' numbers in it; -1 for one that it does not have."""
        if self.ids_U is None:
            return tokens_M
        found = torch.searchsorted(self.ids_U, tokens_M).clamp_max(len(self.ids_U) - 1)
        return found.where(self.ids_U[found] == tokens_M, -1)


def renormalised(head: Callable[[Tensor], Tensor]) -> Teacher:
    """The distribution over the head's own tokens."""

    def answer(labels_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        logits = head(labels_MD).float()
        return logits.softmax(-1), logits.argmax(-1), None

    return answer


class OwnHead(nn.Linear):
    """A draft's own LM head. Its loss is formed inside its forward, where ZeRO-3 has gathered its weight."""

    def __init__(self, width: int, vocabulary: int, bias: bool = False):
        super().__init__(width, vocabulary, bias=bias)

    def forward(self, features: Tensor | None, form: Callable[[Tensor], tuple[Tensor, ...]] | None = None):
        """Logits; or what `form` makes of the weight, a bias being its last column."""
        if features is not None:
            return super().forward(features)
        bias: Any = self.bias
        return form(self.weight if bias is None else torch.cat([self.weight, bias[:, None]], dim=1)) if form else ()


class _Classification(torch.autograd.Function):
    """Per term, the sum of its objective over its rows. The gradient is formed in the forward: no logits outlive a
    chunk. The teacher's p is computed once for all terms, whose rows it shares.
    """

    @staticmethod
    def forward(ctx, plan: "_Plan", weight: Tensor | None, *tensors: Tensor):
        """`weight`: of the draft's own head. ``tensors`` are each term's features at its rows."""
        device, teacher_MD, terms = plan.teacher_MD.device, plan.teacher_MD, _grouped(tensors, plan.sizes)
        totals = [torch.zeros((), device=device) for _ in terms]
        agrees = [torch.zeros((), dtype=torch.long, device=device) for _ in terms]
        accepted = [torch.zeros((), device=device) for _ in terms]
        gradients = [torch.empty_like(x) if x.requires_grad else None for x in tensors]
        gradients_of = _grouped(gradients, plan.sizes)
        chunk = _Chunk(plan, weight, any(x.requires_grad for x in tensors))
        for number, first in enumerate(range(0, len(teacher_MD), plan.chunk)):
            text_M = plan.text_M[first : first + plan.chunk]
            answer = plan.teacher(teacher_MD[first : first + plan.chunk]) if plan.asks_teacher else None
            places, asked = [], []
            for term, parts in enumerate(terms):
                begin, end = plan.ends_of[term][number : number + 2]
                places.append(slice(begin, end))
                rows = plan.rows_of[term][begin:end] - first
                mine: Any = answer
                if plan.objectives[term] == "hard-ce":
                    mine = plan.of_text(text_M[rows])
                elif answer is not None and end - begin != len(answer[0]):
                    mine = tuple(x if x is None else x[rows] for x in answer)
                differentiate = gradients_of[term][0] is not None
                asked.append(_Asked(term, [part[begin:end] for part in parts], mine, differentiate))
            for term, loss, agree, accept, slopes in chunk.sums(asked):
                totals[term] += loss
                agrees[term] += agree
                accepted[term] += accept
                for kept, slope in zip(gradients_of[term], slopes, strict=False):
                    if kept is not None:
                        kept[places[term]] = slope
        ctx.sizes, ctx.shares, ctx.dtype = plan.sizes, plan.shares, None if weight is None else weight.dtype
        ctx.save_for_backward(chunk.slope_of_weight, *gradients)
        ctx.mark_non_differentiable(*agrees, *accepted)
        return (*totals, *agrees, *accepted)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        of_weight, *gradients = ctx.saved_tensors
        out = []
        for up, parts in zip(upstream, _grouped(gradients, ctx.sizes), strict=False):
            out += [None if g is None else (g.float() * up).to(g.dtype) for g in parts]
        if of_weight is not None:  # the terms' shares are in it: what their upstreams have in common is left
            one = next(number for number, share in enumerate(ctx.shares) if share)
            of_weight = (of_weight * (upstream[one] / ctx.shares[one])).to(ctx.dtype)
        return None, of_weight, *out


@dataclass
class _Plan:
    """All that the terms' sums are formed from but tensors that have gradients."""

    teacher_MD: Tensor  # labels
    text_M: Tensor  # and the text's own tokens after them, as numbers of the draft's vocabulary; -1 outside
    teacher: Teacher
    head: Callable[[Tensor], Tensor]  # the frozen one
    chunk: int  # rows
    rows_of: list[Tensor]  # by term: the labels that it answers, ascending
    ends_of: list[list[int]]  # by term: how many of these lie before each chunk, and before the end
    sizes: list[int]  # by term: so many tensors
    objectives: list[Objective]
    shares: list[float]  # by term: its weight in the loss, but for a factor of all
    vocabulary: int  # the draft's

    @property
    def asks_teacher(self) -> bool:
        return any(objective != "hard-ce" for objective in self.objectives)

    def of_text(self, text_m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a teacher would answer that expects the text's own tokens and nothing else."""
        has = text_m[:, None] >= 0
        p = torch.zeros(len(text_m), self.vocabulary, device=text_m.device)
        return p.scatter_(1, text_m[:, None].clamp_min(0), has.float()), text_m, has.float()


@dataclass
class _Asked:
    """One term in one chunk."""

    term: int
    parts: list[Tensor]
    answer: tuple[Tensor, Tensor, Tensor | None]  # the teacher's
    differentiate: bool


def _grouped(values, sizes: list[int]) -> list[list]:
    rest = iter(values)
    return [[next(rest) for _ in range(size)] for size in sizes]


_Sums = tuple[int, Tensor, Tensor, Tensor, Sequence[Tensor]]  # term, loss, agreeing rows, acceptances, gradients


class _Chunk:
    """Works on a chunk of rows after the other; adds up the gradient of the draft's own head, where it has one."""

    def __init__(self, plan: _Plan, weight: Tensor | None, differentiate: bool):
        self._plan, self._weight = plan, None if weight is None else weight.detach()
        self.slope_of_weight: Tensor | None = None
        if weight is not None and weight.requires_grad and differentiate:
            self.slope_of_weight = torch.zeros(weight.shape, device=weight.device)

    def _logits(self, features: Tensor) -> Tensor:
        return self._plan.head(features) if self._weight is None else F.linear(features, self._weight)

    def sums(self, asked: list[_Asked]) -> Iterator[_Sums]:
        """One call of the head for all of them."""
        differentiate, sizes = any(one.differentiate for one in asked), [len(one.parts[0]) for one in asked]
        with torch.enable_grad():
            hidden = torch.cat([one.parts[0] for one in asked]).detach().requires_grad_(differentiate)
            logits = self._logits(hidden)
        whole = logits.detach().float().log_softmax(-1)
        sums = []
        for one, log_q in zip(asked, whole.split(sizes), strict=True):
            p, best, mass = one.answer
            agree = (log_q.argmax(-1) == best).sum()
            objective = _OBJECTIVES[self._plan.objectives[one.term]]
            loss, accept = objective(log_q, p, mass, one.differentiate)  # log_q becomes its gradient by the logits
            sums.append((one.term, loss, agree, accept))
        slopes: list[list[Tensor]] = [[] for _ in asked]
        if differentiate:
            slope = whole.to(logits.dtype)
            (of_hidden,) = torch.autograd.grad(logits, hidden, slope)
            slopes = [[part] for part in of_hidden.split(sizes)]
            if self.slope_of_weight is not None:
                shared = [self._plan.shares[one.term] * x for one, x in zip(asked, slope.split(sizes), strict=True)]
                self.slope_of_weight += torch.cat(shared).T @ hidden.detach()
        for found, own in zip(sums, slopes, strict=True):
            yield *found, own


def _soft_ce(log_q: Tensor, p: Tensor, mass: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
    """The sum of -p.log q; `log_q` becomes its gradient by the logits, q mass(p) - p. Acceptances are not counted."""
    loss = -torch.einsum("mv,mv->m", p, log_q).sum()
    if differentiate:
        log_q.exp_()
        if mass is not None:
            log_q.mul_(mass)
        log_q.sub_(p)
    return loss, torch.zeros((), device=p.device)


def _acceptance(log_q: Tensor, p: Tensor, mass: Tensor | None, differentiate: bool) -> tuple[Tensor, Tensor]:
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


_OBJECTIVES = {"soft-ce": _soft_ce, "hard-ce": _soft_ce, "acceptance": _acceptance}


def term_sums(
    terms: dict[str, Term],
    predictions: dict[str, Prediction],
    batch: "Batch",
    teacher: Teacher,
    chunk: int,
    head: Callable[[Tensor], Tensor],
    normed: Callable[[Tensor], Tensor] | None = None,
    vocabulary: Vocabulary | None = None,
) -> dict[str, dict[str, Tensor]]:
    """By term, sums over its trained positions: "regression" (where it has a weight), "classification", "agree"
    (top-1, with the target's choice; under hard-ce with the text's token), "accept" (where the objective counts
    acceptances), "positions"; of a penalty "penalty" and "positions".

    `head`: the frozen one, or an `OwnHead`; `normed` is what its inputs go through; `vocabulary`: its tokens.
    """
    said = {name: predictions[name] for name in terms if predictions[name].penalty is None}
    rows = batch.rows({terms[name].horizon for name in said}, chunk)
    rows_of = [rows.among[terms[name].horizon] for name in said]
    teacher_MD = batch.labels_BTD.flatten(0, 1)[rows.labels]
    tensors_of = [
        [x.flatten(0, 1).index_select(0, rows.inputs[terms[name].horizon]) for x in one.features]
        for name, one in said.items()
    ]
    sizes, objectives = [len(tensors) for tensors in tensors_of], [terms[name].objective for name in said]
    shares = _shares([terms[name] for name in said], batch)
    vocabulary = vocabulary or Vocabulary(0)
    text_M = vocabulary.numbers(batch.following_BT.flatten()[rows.labels])
    ends_of = [rows.ends[terms[name].horizon] for name in said]
    plan = _Plan(teacher_MD, text_M, teacher, head, chunk, rows_of, ends_of, sizes, objectives, shares, vocabulary.size)
    flat: list[Tensor] = []
    for features in tensors_of:
        given = features if normed is None else map(normed, features)
        if isinstance(head, OwnHead) and head.bias is not None:
            given = [F.pad(feature, (0, 1), value=1.0) for feature in given]
        flat += given
    if isinstance(head, OwnHead):
        found = head(None, lambda weight: _Classification.apply(plan, weight, *flat))
    else:
        found = _Classification.apply(plan, None, *flat)
    sums: dict[str, dict[str, Tensor]] = {}
    for place, (name, features) in enumerate(zip(said, tensors_of, strict=True)):
        term, label_MD = terms[name], teacher_MD[rows_of[place]]
        sums[name] = {"regression": _regression(features[0], label_MD)} if term.weights.get("regression") else {}
        sums[name] |= {"classification": found[place], "agree": found[len(said) + place]}
        if term.objective == "acceptance":
            sums[name]["accept"] = found[2 * len(said) + place]
        sums[name]["positions"] = torch.full((), len(label_MD), device=label_MD.device)
    for name, term in terms.items():
        if (penalty := predictions[name].penalty) is not None:
            positions = torch.full((), int(batch.trained[term.horizon].sum()), device=penalty.device)
            sums[name] = {"penalty": penalty, "positions": positions}
    return sums


def _regression(feature_MD: Tensor, label_MD: Tensor) -> Tensor:
    return F.smooth_l1_loss(feature_MD.float(), label_MD.float(), reduction="none").mean(-1).sum()


def _shares(terms: list[Term], batch: "Batch") -> list[float]:
    """Each term's weight in the loss, in units of a position of the first one."""
    first = max(batch.totals[terms[0].horizon], 1)
    return [t.weights.get("classification", 0.0) * first / max(batch.totals[t.horizon], 1) for t in terms]
