"""The frozen target of a recipe: where its files are, and what is read from them."""

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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from pipeline.basics import embedded
from pipeline.basics.accelerator import kind, resolve_device
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, read_json
from pipeline.lm.attention import require_tree_attention, use_masks
from pipeline.lm.chat import require_template, template_fingerprint, tokenizer_fingerprint
from pipeline.lm.config import TargetConfig
from pipeline.lm.embedding_head import EmbeddingAndHead, LMHead, head_effects
from pipeline.lm.fingerprint import cached_by_files, identity
from pipeline.lm.template import apply_settings
from pipeline.lm.verifier import Verifier

if kind() is None:
    # A CPU's kernel takes a mask over grouped heads; for a GPU's sake transformers would copy keys and values. Here and
    # not where a target is loaded, so that a process has one kernel from its start on.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OF_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What says what a target is, of all that lies in its folder.
_FILES = (
    *("config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.jinja", "*.py"),
    *("additional_chat_templates/*", "*.safetensors", "*.safetensors.index.json"),
)
_WEIGHTS_FILE = re.compile(r"\w[\w.-]*\.safetensors")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Source:
    """Where a target's files are, and how to ask transformers for them."""

    name: str  # folder or Hub id
    revision: str | None
    trust_remote_code: bool

    def options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def file(self, name: str) -> Path | None:
        found = cached_file(self.name, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found else None


def local_folder(model: str) -> Path | None:
    """The folder of a target on this machine; None for one of the Hub, OWNER/NAME. Raises PipelineError for a folder
    that is not there, about which the Hub is not asked.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _OF_THE_HUB.fullmatch(model):
        return None
    what = "is a file" if folder.exists() else "does not exist"
    raise PipelineError(
        f"target.model {model!r} {what}: expected a folder with config.json, tokenizer and safetensors "
        "weights, or OWNER/NAME of the Hub"
    )


def source(config: TargetConfig) -> Source:
    name = config.model
    if name.startswith(embedded.PREFIX):
        name = str(embedded.model_folder(name.removeprefix(embedded.PREFIX)))
    elif (folder := local_folder(name)) is not None:
        name = str(folder)
    return Source(name, config.revision, config.trust_remote_code)


# RuntimeError: weights of other shapes, no memory; the others: files that hold something else than they should.
_UNLOADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, StrictDataclassError)


@contextmanager
def _loading(config: TargetConfig) -> Iterator[None]:
    try:
        yield
    except _UNLOADABLE as error:
        raise PipelineError(f"target {config.model!r} cannot be loaded: {error or type(error).__name__}") from None


def load_config(config: TargetConfig) -> Any:
    """The text configuration. Raises PipelineError when the model cannot be had or its layers cannot verify a tree."""
    where = source(config)
    with _loading(config):
        full = AutoConfig.from_pretrained(where.name, **where.options())
    require_tree_attention(full, config.model)
    return full.get_text_config()


def load_tokenizer(config: TargetConfig) -> Any:
    where = source(config)
    with _loading(config):
        tokenizer = AutoTokenizer.from_pretrained(where.name, **where.options())
    if config.chat_template:
        tokenizer.chat_template = _template_file(config).read_text().rstrip("\n")
    require_template(tokenizer, config.model)
    apply_settings(tokenizer, config)
    return tokenizer


def _template_file(config: TargetConfig) -> Path:
    named = Path(config.chat_template or "").expanduser()
    template = named if named.is_file() else ROOT / named  # a recipe's that comes with the project
    if not template.is_file():
        raise PipelineError(f"target.chat_template {named} does not exist: expected a Jinja file")
    return template


def placement(config: TargetConfig) -> dict[str, Any]:
    """How transformers is to load the weights: for a GPU tensor by tensor from the file to its memory, never whole in
    the host's. The device has its number: the threads that load do not know this one's.
    """
    device = resolve_device(config.device)
    if config.device == "spread":
        return {"device_map": "auto"}
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def weight_files(where: Source) -> dict[str, Path]:
    """Tensor name -> safetensors file. Raises PipelineError when the target has none."""
    index = where.file(_INDEX)
    if index:
        names: Any = read_json(index).get("weight_map")
        values, paths = list(names.values()) if isinstance(names, dict) else [names], {}
        if odd := [name for name in values if not isinstance(name, str) or not _WEIGHTS_FILE.fullmatch(name)]:
            raise PipelineError(f"target {where.name}: {_INDEX} names {odd[0]!r}, expected names of files beside it")
        for shard in sorted(set(names.values())):
            if (path := where.file(shard)) is None:
                raise PipelineError(f"target {where.name}: {_INDEX} names {shard}, which does not exist")
            paths[shard] = path
        return {tensor: paths[shard] for tensor, shard in names.items()}
    single = where.file(_SINGLE)
    if single is None:
        raise PipelineError(
            f"target {where.name} has no safetensors weights ({_SINGLE} or {_INDEX}). Pickled weights are not read: "
            "convert them once with transformers' save_pretrained and point target.model at the folder"
        )
    with safe_open(single, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


@dataclass(frozen=True)
class TargetIdentity:
    """All that a target's states, tokens and answers depend on, by content."""

    fingerprint: str  # configuration and weights
    tokenizer: str
    template: str
    stop_ids: list[int]  # that end an answer

    def differences(self, other: dict[str, Any]) -> list[str]:
        """What `other`, an identity as JSON or a part of one, has otherwise."""
        changed = {key: value for key, value in asdict(self).items() if other.get(key, value) != value}
        return [f"{key} is {value!r}, was {other[key]!r}" for key, value in changed.items()]


def identify(config: TargetConfig) -> TargetIdentity:
    """The target's identity as its files are now; they are read again only where one was changed. Raises
    PipelineError.
    """
    where = source(config)

    def compute() -> dict[str, Any]:
        tokenizer = load_tokenizer(config)
        stop_ids = sorted(stop_ids_of(config, tokenizer))
        parts = fingerprint(config), tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer), stop_ids
        return asdict(TargetIdentity(*parts))

    with _loading(config):
        first = where.file("config.json")
        if first is None:
            raise PipelineError(f"target {config.model!r} has no config.json")
        files = [path for pattern in _FILES for path in first.parent.glob(pattern)]
        files += [_template_file(config)] if config.chat_template else []
        asked = [config.identity(), *(version(library) for library in ("transformers", "tokenizers"))]
        return TargetIdentity(**cached_by_files("targets", asked, files, compute))


