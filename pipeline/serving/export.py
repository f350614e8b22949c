"""A released draft in the formats that engines load: vLLM's, SGLang's, speculators', llama.cpp's and transformers'.

    python -m pipeline export RELEASE --to vllm|sglang|speculators|transformers --out FOLDER
    python -m pipeline export RELEASE --to gguf --out FOLDER --llama-cpp CHECKOUT

Dense EAGLE-1/2 and EAGLE-3 drafts; DFlash for vLLM, SGLang and transformers' own `generate`; for vLLM also DSpark,
P-EAGLE, Medusa, small Llamas and, with infra/vllm_jakiro, drafts with experts. All draft chains (SGLang grows trees of
its own from these weights). What an engine cannot take is refused with the reason. `jakiro import` reads
what was written, but for GGUF and small Llamas: a recipe calls these, as any language model, kind = "small-model".
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import GPT_OSS, MUSE
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json
from pipeline.drafts import DraftConfig, TrainedDraft, kind_of
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3FrameConfig
from pipeline.drafts.jakiro import ExpertsConfig, JakiroConfig
from pipeline.drafts.parallel.dflash import IN_TRANSFORMERS, DFlashConfig
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.mask import MASK
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.drafts.parts.released import AUXILIARY
from pipeline.drafts.small_model import SmallLlama, SmallLlamaConfig
from pipeline.lm.attention import FULL, SLIDING
from pipeline.lm.model import source
from pipeline.serving.gguf import convert
from pipeline.serving.layer import layer_of
from pipeline.serving.load import target_of

PLUG_IN = "infra/vllm_jakiro"
GGUF, DRAFT_GGUF = "gguf", "draft.gguf"
TRANSFORMERS = "transformers"
# By `make serve-test`, by tests.
TRIED = {"vllm": "vLLM 0.32.0", GGUF: "llama.cpp b10434", TRANSFORMERS: "transformers 5.23"}
FUSED = 3  # layers whose outputs engines fuse
LAYER_OPTIONS = ("attention_bias", "qk_norm", "window")


@dataclass(frozen=True)
class Written:
    """What an engine reads."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def export(
    release: Path, engine: str, out: Path, target: str | None = None, llama_cpp: Path | None = None
) -> list[str]:
    """Writes the folder `out`; returns lines for the user. `target`: the verifier's Hub id, which speculators' form
    names; for GGUF its folder, where the release does not know it. `llama_cpp`: the checkout that GGUF takes.

    Raises PipelineError for a damaged release, a draft that the engine cannot take, and an `out` that is there already.
    """
    saved = checkpoint.read_config(release)
    if out.exists():
        raise PipelineError(f"{out} is there already: remove it, or name another folder")
    written = _formed(release, saved, engine, target)
    if engine == GGUF:
        if llama_cpp is None:
            raise PipelineError("--to gguf runs llama.cpp's own converter: say --llama-cpp CHECKOUT")
        folder = _target_folder(release, target)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        building = Path(temporary) / "form"
        building.mkdir()
        checkpoint.write_weights(building / checkpoint.WEIGHTS, written.weights)
        write_json(building / checkpoint.CONFIG, written.config)
        if llama_cpp is not None and engine == GGUF:
            form, building = building, Path(temporary) / GGUF
            building.mkdir()
            convert(llama_cpp, form, building / DRAFT_GGUF, folder)
        building.replace(out)
    return [f"{engine}: {out}", *_launch(saved, engine, out)]


def tried(release: Path) -> dict[str, list[str]]:
    """Each engine that takes this draft and was tried with one of its kind: how to serve it there."""
    saved, out, found = checkpoint.read_config(release), Path("exported"), {}
    if isinstance(saved.config, DSparkConfig):
        return {}  # vLLM runs it on GPUs alone
    for engine, version in TRIED.items():
        try:
            _formed(release, saved, engine, None)
        except PipelineError:
            continue
        more = " --llama-cpp CHECKOUT --target TARGET_FOLDER" if engine == GGUF else ""
        command = f"jakiro export PATH/TO/THIS/FOLDER --to {engine} --out {out}{more}"
        found[version] = [command, *_launch(saved, engine, out)]
    return found


