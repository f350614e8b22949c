"""A released draft in the formats that engines load: vLLM's, SGLang's and speculators'.

    python -m pipeline export RELEASE --to vllm|sglang|speculators --out FOLDER

Dense EAGLE-1/2 and EAGLE-3 drafts, as chains (SGLang grows trees of its own from the same weights). What an engine
cannot take is refused with the reason. `python -m pipeline import` reads what was written.
"""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config

NO_EXPERTS = "no engine loads a draft with experts"
FUSED = 3  # layers whose outputs engines fuse


@dataclass(frozen=True)
class Written:
    """What an engine reads."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def export(release: Path, engine: str, out: Path, target: str | None = None) -> list[str]:
    """Writes the folder `out`; returns lines for the user. `target`: the verifier's Hub id, which speculators' form
    names.

    Raises PipelineError for a damaged release, a draft that the engine cannot take, and an `out` that is there already.
    """
    saved = checkpoint.read_config(release)
    if out.exists():
        raise PipelineError(f"{out} is there already: remove it, or name another folder")
    config = saved.config
    weights = checkpoint.load(release, saved.target["fingerprint"]).state_dict()
    if isinstance(config, EagleConfig):
        written = _eagle(saved, config, weights, engine)
    elif isinstance(config, Eagle3Config):
        written = _eagle3(saved, config, weights, engine, target)
    else:
        raise PipelineError(f"{release} holds a {type(config).__name__}: {NO_EXPERTS}; eagle and eagle3 can go")
    building = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    checkpoint.write_weights(building / checkpoint.WEIGHTS, written.weights)
    write_json(building / checkpoint.CONFIG, written.config)
    building.replace(out)
    return [f"{engine}: {out}", LAUNCH[engine](isinstance(config, Eagle3Config), out, saved.tree.depth)]


# -- what both have ---------------------------------------------------------------------------------------------------


def _llama(saved: checkpoint.Saved, width: int | None, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One Llama layer in the draft's shapes, as transformers writes a config, and as it wrote one before 5.0."""
    shapes = saved.shapes
    rope = dict(shapes["rope_parameters"])
    theta, kind = rope.get("rope_theta", 10000.0), rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shapes["hidden_size"],
        "intermediate_size": width or shapes["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": shapes["num_attention_heads"],
        "num_key_value_heads": shapes["num_key_value_heads"],
        "head_dim": shapes["head_dim"],
        "rms_norm_eps": shapes["rms_norm_eps"],
        "max_position_embeddings": shapes["max_position_embeddings"],
        "vocab_size": shapes["vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "torch_dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
    }


def _eagle(saved: checkpoint.Saved, config: EagleConfig, weights: dict[str, Tensor], engine: str) -> Written:
    """EAGLE-1/2: engines draft with the target's whole head, so that a reduced vocabulary is left behind."""
    if config.horizons > 1:
        raise PipelineError(f"horizons={config.horizons}: no engine takes levels ahead of a dense draft")
    if engine == "speculators":
        raise PipelineError("speculators has no EAGLE-1/2 any more: export to vllm or sglang, or train eagle3")
    weights.pop("draft_token_ids", None)
    width = saved.shapes["hidden_size"]
    if config.embedding_scale != 1.0:
        fc = weights["fc.weight"]
        scaled = fc[:, :width].float() * config.embedding_scale
        weights["fc.weight"] = torch.cat([scaled.to(fc.dtype), fc[:, width:]], dim=1)
    if engine == "vllm" and config.fc_bias:
        raise PipelineError("fc_bias=true: vLLM has no bias there; train with fc_bias=false, or export to sglang")
    if engine == "sglang":  # which would leave a missing bias random
        weights.setdefault("fc.bias", torch.zeros(width, dtype=weights["fc.weight"].dtype))
    names = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    settings = _llama(saved, config.mlp_width, weights)
    return Written({"architectures": [names[engine]], **settings}, weights)


def _eagle3(
    saved: checkpoint.Saved, config: Eagle3Config, weights: dict[str, Tensor], engine: str, target: str | None
) -> Written:
    layers = list(config.needs(saved.shapes["target_layers"]).auxiliary)
    _require_served(saved, config, engine, layers)
    vocabulary, ids = saved.shapes["vocab_size"], weights.pop("draft_token_ids", None)
    if ids is not None:
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_fc": False,
        "draft_vocab_size": vocabulary if ids is None else len(ids),
        "target_hidden_size": saved.shapes["hidden_size"],
    }
    layer = _llama(saved, config.mlp_width, weights)
    if engine != "speculators":
        # vLLM counts a layer's inputs as transformers does; SGLang adds one to what it reads.
        counted = layers if engine == "vllm" else [number - 1 for number in layers]
        own = {"num_aux_hidden_states": len(layers), "eagle_aux_hidden_state_layer_ids": counted}
        inner = {"eagle_config": {"use_aux_hidden_state": True, **own}}
        outer = own if engine == "vllm" else {}
        return Written({"architectures": ["LlamaForCausalLMEagle3"]} | layer | flags | outer | inner, weights)
    verifier = target or saved.target["model"]
    if verifier.count("/") != 1:
        raise PipelineError(f"the target is {verifier!r}, which no engine finds: say --target OWNER/NAME")
    weights = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in weights.items()}
    proposal = {"proposal_type": "greedy", "speculative_tokens": saved.tree.depth}
    return Written(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            "transformer_layer_config": layer,
            "torch_dtype": layer["torch_dtype"],
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": layers,
            **flags,
        },
        weights,
    )


def _require_served(saved: checkpoint.Saved, config: Eagle3Config, engine: str, layers: list[int]) -> None:
    """Raises PipelineError for what engines do not do."""
    if config.embedding_scale != 1.0:
        raise PipelineError(
            f"embedding_scale={config.embedding_scale:g}: engines norm the plain embedding; train with 1.0"
        )
    if len(layers) != FUSED:
        raise PipelineError(f"auxiliary_layers={layers}: engines fuse {FUSED} layers")
    if layers[-1] >= saved.shapes["target_layers"]:
        raise PipelineError(
            f"auxiliary_layers={layers}: engines read the input of a layer, and none follows layer {layers[-1]}"
        )
    if engine == "sglang" and config.norm_before_residual:
        raise PipelineError("norm_before_residual=true: SGLang adds the plain feature; train without, or use vllm")


# -- launch lines -----------------------------------------------------------------------------------------------------


def _vllm(is_eagle3: bool, out: Path, depth: int) -> str:
    method = "eagle3" if is_eagle3 else "eagle"
    settings = f'{{"method": "{method}", "model": "{out}", "num_speculative_tokens": {depth}}}'
    return f"vllm serve TARGET --speculative-config {shlex.quote(settings)}"


def _sglang(is_eagle3: bool, out: Path, depth: int) -> str:
    algorithm = "EAGLE3" if is_eagle3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {shlex.quote(str(out))} --speculative-num-steps {depth} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    )


LAUNCH: dict[str, Callable[[bool, Path, int], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "speculators": lambda _, out, __: f"vllm serve {shlex.quote(str(out))}",
}