def identify_if_here(config: TargetConfig) -> TargetIdentity | None:
    """`identify`, or None where the target's files are not on this machine, which may only look at a run: nothing is
    fetched or made.
    """
    if config.model.startswith(embedded.PREFIX):
        if not embedded.is_made(config.model.removeprefix(embedded.PREFIX)):
            return None
    elif _OF_THE_HUB.fullmatch(config.model) and not Path(config.model).is_dir():
        held = try_to_load_from_cache(config.model, "config.json", revision=config.revision or "main")
        if not isinstance(held, str):
            return None
        config = config.model_copy(update={"model": str(Path(held).parent), "revision": None})
    try:
        return identify(config)
    except PipelineError:
        return None


def fingerprint(config: TargetConfig) -> str:
    """Identifies configuration and weights, of these every byte (`pipeline/lm/fingerprint.py`)."""
    return identity(load_config(config).to_dict(), set(weight_files(source(config)).values()))


def _skeleton(config: TargetConfig) -> Any:
    """The model without its weights, on the meta device."""
    where = source(config)
    full = AutoConfig.from_pretrained(where.name, **where.options())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(full, trust_remote_code=where.trust_remote_code)


def parameter_count_of(config: TargetConfig) -> int:
    return sum(parameter.numel() for parameter in _skeleton(config).parameters())


def _stored_names(skeleton: PreTrainedModel, files: Iterable[str]) -> dict[str, str]:
    """The model's name of a tensor -> its name in the files, which is an older one for some families (Gemma 3 with
    images).
    """
    renamings = [r for r in get_model_conversion_mapping(skeleton) if isinstance(r, WeightRenaming)]
    own = dict(skeleton.named_parameters(remove_duplicate=False))
    return {rename_source_key(name, renamings, [], skeleton.base_model_prefix, own)[0]: name for name in files}


def load_embed_head(config: TargetConfig, decoder_dtype: torch.dtype | None = None) -> EmbeddingAndHead:
    """Reads only the embedding and the head from the target's files, in their stored dtype. With a `decoder_dtype` all
    between them as well, in that one and where the recipe has its target.
    """
    text = load_config(config)
    where = source(config)
    skeleton = _skeleton(config)
    names = {id(parameter): name for name, parameter in skeleton.named_parameters(remove_duplicate=False)}
    output = skeleton.get_output_embeddings()
    files, stored = weight_files(where), _stored_names(skeleton, weight_files(where))
    wanted = {
        "embedding": next(n for n, p in skeleton.named_parameters() if p is skeleton.get_input_embeddings().weight),
        "head": names[id(output.weight)],
        "bias": names[id(output.bias)] if getattr(output, "bias", None) is not None else None,
    }
    if wanted["head"] not in stored and text.tie_word_embeddings:
        wanted["head"] = wanted["embedding"]
    read = {}
    for role, name in wanted.items():
        if name is None:
            continue
        if name not in stored:
            raise _incomplete(config, name)
        with safe_open(files[stored[name]], "pt") as tensors:
            read[role] = tensors.get_tensor(stored[name])
    head = LMHead(read["head"], read.get("bias"), **head_effects(text))
    decoder = None if decoder_dtype is None else _load_decoder(config, decoder_dtype)
    return EmbeddingAndHead(read["embedding"], head, fingerprint(config), decoder)