def _launch(saved: checkpoint.Saved, engine: str, out: Path) -> list[str]:
    is_mixed = isinstance(saved.config, ExpertsConfig)
    first = [f"pip install {PLUG_IN}    # once, into vLLM's environment"] if is_mixed else []
    # A block is as long as it was trained: DFlash's has a place more than there are guesses.
    guesses = saved.config.levels if isinstance(saved.config, DFlashConfig) else saved.tree.depth
    return [*first, LAUNCH[engine](method_of(saved.config), out, guesses)]


def method_of(config: DraftConfig) -> dict[str, Any]:
    """What vLLM's speculative config says of it, beside its folder and the number of guesses."""
    if isinstance(config, DFlashConfig | MedusaConfig | SmallLlamaConfig):
        return {"method": "draft_model" if isinstance(config, SmallLlamaConfig) else config.kind}
    parallel = {"parallel_drafting": True} if isinstance(config, PEagleConfig) else {}
    return {"method": "eagle3" if isinstance(config, Eagle3FrameConfig) else "eagle"} | parallel


def _formed(release: Path, saved: checkpoint.Saved, engine: str, target: str | None) -> Written:
    """Raises PipelineError for what the engine cannot take."""
    draft = checkpoint.load(release, saved.target["fingerprint"])
    config, weights = saved.config, draft.state_dict()
    _require_experts_served(config, engine)
    is_dflash = isinstance(config, DFlashConfig) and not isinstance(config, DSparkConfig)
    if engine == TRANSFORMERS and not is_dflash:
        raise PipelineError(
            f"{engine} is given no {kind_of(config)}: its generate() takes the release (custom_generate)"
        )
    if isinstance(config, EagleConfig | JakiroConfig):
        return _eagle(saved, config, weights, engine)
    if isinstance(config, Eagle3FrameConfig):
        return _eagle3(saved, config, weights, engine, target)
    if isinstance(config, DFlashConfig | MedusaConfig | SmallLlamaConfig):
        if engine not in (("vllm", "sglang", TRANSFORMERS) if is_dflash else ("vllm",)):
            raise PipelineError(f"{engine} is given no {config.kind}: export to vllm")
        if config.vocabulary is not None and not is_dflash:
            raise PipelineError(f"vocabulary={config.vocabulary}: vLLM wants the target's whole one there; train so")
        if isinstance(config, DFlashConfig):
            return (_dflash if is_dflash else _dspark)(saved, config, weights, engine)
        return _medusa(saved, config, weights) if isinstance(config, MedusaConfig) else _small(draft)
    raise PipelineError(f"{release} holds a draft that no engine loads: {type(config).__name__}")


def _target_folder(release: Path, target: str | None) -> Path:
    """Where the target's config and tokenizer lie."""
    folder = Path(source(target_of(release, target)).name)
    if not (folder / "config.json").is_file():
        raise PipelineError(f"the target is {folder}, which is no folder here: say --target with one that holds it")
    return folder


