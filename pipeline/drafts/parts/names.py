"""The names of a draft in other software: its tensors, and the keys of config.json. Each draft's file has such a map,
which `pipeline/serving/export.py` uses for writing and `pipeline/artifacts/imported.py` for reading.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.drafts.parts.module import DraftModule
from pipeline.lm.attention import SLIDING

Facts = dict[str, tuple[Any, Any]]
UNSET: Any = object()  # the value of a setting that is not in a file: the recipe's value holds
DRAFT_TOKEN_IDS = "draft_token_ids"
WINDOW = ("sliding_window", "target_layer_count")  # of config.json
GPT_OSS = "gpt_oss"

# Keys that name the target's layers, counted from 0: two name layers whose input is used, one layers whose output is.
AUXILIARY, INPUTS, OUTPUTS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
LAYER_KEYS = (AUXILIARY, INPUTS, OUTPUTS)

PLUG_IN = "infra/vllm_jakiro"  # for vLLM
NO_OWN_VOCABULARY = {"vocabulary": "vLLM requires the target's full vocabulary here; train without `vocabulary`"}


@dataclass(frozen=True)
class FileFormat:
    """The format of a draft in an engine, or in its authors' code."""

    tensors: Callable[[str, Any], str] = lambda name, config: name  # our name, and the draft's settings -> their name
    architecture: str = ""  # set for engines; other formats are only read
    # Settings that it supports only at their default -> advice about other values; empty: advises an export to vLLM.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    plug_in: str = ""  # the plug-in that its engine requires
    with_lookup: str = ""  # the architecture that also looks the prompt up; empty: none
    is_tried: bool = True  # False if it was not tried in an engine that was


@dataclass(frozen=True)
class Export:
    """The request for an export: the engine, the target and the number of guesses."""

    engine: str
    architecture: str
    target: str  # its Hub id
    family: str  # its model_type; empty if it is not known
    guesses: int
    parallel: int  # levels of the last forward


@dataclass(frozen=True)
class Names:
    """The names of one kind of draft: tensors by format, and keys of config.json."""

    forms: Mapping[str, FileFormat] = field(default_factory=dict)  # by the engine's name
    # Returns config.json for a draft with these tensors, which it may change; raises PipelineError.
    engine_config: Callable[[Any, dict[str, Tensor], Export], dict[str, Any]] = lambda draft, weights, export: {}
    method: Mapping[str, Any] = field(default_factory=dict)  # vLLM's name for it, as keys of its speculative config
    not_exported: tuple[str, ...] = ()  # tensors of ours that no engine reads
    # Whether engines guess the trained number of levels, instead of the depth of its tree.
    is_block: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)  # our key -> the key of config.json
    # Further settings, from config.json or from the tensors' names: our key -> (the file's value or UNSAID, ours).
    facts: Callable[[Any, dict[str, Any], Mapping[str, Tensor]], Facts] = lambda draft, theirs, tensors: {}
    # Keys of config.json that affect the computation -> the values that are supported; empty: any.
    keys: Mapping[str, tuple] = field(default_factory=dict)
    ignored_tensors: str = "$"  # a pattern of tensors that are not read

    def known_keys(self, config: Any) -> dict[str, tuple]:
        """Return `keys` with those of a window, of a draft that can have one, and of `settings`."""
        window = WINDOW if hasattr(config, "window") else ()
        return {**dict.fromkeys((*window, *self.settings.values()), ()), **self.keys}

    def read_settings(self, draft: DraftModule, config_json: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
        """Return, for each setting, the file's value and ours. Raises PipelineError if a setting is not determined."""
        config = draft.config
        settings: Facts = {
            our_key: (config_json.get(key, UNSET), getattr(config, our_key)) for our_key, key in self.settings.items()
        }
        if hasattr(config, "window"):
            settings["window"] = (config_json.get("sliding_window"), config.window)
        return settings | self.facts(draft, config_json, tensors)

    def table(self, draft: DraftModule, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return our name for each name, in all formats; if two disagree, the one with most of `tensors` wins."""
        our_names = list(draft.state_dict())
        tables = [{form.tensors(name, draft.config): name for name in our_names} for form in self.forms.values()]
        tables.sort(key=lambda table: len(table.keys() & tensors.keys()))
        return {name: our_name for table in tables for name, our_name in table.items()}


def llama_config(draft: DraftModule, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return the config of its layers as transformers writes it, with the keys it wrote before 5.0."""
    shapes, config = draft.shapes, draft.config
    rope, layers = dict(shapes["rope_parameters"]), getattr(config, "layers", 1)
    theta, kind = rope.get("rope_theta", 10000.0), rope.get("rope_type", "default")
    scaling = None if kind == "default" else {key: value for key, value in rope.items() if key != "rope_theta"}
    llama = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shapes["hidden_size"],
        "intermediate_size": getattr(config, "mlp_width", None) or shapes["intermediate_size"],
        "num_hidden_layers": layers,
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
        "torch_dtype": str(next(filter(Tensor.is_floating_point, weights.values())).dtype).removeprefix("torch."),
    }
    window = getattr(config, "window", None)
    slides = {"layer_types": [SLIDING] * layers, "sliding_window": window, "use_sliding_window": True}
    return llama | draft.mlp_config() | (slides if window else {})
