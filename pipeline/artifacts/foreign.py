"""Reading the config.json of drafts from other projects.

Guarantee: the settings returned describe what the other project's code computes, or an error names the key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    GenerationConfig,
    LlamaConfig,
    MuseGlimmerAssistantConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pipeline.artifacts.unpickle import WEIGHTS, as_object
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.drafts.parallel.dflash import MUSE
from pipeline.drafts.parts.layers import ROPES, SHAPE_FIELDS, draft_shapes
from pipeline.drafts.parts.names import AUXILIARY, GPT_OSS, INPUTS, LAYER_KEYS, OUTPUTS
from pipeline.lm.attention import FULL, SLIDING, max_positions

OTHER_TARGET = "it was trained for another target"
NESTED = ("eagle_config", "dflash_config", "transformer_layer_config")
FAMILIES = {  # each with its own defaults
    **{"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config},
    MUSE: MuseGlimmerAssistantConfig,
}

# Keys of a config.json that the draft does not read: they do not change the computation (such as sampling settings), or
# shapes and tensors have the same information.
OTHER_KEYS = """
    attention_dropout auto_map base_model_name_or_path bias draft_vocab_size dropout_rate embed_requires_grad
    enable_sp_ulysses gate_rows has_no_defaults_at_init hidden_state_offset hydra_head_arch hydra_num_heads
    hydra_num_layers initializer_range medusa_num_heads medusa_num_layers model_type num_aux_hidden_states num_experts
    num_experts_per_tok num_hidden_layers num_local_experts output_router_logits parallel_draft_heads_num_layers
    pretraining_tp reduced_vocabulary rope_scaling rope_theta router_aux_loss_coef router_jitter_noise sep_token_id
    speculators_config speculators_version target_hidden_size tie_word_embeddings tokenizer_class torch_dtype ttt_length
    ttt_steps version
"""
IGNORED_KEYS = {*vars(GenerationConfig()), *vars(PretrainedConfig()), *SHAPE_FIELDS, *OTHER_KEYS.split()}
# Keys whose values inside and outside a nested object may differ.
MAY_DIFFER = {AUXILIARY} | IGNORED_KEYS - {*SHAPE_FIELDS, "rope_theta", "rope_scaling"} | {"vocab_size"}
# Key -> the supported values; (): any value.
CONFIG_KEYS: dict[str, tuple] = dict.fromkeys(IGNORED_KEYS, ()) | {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "eagle_decoder_type": ("llama",),
    "grounded_heads": (True,),
    "is_causal": (True,),
    "is_neox_style": (True,),
    "layer_types": (),
    "logit_scale": (1,),
    "parallel_draft_step": (1,),
    "partial_rotary_factor": (1,),
    "rope_is_neox_style": (True,),
    "scale_attn_weights": (True,),
    "speculators_model_type": ("eagle", "eagle3"),
    "use_rope": (True,),
}


def raw_config(source: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises PipelineError if there is none."""
    path = source / "config.json"
    if not path.is_file():
        raise PipelineError(
            f"{source} holds no config.json: expected a folder with config.json and {' or '.join(WEIGHTS)}"
        )
    return read_json(path)


def read_foreign_config(source: Path, target: Any) -> dict[str, Any]:
    """Return the settings in config.json, flattened and without nulls; under AUXILIARY the layers that it names,
    counted as in this project (1: the output of the first layer); a sliding window only if it is shorter than the
    longest text of the target's configuration.

    Raises PipelineError for an unsupported RoPE or attention, for contradictions, and for values of a wrong type.
    """
    path, raw = source / "config.json", raw_config(source)
    settings: dict[str, Any] = {}
    for part in (raw, *(as_object(f"{path}: {key}", raw.get(key) or {}) for key in NESTED)):
        for key, value in part.items():
            if key in NESTED or value is None:
                continue
            if key not in MAY_DIFFER and settings.get(key, value) != value:
                raise PipelineError(
                    f"{path} says {key}={settings[key]!r} and, nested, {value!r}: which one is not known"
                )
            settings[key] = value
    _require_types(path, settings)
    settings[AUXILIARY] = _read_layers(path, raw, target)
    _require_rope(path, settings)
    _resolve_window(path, settings, max_positions(target))
    return settings


