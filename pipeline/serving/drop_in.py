"""transformers' `generate` with a draft: a release's custom_generate/generate.py calls it.

Arguments are those of `model.generate`, with its defaults. A setting that would change the answer and is not supported
is an error, never ignored.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import cached_file

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_speculative, prefill
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.attention import use_masked_attention
from pipeline.lm.verifier import Verifier

OPEN_DRAFTS = "_opened_drafts"  # attribute of the model
INITIAL_POSITIONS = 1024  # positions that a cache holds at first; it grows
MAX_OPEN_RELEASES = 2  # releases whose drafts stay with a model
# Settings that are supported, or cannot change an answer of one sequence.
SUPPORTED_SETTINGS = (
    *("max_new_tokens", "max_length", "max_time", "stop_strings", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "return_dict_in_generate"),
    *("use_cache", "length_penalty", "early_stopping", "compile_config", "disable_compile", "transformers_version"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
)
# Arguments of `generate` itself that are refused.
REFUSED_ARGUMENTS = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
)
# Arguments that say where the weights come from.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
NO_SCORES: Any = None  # scores passed to stopping criteria


@dataclass(frozen=True)
class Released:
    """A released draft as its code describes it; the weights lie next to the code."""

    make: Callable[[], TrainedDraft]
    method: Callable[[TrainedDraft], LoadedMethod]  # how it decodes
    weights: str  # name of their file
    weights_sha256: str
    vocabulary: int  # of the target,
    width: int  # its hidden size,
    layers: int  # and its decoder layers


@dataclass
class OpenDrafts:
    """The verifier and drafts that were made for a model. A copy of the model, or a saved one, begins without them."""

    verifier: Verifier | None = None
    methods: dict[Released, LoadedMethod] = field(default_factory=dict)

    def __deepcopy__(self, _: Any) -> "OpenDrafts":
        return OpenDrafts()

    def __reduce__(self) -> Any:
        return OpenDrafts, ()


def decode(model: Any, released: Released, **arguments: Any) -> Any:
    """Return tokens (1, L), prompt and answer, as `model.generate` returns them.

    `draft`: the release's folder or repository; by default the value of `custom_generate`. Raise PipelineError, a
    ValueError, for settings that are not supported, and for another target than the draft's.
    """
    release_name = arguments.pop("draft", None) or _release_of_caller()
    hub = {name: arguments.pop(name) for name in HUB_ARGUMENTS if name in arguments}
    streamer, criteria = arguments.pop("streamer", None), arguments.pop("stopping_criteria", None)
    tokenizer = arguments.pop("tokenizer", None)
    generation_config, inputs = arguments.pop("generation_config", None), arguments.pop("inputs", None)
    for name in REFUSED_ARGUMENTS:
        value = arguments.pop(name, None)
        if isinstance(value, Tensor) or value:
            raise PipelineError(f"{name} is not supported with a draft: leave it out, or call generate without one")
    config, unused = model._prepare_generation_config(generation_config, **arguments)
    _require_supported(config)
    ids = _checked_prompt(unused.pop("input_ids", None) if inputs is None else inputs)
    text = _remove_padding(ids, unused.pop("attention_mask", None), config)
    if unknown := [name for name, value in unused.items() if value is not None and name != "token_type_ids"]:
        raise PipelineError(f"{unknown[0]} is not supported: expected one prompt of text, and generate's settings")
    attention = model.config._attn_implementation
    verifier, method = _open(model, released, release_name, hub)
    try:
        requested = _requested_tokens(model, generation_config, arguments, config, ids.shape[1])
        sampling = _sampling(config, min(requested, _available_positions(verifier, method, len(text))))
        listener = _Listener(ids, _criteria(config, criteria, tokenizer), streamer)
        positions = min(sampling.max_new_tokens + method.room(False), INITIAL_POSITIONS)
        prefilled = prefill(verifier, text, positions, method.draft.needs.auxiliary)
        answer = decode_speculative(verifier, method, text, sampling, prefilled=prefilled, on_tokens=listener)
    finally:
        verifier.unhook()
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
    listener.end()
    sequences: Any = torch.cat([ids, torch.tensor([answer.tokens], dtype=ids.dtype, device=ids.device)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


# -- arguments --------------------------------------------------------------------------------------------------------


def _release_of_caller() -> str:
    """Return the user's `custom_generate`, from the stack: transformers does not pass it on, and copies the code away
    from the weights.
    """
    frame = sys._getframe(1)
    while frame is not None:
        release_name = frame.f_locals.get("custom_generate")
        if isinstance(release_name, str):
            return release_name
        frame = frame.f_back  # type: ignore[assignment]
    raise PipelineError("the release of the weights is not known: pass draft=FOLDER or draft=OWNER/NAME")


def _require_supported(config: Any) -> None:
    """Raise PipelineError for an unsupported setting that would change the answer."""
    neutral = config._get_default_generation_params()
    for name in vars(GenerationConfig()):  # a model's own file may hold further settings
        value = getattr(config, name, None)
        if name.startswith("_") or name in SUPPORTED_SETTINGS or value in (None, False, neutral.get(name)):
            continue
        raise PipelineError(
            f"{name}={value!r} is not supported with a draft (one sequence; greedy or temperature, top_k, top_p, "
            "repetition_penalty): leave it out, or call generate without one"
        )


def _checked_prompt(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.long, torch.int) or not ids.numel():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise PipelineError(f"input_ids: got {got}, expected whole numbers (1, L)")
    if len(ids) > 1:
        raise PipelineError(f"a batch of {len(ids)} prompts: one at a time is decoded with a draft")
    return ids


def _remove_padding(ids: Tensor, mask: Tensor | None, config: Any) -> list[int]:
    """Return the prompt's tokens without padding. Without a mask, padding is found as transformers finds it."""
    pad, stop = config.pad_token_id, config.eos_token_id
    if mask is None and pad is not None and pad not in (stop if isinstance(stop, list) else [stop]):
        mask = ids != pad
    text_ids = ids if mask is None else ids[:, mask[0].bool()]
    if not text_ids.numel():
        raise PipelineError("attention_mask hides the whole prompt")
    if text_ids.shape != ids.shape and config.repetition_penalty != 1.0:
        raise PipelineError("repetition_penalty with padding: generate would penalise the padding, too; leave it out")
    return text_ids[0].tolist()