def load_final_norm(config: TargetConfig, dtype: str) -> nn.Module:
    """The target's norm behind its last layer, its weights alone read. Raises PipelineError where it has none."""
    skeleton = _skeleton(config)
    decoder = skeleton.get_decoder()
    norm = getattr(decoder, "norm", None)
    if norm is None:
        raise PipelineError(
            f"target {config.model!r}: its decoder has no final norm by that name, so states of an engine cannot be "
            "normed: use target.engine = 'transformers'"
        )
    where = source(config)
    files, stored = weight_files(where), _stored_names(skeleton, weight_files(where))
    names = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    read = {}
    for own, parameter in norm.named_parameters():
        name = names[id(parameter)]
        if name not in stored:
            raise _incomplete(config, name)
        with safe_open(files[stored[name]], "pt") as tensors:
            read[own] = tensors.get_tensor(stored[name]).to(DTYPES[dtype])
    norm.load_state_dict(read, assign=True)
    return norm.requires_grad_(False)


def load_reader(config: TargetConfig, device: torch.device, dtype: torch.dtype) -> tuple[Verifier, Any]:
    """Any causal language model that can read a tree, and its tokenizer. Raises PipelineError."""
    where, text = source(config), load_config(config)
    with _loading(config):
        tokenizer = AutoTokenizer.from_pretrained(where.name, **where.options())
    return Verifier(_load(config, dtype).to(device), text, config.model), tokenizer


def _load_decoder(config: TargetConfig, dtype: torch.dtype) -> nn.Module:
    model = _load(config, dtype)
    use_masks(model)
    return model.get_decoder().to(resolve_device(config.device))


def empty_decoder(config: TargetConfig, dtype: torch.dtype) -> nn.Module:
    """The target's decoder without its weights: all between embedding and head."""
    where = source(config)
    full = AutoConfig.from_pretrained(where.name, **where.options())
    model = AutoModelForCausalLM.from_config(full, trust_remote_code=where.trust_remote_code, dtype=dtype)
    use_masks(model)
    return model.requires_grad_(False).get_decoder()


def _load(config: TargetConfig, dtype: torch.dtype, **where_to: Any) -> Any:
    """Raises PipelineError where the files lack a tensor: transformers would fill it with random numbers."""
    where = source(config)
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, **where_to, **where.options()}
    with _loading(config):
        loaded: Any = AutoModelForCausalLM.from_pretrained(where.name, dtype=dtype, **options)
    model, found = loaded
    if found["missing_keys"]:
        raise _incomplete(config, min(found["missing_keys"]))
    return model.eval().requires_grad_(False)


def _incomplete(config: TargetConfig, name: str) -> PipelineError:
    return PipelineError(
        f"target {config.model!r}: its weights hold no {name}; the checkpoint is incomplete, or its config.json is of "
        "another one (tie_word_embeddings says whether the head is the embedding)"
    )


class Target(Verifier):
    """The frozen model of a recipe, loaded, and its tokenizer."""

    def __init__(self, config: TargetConfig, dtype: str):
        """Raises PipelineError when hidden state and head do not reproduce the model's own logits."""
        text = load_config(config)
        self.tokenizer = load_tokenizer(config)
        model = _load(config, DTYPES[dtype], **placement(config))
        if config.device == "spread" and {"cpu", "disk"} & {str(place) for place in model.hf_device_map.values()}:
            raise PipelineError(
                f"target {config.model!r} does not fit the {torch.accelerator.device_count()} GPUs that are seen here: "
                "give a worker more of them (features.gpus_per_worker), or larger ones"
            )
        super().__init__(model, text, config.model)

    def stop_ids(self) -> set[int]:
        return _stop_ids(self.model.generation_config, self.tokenizer)


def stop_ids_of(config: TargetConfig, tokenizer: Any) -> frozenset[int]:
    """`Target.stop_ids` without loading it."""
    where = source(config)
    with _loading(config):
        try:
            generation = GenerationConfig.from_pretrained(where.name, revision=where.revision or "main")
        except OSError:  # it has no such file
            generation = GenerationConfig.from_model_config(load_config(config))
        return frozenset(_stop_ids(generation, tokenizer))


def _stop_ids(generation: Any, tokenizer: Any) -> set[int]:
    eos = generation.eos_token_id
    ids = {tokenizer.eos_token_id} | set(eos if isinstance(eos, list) else [eos])
    return {token for token in ids if token is not None}
