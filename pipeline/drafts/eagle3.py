"""EAGLE-3 (arXiv 2503.01840): features fused from three layers of the target, the draft's own head, no regression.

With g_i = fc([a_i; b_i; c_i]) of the outputs of three decoder layers, and e the embedding of t_{i+1}:

    u = attention([norm(e); norm(g)]) + g,    f = u + MLP(norm(u)),    logits of t_{i+2} = head(norm(f))

The next forward's feature is f. It is trained in up to 7 steps over its own features (the training-time test); step s
has weight 0.8^(s-1). EAGLE-3.1 has two options: a norm for each layer's output before fc (`fc_norm`), and the normed f
as the next feature (`norm_output`). Other published drafts have one norm for the three outputs together
(`norm_before_fc`), biases of the attention, norms of its queries and keys. Tensor names are those that engines read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.basics.errors import PipelineError
from pipeline.drafts.parts.attention.chains import ANCHORS, step_group
from pipeline.drafts.parts.base import DenseConfig, FusedConfig
from pipeline.drafts.parts.layers import AttentionBlock, norm
from pipeline.drafts.parts.losses import OwnHead, Term
from pipeline.drafts.parts.names import (
    AUXILIARY,
    DRAFT_TOKEN_IDS,
    GPT_OSS,
    UNSET,
    Export,
    Facts,
    FileFormat,
    Names,
    llama_config,
)
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.parts.one_layer import Dense, OneLayer, OneLayerConfig
from pipeline.features.positions import Group, Horizons, Positions, Seed, draw_inputs, trained_mask

STREAM = 0x74747431  # random stream, separate from others with the same seeds
DECAY = 0.8  # factor of a loss's weight for each earlier forward pass or depth


@dataclass(frozen=True, kw_only=True)
class Eagle3FrameConfig(FusedConfig, OneLayerConfig):
    """The settings of the frame. A fused feature has no label, so there is no regression."""

    next_weights: ClassVar = {"classification": 1.0}
    ahead_weights: ClassVar = {"classification": 0.5}

    fc_norm: bool = False  # EAGLE-3.1
    norm_output: bool = False  # EAGLE-3.1
    norm_before_fc: bool = False  # one norm over all outputs together, speculators' default
    norm_before_residual: bool = False  # add norm(g) to the attention's output, not g
    attention_bias: bool = False  # of q, k, v and o
    qk_norm: bool = False  # of each head's queries and keys, before RoPE, as Qwen3's
    # The target's distribution over a reduced vocabulary. masked: renormalised, and positions whose likeliest token is
    # not in it have no loss (the reference's); renormalised: every position; whole: not renormalised, mass below 1.
    teacher: Literal["masked", "renormalised", "whole"] = "masked"

    def __post_init__(self):
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both true: an output is normed once before fc, set one of them to false"
            )

    @property
    def needs_full_head(self) -> bool:
        return self.vocabulary is not None and self.teacher != "renormalised"

    @property
    def masks_teacher(self) -> bool:
        return self.teacher == "masked"

    @property
    def auxiliary(self) -> Sequence[int | str]:
        return self.auxiliary_layers or ["default"]

    def reference_layers(self, target_layers: int) -> list[int]:
        """Return layers 2, L // 2 and L - 3 of targets with at least 7 layers; fewer layers of smaller targets."""
        return sorted({min(2, target_layers), max(target_layers // 2, 1), max(target_layers - 3, 1)})


@dataclass(frozen=True, kw_only=True)
class TrainingTimeTestConfig(Eagle3FrameConfig):
    ttt_steps: int = 7  # training-time test: forwards of a batch; from the second on, features are the draft's own
    anchors: int | None = None  # forwards from the second on run after so many drawn inputs of a dialogue; default: all

    def __post_init__(self):
        super().__post_init__()
        self.require_at_least(1, "ttt_steps", "anchors")

    def terms(self, step: int) -> list[Term]:
        """Return the terms, including those of the forward passes on the draft's own features."""
        ttt_terms = []
        for number in range(2, self.ttt_steps + 1):
            group = 1 if self.anchors is None else step_group(number)
            weights = {"classification": DECAY ** (number - 1)}
            ttt_terms.append(Term(f"ttt_{number}", group, weights, self.objective))
        return [*super().terms(step), *ttt_terms]


class TrainingTimeTestObjective(Objective):
    """The objective whose steps from the second on are trained after drawn inputs, if the settings have `anchors`.

    An anchor a is an input that the first step trains. Step s is trained at input a + s - 1, if the first step trains
    that one, too. Without a seed, so in validation, there are no anchors, and every step is trained where the first is.
    """

    config: TrainingTimeTestConfig

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        horizons = Horizons(range(1, self.config.levels + 1)).positions(ids, loss_mask, seed)
        if self.config.anchors is None:
            return horizons
        steps = range(2, self.config.ttt_steps + 1)
        if not seed:
            return horizons | {step_group(number): horizons[1] for number in steps}
        is_trained = np.append(trained_mask(loss_mask, 1), np.zeros(len(steps), dtype=bool))
        anchors = draw_inputs(is_trained.nonzero()[0], self.config.anchors, (STREAM, *seed))
        positions: dict[Group, Positions] = {ANCHORS: _next_labels(anchors)}
        for number in steps:
            inputs = anchors + (number - 1)
            positions[step_group(number)] = _next_labels(inputs[is_trained[inputs]])
        return horizons | positions


def _next_labels(inputs: np.ndarray) -> Positions:
    return Positions(torch.from_numpy(inputs), torch.from_numpy(inputs + 1))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DenseConfig, TrainingTimeTestConfig):
    description: ClassVar = (
        "EAGLE-3 ([2503.01840](https://arxiv.org/abs/2503.01840)), one dense layer on fused features,"
    )

    kind: Literal["eagle3"] = "eagle3"


class Eagle3Frame(OneLayer):
    config: Eagle3FrameConfig

    def __init__(self, config: Any, shapes: dict[str, Any]):
        super().__init__(config, shapes)
        self.llama.attention_bias = config.attention_bias
        width, sources = self.llama.hidden_size, len(self.needs.auxiliary)
        if config.norm_before_fc:
            self.input_norm = norm(self.llama, sources * width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(self.llama) for _ in range(sources))
        self.fc = nn.Linear(sources * width, width, bias=False)
        norms = {"input_layernorm": norm(self.llama), "hidden_norm": norm(self.llama)}
        parts = self.mlp_modules(self.llama) | norms
        self.midlayer = AttentionBlock(self.llama, parts, inputs=2 * width, qk_norm=config.qk_norm)
        self.norm = norm(self.llama)
        self.lm_head = OwnHead(width, self.vocabulary_size)

    @property
    def block(self) -> AttentionBlock:
        return self.midlayer

    def features(self, states_TSD: Tensor) -> Tensor:
        if self.config.fc_norm:
            normed = [layer_norm(states_TSD[..., place, :]) for place, layer_norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        joined = states_TSD.flatten(-2)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def inputs(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        block: Any = self.midlayer
        normed = block.hidden_norm(features)
        both = torch.cat([block.input_layernorm(embedded), normed], dim=-1)
        return both, normed if self.config.norm_before_residual else features

    def next_feature(self, feature: Tensor) -> Tensor:
        return self.norm(feature) if self.config.norm_output else feature

    @property
    def own_heads(self) -> list[OwnHead]:
        return [self.lm_head]

    def head_input(self, features: Tensor) -> Tensor:
        return self.norm(features)


class Eagle3(Dense, Eagle3Frame):
    config: Eagle3Config


# -- names in other software -------------------------------------------------------------------------------------------

FUSED_LAYERS = 3  # layers whose outputs engines fuse
FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
NO_EAGLE_3_1 = "llama.cpp has no EAGLE-3.1; train without, or use vllm"
UNSUPPORTED_LAYER_OPTIONS = dict.fromkeys(("attention_bias", "qk_norm", "window"), "")


def engine_config(
    draft: Eagle3Frame, weights: dict[str, Tensor], export: Export, extra_keys: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return config.json for an engine. Raises PipelineError for layers that engines cannot fuse."""
    config, layers, last = draft.config, list(draft.needs.auxiliary), draft.shapes["target_layers"]
    if len(layers) != FUSED_LAYERS:
        raise PipelineError(f"auxiliary_layers={layers}: engines fuse {FUSED_LAYERS} layers")
    if layers[-1] >= last:
        raise PipelineError(
            f"auxiliary_layers={layers}: engines read the input of a layer, and none follows layer {layers[-1]}"
        )
    if (ids := weights.pop(DRAFT_TOKEN_IDS, None)) is not None:
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(draft.target_vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    layer = llama_config(draft, weights) | {"attention_bias": config.attention_bias}
    layer |= {"model_type": "qwen3"} if config.qk_norm else {}
    flags = {key: getattr(config, key) for key in FLAGS}
    flags |= {"draft_vocab_size": draft.vocabulary_size, "target_hidden_size": draft.shapes["hidden_size"]}
    if export.engine == "speculators":
        return _speculators(layer, export) | {AUXILIARY: layers} | flags
    # vLLM and llama.cpp number layer inputs as transformers does. SGLang adds one to the numbers that it reads, except
    # for gpt-oss since its pull request 32334.
    adds_one = export.engine == "sglang" and export.family != GPT_OSS
    layer_keys = {"num_aux_hidden_states": len(layers), AUXILIARY: [n - 1 for n in layers] if adds_one else layers}
    name = "Eagle3Qwen3ForCausalLM" if config.qk_norm else export.architecture
    outer = flags | (extra_keys or {}) | ({} if adds_one else layer_keys)
    return {"architectures": [name]} | layer | outer | {"eagle_config": {"use_aux_hidden_state": True, **layer_keys}}


def _speculators(layer: dict[str, Any], export: Export) -> dict[str, Any]:
    if export.target.count("/") != 1:
        raise PipelineError(f"the target is {export.target!r}, expected a name of the Hub: give --target OWNER/NAME")
    return {
        "architectures": [export.architecture],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": export.guesses}],
            "verifier": {"name_or_path": export.target, "architectures": []},
        },
        "transformer_layer_config": layer,
        "torch_dtype": layer["torch_dtype"],
        "tie_word_embeddings": False,
    }


def _numbered_name(name: str, _: Any) -> str:
    return name.replace("midlayer.", "layers.0.", 1)


def facts(draft: Eagle3Frame, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
    """Return the layers and flags, the file's and ours.

    A missing flag is false, except `norm_before_residual` of speculators' EAGLE-3, which vLLM takes as true. Options
    that have tensors are also recognised by these.
    """
    last, fused_layers = draft.shapes["target_layers"], list(draft.needs.auxiliary)
    layers = config_json.get(AUXILIARY) or UNSET
    fc = tensors.get("fc.weight")
    fc_fits = fc is None or fc.shape[-1] == len(fused_layers) * draft.shapes["hidden_size"]
    if layers == [*fused_layers, last] and fc_fits:  # some files also list the last layer, which only training reads
        layers = fused_layers
    attention = {name.rpartition(".self_attn.")[2] for name in tensors}
    by_default = {
        "norm_before_residual": config_json.get("speculators_model_type") == "eagle3",
        "norm_before_fc": "input_norm.weight" in tensors,
        "fc_norm": "fc_norm.0.weight" in tensors,
    }
    stated = {key: config_json.get(key, by_default.get(key, False)) for key in FLAGS}
    stated["attention_bias"] = (
        config_json.get("attention_bias") or config_json.get("qkv_bias") or "q_proj.bias" in attention
    )
    stated["qk_norm"] = "q_norm.weight" in attention
    layer_fact: Facts = {"auxiliary_layers": (layers, fused_layers)}
    return layer_fact | {key: (bool(value), getattr(draft.config, key)) for key, value in stated.items()}


NUMBERED_FORMAT = {"others": FileFormat(_numbered_name)}  # only read, never written
AUTHORS_FORMAT = FileFormat(architecture="LlamaForCausalLMEagle3")
NO_RESIDUAL = {"norm_before_residual": "SGLang adds the plain feature; train without, or use vllm"}
NAMES = Names(
    forms={
        "vllm": replace(AUTHORS_FORMAT, with_lookup="PromptLookupForCausalLMEagle3"),
        "sglang": replace(AUTHORS_FORMAT, unsupported=NO_RESIDUAL | {"norm_before_fc": ""} | UNSUPPORTED_LAYER_OPTIONS),
        "gguf": replace(
            AUTHORS_FORMAT,
            unsupported={"fc_norm": NO_EAGLE_3_1, "norm_output": NO_EAGLE_3_1} | UNSUPPORTED_LAYER_OPTIONS,
        ),
        "speculators": FileFormat(_numbered_name, "Eagle3Speculator"),
    },
    engine_config=engine_config,
    method={"method": "eagle3"},
    facts=facts,
    keys=dict.fromkeys((*FLAGS, "attention_bias", "qkv_bias", AUXILIARY, "prompt_lookup"), ())
    | {
        "use_aux_hidden_state": (True,),
        "use_input_layernorm_in_first_layer": (True,),
        "use_last_layernorm": (True,),
        "next_layer_regular": (True,),
    },
)