def require_known(source: Path, settings: dict[str, Any], extra_keys: Mapping[str, tuple]) -> list[str]:
    """Return the unknown keys with false or empty values, which no code reads.

    Raises PipelineError for other keys of config.json that neither `CONFIG_KEYS` nor the draft's `extra_keys` has.
    """
    supported, problems = {**CONFIG_KEYS, **extra_keys}, []
    for key, value in settings.items():
        if key in supported and supported[key] and value not in supported[key]:
            problems.append(f"{key}={value!r}, and only {' or '.join(map(repr, supported[key]))} is computed here")
        elif key not in supported and value not in (False, "", [], {}):
            problems.append(f"{key}={value!r}, which is not known here for this kind of draft")
    if problems:
        raise PipelineError(
            f"{source / 'config.json'} says {'; '.join(problems)}. A key that changes nothing of what the draft "
            "computes can be taken out of a copy of the file"
        )
    return sorted(settings.keys() - supported.keys() - {AUXILIARY})


def foreign_shapes(source: Path, settings: dict[str, Any], target: Any, name: str) -> dict[str, Any]:
    """Return the draft's shapes: widths, heads, eps and RoPE of its own config; vocabulary and layers of the target,
    whose configuration and name are given. All are the target's if the config has none, as Hydra's and Medusa's.

    Raises PipelineError if the width differs from the target's.
    """
    shapes, width = draft_shapes(target), target.hidden_size
    is_own = "hidden_size" in settings and settings.get("model_type") != "medusa"
    for key in ("target_hidden_size", "hidden_size") if is_own else ("target_hidden_size",):
        if (size := settings.get(key, width)) != width:
            is_narrow = key == "hidden_size" and "target_hidden_size" in settings
            reason = "a draft that is narrower than its target has no place here" if is_narrow else OTHER_TARGET
            raise PipelineError(f"the checkpoint's {key} is {size}, that of target {name!r} {width}: {reason}")
    if not is_own:
        return shapes
    family = FAMILIES.get(settings.get("model_type", "llama"))
    if family is None:
        raise PipelineError(
            f"{source / 'config.json'} says model_type={settings['model_type']!r}, and only {', '.join(FAMILIES)} are "
            "known here: others have defaults of their own"
        )
    fields = {key: settings[key] for key in (*SHAPE_FIELDS, "rope_theta", "rope_scaling") if key in settings}
    try:
        return draft_shapes(family(**fields)) | {key: shapes[key] for key in ("vocab_size", "target_layers")}
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PipelineError(f"{source / 'config.json'} makes no layer: {' '.join(str(error).split())}") from None


def _require_types(path: Path, settings: dict[str, Any]) -> None:
    """Raise PipelineError for a value of the wrong type under a key that the computation uses."""
    sizes = {*SHAPE_FIELDS, "num_hidden_layers", "max_window_layers", "target_hidden_size"}
    sizes -= {"rms_norm_eps", "rope_parameters"}
    texts, reals = ("model_type",), ("partial_rotary_factor", "rms_norm_eps", "rope_theta")
    for key, value in settings.items():
        if key in sizes and (type(value) is not int or value < (0 if key == "max_window_layers" else 1)):
            raise PipelineError(f"{path}: {key}={value!r}, expected a positive number without a fraction")
        if key in reals and (type(value) not in (int, float) or value <= 0):
            raise PipelineError(f"{path}: {key}={value!r}, expected a positive number")
        if key in texts and not isinstance(value, str):
            raise PipelineError(f"{path}: {key}={value!r}, expected a name")
        if key == "layer_types" and not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
            raise PipelineError(f"{path}: {key}={value!r}, expected a list of names")


