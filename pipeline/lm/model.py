"""Load the frozen target of a recipe, or parts of it, from its files."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from pipeline.basics import embedded
from pipeline.basics.accelerator import accelerator_kind, resolve_device
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, read_json
from pipeline.basics.fingerprint import cache_by_files, identity
from pipeline.lm.ability import auto_class, find_decoder, find_tree_obstacle, require_readable
from pipeline.lm.adapter import adapter_files, changes_modules, is_local, merge_adapter
from pipeline.lm.attention import use_masked_attention
from pipeline.lm.chat import require_template, template_fingerprint, tokenizer_fingerprint
from pipeline.lm.config import TargetConfig
from pipeline.lm.states import EmbeddingAndHead, LMHead, head_effects, shared_parts
from pipeline.lm.template import apply_settings
from pipeline.lm.verifier import Verifier

if accelerator_kind() is None:
    # A CPU's kernel supports a mask over grouped heads; transformers would copy keys and values, as GPUs require. Set
    # here and not where a target is loaded, so that a process uses one kernel from its start.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files of its folder that define a target.
_FILES = (
    *("config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.jinja", "*.py"),
    *("additional_chat_templates/*", "*.safetensors", "*.safetensors.index.json"),
)
_WEIGHTS_FILE = re.compile(r"\w[\w.-]*\.safetensors")
FINAL_NORMS = ("norm", "final_layernorm", "norm_f", "embedding_norm", "ln_f")  # of a decoder, its name
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class TargetFiles:
    """A target's files: where they are, and how transformers loads them."""

    name: str  # folder or Hub id
    revision: str | None
    trust_remote_code: bool

    def options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def file(self, name: str) -> Path | None:
        path = cached_file(self.name, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        return Path(path) if path else None


def local_folder(model: str) -> Path | None:
    """Return the folder of a target on this machine; None for one of the Hub, OWNER/NAME. Raise PipelineError for a
    folder that does not exist, without asking the Hub.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(model):
        return None
    problem = "is a file" if folder.exists() else "does not exist"
    raise PipelineError(
        f"target.model {model!r} {problem}: expected a folder with config.json, tokenizer and safetensors "
        "weights, or OWNER/NAME of the Hub"
    )


def locate_target(config: TargetConfig) -> TargetFiles:
    name = config.model
    if name.startswith(embedded.PREFIX):
        name = str(embedded.model_folder(name.removeprefix(embedded.PREFIX)))
    elif (folder := local_folder(name)) is not None:
        name = str(folder)
    return TargetFiles(name, config.revision, config.trust_remote_code)


# RuntimeError: weights of wrong shapes, no memory; the others: files with unexpected content.
_UNLOADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, StrictDataclassError)


@contextmanager
def _loading(config: TargetConfig) -> Iterator[None]:
    try:
        yield
    except _UNLOADABLE as error:
        raise PipelineError(f"target {config.model!r} cannot be loaded: {error or type(error).__name__}") from None


def load_full_config(config: TargetConfig) -> Any:
    """Load the configuration. Raise PipelineError when the model is unavailable or no causal language model."""
    files = locate_target(config)
    with _loading(config):
        full = AutoConfig.from_pretrained(files.name, **files.options())
    require_readable(full, config.model)
    return full


def load_config(config: TargetConfig) -> Any:
    """Load the text configuration. Raise PipelineError when the model is unavailable or no causal language model."""
    return load_full_config(config).get_text_config()


def load_tree_obstacle(config: TargetConfig) -> str | None:
    """Return why the target cannot verify a tree, by its configuration; None if it can. Raise as `load_config`."""
    return find_tree_obstacle(load_full_config(config))


def load_tokenizer(config: TargetConfig) -> Any:
    files = locate_target(config)
    with _loading(config):
        tokenizer = AutoTokenizer.from_pretrained(files.name, **files.options())
    if config.chat_template:
        tokenizer.chat_template = _template_file(config).read_text().rstrip("\n")
    require_template(tokenizer, config.model)
    apply_settings(tokenizer, config)
    return tokenizer


def _template_file(config: TargetConfig) -> Path:
    path = Path(config.chat_template or "").expanduser()
    template = path if path.is_file() else ROOT / path  # a template file of the project
    if not template.is_file():
        raise PipelineError(f"target.chat_template {path} does not exist: expected a Jinja file")
    return template


def placement_options(config: TargetConfig) -> dict[str, Any]:
    """Return how transformers is to place the weights: for a GPU each tensor goes from the file to its memory, and the
    complete model is never in the host's. The device has its index, as the loading threads do not know this thread's.
    """
    device = resolve_device(config.device)
    if config.device == "spread":
        return {"device_map": "auto"}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def weight_files(files: TargetFiles) -> dict[str, Path]:
    """Return tensor name -> safetensors file. Raise PipelineError when the target has none."""
    index = files.file(_INDEX)
    if index:
        names: Any = read_json(index).get("weight_map")
        values, paths = list(names.values()) if isinstance(names, dict) else [names], {}
        if invalid := [name for name in values if not isinstance(name, str) or not _WEIGHTS_FILE.fullmatch(name)]:
            raise PipelineError(
                f"target {files.name}: {_INDEX} names {invalid[0]!r}, expected names of files in its folder"
            )
        for shard in sorted(set(names.values())):
            if (path := files.file(shard)) is None:
                raise PipelineError(f"target {files.name}: {_INDEX} names {shard}, which does not exist")
            paths[shard] = path
        return {tensor: paths[shard] for tensor, shard in names.items()}
    single = files.file(_SINGLE)
    if single is None:
        raise PipelineError(
            f"target {files.name} has no safetensors weights ({_SINGLE} or {_INDEX}). Pickled weights are not loaded: "
            "convert them once with transformers' save_pretrained and point target.model at the folder"
        )
    with safe_open(single, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


@dataclass(frozen=True)
class TargetIdentity:
    """The content that a target's states, tokens and answers depend on, as hashes and stop ids."""

    fingerprint: str  # configuration and weights
    tokenizer: str
    template: str
    stop_ids: list[int]  # tokens that end an answer

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """Return the fields in which `recorded`, an identity as JSON or a part of one, differs."""
        changed = {key: value for key, value in asdict(self).items() if recorded.get(key, value) != value}
        return [f"{key} is {value!r}, was {recorded[key]!r}" for key, value in changed.items()]


def identify(config: TargetConfig) -> TargetIdentity:
    """Return the target's identity by its current files; they are read again only where one was changed. Raise
    PipelineError.
    """
    files_of_target = locate_target(config)

    def compute() -> dict[str, Any]:
        tokenizer = load_tokenizer(config)
        stop_ids = sorted(load_stop_ids(config, tokenizer))
        parts = fingerprint(config), tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer), stop_ids
        return asdict(TargetIdentity(*parts))

    with _loading(config):
        config_file = files_of_target.file("config.json")
        if config_file is None:
            raise PipelineError(f"target {config.model!r} has no config.json")
        files = [path for pattern in _FILES for path in config_file.parent.glob(pattern)]
        files += ([_template_file(config)] if config.chat_template else []) + adapter_files(config)
        key = [config.identity(), *(version(library) for library in ("transformers", "tokenizers"))]
        return TargetIdentity(**cache_by_files("targets", key, files, compute))


