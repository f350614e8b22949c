"""DeepSpeed's own configuration, from a recipe's [train]."""

from typing import Any

from pipeline.basics.errors import PipelineError
from pipeline.recipe.sections import TrainConfig


def deepspeed_config(config: TrainConfig, accumulation: int, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's own configuration, derived from the recipe here and nowhere else."""
    config.require_exact_sum(accumulation)
    derived = {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.clip_norm,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": config.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "fp16": {"enabled": config.dtype == "float16"},
    }
    if config.dtype != "float32" and config.zero_stage:
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    settings = _merge(derived, config.deepspeed, "train.deepspeed")
    if "data_types" in derived:  # ranks exchange gradients in float32 as well; ZeRO-0 rounds their sum in any case
        settings.setdefault("communication_data_type", "fp32")
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        settings["zero_optimization"].setdefault(bucket, config.bucket_elements(parameters))
    return settings


def _merge(base: dict, overrides: dict, section: str) -> dict:
    """Return `base` with `overrides`. Raise PipelineError if they change a value derived from the recipe's own keys."""
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value, f"{section}.{key}")
        elif key in base and value != base[key]:
            raise PipelineError(
                f"{section}.{key}={value!r} contradicts {base[key]!r}, which follows from the recipe's own keys of "
                "[train]: set those (micro_batch, global_batch, clip_norm, dtype, zero_stage) instead"
            )
        else:
            merged[key] = value
    return merged
