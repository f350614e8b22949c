"""The MTP heads that targets come with: the names of their tensors, and the options of their formula, by family.

A head is a decoder layer of its target's family, with full attention, and a few parts around it. With e the embedding
of the next token and h the target's final state:

    x = eh_proj([enorm(e); hnorm(h)]),    f = Layer(x),    logits = the target's head(norm(f))

The next forward's h is norm(f) or f. Options and names are those of vLLM 0.32 (its files `*_mtp.py`), since its counts
are what users serve.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from pipeline.lm.attention import FULL, GROUPED

DECODER = "decoder."  # before the names of the layer's tensors in a draft
EXPERTS = "mlp.experts.gate_up_proj"  # all experts of a layer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of the target, in its files
# Settings of a decoder of one layer that has full attention, and experts if its family's later layers have them. They
# hold for every draft, whatever its artifact says.
ONE_LAYER: Mapping[str, Any] = {
    **{"num_hidden_layers": 1, "layer_types": [FULL], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0},
    **{"sliding_window": None, "use_sliding_window": False, "attention_dropout": 0.0},
    **{"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    **{"tie_word_embeddings": False, "use_cache": True},
}
UNDECLARED = ("head_dim",)  # settings that layers read and some families' configurations do not declare


@dataclass(frozen=True)
class HeadForm:
    """One family's head. In names, `{number}` is 0, and `{layer}` the number of the target's layers."""

    layer: str  # what precedes the names of the layer's tensors
    parts: Mapping[str, str]  # enorm, hnorm, eh_proj and norm, if there is one -> their names
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors that repeat the target's -> its names of them
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the layer, in addition to ONE_LAYER
    model_type: str = ""  # transformers' name of the layer's family, if it is not the target's
    renamed: Mapping[str, str] = field(default_factory=dict)  # how a name in the layer begins -> in the files
    keys: Mapping[str, str] = field(default_factory=dict)  # a setting of the layer -> its name in the target's
    scales_latents: bool = False  # the attention's latents are multiplied by sqrt(hidden size / rank)
    state_first: bool = False  # eh_proj takes [hnorm(h); enorm(e)]
    zeroes_first: bool = False  # the embedding is 0 at the first position of a text
    passes_normed: bool = True  # the next forward's h is norm(f)
    before_norm: bool = False  # h is the target's state before its final norm

    def names_in_files(self, layers: int, number: int = 0) -> "HeadForm":
        """Return the form with the names of a target with this number of layers."""

        def fill(name: str) -> str:
            return name.format(number=number, layer=layers + number)

        parts = {part: fill(name) for part, name in self.parts.items()}
        copies = {fill(name): original for name, original in self.copies.items()}
        return replace(self, layer=fill(self.layer), parts=parts, copies=copies)


NUMBERED = "model.layers.{layer}."
DEEPSEEK = HeadForm(
    layer=NUMBERED,
    parts={part: f"{NUMBERED}{part}" for part in ("enorm", "hnorm", "eh_proj")}
    | {"norm": f"{NUMBERED}shared_head.norm"},
    copies={f"{NUMBERED}embed_tokens.weight": EMBEDDING, f"{NUMBERED}shared_head.head.weight": HEAD},
    zeroes_first=True,
)
QWEN = HeadForm(
    layer="mtp.layers.{number}.",
    parts={
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "norm": "mtp.norm",
    },
)
MIMO_LAYER = "model.mtp_layers.{number}."
MIMO = HeadForm(
    layer=MIMO_LAYER,
    parts={
        "enorm": f"{MIMO_LAYER}token_layernorm",
        "hnorm": f"{MIMO_LAYER}hidden_layernorm",
        "eh_proj": f"{MIMO_LAYER}input_proj",
        "norm": f"{MIMO_LAYER}final_layernorm",
    },
    model_type="qwen2",
    state_first=True,
    zeroes_first=True,
    before_norm=True,
)
ERNIE = HeadForm(
    layer="model.mtp_block.{number}.",
    parts={
        "enorm": "model.mtp_emb_norm.{number}",
        "hnorm": "model.mtp_hidden_norm.{number}",
        "eh_proj": "model.mtp_linear_proj.{number}",
    },
    model_type="llama",
    zeroes_first=True,
    passes_normed=False,
)
GLM = replace(DEEPSEEK, passes_normed=False)
SPARSE = replace(DEEPSEEK, settings={"layer_types": ["indexed_attention"], "indexer_types": ["full"]})
FINAL_NORM = {**DEEPSEEK.parts, "norm": f"{NUMBERED}final_layernorm"}
HEADS: dict[str, HeadForm] = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": SPARSE,
    "glm4_moe": GLM,
    "glm4_moe_lite": GLM,
    "glm_moe_dsa": SPARSE,
    "ernie4_5_moe": ERNIE,
    "longcat_flash": HeadForm(
        layer="model.mtp.layers.{number}.",
        parts={
            "enorm": "model.mtp.layers.{number}.enorm.m",
            "hnorm": "model.mtp.layers.{number}.hnorm.m",
            "eh_proj": "model.mtp.layers.{number}.eh_proj",
            "norm": "model.mtp.norm",
        },
        copies={"model.mtp.embed_tokens.weight": EMBEDDING},
        settings={"first_k_dense_replace": 1},
        model_type="deepseek_v3",
        renamed={"mlp.": "transformer_layer.mlp."},
        keys={"intermediate_size": "ffn_hidden_size"},
        scales_latents=True,
    ),
    "hy_v3": replace(DEEPSEEK, parts=FINAL_NORM, copies={}),
    "bailing_hybrid": replace(DEEPSEEK, parts=FINAL_NORM, copies={}, zeroes_first=False),
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "mimo": MIMO,
}


def find_family(text: Any) -> str | None:
    """Return the family whose head a target has, by its text configuration; None if it has none that is known."""
    if "MiMoForCausalLM" in (getattr(text, "architectures", None) or ()):
        return "mimo"  # a Qwen2 with a head
    return text.model_type if text.model_type in HEADS else None


def layer_shapes(text: Any) -> dict[str, Any] | None:
    """Return the settings of the head's layer, for a draft's shapes; None if the target's family has no known head."""
    family = find_family(text)
    if family is None:
        return None
    names = {key: HEADS[family].keys.get(key, key) for key in _list_settings(family)}
    settings = {key: getattr(text, name) for key, name in names.items() if hasattr(text, name)}
    return {"family": family, "settings": {key: value for key, value in settings.items() if key not in ONE_LAYER}}


