"""The frozen target: its hidden states for the dump, its verdict on a token tree, its two ends for the draft.

Works on any `AutoModelForCausalLM` of full or sliding attention through its own forward; holds no private copy of a
model.
"""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json
from pipeline.basics.public import scrubbed
from pipeline.target.attention import masks, most_positions, require_tree, require_tree_attention, use_masks, windows
from pipeline.target.cache import TreeCache
from pipeline.target.chat import require_template
from pipeline.target.config import TargetConfig
from pipeline.target.ends import Ends, LMHead, head_effects
from pipeline.target.fingerprint import identity
from pipeline.target.states import States
from pipeline.target.template import settle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAPACITY_STEP = 512  # caches of a compiled target come in multiples of it: few shapes, few compilations
_OF_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
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
    """Of a target on this machine; None for one of the Hub, OWNER/NAME. Raises PipelineError for a folder that is not
    there, about which the Hub is not asked.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _OF_THE_HUB.fullmatch(model):
        return None
    what = "is a file" if folder.exists() else "does not exist"
    raise PipelineError(
        f"target.model {scrubbed(model)!r} {what}: expected a folder with config.json, tokenizer and safetensors "
        "weights, or OWNER/NAME of the Hub"
    )


def source(config: TargetConfig) -> Source:
    name = config.model
    if name.startswith(embedded.PREFIX):
        name = str(embedded.model_folder(name.removeprefix(embedded.PREFIX)))
    elif (folder := local_folder(name)) is not None:
        name = str(folder)
    return Source(name, config.revision, config.trust_remote_code)


@contextmanager
def _loading(config: TargetConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: weights of other shapes, no memory
        raise PipelineError(f"target {config.model!r} cannot be loaded: {error}") from None


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
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            raise PipelineError(f"target.chat_template {template} does not exist: expected a Jinja file")
        tokenizer.chat_template = template.read_text().rstrip("\n")
    require_template(tokenizer, config.model)
    settle(tokenizer, config)
    return tokenizer


def resolve_device(name: str) -> torch.device:
    """Of "spread" the first; where the target's hidden states arrive, `Target.device` says."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cuda", "spread") and not torch.cuda.is_available():
        raise PipelineError(f"target.device={name!r}, but torch sees no CUDA device here: use 'auto' or 'cpu'")
    return torch.device("cpu" if name == "cpu" else "cuda")


def placement(config: TargetConfig) -> dict[str, Any]:
    """How transformers is to load the weights: for a GPU tensor by tensor from the file to its memory, never whole in
    the host's.

    The device has its number: the threads that load do not know this one's.
    """
    device = resolve_device(config.device)
    if config.device == "spread":
        return {"device_map": "auto"}
    return {"device_map": {"": torch.device("cuda", torch.cuda.current_device())}} if device.type == "cuda" else {}


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """How far two ways to the same logits may part, over the largest: not at all in float32 on a CPU; elsewhere by a
    few steps of the dtype and, whatever it is, by sums in another order.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return 0.0
    return max(4 * torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)


def weight_files(where: Source) -> dict[str, Path]:
    """Tensor name -> safetensors file. Raises PipelineError when the target has none."""
    index = where.file(_INDEX)
    if index:
        names = read_json(index)["weight_map"]
        paths = {}
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


def fingerprint(config: TargetConfig) -> str:
    """Identifies configuration and weights, of these every byte (`pipeline/target/fingerprint.py`)."""
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


def load_ends(config: TargetConfig) -> Ends:
    """Reads only the embedding and the head from the target's files, in their stored dtype."""
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
            raise PipelineError(f"target {config.model!r}: its weights hold no {name}; the checkpoint is incomplete")
        with safe_open(files[stored[name]], "pt") as tensors:
            read[role] = tensors.get_tensor(stored[name])
    head = LMHead(read["head"], read.get("bias"), **head_effects(text))
    return Ends(read["embedding"], head, fingerprint(config))


