"""transformers' `generate`, with a draft: what a release's custom_generate/generate.py calls.

Arguments are those of `model.generate`, with its defaults. What would change the answer and is not done here is an
error, never ignored.
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
from pipeline.decoding.generate import Sampling, prefill, speculative
from pipeline.drafts.parts.module import TrainedDraft
from pipeline.lm.attention import require_tree_attention, use_masks
from pipeline.lm.verifier import Verifier

OPENED = "_opened_drafts"  # on the model
FIRST_ROOM = 1024  # positions that a cache takes at once; it grows
KEPT = 2  # releases whose drafts stay with a model
# What is honoured, and what cannot change an answer of one sequence.
HONOURED = (
    *("max_new_tokens", "max_length", "max_time", "stop_strings", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "return_dict_in_generate"),
    *("use_cache", "length_penalty", "early_stopping", "compile_config", "disable_compile", "transformers_version"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
)
# Arguments of `generate` itself that are refused when they are given.
REFUSED = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
)
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")  # where weights come from
NO_SCORES: Any = None  # which stopping criteria would see


@dataclass(frozen=True)
class Released:
    """A draft of a release, as its code has it; the weights lie beside."""

    make: Callable[[], TrainedDraft]
    method: Callable[[TrainedDraft], LoadedMethod]  # how it decodes
    weights: str  # their file
    weights_sha256: str
    vocabulary: int  # of the target,
    width: int  # its hidden size,
    layers: int  # and its decoder layers


@dataclass
class Opened:
    """What was made for a model. A copy of the model, or a saved one, begins without it."""

    verifier: Verifier | None = None
    methods: dict[Released, LoadedMethod] = field(default_factory=dict)

    def __deepcopy__(self, _: Any) -> "Opened":
        return Opened()

    def __reduce__(self) -> Any:
        return Opened, ()


def decode(model: Any, released: Released, **arguments: Any) -> Any:
    """Tokens (1, L), prompt and answer, as `model.generate` returns them.

    `draft`: the release's folder or repository; by default what `custom_generate` was. Raises PipelineError, a
    ValueError, for what is not done, and for another target than the draft's.
    """
    place = arguments.pop("draft", None) or _asked_for()
    hub = {name: arguments.pop(name) for name in HUB if name in arguments}
    streamer, criteria = arguments.pop("streamer", None), arguments.pop("stopping_criteria", None)
    tokenizer = arguments.pop("tokenizer", None)
    given, inputs = arguments.pop("generation_config", None), arguments.pop("inputs", None)
    for name in REFUSED:
        value = arguments.pop(name, None)
        if isinstance(value, Tensor) or value:
            raise PipelineError(f"{name} is not done with a draft: leave it out, or call generate without one")
    config, rest = model._prepare_generation_config(given, **arguments)
    _require_honoured(config)
    ids = _prompt(rest.pop("input_ids", None) if inputs is None else inputs)
    text = _unpadded(ids, rest.pop("attention_mask", None), config)
    if left := [name for name, value in rest.items() if value is not None and name != "token_type_ids"]:
        raise PipelineError(f"{left[0]} is not known here: one prompt of text, and generate's settings")
    before = model.config._attn_implementation
    verifier, method = _open(model, released, place, hub)
    try:
        wanted = _room(model, given, arguments, config, ids.shape[1])
        sampling = _sampling(config, min(wanted, _most(verifier, method, len(text))))
        listener = _Listener(ids, _criteria(config, criteria, tokenizer), streamer)
        room = min(sampling.max_new_tokens + method.room(False), FIRST_ROOM)
        begun = prefill(verifier, text, room, method.draft.needs.auxiliary)
        found = speculative(verifier, method, text, sampling, prefilled=begun, on_tokens=listener)
    finally:
        verifier.unhook()
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
    listener.end()
    whole: Any = torch.cat([ids, torch.tensor([found.tokens], dtype=ids.dtype, device=ids.device)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=whole) if config.return_dict_in_generate else whole


# -- what is asked for ------------------------------------------------------------------------------------------------


def _asked_for() -> str:
    """What the user wrote as `custom_generate`: transformers does not hand it on, and copies code away from weights."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("custom_generate")
        if isinstance(found, str):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise PipelineError("which release's weights? Say draft=FOLDER or draft=OWNER/NAME")


def _require_honoured(config: Any) -> None:
    """Raises PipelineError for a setting that would change the answer."""
    neutral = config._get_default_generation_params()
    for name in vars(GenerationConfig()):  # not what else a model's own file says
        value = getattr(config, name, None)
        if name.startswith("_") or name in HONOURED or value in (None, False, neutral.get(name)):
            continue
        raise PipelineError(
            f"{name}={value!r} is not done with a draft (one sequence; greedy or temperature, top_k, top_p, "
            "repetition_penalty): leave it out, or call generate without one"
        )


def _prompt(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.long, torch.int) or not ids.numel():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise PipelineError(f"input_ids: got {got}, expected whole numbers (1, L)")
    if len(ids) > 1:
        raise PipelineError(f"a batch of {len(ids)} prompts: one at a time is decoded with a draft")
    return ids