def _requested_tokens(model: Any, generation_config: Any, arguments: dict[str, Any], config: Any, prompt: int) -> int:
    """Return the requested maximum of new tokens: 20 unless a length is set, as in `generate`."""
    lengths = [arguments.get("max_length"), model.generation_config.max_length]
    lengths.append(getattr(generation_config, "max_length", None))
    requested = config.max_new_tokens or (config.max_length - prompt if any(lengths) else config.max_length)
    if requested < 1:
        raise PipelineError(f"max_length={config.max_length}, but the prompt has {prompt} tokens already")
    return requested


def _available_positions(verifier: Verifier, method: LoadedMethod, prompt: int) -> int:
    """Return the number of new tokens that fit the target's positions, its last tree included."""
    available = verifier.positions - prompt - method.room(False)
    if available < 1:
        raise PipelineError(f"a prompt of {prompt} tokens fills the target's {verifier.positions} positions")
    return available


def _sampling(config: Any, max_new_tokens: int) -> Sampling:
    stop_ids = config.eos_token_id
    stop = frozenset(stop_ids if isinstance(stop_ids, list) else [] if stop_ids is None else [int(stop_ids)])
    if not config.do_sample:
        return Sampling(max_new_tokens, stop, repetition_penalty=config.repetition_penalty)
    if not config.temperature > 0:
        raise PipelineError(f"temperature={config.temperature} with do_sample: expected more than 0")
    return Sampling(
        max_new_tokens,
        stop,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        repetition_penalty=config.repetition_penalty,
        seed=int(torch.randint(2**31, ()).item()),  # torch.manual_seed repeats an answer
    )


def _criteria(config: Any, criteria: StoppingCriteriaList | None, tokenizer: Any) -> StoppingCriteriaList:
    combined = StoppingCriteriaList(criteria or [])
    if config.stop_strings:
        if tokenizer is None:
            raise PipelineError("stop_strings requires tokenizer=..., as in generate")
        combined.append(StopStringCriteria(tokenizer, config.stop_strings))
    if config.max_time:
        combined.append(MaxTimeCriteria(config.max_time))
    return combined


