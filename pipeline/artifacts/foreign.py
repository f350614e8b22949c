"""What a draft's config.json says, as others write it.

Guarantees: what is read is what their code computes, or the key that says otherwise is named in an error.
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
from pipeline.drafts.parts.layers import ROPES, SHAPE_FIELDS, shapes_of
from pipeline.drafts.parts.names import AUXILIARY, GPT_OSS, INPUTS, LAYER_KEYS, OUTPUTS
from pipeline.lm.attention import FULL, SLIDING, most_positions

ANOTHER = "it was trained for another target"
NESTED = ("eagle_config", "dflash_config", "transformer_layer_config")
FAMILIES = {  # each with its own defaults
    **{"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config},
    MUSE: MuseGlimmerAssistantConfig,
}

# What a config.json may say beside what the draft itself reads: nothing of what is computed (how an answer is drawn),
# or what shapes and tensors say as well.
OTHERS = """
    attention_dropout auto_map base_model_name_or_path bias draft_vocab_size dropout_rate embed_requires_grad
    enable_sp_ulysses gate_rows has_no_defaults_at_init hidden_state_offset hydra_head_arch hydra_num_heads
    hydra_num_layers initializer_range medusa_num_heads medusa_num_layers model_type num_aux_hidden_states num_experts
    num_experts_per_tok num_hidden_layers num_local_experts output_router_logits parallel_draft_heads_num_layers
    pretraining_tp reduced_vocabulary rope_scaling rope_theta router_aux_loss_coef router_jitter_noise sep_token_id
    speculators_config speculators_version target_hidden_size tie_word_embeddings tokenizer_class torch_dtype ttt_length
    ttt_steps version
