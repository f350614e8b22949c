"""Jakiro (arXiv 2502.06282): a mixture of experts in a one-layer draft and a contrast branch two tokens ahead.

With u the attention block's output, n = RMSNorm(u), E_j the experts and w the routing weights of the kept ones:

    horizon 1   f_moe   = u + sum_j w_j E_j(n)                  (eq. 3, 6)
    horizon 2   f_const = u + beta E_a(n) - alpha E_b(n)        (eq. 7)

beta and alpha are "learnable" in the paper. ``contrast = "router"`` takes the released code's reading: two more rows of
the gate, softmaxed; the larger is beta and names E_a. ``contrast = "scalar"`` learns two numbers, E_a being the
better-routed expert. ``contrast = "experts"`` contrasts nothing: horizon h is the h-th best-routed expert's own,
u + E_h(n), so that K kept experts look K tokens ahead. A token is computed by the experts that it keeps, and when
decoding the others are not even read.

The experts' own heads, u + E_j(n) (the paper's left and right; scaling ONE vector twice, its eq. 4, would rank tokens
identically), are what decoupled trees take candidates from. ``routing = "depth"`` has no gate: expert j answers where j
of the input's features are the draft's own. ``routing = "domain"``: one expert a token, of a gate that learns nothing
but what its dialogue is: code, mathematics or chat (parts/domains.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from pipeline.basics.settings import Settings
from pipeline.drafts.eagle import EagleFrame, EagleFrameConfig
from pipeline.drafts.eagle3 import Eagle3Frame, Eagle3FrameConfig
from pipeline.drafts.parts.domains import DOMAINS, marks, surprise
from pipeline.drafts.parts.layers import swiglu
from pipeline.drafts.parts.losses import Prediction, Term
from pipeline.drafts.parts.one_layer import Heads, OneLayer, Weights

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Settings):
    """What follows the attention, in either frame."""

    experts: int = 2
    experts_per_token: int = 2
    expert_width: int | None = None  # default: the hidden size, as in the released code
    # depth: expert j for the j-th level of a roll-out; domain: an expert for each of DOMAINS. Both run one a token
    routing: Literal["learned", "depth", "domain"] = "learned"
    # the branches ahead: eq. 7 twice, one expert each, none
    contrast: Literal["router", "scalar", "experts", "none"] = "router"
    expert_loss: Weights | None = None  # of each kept expert's own head (decoupled trees); averaged over them
    mixture_loss: float = 0.0  # weight of the cross-entropy of the experts' mixture of softmaxes
    balance_loss: float = 0.0  # weight of E sum_e share_e mean_e in each dialogue: 1 where experts are used alike

    def __post_init__(self):
        super().__post_init__()  # the frame's
        self.at_least(2, "experts")
        self.at_least(1, "experts_per_token", "expert_width")
        self.at_least(0, "mixture_loss", "balance_loss")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        own = self.expert_loss or self.mixture_loss
        if self.routing != "learned":
            if self.experts_per_token > 1 or self.contrast != "none":
                raise ValueError(
                    f"routing={self.routing!r} runs one expert a token: it needs experts_per_token=1 and "
                    "contrast='none'"
                )
            if own or self.balance_loss:
                raise ValueError(
                    f"routing={self.routing!r} runs one expert a token, and nobody chooses among several: expert_loss, "
                    "mixture_loss and balance_loss are not for it"
                )
        if self.routing == "depth" and self.ttt_steps == 1:
            raise ValueError("routing='depth' with ttt_steps=1: there is but one depth; set ttt_steps to 2 or more")
        if self.routing == "domain" and self.experts != len(DOMAINS):
            raise ValueError(f"routing='domain' has an expert for each of {', '.join(DOMAINS)}: set experts=3")
        if self.contrast == "experts" and (own or self.experts_per_token > 5):
            raise ValueError(
                "contrast='experts' gives each of at most 5 kept experts a horizon of its own: expert_loss and "
                "mixture_loss would train all of them for the next token"
            )
        if self.routing == "learned" and self.experts_per_token < 2:
            raise ValueError("experts_per_token=1 with routing='learned': nothing would train the gate; use 2 or more")

    @property
    def levels(self) -> int:
        return {"router": 2, "scalar": 2, "experts": self.experts_per_token, "none": 1}[self.contrast]

    @property
    def has_experts(self) -> bool:
        return self.experts_per_token > 1 and self.contrast != "experts"

    def terms(self) -> dict[str, Term]:
        found, objective, kept = super().terms(), self.objective, self.experts_per_token  # type: ignore[misc, attr-defined]
        if self.expert_loss:
            share = self.expert_loss.of(1 / kept)
            found |= {f"expert_{place}": Term(1, share, objective) for place in range(1, kept + 1)}
        if self.mixture_loss:
            found["mixture"] = Term(1, {"classification": self.mixture_loss}, features=kept)
        if self.balance_loss:
            found["balance"] = Term(1, {"penalty": self.balance_loss}, features=0)
        if self.routing == "domain":
            found["domain"] = Term(1, {"penalty": 1.0}, features=0)
        return found


@dataclass(frozen=True, kw_only=True)
class JakiroConfig(ExpertsConfig, EagleFrameConfig):
    description: ClassVar = (
        "Jakiro ([2502.06282](https://arxiv.org/abs/2502.06282)), a mixture of experts in one layer,"
    )

    kind: Literal["jakiro"] = "jakiro"
    frame: Literal["eagle"] = "eagle"


@dataclass(frozen=True, kw_only=True)
class JakiroOnEagle3Config(ExpertsConfig, Eagle3FrameConfig):
    description: ClassVar = (
        "Jakiro ([2502.06282](https://arxiv.org/abs/2502.06282)) on EAGLE-3's frame, a mixture of experts in one layer,"
    )

    kind: Literal["jakiro"] = "jakiro"
    frame: Literal["eagle-3"]


class MixtureOfExperts(nn.Module):
    """Tensor names are the released checkpoints': ``gate`` [N + 2, d] (N for scalar contrast), ``experts.j``."""

    def __init__(self, llama: Any, config: Any):
        super().__init__()
        self.kept, self.count, self.contrast = config.experts_per_token, config.experts, config.contrast
        router_rows = 2 if self.contrast == "router" else 0
        if config.routing != "depth":
            self.gate = nn.Linear(llama.hidden_size, self.count + router_rows, bias=False)
        width = config.expert_width or llama.hidden_size
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(self.count))
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.tensor([1.0, 0.0]))  # beta, alpha

    def forward(self, u: Tensor, n: Tensor) -> Heads:
        """``u`` and its norm (..., D)."""
        # A gate by domain classifies beside the draft: its loss does not move what it reads.
        scores = self.gate(n.detach() if self.kept == 1 else n)
        kept_scores, kept = scores[..., : self.count].topk(self.kept, dim=-1)  # best first
        chosen = self._chosen(n, kept)  # (..., K, D)
        weights = kept_scores.float().softmax(-1).to(n.dtype)
        mixture = (weights[..., None] * chosen).sum(-2)
        experts = [u + output for output in chosen.unbind(-2)]
        ahead = experts[1:] if self.contrast == "experts" else []
        if self.contrast in ("router", "scalar"):
            ahead = [u + self._contrast(scores, kept, chosen)]
        return Heads([u + mixture, *ahead], experts, kept_scores.float().log_softmax(-1), (scores, kept))

    def _chosen(self, n: Tensor, kept: Tensor) -> Tensor:
        """The kept experts' outputs (..., K, D), best first."""
        # Decoding on an accelerator: asking it which experts have tokens would take longer than reading them all.
        waits = n.device.type != "cpu" and torch.is_inference_mode_enabled()
        if self.kept == self.count or waits:
            outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)  # (..., E, D)
            return outputs.gather(-2, kept[..., None].expand(*kept.shape, n.shape[-1]))
        slots = kept.reshape(-1)  # of all tokens, K each
        order = slots.argsort(stable=True)
        parts = n.reshape(-1, n.shape[-1])[order // self.kept].split(self._counts(slots))
        # All ranks of a training, and of its validation, run the same modules, also those that they have no token for.
        all_run = not torch.is_inference_mode_enabled()
        used = [expert(x) for expert, x in zip(self.experts, parts, strict=True) if len(x) or all_run]
        return torch.cat(used)[order.argsort()].view(*kept.shape, n.shape[-1])

    def _counts(self, slots: Tensor) -> list[int]:
        """How many slots each expert has."""
        if detect_fake_mode(slots):  # an estimate of memory: there are no scores to go by
            return [len(slots) * (n + 1) // self.count - len(slots) * n // self.count for n in range(self.count)]
        if slots.device.type == "cpu":
            return torch.bincount(slots, minlength=self.count).tolist()
        return (slots[:, None] == torch.arange(self.count, device=slots.device)).sum(0).tolist()  # waits once

    def _contrast(self, scores: Tensor, kept: Tensor, chosen: Tensor) -> Tensor:
        best, second = chosen[..., 0, :], chosen[..., 1, :]
        if self.contrast == "scalar":
            beta, alpha = self.contrast_scalars
            return beta * best - alpha * second
        # The router's two rows belong to the two best experts in the order of their numbers.
        raw = scores[..., self.count :]
        pair = raw.float().softmax(-1).to(chosen.dtype)
        in_order = (kept[..., 0] < kept[..., 1])[..., None]
        low, high = torch.where(in_order, best, second), torch.where(in_order, second, best)
        v_low, v_high = pair[..., :1], pair[..., 1:]
        # By the raw scores, as the released code: rounded to half precision, different weights become equal ones.
        return torch.where(raw[..., :1] > raw[..., 1:], v_low * low - v_high * high, v_high * high - v_low * low)


class Experts(OneLayer):
    """Behind the attention of either frame."""

    config: Any

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        # By token, until `read` nothing. A list keeps it out of the module tree: it is for training alone.
        self._marks = [torch.zeros(self.target_vocabulary, len(DOMAINS) - 1, dtype=torch.bool)]

    def read(self, tokenizer: Callable[[], Any]) -> None:
        if self.config.routing == "domain":
            self._marks[:] = [marks(tokenizer(), self.target_vocabulary)]

    def _share(self, other: Self) -> None:
        super()._share(other)
        other._marks = self._marks

    def follow(self, llama: Any) -> dict[str, nn.Module]:
        return {"mlp_moe": MixtureOfExperts(llama, self.config)}

    def heads(self, u: Tensor, depth: int) -> Heads:
        block: Any = self.block
        moe, n = block.mlp_moe, block.post_attention_layernorm(u)
        if self.config.routing == "depth":
            return Heads([u + moe.experts[min(depth, moe.count - 1)](n)])
        return moe(u, n)

    def released_facts(self, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        found, keys = super().released_facts(theirs, names), {"num_experts_per_tok": "experts_per_token"}
        return found | {ours: (theirs[key], getattr(self.config, ours)) for key, ours in keys.items() if key in theirs}

    def warning(self, validation: dict[str, float]) -> str | None:
        """Where the penalty, which only a draft with `balance_loss` has, is more than halfway to its largest. It weighs
        a dialogue's experts by their probability: a gate that hardly prefers those it keeps goes unseen.
        """
        experts, kept = self.config.experts, self.config.experts_per_token
        penalty = validation.get("balance_penalty", 1.0)
        if kept == experts or penalty <= (1 + experts / kept) / 2:
            return None
        return (
            f"in each dialogue the gate keeps to few of its {experts} experts (balance_penalty {penalty:.1f}: 1 is "
            f"even, {experts / kept:g} the most): raise its balance_loss, which is {self.config.balance_loss:g}"
        )

    def more_predictions(self, heads: Heads, batch: "Batch") -> dict[str, Prediction]:
        found: dict[str, Prediction] = {}
        if self.config.expert_loss:
            found |= {f"expert_{place}": Prediction([f]) for place, f in enumerate(heads.experts, start=1)}
        if self.config.mixture_loss:
            found["mixture"] = Prediction(heads.experts, heads.log_weights)
        if self.config.balance_loss:
            assert heads.routed is not None
            found["balance"] = Prediction(penalty=unbalance(*heads.routed, self.config.experts, batch))
        if self.config.routing == "domain":
            assert heads.routed is not None
            self._marks[:] = [self._marks[0].to(batch.tokens_BT.device)]  # once
            found["domain"] = Prediction(penalty=surprise(heads.routed[0], self._marks[0], batch))
        return found


def unbalance(scores_BTR: Tensor, kept_BTK: Tensor, experts: int, batch: "Batch") -> Tensor:
    """Over dialogues, the sum of (trained positions) x E sum_e share_e mean_e: the share of slots that expert e has
    among a dialogue's trained positions, and the mean of its probability by the gate. By dialogue (DeepSeek-V3, eq.
    17), so that it does not depend on how a global batch is cut.
    """
    probabilities_BTE = scores_BTR[..., :experts].float().softmax(-1)
    numbers_E = torch.arange(experts, device=kept_BTK.device)
    slots_BTE = (kept_BTK[..., None] == numbers_E).sum(-2).float() / kept_BTK.shape[-1]
    (slots_NE, positions_N), (sums_NE, _) = map(batch.sums_by_dialogue, (slots_BTE, probabilities_BTE))
    return experts * ((slots_NE * sums_NE).sum(-1) / positions_N.clamp_min(1)).sum()


class Jakiro(Experts, EagleFrame):
    pass


class JakiroOnEagle3(Experts, Eagle3Frame):
    pass