def identify_if_local(config: TargetConfig) -> TargetIdentity | None:
    """Return `identify`'s result, or None where the target's files are not on this machine, which may only inspect a
    run: nothing is downloaded or created.
    """
    if config.model.startswith(embedded.PREFIX):
        if not embedded.is_converted(config.model.removeprefix(embedded.PREFIX)):
            return None
    elif _HUB_ID.fullmatch(config.model) and not Path(config.model).is_dir():
        cached = try_to_load_from_cache(config.model, "config.json", revision=config.revision or "main")
        if not isinstance(cached, str):
            return None
        config = config.model_copy(update={"model": str(Path(cached).parent), "revision": None})
    try:
        return identify(config) if is_local(config) else None
    except PipelineError:
        return None


def fingerprint(config: TargetConfig) -> str:
    """Hash configuration and every byte of the weights (`pipeline/basics/fingerprint.py`)."""
    weights = {*weight_files(locate_target(config)).values(), *adapter_files(config)}
    return identity(load_config(config).to_dict(), weights)


def _skeleton(config: TargetConfig) -> Any:
    """Build the model without its weights, on the meta device."""
    full = load_full_config(config)
    with torch.device("meta"):
        return auto_class(full, config.model).from_config(full, trust_remote_code=config.trust_remote_code)


