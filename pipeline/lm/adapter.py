"""A target's LoRA adapter, merged into the target's weights when these are loaded; the library is peft.

An adapter comes from strangers. Only safetensors are read, and of adapter_config.json only the keys that say what the
weights are: peft imports modules by the names that other keys give.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
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
# Ways to initialise an adapter that leave the base model's weights as they are.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
MAX_RANK, MAX_PATTERN = 4096, 1000  # of a LoRA; characters of a regular expression over modules' names


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


def is_local(config: "TargetConfig") -> bool:
    """Return whether no file of the adapter has to be downloaded."""
    on_hub = ON_HUB.fullmatch(config.adapter or "")
    names = (CONFIG, WEIGHTS) if on_hub and not Path(config.adapter or "").is_dir() else ()
    return all(isinstance(try_to_load_from_cache(on_hub[1], name, revision=on_hub[2]), str) for name in names if on_hub)


def adapter_files(config: "TargetConfig") -> list[Path]:
    """Return the files that the merged weights depend on; none without an adapter. Raise PipelineError."""
    return [adapter_file(config, name) for name in (CONFIG, WEIGHTS)] if config.adapter else []


def _read_settings(config: "TargetConfig") -> dict[str, Any]:
    """Return the keys of LoraConfig that the weights depend on. Raise PipelineError for another kind of adapter."""
    path = adapter_file(config, CONFIG)
    settings: Any = read_json(path)
    if settings.get("peft_type") != "LORA":
        raise PipelineError(f"{path}: peft_type={settings.get('peft_type')!r}, expected 'LORA': only LoRAs are merged")
    start, rank = settings.get("init_lora_weights"), settings.get("r")
    if start not in PLAIN_STARTS:
        raise PipelineError(
            f"{path}: init_lora_weights={start!r} changes the base model's weights, too. Save it as a plain LoRA "
            "(peft's path_initial_model_for_weight_conversion)"
        )
    if type(rank) is not int or not 0 < rank <= MAX_RANK or len(str(settings.get("target_modules"))) > MAX_PATTERN:
        raise PipelineError(f"{path}: r={rank!r}, expected a rank of 1 to {MAX_RANK}, and few target_modules")
    unknown = [key for key, value in settings.items() if key not in KEYS | IGNORED_KEYS and value]
    if unknown:
        raise PipelineError(
            f"{path}: {unknown[0]}={settings[unknown[0]]!r} is not supported. Merge the adapter with peft's "
            "merge_and_unload, and name the merged folder in target.model"
        )
    return {key: settings[key] for key in KEYS & settings.keys()}


def changes_modules(config: "TargetConfig", names: Iterable[str]) -> bool:
    """Return whether the adapter has weights for one of these modules of the target."""
    with _open_weights(config) as weights:
        return any(f".{name}." in f".{key}" for key in weights.keys() for name in names)  # noqa: SIM118


@contextmanager
def _open_weights(config: "TargetConfig") -> Iterator[Any]:
    file = adapter_file(config, WEIGHTS)
    try:
        with safe_open(file, "pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise PipelineError(f"{file} is damaged: {error}. Fetch it again") from None


def merge_adapter(model: Any, config: "TargetConfig") -> Any:
    """Add the adapter to the model's weights, and return the model. Raise PipelineError where it does not fit."""
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict  # slow to import, and rarely required

    settings = _read_settings(config)
    with _open_weights(config) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        adapted = PeftModel(model, LoraConfig(**settings))
        result: Any = set_peft_model_state_dict(adapted, weights)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, re.error) as error:
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