class Target:
    """The frozen model, loaded. Hidden states are the decoder's output after its final norm."""

    def __init__(self, config: TargetConfig, dtype: str):
        """Raises PipelineError when hidden state and head do not reproduce the model's own logits."""
        where = source(config)
        self.config = load_config(config)
        self.tokenizer = load_tokenizer(config)
        place = placement(config)
        self.compiled, self.filled = False, 1  # rows that a single one of packed layers is filled up to
        self._caches: dict[int, TreeCache] = {}  # of a compiled target, by capacity
        self._captured = threading.local()  # by thread: layer -> output
        self._hooked: set[int] = set()  # layers that have a hook
        with _loading(config):
            model: Any = AutoModelForCausalLM.from_pretrained(
                where.name,
                dtype=DTYPES[dtype],
                use_safetensors=True,
                **place,
                **where.options(),
            )
        if config.device == "spread" and {"cpu", "disk"} & {str(place) for place in model.hf_device_map.values()}:
            raise PipelineError(
                f"target {config.model!r} does not fit the {torch.cuda.device_count()} GPUs that are seen here: give "
                "a worker more of them (features.gpus_per_worker), or larger ones"
            )
        self.model: Any = model.eval().requires_grad_(False)
        use_masks(self.model)
        self.positions, self._windows = most_positions(self.config), windows(self.config)
        self.dtype = DTYPES[dtype]
        self.decoder = self.model.base_model
        output: Any = self.model.get_output_embeddings()
        self.device = (
            output.weight.device
        )  # of a spread target the last; its own hooks take inputs to where they belong
        self.head = LMHead(output.weight, output.bias, **head_effects(self.config))
        self.embedding_VD = self.model.get_input_embeddings().weight
        self._require_split(config.model)
        require_tree(self, config.model)

    def _require_split(self, name: str) -> None:
        probe = torch.arange(8, device=self.device)[None]
        with torch.inference_mode():
            whole = self.model(input_ids=probe).logits
            split = self.head(self.capture(probe))
            whole = whole.to(self.device)
        if not whole.isfinite().all():
            raise PipelineError(f"target {name!r}: its logits are not finite in {self.dtype}; use another dtype")
        apart, largest = (whole.float() - split.float()).abs().max().item(), whole.float().abs().max().item()
        if not apart <= rounding(self.dtype, self.device) * largest:
            raise PipelineError(
                f"target {name!r}: its logits are not head(last hidden state) (largest difference "
                f"{apart:.3g}); this architecture needs support in pipeline/target/model.py"
            )

    def stop_ids(self) -> set[int]:
        eos = self.model.generation_config.eos_token_id
        ids = {self.tokenizer.eos_token_id} | set(eos if isinstance(eos, list) else [eos])
        return {token for token in ids if token is not None}

    @torch.inference_mode()
    def capture(self, tokens_BT: Tensor) -> Tensor:
        """``hidden_BTD`` of right-padded dialogues. Causality keeps padding out of every real position."""
        return self.decoder(input_ids=tokens_BT.to(self.device), use_cache=False).last_hidden_state.to(self.device)

    @torch.inference_mode()
    def capture_all(self, tokens_BT: Tensor, layers: list[int]) -> Tensor:
        """``states_BTSD``: what `capture` gives, then the outputs of the given decoder layers (counted from 1),
        unnormed.
        """
        if not layers:
            return self.capture(tokens_BT).unsqueeze(2)
        with self._capturing(layers) as found:
            hidden_BTD = self.capture(tokens_BT)
        return torch.stack([hidden_BTD, *(found[layer] for layer in layers)], dim=2)

    @torch.inference_mode()
    def states(self, tokens: list[int], layers: Iterable[int] = ()) -> States:
        """Of one text, from one causal forward."""
        layers = tuple(sorted(set(layers)))
        states_TSD = self.capture_all(torch.tensor([tokens]), list(layers))[0]
        return States(states_TSD[:, 0], states_TSD[:, 1:] if layers else None, layers)

    @contextmanager
    def _capturing(self, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Fills the dictionary with the layers' outputs in a forward of this thread."""
        new = set(layers) - self._hooked
        for layer in new:
            self.model.get_decoder().layers[layer - 1].register_forward_hook(partial(self._keep, layer))
            self._hooked.add(layer)
        if new and self.compiled:
            torch.compiler.reset()  # what is compiled does not look for new hooks
        found: dict[int, Tensor] = {}
        self._captured.outputs = found
        try:
            yield found
        finally:
            del self._captured.outputs

    def _keep(self, layer: int, _module, _inputs, output) -> None:
        """A hook sees the forwards of all threads; each keeps its own."""
        found = getattr(self._captured, "outputs", None)
        if found is not None:
            found[layer] = (output[0] if isinstance(output, tuple) else output).to(self.device)

    @torch.inference_mode()
    def new_cache(self, capacity: int) -> TreeCache:
        """For up to `capacity` tokens. A compiled target uses the same memory every time, as CUDA graphs are bound to
        addresses: the cache that was given out before is void.
        """
        if not self.compiled:
            return TreeCache(expected=capacity)
        capacity = fixed_capacity(capacity)
        cache = self._caches.setdefault(capacity, TreeCache(self.config.num_hidden_layers, capacity))
        cache.keep(0)
        return cache

    def compile(self, backend: str = "inductor") -> None:
        """From now on forwards over a cache have fixed shapes and are compiled, on a GPU into CUDA graphs. Prompts are
        not.
        """
        torch._dynamo.config.recompile_limit = 256  # a compilation for every width and capacity; the tuner tries many
        graphs: Any = {"mode": "reduce-overhead"} if backend == "inductor" and self.device.type == "cuda" else {}
        self._compiled = torch.compile(self.decoder, backend=backend, dynamic=False, fullgraph=True, **graphs)
        self.compiled = True

    @torch.inference_mode()
    def forward(
        self,
        tokens_N: Tensor,
        cache: TreeCache,
        positions_N: Tensor | None = None,
        mask_NC: Tensor | None = None,
        width: int = 1,
        layers: tuple[int, ...] = (),
    ) -> States:
        """Appends N tokens to the cache and returns their states, with the outputs of these decoder layers.

        ``mask_NC`` (bool, C = cached + N) says what each token sees; without it tokens follow each other causally,
        which is right for a first prompt or a single token only. A compiled target fills up to `width` tokens.
        """
        past, count = cache.length, len(tokens_N)
        assert mask_NC is not None or past == 0 or count == 1
        if positions_N is None:
            positions_N = torch.arange(past, past + count, device=self.device)
        mask = None
        if self.compiled and mask_NC is None:
            mask_NC = torch.ones(count, past + count, dtype=torch.bool, device=self.device).tril(past)
        if mask_NC is not None:
            fixed = (width if past else count, cache.capacity) if self.compiled and cache.capacity else None
            mask = masks(self._windows, mask_NC, positions_N, self.dtype, fixed)
        decoder: Any = self.decoder
        if self.compiled and past:
            decoder = self._compiled
            tokens_N, positions_N = (F.pad(x, (0, width - count)) for x in (tokens_N, positions_N))
        capturing: Any = self._capturing(layers) if layers else nullcontext({})
        with capturing as found:
            out = decoder(
                input_ids=tokens_N[None],
                position_ids=positions_N[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        cache.length = past + count
        auxiliary_NSD = torch.stack([found[layer][0, :count] for layer in layers], dim=1) if layers else None
        return States(out.last_hidden_state[0, :count].to(self.device), auxiliary_NSD, layers)


def fixed_capacity(tokens: int) -> int:
    """Of a compiled target's cache for so many tokens."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