"""
SAYS_NOTHING = {*vars(GenerationConfig()), *vars(PretrainedConfig()), *SHAPE_FIELDS, *OTHERS.split()}
# What may differ beside a nested object and in it.
APART = {AUXILIARY} | SAYS_NOTHING - {*SHAPE_FIELDS, "rope_theta", "rope_scaling"} | {"vocab_size"}
# Key -> the values that are computed here; none: any.
KNOWN: dict[str, tuple] = dict.fromkeys(SAYS_NOTHING, ()) | {
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
    """Raises PipelineError where there is none."""
    path = source / "config.json"
    if not path.is_file():
        raise PipelineError(
            f"{source} holds no config.json: expected a folder with config.json and {' or '.join(WEIGHTS)}"
        )
    return read_json(path)


def their_config(source: Path, target: Any) -> dict[str, Any]:
    """What config.json says: without nesting and what is null; under AUXILIARY the layers that it names, counted as
    ours (1: the first one's output); a sliding window where the layer has one that is shorter than the longest text of
    the target's configuration.

    Raises PipelineError for a RoPE or an attention that is not computed here, for contradictions, and for what is no
    number where one is due.
    """
    path, raw = source / "config.json", raw_config(source)
    theirs: dict[str, Any] = {}
    for part in (raw, *(as_object(f"{path}: {key}", raw.get(key) or {}) for key in NESTED)):
        for key, value in part.items():
            if key in NESTED or value is None:
                continue
            if key not in APART and theirs.get(key, value) != value:
                raise PipelineError(f"{path} says {key}={theirs[key]!r} and, nested, {value!r}: which one is not known")
            theirs[key] = value
    _require_kinds(path, theirs)
    theirs[AUXILIARY] = _layers(path, raw, target)
    _require_rope(path, theirs)
    _settle_window(path, theirs, most_positions(target))
    return theirs


def require_known(source: Path, theirs: dict[str, Any], more: Mapping[str, tuple]) -> list[str]:
    """Return the keys that are not known and false or empty: nothing reads them.

    Raises PipelineError for what config.json says and neither `KNOWN` nor `more`, the draft's own, has.
    """
    known, said = {**KNOWN, **more}, []
    for key, value in theirs.items():
        if key in known and known[key] and value not in known[key]:
            said.append(f"{key}={value!r}, and only {' or '.join(map(repr, known[key]))} is computed here")
        elif key not in known and value not in (False, "", [], {}):
            said.append(f"{key}={value!r}, which is not known here for this kind of draft")
    if said:
        raise PipelineError(
            f"{source / 'config.json'} says {'; '.join(said)}. A key that changes nothing of what the draft computes "
            "can be taken out of a copy of the file"
        )
    return sorted(theirs.keys() - known.keys() - {AUXILIARY})


def their_shapes(source: Path, theirs: dict[str, Any], target: Any, name: str) -> dict[str, Any]:
    """The draft's: its own config's widths, heads, eps and RoPE; vocabulary and layers of the target, whose
    configuration and name are given. All are the target's where the config has none of them, as Hydra's, and Medusa's.

    Raises PipelineError for another width than the target's.
    """
    shapes, width = shapes_of(target), target.hidden_size
    is_own = "hidden_size" in theirs and theirs.get("model_type") != "medusa"
    for key in ("target_hidden_size", "hidden_size") if is_own else ("target_hidden_size",):
        if (size := theirs.get(key, width)) != width:
            is_narrow = key == "hidden_size" and "target_hidden_size" in theirs
            why = "a draft that is narrower than its target has no place here" if is_narrow else ANOTHER
            raise PipelineError(f"the checkpoint's {key} is {size}, that of target {name!r} {width}: {why}")
    if not is_own:
        return shapes
    family = FAMILIES.get(theirs.get("model_type", "llama"))
    if family is None:
        raise PipelineError(
            f"{source / 'config.json'} says model_type={theirs['model_type']!r}, and only {', '.join(FAMILIES)} are "
            "known here: others have defaults of their own"
        )
    known = {key: theirs[key] for key in (*SHAPE_FIELDS, "rope_theta", "rope_scaling") if key in theirs}
    try:
        return shapes_of(family(**known)) | {key: shapes[key] for key in ("vocab_size", "target_layers")}
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PipelineError(f"{source / 'config.json'} makes no layer: {' '.join(str(error).split())}") from None


def _require_kinds(path: Path, theirs: dict[str, Any]) -> None:
    """Raises PipelineError for a value of the wrong type under a key that is computed with."""
    sizes = {*SHAPE_FIELDS, "num_hidden_layers", "max_window_layers", "target_hidden_size"}
    sizes -= {"rms_norm_eps", "rope_parameters"}
    texts, reals = ("model_type",), ("partial_rotary_factor", "rms_norm_eps", "rope_theta")
    for key, value in theirs.items():
        if key in sizes and (type(value) is not int or value < (0 if key == "max_window_layers" else 1)):
            raise PipelineError(f"{path}: {key}={value!r}, expected a positive number without a fraction")
        if key in reals and (type(value) not in (int, float) or value <= 0):
            raise PipelineError(f"{path}: {key}={value!r}, expected a positive number")
        if key in texts and not isinstance(value, str):
            raise PipelineError(f"{path}: {key}={value!r}, expected a name")
        if key == "layer_types" and not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
            raise PipelineError(f"{path}: {key}={value!r}, expected a list of names")


def _layers(path: Path, raw: dict[str, Any], target: Any) -> list[int]:
    """Return the layers that the file names, counted as ours; none where it names none.

    An id is that of the layer whose input is taken, counted from 0: our number of the layer before. `target_layer_ids`,
    and ids in a nested object alone, as SpecForge and ModelOpt write them, are of the layer whose output is taken. No
    output has the number of the target's layers: nested ids with it are of inputs.

    Raises PipelineError where two places differ, where a place leaves it open, and for ids that are no layers.
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


def _require_rope(path: Path, theirs: dict[str, Any]) -> None:
    said = {"rope_theta": theirs["rope_theta"]} if "rope_theta" in theirs else {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = as_object(f"{path}: {key}", theirs.get(key) or {})
        kind, part = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1)
        if any(isinstance(value, dict) for value in rope.values()):
            raise PipelineError(f"{path}: {key} is given by kind of layer, and a draft here has one RoPE")
        if not isinstance(kind, str) or kind not in ROPES:
            raise PipelineError(f"{path}: {key} is of kind {kind!r}, and only {', '.join(ROPES)} are computed here")
        if part != 1:
            raise PipelineError(f"{path}: {key} turns {part} of a head, and only whole heads are turned here")
        for name in ("factor", "rope_theta"):
            if name in rope and (type(rope[name]) not in (int, float) or rope[name] <= 0):
                raise PipelineError(f"{path}: {key} has {name}={rope[name]!r}, expected a positive number")
        for name, value in (rope | ({"rope_type": kind} if rope.keys() - {"rope_theta"} else {})).items():
            if name != "type" and said.setdefault(name, value) != value:
                raise PipelineError(f"{path}: {key} says {name}={value!r}, and {said[name]!r} stands elsewhere")


def _settle_window(path: Path, theirs: dict[str, Any], positions: int) -> None:
    """Leaves of the four keys that say whether a layer has one `layer_types`, the one kind of sliding layers, and
    `sliding_window` where it makes a difference.
    """
    if theirs.get("model_type") == MUSE and set(theirs.get("layer_types", [SLIDING])) != {FULL}:
        raise PipelineError(f"{path}: {MUSE} with a window, whose ends transformers counts otherwise than we do")
    kinds, window = theirs.pop("layer_types", None), theirs.pop("sliding_window", None)
    asked, first = theirs.pop("use_sliding_window", False), theirs.pop("max_window_layers", 28)
    own = set(kinds[: theirs.get("num_hidden_layers", 1)] if kinds else [SLIDING if asked and not first else FULL])
    if len(own) > 1 or not own <= {FULL, SLIDING}:
        raise PipelineError(f"{path}: layer_types={kinds!r}, expected {FULL} or {SLIDING}, the same of all layers")
    if own == {SLIDING}:
        if type(window) is not int or window < 1:
            raise PipelineError(f"{path}: a {SLIDING} layer with sliding_window={window!r}, expected a positive number")
        theirs |= {"layer_types": [SLIDING]} | ({"sliding_window": window} if window < positions else {})
