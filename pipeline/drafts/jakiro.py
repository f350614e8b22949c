"""Jakiro (arXiv 2502.06282): a mixture of experts in a one-layer draft and a contrast branch two tokens ahead.

With u the attention block's output, n = RMSNorm(u), E_j the experts and w the routing weights of the kept ones:

    horizon 1   f_moe   = u + sum_j w_j E_j(n)                  (eq. 3, 6)
    horizon 2   f_const = u + beta E_a(n) - alpha E_b(n)        (eq. 7)

beta and alpha are "learnable" in the paper. ``contrast = "router"`` takes the released code's reading: two more rows of
the gate, softmaxed; the larger is beta and names E_a. ``contrast = "scalar"`` learns two numbers, E_a being the
better-routed expert. A token is computed by the experts that it keeps; decoding does not even read the others.

Each expert has an output of its own, u + E_j(n) (the paper's left and right; scaling ONE vector twice, its eq. 4, would
rank tokens identically). Trees with ``candidates = "decoupled"`` take their candidates from these.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from pipeline.basics.settings import Settings
from pipeline.drafts.eagle import NAMES as OF_EAGLE
from pipeline.drafts.eagle import NO_BIAS, EagleFrame, EagleFrameConfig
from pipeline.drafts.eagle3 import BY_NUMBER, Eagle3Frame, TrainingTimeTestConfig
from pipeline.drafts.eagle3 import NAMES as OF_EAGLE3
from pipeline.drafts.parts.layers import swiglu
from pipeline.drafts.parts.losses import Term
from pipeline.drafts.parts.names import Form
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.one_layer import Heads, OneLayer

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Settings):
    """What follows the attention, in either frame."""

    experts: int = 2
    experts_per_token: int = 2
    expert_width: int | None = None  # default: the hidden size, as in the released code
    # eq. 7 with either reading of beta and alpha, or without it
    contrast: Literal["router", "scalar", "none"] = "router"
    balance_loss: float = 0.0  # weight of E sum_e share_e mean_e in each dialogue: 1 where experts are used alike

    def __post_init__(self):
        super().__post_init__()  # the frame's
        self.at_least(2, "experts", "experts_per_token")
        self.at_least(1, "expert_width")
        self.at_least(0, "balance_loss")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")

    @property
    def levels(self) -> int:
        return 1 if self.contrast == "none" else 2

    @property
    def has_experts(self) -> bool:
        return True

    def terms(self, step: int) -> list[Term]:
        found = super().terms(step)  # type: ignore[misc]
        return [*found, Term("balance", 1, {"penalty": self.balance_loss})] if self.balance_loss else found


@dataclass(frozen=True, kw_only=True)
class JakiroConfig(ExpertsConfig, EagleFrameConfig):
    description: ClassVar = (
        "Jakiro ([2502.06282](https://arxiv.org/abs/2502.06282)), a mixture of experts in one layer,"
    )

    kind: Literal["jakiro"] = "jakiro"


@dataclass(frozen=True, kw_only=True)
class JakiroOnEagle3Config(ExpertsConfig, TrainingTimeTestConfig):
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
        self.gate = nn.Linear(llama.hidden_size, self.count + router_rows, bias=False)
        width = config.expert_width or llama.hidden_size
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(self.count))
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.tensor([1.0, 0.0]))  # beta, alpha

    def forward(self, u: Tensor, n: Tensor) -> Heads:
        """``u`` and its norm (..., D)."""
        scores = self.gate(n)
        kept_scores, kept = scores[..., : self.count].topk(self.kept, dim=-1)  # best first
        chosen = self._chosen(n, kept)  # (..., K, D)
        weights = kept_scores.float().softmax(-1).to(n.dtype)
        mixture = (weights[..., None] * chosen).sum(-2)
        experts = [u + output for output in chosen.unbind(-2)]
        ahead = [] if self.contrast == "none" else [u + self._contrast(scores, kept, chosen)]
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
        # All ranks of a training, and of its validation, run the same modules, also those that they have no row for.
        all_run = not torch.is_inference_mode_enabled()
        outputs = torch.cat([expert(x) for expert, x in zip(self.experts, parts, strict=True) if len(x) or all_run])
        return outputs[order.argsort()].view(*kept.shape, n.shape[-1])

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

    def follow(self, llama: Any) -> dict[str, nn.Module]:
        return {"mlp_moe": MixtureOfExperts(llama, self.config)}

    def heads(self, u: Tensor) -> Heads:
        block: Any = self.block
        return block.mlp_moe(u, block.post_attention_layernorm(u))

    def behind_attention(self) -> dict[str, Any]:
        block: Any = self.block
        return {
            "intermediate_size": self.config.expert_width or self.shapes["hidden_size"],
            "num_experts": self.config.experts,
            "num_experts_per_tok": self.config.experts_per_token,
            "gate_rows": block.mlp_moe.gate.out_features,  # two more than experts where the contrast has a router
            "reduced_vocabulary": self.config.vocabulary,
        }


class ExpertsObjective(Objective):
    def penalties(self, aside: tuple[Tensor, Tensor], batch: "Batch") -> list[Tensor]:
        scores_BTR, kept_BTK = aside
        return [unbalance(scores_BTR, kept_BTK, self.config.experts, batch)] if self.config.balance_loss else []

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


# -- what others call it -----------------------------------------------------------------------------------------------

OF_LLAMA = {"qk_norm": "the plug-in's drafts with experts have Llama's attention; train without"}
PLUG_IN = "infra/vllm_jakiro"
SETTINGS = {"experts_per_token": "num_experts_per_tok"}
FORM = Form(architecture="EagleJakiroForCausalLM", lacks=NO_BIAS, plug_in=PLUG_IN)
NAMES = replace(OF_EAGLE, forms={"vllm": FORM}, not_exported=(), settings=SETTINGS)
FORM_ON_EAGLE3 = Form(architecture="JakiroForCausalLMEagle3", lacks=OF_LLAMA, plug_in=PLUG_IN)
NAMES_ON_EAGLE3 = replace(OF_EAGLE3, forms={"vllm": FORM_ON_EAGLE3} | BY_NUMBER, settings=SETTINGS)
