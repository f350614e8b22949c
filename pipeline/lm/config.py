"""Which target, and how it is loaded."""

from datetime import date
from typing import Literal

from pipeline.basics.section import Dtype, Scalar, Section


class TargetConfig(Section):
    """The frozen model that the draft drafts for."""

    model: str  # Hugging Face id, local folder, or "embedded:smollm2-135m-instruct"
    revision: str | None = None
    dtype: Dtype = "bfloat16"  # of the feature dump; evaluation has its own
    device: Literal["auto", "cpu", "cuda", "spread"] = "auto"  # spread: layer by layer over all GPUs that are seen
    trust_remote_code: bool = False
    chat_template: str | None = None  # a Jinja file, for a tokenizer that comes without a template
    template_keywords: dict[str, Scalar | list[Scalar]] = {}  # of the chat template: { enable_thinking = false }, ...
    template_date: date = date(2024, 7, 26)  # today, for templates that print it; Llama's own where it knows no clock