def _eagle(
    saved: checkpoint.Saved, config: EagleConfig | JakiroConfig, weights: dict[str, Tensor], engine: str
) -> Written:
    """EAGLE-1/2's frame. Engines draft with the target's whole head: a dense draft's reduced vocabulary is left behind;
    our plug-in keeps it.
    """
    is_dense = isinstance(config, EagleConfig)
    if engine == "speculators":
        raise PipelineError("speculators has no EAGLE-1/2 any more: export to vllm or sglang, or train eagle3")
    if engine == GGUF:
        raise PipelineError("llama.cpp has no EAGLE-1/2: train eagle3")
    if is_dense:
        weights.pop("draft_token_ids", None)
    width = saved.shapes["hidden_size"]
    if config.embedding_scale != 1.0:
        fc = weights["fc.weight"]
        scaled = fc[:, :width].float() * config.embedding_scale
        weights["fc.weight"] = torch.cat([scaled.to(fc.dtype), fc[:, width:]], dim=1)
    if engine == "vllm" and config.fc_bias:
        raise PipelineError("fc_bias=true: vLLM has no bias there; train with fc_bias=false, or export to sglang")
    if engine == "sglang" and config.window:
        raise PipelineError(f"window={config.window}: {engine} has no such draft; export to vllm")
    if engine == "sglang":  # which would leave a missing bias random
        weights.setdefault("fc.bias", torch.zeros(width, dtype=weights["fc.weight"].dtype))
    names = {"vllm": "LlamaForCausalLM" if is_dense else "EagleJakiroForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    # vLLM counts its layers behind the target's, and looks them up in `layer_types` less this number.
    more = {"target_layer_count": saved.shapes["target_layers"]} if config.window else {}
    return Written({"architectures": [names[engine]], **layer_of(saved, config, weights), **more}, weights)


def _eagle3(
    saved: checkpoint.Saved, config: Eagle3FrameConfig, weights: dict[str, Tensor], engine: str, target: str | None
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
        "norm_before_fc": config.norm_before_fc,
        "draft_vocab_size": vocabulary if ids is None else len(ids),
        "target_hidden_size": saved.shapes["hidden_size"],
    }
    layer = layer_of(saved, config, weights) | {"attention_bias": config.attention_bias}
    if isinstance(config, PEagleConfig):
        flags["pard_token"] = int(weights.pop(MASK))
        layer["num_hidden_layers"] = config.layers
        if config.window:
            layer["layer_types"] = [SLIDING] * config.layers
    if config.qk_norm:
        layer["model_type"] = "qwen3"
    if engine != "speculators":
        # vLLM and llama.cpp count a layer's inputs as transformers does; SGLang adds one to what it reads, but for
        # gpt-oss since its pull request 32334.
        adds_one = engine == "sglang" and not _is_gpt_oss(target, saved.target["model"])
        counted = [number - 1 for number in layers] if adds_one else layers
        own = {"num_aux_hidden_states": len(layers), AUXILIARY: counted}
        inner = {"eagle_config": {"use_aux_hidden_state": True, **own}}
        outer = {} if adds_one else own
        name = "JakiroForCausalLMEagle3" if isinstance(config, ExpertsConfig) else "LlamaForCausalLMEagle3"
        name = "Eagle3Qwen3ForCausalLM" if config.qk_norm else name
        return Written({"architectures": [name]} | layer | flags | outer | inner, weights)
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
            AUXILIARY: layers,
            **flags,
        },
        weights,
    )


def _is_gpt_oss(target: str | None, name: str) -> bool:
    """Return whether a target is of this family: by the config.json of the folder `target`, else by that or `name`."""
    config = Path(target or "") / "config.json"
    if target and config.is_file():
        return read_json(config).get("model_type") == GPT_OSS
    return "gpt-oss" in (target or name).lower()


def _dflash(saved: checkpoint.Saved, config: DFlashConfig, weights: dict[str, Tensor], engine: str) -> Written:
    """The form of its authors' released weights; transformers' own, of the one such draft that it has. They guess with
    the target's whole head: a reduced vocabulary is left behind.
    """
    weights.pop("draft_token_ids", None)
    layers = config.needs(saved.shapes["target_layers"]).auxiliary
    own = {"mask_token_id": int(weights.pop(MASK)), "target_layer_ids": [number - 1 for number in layers]}
    if config.window and engine != "vllm":
        raise PipelineError(f"window={config.window}: {engine} has no such draft; export to vllm")
    if config.causal and engine == TRANSFORMERS:
        raise PipelineError(f"causal=true: {engine} has no such draft; export to vllm or sglang")
    llama = layer_of(saved, config, weights) | {"num_hidden_layers": config.layers, "block_size": config.block}
    llama |= {"layer_types": [SLIDING] * config.layers} if config.window else {}
    if engine == TRANSFORMERS:
        weights = {IN_TRANSFORMERS.get(name, name): tensor for name, tensor in weights.items()}
        said = {"model_type": MUSE, "layer_types": [FULL] * config.layers}
        return Written({"architectures": ["MuseGlimmerAssistantModel"]} | llama | said | own, weights)
    llama |= {"model_type": "qwen3", "num_target_layers": saved.shapes["target_layers"]}
    llama |= {"is_causal": True} if config.causal else {}  # what SGLang reads; vLLM reads either
    inner = own | {"causal": config.causal}
    return Written({"architectures": ["DFlashDraftModel"], **llama, "dflash_config": inner}, weights)


def _dspark(saved: checkpoint.Saved, config: Any, weights: dict[str, Tensor], engine: str) -> Written:
    written = _dflash(saved, config, weights, engine)
    bias = {"markov_rank": config.rank, "markov_head_type": "vanilla"}
    return Written(written.config | {"architectures": ["Qwen3DSparkModel"]} | bias, written.weights)


