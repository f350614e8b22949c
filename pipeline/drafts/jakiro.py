"""Jakiro (arXiv 2502.06282): a mixture of experts in a one-layer draft and a contrast branch two tokens ahead.

With u the attention block's output, n = RMSNorm(u), E_j the experts and w the routing weights of the selected ones:

    horizon 1   f_moe   = u + sum_j w_j E_j(n)                  (eq. 3, 6)
    horizon 2   f_const = u + beta E_a(n) - alpha E_b(n)        (eq. 7)

beta and alpha are "learnable" in the paper. ``contrast = "router"`` does as the released code: the gate has two more
rows, which are softmaxed; the larger is beta and selects E_a. ``contrast = "scalar"`` learns two numbers, and E_a is
the better-routed expert. A token is computed only by its selected experts; decoding does not even read the others.

Each expert has its own output, u + E_j(n) (the paper's left and right; scaling ONE vector twice, its eq. 4, would rank
tokens identically). Trees with ``candidates = "decoupled"`` take their candidates from these.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from pipeline.basics.settings import Settings
from pipeline.drafts.eagle import NAMES as EAGLE_NAMES
from pipeline.drafts.eagle import NO_BIAS, EagleFrame, EagleFrameConfig
from pipeline.drafts.eagle3 import NAMES as EAGLE3_NAMES
from pipeline.drafts.eagle3 import NUMBERED_FORMAT, Eagle3Frame, TrainingTimeTestConfig, TrainingTimeTestObjective
from pipeline.drafts.parts.layers import swiglu
from pipeline.drafts.parts.losses import Term
from pipeline.drafts.parts.names import PLUG_IN, Export, FileFormat, Names
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.one_layer import Heads, OneLayer

if TYPE_CHECKING:
    from pipeline.features.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Settings):
    """The settings of the experts after the attention, in either frame."""

    experts: int = 2
    experts_per_token: int = 2
    expert_width: int | None = None  # default: the hidden size, as in the released code
    # eq. 7 with either interpretation of beta and alpha, or without eq. 7
    contrast: Literal["router", "scalar", "none"] = "router"
    balance_loss: float = 0.0  # weight of E sum_e share_e mean_e in each dialogue: 1 if experts are used equally

    def __post_init__(self):
        super().__post_init__()  # of the frame
        self.require_at_least(2, "experts", "experts_per_token")
        self.require_at_least(1, "expert_width")
        self.require_at_least(0, "balance_loss")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")

    @property
    def levels(self) -> int:
        return 1 if self.contrast == "none" else 2

    @property
    def has_experts(self) -> bool:
        return True

    def terms(self, step: int) -> list[Term]:
        frame_terms = super().terms(step)  # type: ignore[misc]
        return [*frame_terms, Term("balance", 1, {"penalty": self.balance_loss})] if self.balance_loss else frame_terms


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
    """A mixture of experts. Tensor names are the released checkpoints': ``gate`` [N + 2, d] (N for scalar contrast),
    ``experts.j``.
    """

    def __init__(self, llama: Any, config: Any):
        super().__init__()
        self.top_k, self.count, self.contrast = config.experts_per_token, config.experts, config.contrast
        router_rows = 2 if self.contrast == "router" else 0
        self.gate = nn.Linear(llama.hidden_size, self.count + router_rows, bias=False)
        width = config.expert_width or llama.hidden_size
        self.experts = nn.ModuleList(swiglu(llama, width) for _ in range(self.count))
        if self.contrast == "scalar":
            self.contrast_scalars = nn.Parameter(torch.tensor([1.0, 0.0]))  # beta, alpha

    def forward(self, u: Tensor, n: Tensor) -> Heads:
        """Return the predictions for ``u`` and its norm ``n`` (..., D)."""
        scores = self.gate(n)
        selected_scores, selected = scores[..., : self.count].topk(self.top_k, dim=-1)  # best first
        outputs = self._expert_outputs(n, selected)  # (..., K, D)
        weights = selected_scores.float().softmax(-1).to(n.dtype)
        mixture = (weights[..., None] * outputs).sum(-2)
        experts = [u + output for output in outputs.unbind(-2)]
        ahead = [] if self.contrast == "none" else [u + self._contrast(scores, selected, outputs)]
        return Heads([u + mixture, *ahead], experts, selected_scores.float().log_softmax(-1), (scores, selected))

    def _expert_outputs(self, n: Tensor, selected: Tensor) -> Tensor:
        """Return the selected experts' outputs (..., K, D), best first."""
        # In decoding on an accelerator, waiting for the experts' token counts takes longer than reading all experts.
        waits = (n.device.type != "cpu" and torch.is_inference_mode_enabled()) or torch.compiler.is_compiling()
        if self.top_k == self.count or waits:
            outputs = torch.stack([expert(n) for expert in self.experts], dim=-2)  # (..., E, D)
            return outputs.gather(-2, selected[..., None].expand(*selected.shape, n.shape[-1]))
        slots = selected.reshape(-1)  # of all tokens, K each
        order = slots.argsort(stable=True)
        parts = n.reshape(-1, n.shape[-1])[order // self.top_k].split(self._count_slots(slots))
        # In training and validation all ranks run the same modules, also experts without a row on the rank.
        all_run = not torch.is_inference_mode_enabled()
        outputs = torch.cat([expert(x) for expert, x in zip(self.experts, parts, strict=True) if len(x) or all_run])
        return outputs[order.argsort()].view(*selected.shape, n.shape[-1])

    def _count_slots(self, slots: Tensor) -> list[int]:
        """Return the number of slots of each expert."""
        if detect_fake_mode(slots):  # an estimate of memory, where there are no scores: an even split
            return [len(slots) * (n + 1) // self.count - len(slots) * n // self.count for n in range(self.count)]
        if slots.device.type == "cpu":
            return torch.bincount(slots, minlength=self.count).tolist()
        return (slots[:, None] == torch.arange(self.count, device=slots.device)).sum(0).tolist()  # waits once

    def _contrast(self, scores: Tensor, selected: Tensor, outputs: Tensor) -> Tensor:
        best, second = outputs[..., 0, :], outputs[..., 1, :]
        if self.contrast == "scalar":
            beta, alpha = self.contrast_scalars
            return beta * best - alpha * second
        # The router's two rows belong to the two best experts in the order of their indices.
        raw = scores[..., self.count :]
        pair = raw.float().softmax(-1).to(outputs.dtype)
        in_order = (selected[..., 0] < selected[..., 1])[..., None]
        low, high = torch.where(in_order, best, second), torch.where(in_order, second, best)
        v_low, v_high = pair[..., :1], pair[..., 1:]
        # Compare raw scores, as the released code does: in half precision, different weights may round to equal ones.
        return torch.where(raw[..., :1] > raw[..., 1:], v_low * low - v_high * high, v_high * high - v_low * low)


class Experts(OneLayer):
    """A draft with experts after the attention, in either frame."""

    config: Any

    def mlp_modules(self, llama: Any) -> dict[str, nn.Module]:
        return {"mlp_moe": MixtureOfExperts(llama, self.config)}

    def heads(self, u: Tensor) -> Heads:
        block: Any = self.block
        return block.mlp_moe(u, block.post_attention_layernorm(u))

    def mlp_config(self) -> dict[str, Any]:
        block: Any = self.block
        return {
            "intermediate_size": self.config.expert_width or self.shapes["hidden_size"],
            "num_experts": self.config.experts,
            "num_experts_per_tok": self.config.experts_per_token,
            "gate_rows": block.mlp_moe.gate.out_features,  # two more than experts if the contrast has a router
            "reduced_vocabulary": self.config.vocabulary,
        }


class ExpertsObjective(Objective):
    def penalties(self, penalty_inputs: tuple[Tensor, Tensor], batch: "Batch") -> list[Tensor]:
        scores_BTR, selected_BTK = penalty_inputs
        return (
            [balance_penalty(scores_BTR, selected_BTK, self.config.experts, batch)] if self.config.balance_loss else []
        )

    def warning(self, validation: dict[str, float]) -> str | None:
        """Return a warning if the penalty is more than halfway to its maximum.

        Only a draft with `balance_loss` has the penalty. It weighs a dialogue's experts by their probability, so it
        misses a gate that hardly prefers the experts it selects.
        """
        experts, selected = self.config.experts, self.config.experts_per_token
        penalty = validation.get("balance_penalty", 1.0)
        if selected == experts or penalty <= (1 + experts / selected) / 2:
            return None
        return (
            f"in each dialogue the gate keeps to few of its {experts} experts (balance_penalty {penalty:.1f}: 1 is "
            f"even, {experts / selected:g} the most): raise its balance_loss, which is {self.config.balance_loss:g}"
        )


class ExpertsOnEagle3Objective(ExpertsObjective, TrainingTimeTestObjective):
    pass


def balance_penalty(scores_BTR: Tensor, selected_BTK: Tensor, experts: int, batch: "Batch") -> Tensor:
    """Return the sum over dialogues of (trained positions) x E sum_e share_e mean_e.

    share_e is expert e's share of the slots at a dialogue's trained positions, mean_e its mean probability by the gate.
    Computed for each dialogue (DeepSeek-V3, eq. 17), the sum does not depend on how a global batch is split.
    """
    probabilities_BTE = scores_BTR[..., :experts].float().softmax(-1)
    numbers_E = torch.arange(experts, device=selected_BTK.device)
    slots_BTE = (selected_BTK[..., None] == numbers_E).sum(-2).float() / selected_BTK.shape[-1]
    (slots_NE, positions_N), (sums_NE, _) = map(batch.sums_by_dialogue, (slots_BTE, probabilities_BTE))
    return experts * ((slots_NE * sums_NE).sum(-1) / positions_N.clamp_min(1)).sum()


class Jakiro(Experts, EagleFrame):
    pass


class JakiroOnEagle3(Experts, Eagle3Frame):
    pass


# -- names in other software -------------------------------------------------------------------------------------------

NO_QK_NORM = {"qk_norm": "the plug-in's drafts with experts have Llama's attention; train without"}
SETTINGS = {"experts_per_token": "num_experts_per_tok", "contrast": "contrast"}


def _add_hybrid(names: Names, form: FileFormat, formats: dict[str, FileFormat], not_exported: tuple[str, ...]) -> Names:
    """Return the frame's names with the plug-in's form, and `formats` that are only read. config.json also states how a
    chain's last token is drafted.
    """

    def engine_config(draft: Any, weights: dict[str, Tensor], export: Export) -> dict[str, Any]:
        hybrid = {"contrast": draft.config.contrast, "parallel": export.parallel}
        return names.engine_config(draft, weights, export) | hybrid

    form = replace(form, plug_in=PLUG_IN, with_lookup=form.architecture)
    changes: Any = {"engine_config": engine_config, "not_exported": not_exported, "settings": SETTINGS}
    return replace(names, forms={"vllm": form} | formats, keys={**names.keys, "parallel": ()}, **changes)


FORM = FileFormat(architecture="EagleJakiroForCausalLM", unsupported=NO_BIAS)
FORM_ON_EAGLE3 = FileFormat(architecture="JakiroForCausalLMEagle3", unsupported=NO_QK_NORM)
NAMES = _add_hybrid(EAGLE_NAMES, FORM, {}, ())
NAMES_ON_EAGLE3 = _add_hybrid(EAGLE3_NAMES, FORM_ON_EAGLE3, NUMBERED_FORMAT, EAGLE3_NAMES.not_exported)