def count_parameters(config: TargetConfig) -> int:
    return sum(parameter.numel() for parameter in _skeleton(config).parameters())


def _stored_names(skeleton: PreTrainedModel, files: Iterable[str]) -> dict[str, str]:
    """Return the model's name of a tensor -> its name in the files, which is an older one for some families (Gemma 3
    with images).
    """
    renamings = [r for r in get_model_conversion_mapping(skeleton) if isinstance(r, WeightRenaming)]
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    return {rename_source_key(name, renamings, [], skeleton.base_model_prefix, parameters)[0]: name for name in files}


def load_embed_head(config: TargetConfig, decoder_dtype: torch.dtype | None = None) -> EmbeddingAndHead:
    """Load only the embedding and the head from the target's files, in their stored dtype in float32 if an adapter
    changes them. With a `decoder_dtype` load the layers between them, too, in that dtype and on the recipe's device.
    """
    text, target_files, skeleton = load_config(config), locate_target(config), _skeleton(config)
    decoder = None if decoder_dtype is None else _load_decoder(config, decoder_dtype)
    names = {id(parameter): name for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    output = skeleton.get_output_embeddings()
    files, stored = weight_files(target_files), _stored_names(skeleton, weight_files(target_files))
    tensor_names = {
        "embedding": next(n for n, p in skeleton.named_parameters() if p is skeleton.get_input_embeddings().weight),
        "head": names[id(output.weight)],
        "bias": names[id(output.bias)] if getattr(output, "bias", None) is not None else None,
    }
    if tensor_names["head"] not in stored and text.tie_word_embeddings:
        tensor_names["head"] = tensor_names["embedding"]
    modules = [name.rpartition(".")[0] for name in tensor_names.values() if name]
    if config.adapter and changes_modules(config, modules):
        return EmbeddingAndHead(*shared_parts(load_model(config, torch.float32), text), fingerprint(config), decoder)
    tensors_by_role = {}
    for role, name in tensor_names.items():
        if name is None:
            continue
        if name not in stored:
            raise _incomplete(config, name)
        with safe_open(files[stored[name]], "pt") as tensors:
            tensors_by_role[role] = tensors.get_tensor(stored[name])
    head = LMHead(tensors_by_role["head"], tensors_by_role.get("bias"), **head_effects(text))
    return EmbeddingAndHead(tensors_by_role["embedding"], head, fingerprint(config), decoder)


def load_final_norm(config: TargetConfig, dtype: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the name of the norm after the last layer, and its weights. Raise PipelineError where there is none."""
    skeleton = _skeleton(config)
    decoder = find_decoder(skeleton)
    norm = next((getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)), None)
    if norm is None:
        raise PipelineError(
            f"target {config.model!r}: its decoder has no final norm by one of the names {', '.join(FINAL_NORMS)}, so "
            "states of an engine cannot be normed: use target.engine = 'transformers'"
        )
    target_files = locate_target(config)
    files, stored = weight_files(target_files), _stored_names(skeleton, weight_files(target_files))
    names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    weights = {}
    for parameter_name, parameter in norm.named_parameters():
        name = names[id(parameter)]
        if name not in stored:
            raise _incomplete(config, name)
        with safe_open(files[stored[name]], "pt") as tensors:
            weights[parameter_name] = tensors.get_tensor(stored[name]).to(DTYPES[dtype])
    return next(name for name, module in skeleton.named_modules() if module is norm), weights


def load_reader(config: TargetConfig, device: torch.device, dtype: torch.dtype) -> tuple[Verifier, Any]:
    """Load a causal language model that can verify a tree, and its tokenizer. Raise PipelineError."""
    files, text = locate_target(config), load_config(config)
    if obstacle := load_tree_obstacle(config):
        raise PipelineError(
            f"model {config.model!r} cannot draft: it has {obstacle}. Name one of full or sliding attention"
        )
    with _loading(config):
        tokenizer = AutoTokenizer.from_pretrained(files.name, **files.options())
    return Verifier(load_model(config, dtype).to(device), text, config.model), tokenizer


def _load_decoder(config: TargetConfig, dtype: torch.dtype) -> nn.Module:
    model = load_model(config, dtype)
    use_masked_attention(model)
    return find_decoder(model).to(resolve_device(config.device))


def empty_decoder(config: TargetConfig, dtype: torch.dtype) -> nn.Module:
    """Build the target's decoder (the layers between embedding and head) without its weights."""
    full = load_full_config(config)
    options = {"trust_remote_code": config.trust_remote_code, "dtype": dtype}
    model = auto_class(full, config.model).from_config(full, **options)
    use_masked_attention(model)
    return find_decoder(model.requires_grad_(False))


def load_model(config: TargetConfig, dtype: torch.dtype, **placement: Any) -> Any:
    """Load the model. Raise PipelineError where the files lack a tensor, which transformers would fill with random
    numbers.
    """
    files = locate_target(config)
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, **placement}
    options |= files.options()
    model_class = auto_class(load_full_config(config), config.model)
    with _loading(config):
        loaded: Any = model_class.from_pretrained(files.name, dtype=dtype, **options)
    model, info = loaded
    if info["missing_keys"]:
        raise _incomplete(config, min(info["missing_keys"]))
    return (merge_adapter(model, config) if config.adapter else model).eval().requires_grad_(False)


def _incomplete(config: TargetConfig, name: str) -> PipelineError:
    return PipelineError(
        f"target {config.model!r}: its weights hold no {name}; the checkpoint is incomplete, or its config.json is of "
        "another one (tie_word_embeddings tells whether the head is the embedding)"
    )


class Target(Verifier):
    """The loaded frozen model of a recipe, and its tokenizer."""

    def __init__(self, config: TargetConfig, dtype: str, verify: bool = True):
        """Raise PipelineError when hidden state and head do not reproduce the model's own logits. `verify`: as for
        `Verifier`.
        """
        text = load_config(config)
        self.tokenizer = load_tokenizer(config)
        model = load_model(config, DTYPES[dtype], **placement_options(config))
        if config.device == "spread" and {"cpu", "disk"} & {str(device) for device in model.hf_device_map.values()}:
            raise PipelineError(
                f"target {config.model!r} does not fit the {torch.accelerator.device_count()} visible GPUs: "
                "give a worker more of them (features.gpus_per_worker), or larger ones"
            )
        super().__init__(model, text, config.model, verify)

    def stop_ids(self) -> set[int]:
        return _stop_ids(self.model.generation_config, self.tokenizer)


def load_stop_ids(config: TargetConfig, tokenizer: Any) -> frozenset[int]:
    """Return `Target.stop_ids` without loading the weights."""
    files = locate_target(config)
    with _loading(config):
        try:
            generation = GenerationConfig.from_pretrained(files.name, revision=files.revision or "main")
        except OSError:  # the file does not exist
            generation = GenerationConfig.from_model_config(load_config(config))
        return frozenset(_stop_ids(generation, tokenizer))


def _stop_ids(generation: Any, tokenizer: Any) -> set[int]:
    eos = generation.eos_token_id
    ids = {tokenizer.eos_token_id} | set(eos if isinstance(eos, list) else [eos])
    return {token for token in ids if token is not None}
