"""A target's LoRA adapter, merged into the target's weights when these are loaded; the library is peft.

An adapter comes from strangers. Only safetensors are read, and of adapter_config.json only the keys that say what the
weights are: peft imports modules by the names that other keys give.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import cached_file

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.basics.public import ON_HUB

if TYPE_CHECKING:
    from pipeline.lm.config import TargetConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEYS = {  # of LoraConfig
    *("r", "lora_alpha", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora", "use_dora"),
    *("modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters"),
    "lora_bias",
}
# Keys about names, initialisation, training or placement: the merged weights do not depend on them.
IGNORED_KEYS = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "peft_type",
        "task_type",
        "inference_mode",
        "peft_version",
    ),
    *("lora_dropout", "init_lora_weights", "megatron_core", "runtime_config", "qalora_group_size", "loftq_config"),
    "ensure_weight_tying",
}
_SHARED_PARTS = ("embed_tokens", "lm_head", "wte", "embed_out")  # embeddings and heads, by their usual names


def adapter_file(config: "TargetConfig", name: str) -> Path:
    """Return the path of an adapter's file; a file of the Hub is downloaded. Raise PipelineError."""
    adapter = config.adapter or ""
    if (folder := Path(adapter).expanduser()).is_dir():
        path: Any = folder / name
    elif on_hub := ON_HUB.fullmatch(adapter):
        try:
            path = cached_file(on_hub[1], name, revision=on_hub[2], _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            reason = " ".join(str(error).split())[:300]
            raise PipelineError(f"target.adapter {adapter} cannot be fetched: {reason}") from None
    else:
        raise PipelineError(
            f"target.adapter {adapter!r} is no folder: expected one with {CONFIG} and {WEIGHTS}, or "
            "OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits"
        )
    if path is None or not Path(path).is_file():
        raise PipelineError(f"target.adapter {adapter!r} holds no {name}. Save it with peft's save_pretrained")
    return Path(path)


def adapter_files(config: "TargetConfig") -> list[Path]:
    """Return the files that the merged weights depend on; none without an adapter. Raise PipelineError."""
    return [adapter_file(config, name) for name in (CONFIG, WEIGHTS)] if config.adapter else []


def _read_settings(config: "TargetConfig") -> dict[str, Any]:
    """Return the keys of LoraConfig that the weights depend on. Raise PipelineError for another kind of adapter."""
    path = adapter_file(config, CONFIG)
    settings: Any = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise PipelineError(f"{path}: peft_type={settings.get('peft_type')!r}, expected 'LORA': only LoRAs are merged")
    unknown = [key for key, value in settings.items() if key not in KEYS | IGNORED_KEYS and value]
    if unknown:
        raise PipelineError(
            f"{path}: {unknown[0]}={settings[unknown[0]]!r} is not supported. Merge the adapter with peft's "
            "merge_and_unload, and name the merged folder in target.model"
        )
    return {key: settings[key] for key in KEYS & settings.keys()}


def changes_embedding_or_head(config: "TargetConfig") -> bool:
    """Return whether an adapter changes the parts that drafts share with the target."""
    settings = _read_settings(config)
    named = [settings.get("target_modules"), settings.get("modules_to_save")]
    return any(part in str(modules) for modules in named for part in (*_SHARED_PARTS, "all-linear"))


def merge_adapter(model: Any, config: "TargetConfig") -> Any:
    """Add the adapter to the model's weights, and return the model. Raise PipelineError where it does not fit."""
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict  # slow to import, and rarely required

    settings, file = _read_settings(config), adapter_file(config, WEIGHTS)
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise PipelineError(f"{file} is damaged: {error}. Fetch it again") from None
    try:
        adapted = PeftModel(model, LoraConfig(**settings))
        result: Any = set_peft_model_state_dict(adapted, weights)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _misfit(config, " ".join(str(error).split())[:300]) from None
    missing = [name for name in result.missing_keys if "lora_" in name or "modules_to_save" in name]
    if wrong := [*result.unexpected_keys, *missing]:
        raise _misfit(config, f"{wrong[0]} is in only one of the two")
    merged: Any = adapted.merge_and_unload()
    return merged


def _misfit(config: "TargetConfig", reason: str) -> PipelineError:
    return PipelineError(
        f"target.adapter {config.adapter!r} does not fit target {config.model!r}: {reason}. Name the base model that "
        "it was trained on in target.model"
    )
