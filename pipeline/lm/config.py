"""The recipe's target section: the model, and how it is loaded."""

from datetime import date
from typing import Any, Literal

from pydantic import model_validator

from pipeline.basics.section import AutoDtype, Later, Measured, Positive, Runtime, Scalar, Section

ENGINE_KEYS = {"engine", "engine_python", "engine_url", "tensor_parallel", "engine_options"}
# The allowed vLLM EngineArgs: how it uses the machine. Others are keys of the recipe, or change the computed states.
OPTIONS = {
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("enforce_eager", "enable_chunked_prefill", "block_size", "swap_space", "cpu_offload_gb", "attention_backend"),
    *("enable_expert_parallel", "disable_custom_all_reduce", "distributed_executor_backend", "download_dir"),
    *("max_parallel_loading_workers", "compilation_config"),
}


BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # 1 in the environment: a text's states do not depend on its batch


class TargetConfig(Section):
    """The frozen model that the draft serves."""

    model: str  # Hugging Face id, local folder, or "embedded:smollm2-135m-instruct"
    revision: str | None = None  # a commit, branch or tag of the Hub; default: the newest
    # A LoRA of peft, merged into the weights: a folder, or OWNER/NAME@COMMIT of the Hub.
    adapter: Later[str] = None
    # The feature dump's; evaluation has its own. auto: bfloat16 where the device computes it natively, else float32.
    dtype: AutoDtype = "bfloat16"
    # The program that computes states and answers of the dump.
    engine: Measured[Literal["transformers", "vllm", "server"]] = "transformers"
    engine_python: Runtime[str | None] = None  # the Python of vLLM's own environment
    engine_url: Runtime[str | None] = None  # of a running server: it generates answers, but no states
    tensor_parallel: Runtime[Positive] = 1  # GPUs of one engine
    engine_options: Runtime[dict[str, Any]] = {}  # other vLLM EngineArgs, of OPTIONS
    # For transformers. spread: layer by layer over all visible GPUs.
    device: Measured[Literal["auto", "cpu", "cuda", "spread"]] = "auto"
    trust_remote_code: bool = False  # run code that comes with the model
    chat_template: str | None = None  # a Jinja file, for a tokenizer that comes without a template
    template_keywords: dict[str, Scalar | list[Scalar]] = {}  # of the chat template: { enable_thinking = false }, ...
    template_date: date = date(2024, 7, 26)  # today's date for templates that print it; the default of Llama's template

    @model_validator(mode="after")
    def _engine_fits(self) -> "TargetConfig":
        allowed = {"transformers": set(), "vllm": ENGINE_KEYS - {"engine_url"}, "server": {"engine_url"}}[self.engine]
        for key in sorted(ENGINE_KEYS - allowed - {"engine"}):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} does not apply to engine={self.engine!r}: set another engine, or leave it out")
        if self.engine == "vllm" and self.engine_python is None:
            raise ValueError("engine='vllm' requires engine_python, the Python of the environment that vLLM is in")
        if self.engine == "vllm" and self.adapter:
            raise ValueError("engine='vllm' takes no adapter: run jakiro merge, and set model to its folder")
        if self.engine == "server" and self.engine_url is None:
            raise ValueError("engine='server' requires engine_url, the address of a server that speaks OpenAI's API")
        if refused := sorted(self.engine_options.keys() - OPTIONS):
            raise ValueError(
                f"engine_options.{refused[0]}: it is a key of the recipe, or would change the states "
                f"silently. Expected some of {', '.join(sorted(OPTIONS))}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Return what states depend on, except for rounding: not the device that computes them, nor the engine."""
        return self.settings_affecting("dump")