def _unpadded(ids: Tensor, mask: Tensor | None, config: Any) -> list[int]:
    """The prompt's text. Without a mask, padding is what transformers takes for it."""
    pad, ends = config.pad_token_id, config.eos_token_id
    if mask is None and pad is not None and pad not in (ends if isinstance(ends, list) else [ends]):
        mask = ids != pad
    kept = ids if mask is None else ids[:, mask[0].bool()]
    if not kept.numel():
        raise PipelineError("attention_mask hides the whole prompt")
    if kept.shape != ids.shape and config.repetition_penalty != 1.0:
        raise PipelineError("repetition_penalty with padding: generate would penalise the padding, too; leave it out")
    return kept[0].tolist()


def _room(model: Any, given: Any, arguments: dict[str, Any], config: Any, prompt: int) -> int:
    """New tokens that are asked for, at most: 20 unless somebody says another length, as in `generate`."""
    lengths = [arguments.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length]
    room = config.max_new_tokens or (config.max_length - prompt if any(lengths) else config.max_length)
    if room < 1:
        raise PipelineError(f"max_length={config.max_length}, but the prompt has {prompt} tokens already")
    return room


def _most(verifier: Verifier, method: LoadedMethod, prompt: int) -> int:
    """New tokens that the target's positions have room for, its last tree included."""
    most = verifier.positions - prompt - method.room(False)
    if most < 1:
        raise PipelineError(f"a prompt of {prompt} tokens fills the target's {verifier.positions} positions")
    return most


def _sampling(config: Any, room: int) -> Sampling:
    ends = config.eos_token_id
    stop = frozenset(ends if isinstance(ends, list) else [] if ends is None else [int(ends)])
    if not config.do_sample:
        return Sampling(room, stop, repetition_penalty=config.repetition_penalty)
    if not config.temperature > 0:
        raise PipelineError(f"temperature={config.temperature} with do_sample: expected more than 0")
    return Sampling(
        room,
        stop,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        repetition_penalty=config.repetition_penalty,
        seed=int(torch.randint(2**31, ()).item()),  # torch.manual_seed repeats an answer
    )


def _criteria(config: Any, given: StoppingCriteriaList | None, tokenizer: Any) -> StoppingCriteriaList:
    found = StoppingCriteriaList(given or [])
    if config.stop_strings:
        if tokenizer is None:
            raise PipelineError("stop_strings wants tokenizer=..., as in generate")
        found.append(StopStringCriteria(tokenizer, config.stop_strings))
    if config.max_time:
        found.append(MaxTimeCriteria(config.max_time))
    return found


class _Listener:
    """Asks the stopping criteria after every token, and hands tokens on."""

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


# -- what decodes -----------------------------------------------------------------------------------------------------


def _open(model: Any, released: Released, place: str, hub: dict[str, Any]) -> tuple[Verifier, LoadedMethod]:
    """What verifies for the model, and the draft beside it: made once. Raises PipelineError."""
    opened: Opened = getattr(model, OPENED, Opened())
    if opened.verifier is None or not _is_of(opened.verifier, model):
        _require_target(model, released)
        name = Path(model.config.name_or_path or "model").name
        require_tree_attention(model.config, name)
        opened = Opened(Verifier(model, model.config.get_text_config(), name))
        setattr(model, OPENED, opened)
    use_masks(model)
    verifier = opened.verifier
    assert verifier is not None
    if released not in opened.methods:
        draft = released.make()
        draft.load_state_dict(load_file(_weights(released, place, hub)))
        draft = draft.to(verifier.device, verifier.dtype).eval().requires_grad_(False)
        draft.bind(verifier.embed_head(""))
        opened.methods[released] = released.method(draft)
        for old in list(opened.methods)[:-KEPT]:
            del opened.methods[old]
    return verifier, opened.methods[released]


def _is_of(verifier: Verifier, model: Any) -> bool:
    """Whether the model's embedding and head are still those that it was made with."""
    now = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    then = verifier.embedding_VD, verifier.head.linear.weight
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in zip(now, then, strict=True))


def _require_target(model: Any, released: Released) -> None:
    text = model.config.get_text_config()
    got = text.vocab_size, text.hidden_size, text.num_hidden_layers
    if got != (wanted := (released.vocabulary, released.width, released.layers)):
        raise PipelineError(
            f"this model has a vocabulary, width and layers of {got}, the draft's target {wanted}: a draft works with "
            "its own target only"
        )


def _weights(released: Released, place: str, hub: dict[str, Any]) -> Path:
    """Raises PipelineError where the release's files are not there, or others than it was made with."""
    found = _file(place, released.weights, hub)
    if _sha256(found) != released.weights_sha256:
        raise PipelineError(f"{found} holds other weights than this code was made for: take the release anew")
    folder = found.parent  # also of a repository's snapshot, which holds what was fetched of it
    for name, digest in json.loads(_file(place, "config.json", hub).read_text()).get("files", {}).items():
        if (folder / name).exists() and _sha256(folder / name) != digest:  # whose change would change answers
            raise PipelineError(f"{place}: {name} was changed after the release was made: take the release anew")
    return found


def _file(place: str, name: str, hub: dict[str, Any]) -> Path:
    found = cached_file(place, name, **hub, _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise PipelineError(f"{place} holds no {name}: draft= names the release's folder or repository")
    return Path(found)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