def _read_layers(path: Path, raw: dict[str, Any], target: Any) -> list[int]:
    """Return the layers that the file names, counted as in this project; an empty list if it names none.

    An id is the number of the layer whose input is used, counted from 0, which is this project's number of the layer
    before it. `target_layer_ids`, and ids only in a nested object, as SpecForge and ModelOpt write them, are numbers of
    layers whose output is used. An output never has the number of the target's layers: nested ids with it are inputs.

    Raises PipelineError if two places differ, if a place is ambiguous, and for ids that are not layers.
    """
    count, layers = target.num_hidden_layers, {}
    parts = {"": raw} | {place: raw[place] for place in NESTED if raw.get(place)}
    stated = {(place, key): part[key] for place, part in parts.items() for key in LAYER_KEYS if part.get(key)}
    inputs = [ids for (place, key), ids in stated.items() if key == INPUTS or (key == AUXILIARY and not place)]
    for (place, key), ids in stated.items():
        where = f"{place}.{key}".lstrip(".")
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise PipelineError(f"{path}: {key}={ids!r}, expected numbers of layers")
        alone = place and key == AUXILIARY and ids not in inputs and count not in ids
        if alone and target.model_type == GPT_OSS:
            raise PipelineError(
                f"{path}: {where}={ids}: of gpt-oss' layers, SGLang takes such ids for those whose outputs are read "
                f"before its pull request 32334, and since then whose inputs are. Write {AUXILIARY} at the top of a "
                "copy of the file, which names inputs"
            )
        layers[where] = numbers = [number + 1 for number in ids] if alone or key == OUTPUTS else ids
        if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= count:
            raise PipelineError(
                f"{path}: {where} names the outputs of layers {numbers}, counted from 1: expected different ones in "
                f"rising order, from 1 to the target's {count}"
            )
    if len({*map(tuple, layers.values())}) > 1:
        both = "; ".join(f"{where}: {numbers}" for where, numbers in layers.items())
        raise PipelineError(
            f"{path} names other layers at each place (counted from 1, by output: {both}): which ones are meant is not "
            "known. Correct a copy of the file"
        )
    return next(iter(layers.values()), [])


def _require_rope(path: Path, settings: dict[str, Any]) -> None:
    parameters = {"rope_theta": settings["rope_theta"]} if "rope_theta" in settings else {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = as_object(f"{path}: {key}", settings.get(key) or {})
        kind, part = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1)
        if any(isinstance(value, dict) for value in rope.values()):
            raise PipelineError(f"{path}: {key} is given for each kind of layer, expected one RoPE for all layers")
        if not isinstance(kind, str) or kind not in ROPES:
            raise PipelineError(f"{path}: {key} is of kind {kind!r}, expected one of {', '.join(ROPES)}")
        if part != 1:
            raise PipelineError(f"{path}: {key} rotates {part} of a head, expected whole heads")
        for name in ("factor", "rope_theta"):
            if name in rope and (type(rope[name]) not in (int, float) or rope[name] <= 0):
                raise PipelineError(f"{path}: {key} has {name}={rope[name]!r}, expected a positive number")
        for name, value in (rope | ({"rope_type": kind} if rope.keys() - {"rope_theta"} else {})).items():
            if name != "type" and parameters.setdefault(name, value) != value:
                raise PipelineError(
                    f"{path}: {key} says {name}={value!r}, but another key of the file says {parameters[name]!r}"
                )


def _resolve_window(path: Path, settings: dict[str, Any], positions: int) -> None:
    """Reduce the four keys about sliding windows to `layer_types`, with the single kind of sliding layers, and
    `sliding_window`, if it is shorter than the longest text.
    """
    if settings.get("model_type") == MUSE and set(settings.get("layer_types", [SLIDING])) != {FULL}:
        raise PipelineError(f"{path}: {MUSE} with a window, whose ends transformers counts otherwise than we do")
    kinds, window = settings.pop("layer_types", None), settings.pop("sliding_window", None)
    uses_window, first_window_layer = settings.pop("use_sliding_window", False), settings.pop("max_window_layers", 28)
    layer_kinds = set(
        kinds[: settings.get("num_hidden_layers", 1)]
        if kinds
        else [SLIDING if uses_window and not first_window_layer else FULL]
    )
    if len(layer_kinds) > 1 or not layer_kinds <= {FULL, SLIDING}:
        raise PipelineError(f"{path}: layer_types={kinds!r}, expected {FULL} or {SLIDING}, the same of all layers")
    if layer_kinds == {SLIDING}:
        if type(window) is not int or window < 1:
            raise PipelineError(f"{path}: a {SLIDING} layer with sliding_window={window!r}, expected a positive number")
        settings |= {"layer_types": [SLIDING]} | ({"sliding_window": window} if window < positions else {})