def _list_settings(family: str) -> list[str]:
    """Return the settings that a family defines for itself: none of them names code, a kernel or a file."""
    shared, config_class = fields(PreTrainedConfig), CONFIG_MAPPING[HEADS[family].model_type or family]
    declared = {declared_field.name for declared_field in fields(config_class)}
    return sorted({*UNDECLARED, *declared} - {shared_field.name for shared_field in shared})


def make_decoder(layer: dict[str, Any]) -> Any:
    """Return a decoder of the head's layer alone, from `layer_shapes`: it takes embeddings, and has no final norm."""
    decoder: Any = AutoModel.from_config(_config_of(layer))
    decoder.set_attn_implementation(GROUPED if decoder._supports_sdpa else "eager")
    if HEADS[layer["family"]].scales_latents:
        config, attention = decoder.config, decoder.layers[0].self_attn
        norms = {attention.q_a_layernorm: config.q_lora_rank, attention.kv_a_layernorm: config.kv_lora_rank}
        for norm, rank in norms.items():
            norm.register_forward_hook(partial(_scale, (config.hidden_size / rank) ** 0.5))
    return decoder


def _scale(factor: float, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output * factor


def _config_of(layer: dict[str, Any]) -> PreTrainedConfig:
    form, keys = HEADS[layer["family"]], _list_settings(layer["family"])
    settings = {**layer["settings"], **ONE_LAYER, **form.settings}
    model_type = form.model_type or layer["family"]
    return AutoConfig.for_model(model_type, **{key: settings[key] for key in keys if key in settings})


# -- files -------------------------------------------------------------------------------------------------------------


def to_file_names(
    decoder: Any, form: HeadForm, weights: Mapping[str, Tensor], files: Container[str] = ()
) -> dict[str, Tensor]:
    """Return a draft's tensors by their names in the target's files; `form` has the names there. `files`: the names of
    all tensors there, which tell whether the experts of a layer are one tensor, as in transformers' modules.
    """
    layer = {name.removeprefix(DECODER): tensor for name, tensor in weights.items() if name.startswith(DECODER)}
    if f"{form.layer}{EXPERTS}" not in files:
        layer = revert_weight_conversion(decoder, layer)
    in_layer = {name.removeprefix("layers.0."): tensor for name, tensor in layer.items()}
    in_file = {form.layer + _rename(name, form.renamed): tensor for name, tensor in in_layer.items()}
    for part, name in form.parts.items():
        in_file[f"{name}.weight"] = weights[f"{part}.weight"]
    return in_file


def _rename(name: str, beginnings: Mapping[str, str]) -> str:
    for beginning, replacement in beginnings.items():
        if name.startswith(beginning):
            return replacement + name.removeprefix(beginning)
    return name


def from_file_names(layer: dict[str, Any], form: HeadForm, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a target's files by their names in a draft, in the files' dtype."""
    parts = {f"{name}.weight": part for part, name in form.parts.items()}
    original = {in_files: name for name, in_files in form.renamed.items()}
    one_layer = {
        f"layers.0.{_rename(name.removeprefix(form.layer), original)}": tensor
        for name, tensor in tensors.items()
        if name not in parts
    }
    config, projection = _config_of(layer), tensors[f"{form.parts['eh_proj']}.weight"]
    ignored = {"embed_tokens.weight": torch.zeros(1, len(projection)), "norm.weight": torch.zeros(len(projection))}
    model_class: Any = MODEL_MAPPING[type(config)]
    loaded = model_class.from_pretrained(None, config=config, state_dict=one_layer | ignored, dtype=projection.dtype)
    weights = {f"{DECODER}{name}": tensor for name, tensor in loaded.state_dict().items() if name not in ignored}
    return weights | {f"{part}.weight": tensors[name] for name, part in parts.items()}