class _Listener:
    """The callback that applies the stopping criteria after every token, and passes tokens to the streamer."""

    def __init__(self, prompt: Tensor, criteria: StoppingCriteriaList, streamer: Any):
        self._ids, self._criteria, self._streamer = prompt, criteria, streamer
        if streamer:
            streamer.put(prompt.cpu())

    def __call__(self, new: list[int]) -> int | None:
        end = None
        tokens = torch.tensor([new], dtype=self._ids.dtype, device=self._ids.device)
        if self._criteria:
            for count in range(1, len(new) + 1):
                so_far = torch.cat([self._ids, tokens[:, :count]], dim=1)
                if self._criteria(so_far, NO_SCORES).all():
                    end = count
                    break
        tokens = tokens[:, :end]
        self._ids = torch.cat([self._ids, tokens], dim=1)
        if self._streamer:
            for token in tokens[0].cpu():
                self._streamer.put(token[None])
        return end

    def end(self) -> None:
        if self._streamer:
            self._streamer.end()


# -- verifier and draft -----------------------------------------------------------------------------------------------


def _open(model: Any, released: Released, release_name: str, hub: dict[str, Any]) -> tuple[Verifier, LoadedMethod]:
    """Return the model's verifier and the release's draft; both are made once for a model. Raise PipelineError."""
    opened: OpenDrafts = getattr(model, OPEN_DRAFTS, OpenDrafts())
    if opened.verifier is None or not _is_built_from(opened.verifier, model):
        _require_target(model, released)
        name = Path(model.config.name_or_path or "model").name
        opened = OpenDrafts(Verifier(model, model.config.get_text_config(), name))
        setattr(model, OPEN_DRAFTS, opened)
    use_masked_attention(model)
    verifier = opened.verifier
    assert verifier is not None
    if released not in opened.methods:
        draft = released.make()
        draft.load_state_dict(load_file(_weights(released, release_name, hub)))
        draft = draft.to(verifier.device, verifier.dtype).eval().requires_grad_(False)
        draft.bind(verifier.embed_head(""))
        opened.methods[released] = released.method(draft)
        for oldest in list(opened.methods)[:-MAX_OPEN_RELEASES]:
            del opened.methods[oldest]
    return verifier, opened.methods[released]


def _is_built_from(verifier: Verifier, model: Any) -> bool:
    """Return whether the model's embedding and head are still those of the verifier."""
    current = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    original = verifier.embedding_VD, verifier.head.linear.weight
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in zip(current, original, strict=True))


def _require_target(model: Any, released: Released) -> None:
    text = model.config.get_text_config()
    got = text.vocab_size, text.hidden_size, text.num_hidden_layers
    if got != (expected := (released.vocabulary, released.width, released.layers)):
        raise PipelineError(
            f"this model has a vocabulary, width and layers of {got}, the draft's target {expected}: a draft works "
            "with its own target only"
        )


def _weights(released: Released, release_name: str, hub: dict[str, Any]) -> Path:
    """Return the path of the weights. Raise PipelineError where a file of the release is missing or was changed."""
    path = _cached_file(release_name, released.weights, hub)
    if _sha256(path) != released.weights_sha256:
        raise PipelineError(f"{path} holds other weights than this code was made for: download the release again")
    folder = path.parent  # or a repository's snapshot, which holds the files fetched so far
    config = json.loads(_cached_file(release_name, "config.json", hub).read_text())
    for name, digest in config.get("files", {}).items():
        if (folder / name).exists() and _sha256(folder / name) != digest:  # a changed file would change answers
            raise PipelineError(f"{release_name}: {name} was changed after the release was made: download it again")
    return path


def _cached_file(release_name: str, name: str, hub: dict[str, Any]) -> Path:
    path = cached_file(release_name, name, **hub, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise PipelineError(f"{release_name} holds no {name}: expected the release's folder or repository in draft=")
    return Path(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