def _medusa(saved: checkpoint.Saved, config: MedusaConfig, weights: dict[str, Tensor]) -> Written:
    """The form of its authors' released weights, and in config.json what vLLM asks beside it."""
    if not config.own_head or config.head_bias:
        raise PipelineError(
            f"own_head={config.own_head}, head_bias={config.head_bias}: vLLM's heads are their own, without a bias"
        )
    keys = {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks, "medusa_fc_bias": True}
    shapes = {key: saved.shapes[key] for key in ("hidden_size", "vocab_size")}
    names = (re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{config.blocks}.", name.removeprefix("heads.")) for name in weights)
    said = {"architectures": ["MedusaModel"], "model_type": "medusa", **keys, **shapes}
    return Written(said, dict(zip(names, weights.values(), strict=True)))


def _small(draft: TrainedDraft) -> Written:
    """The language model that it is."""
    assert isinstance(draft, SmallLlama)
    said = draft.lm.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return Written(said, draft.lm.state_dict())


def _require_experts_served(config: DraftConfig, engine: str) -> None:
    """Raises PipelineError for experts that no engine runs."""
    if isinstance(config, ExpertsConfig) and engine != "vllm":
        raise PipelineError(f"{engine} loads no draft with experts: export to vllm, which does with {PLUG_IN}")


def _require_served(saved: checkpoint.Saved, config: Eagle3FrameConfig, engine: str, layers: list[int]) -> None:
    """Raises PipelineError for what engines do not do."""
    if len(layers) != FUSED:
        raise PipelineError(f"auxiliary_layers={layers}: engines fuse {FUSED} layers")
    if layers[-1] >= saved.shapes["target_layers"]:
        raise PipelineError(
            f"auxiliary_layers={layers}: engines read the input of a layer, and none follows layer {layers[-1]}"
        )
    if engine == GGUF and (config.fc_norm or config.norm_output):
        raise PipelineError("fc_norm or norm_output=true: llama.cpp has no EAGLE-3.1; train without, or use vllm")
    if engine == "sglang" and config.norm_before_residual:
        raise PipelineError("norm_before_residual=true: SGLang adds the plain feature; train without, or use vllm")
    if isinstance(config, PEagleConfig) and engine != "vllm":
        raise PipelineError(f"{engine} is given no {config.kind}: export to vllm")
    missing = {"sglang": ("norm_before_fc", *LAYER_OPTIONS), GGUF: LAYER_OPTIONS}.get(engine, ())
    if asked := [key for key in missing if getattr(config, key)]:
        raise PipelineError(f"{asked[0]}={getattr(config, asked[0])}: {engine} has no such draft; export to vllm")
    if config.qk_norm and isinstance(config, ExpertsConfig):
        raise PipelineError("qk_norm=true: the plug-in's drafts with experts have Llama's attention; train without")


# -- launch lines -----------------------------------------------------------------------------------------------------


def speculation(method: dict[str, Any], draft: Path, guesses: int) -> str:
    """vLLM's `--speculative-config`."""
    return json.dumps({**method, "model": str(draft), "num_speculative_tokens": guesses})


def _vllm(method: dict[str, Any], out: Path, depth: int) -> str:
    return f"vllm serve TARGET --speculative-config {shlex.quote(speculation(method, out, depth))}"


def _sglang(method: dict[str, Any], out: Path, depth: int) -> str:
    a_chain = "" if method["method"] == "dflash" else f"--speculative-num-steps {depth} --speculative-eagle-topk 1 "
    return (
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm {method['method'].upper()} "
        f"--speculative-draft-model-path {shlex.quote(str(out))} {a_chain}--speculative-num-draft-tokens {depth + 1}"
    )


def _transformers(_: dict[str, Any], out: Path, __: int) -> str:
    return (
        f"tokens = model.generate(**inputs, assistant_model=AutoModel.from_pretrained({str(out)!r}), "
        'speculation_type="dflash", do_sample=False)'
    )


LAUNCH: dict[str, Callable[[dict[str, Any], Path, int], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    GGUF: lambda _, out, depth: (
        f"llama-server -m TARGET.gguf -md {shlex.quote(str(out / DRAFT_GGUF))} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {depth}"
    ),
    TRANSFORMERS: _transformers,
    "speculators": lambda _, out, __: f"vllm serve {shlex.quote(str(out))}",
}
