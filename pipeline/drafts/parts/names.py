"""What others call a draft: its tensors, and what config.json says of it. Each draft's file has such a map, which
`pipeline/serving/export.py` writes by and `pipeline/artifacts/imported.py` reads by.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.drafts.parts.module import DraftModule
from pipeline.lm.attention import SLIDING

Facts = dict[str, tuple[Any, Any]]
UNSAID: Any = object()  # the value of a setting that a file does not give: the recipe's is taken
IDS = "draft_token_ids"
WINDOW = ("sliding_window", "target_layer_count")  # of config.json
GPT_OSS = "gpt_oss"

# Keys that name the target's layers, counted from 0: two by those whose input is taken, one by those whose output is.
AUXILIARY, INPUTS, OUTPUTS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
LAYER_KEYS = (AUXILIARY, INPUTS, OUTPUTS)

WHOLE = {"vocabulary": "vLLM wants the target's whole one there; train so"}


@dataclass(frozen=True)
class Form:
    """A draft as an engine, or its authors' code, has it."""

    tensors: Callable[[str, Any], str] = lambda name, config: name  # our name, and the draft's settings -> their name
    architecture: str = ""  # of an engine's; other forms are only read
    # Settings that it has at our default alone -> what to do about another value; empty: an export to vLLM.
    lacks: Mapping[str, str] = field(default_factory=dict)
    plug_in: str = ""  # what its engine needs
    is_tried: bool = True  # where its engine is


@dataclass(frozen=True)
class Export:
    """What an export is for."""

    engine: str
    architecture: str
    target: str  # its Hub id
    family: str  # its model_type, as far as that is known
    guesses: int


@dataclass(frozen=True)
class Names:
    """Of one kind of draft."""

    forms: Mapping[str, Form] = field(default_factory=dict)  # an engine's under its name
    # What config.json says of a draft with these tensors, which it may change; raises PipelineError.
    engine_config: Callable[[Any, dict[str, Tensor], Export], dict[str, Any]] = lambda draft, weights, export: {}
    method: Mapping[str, Any] = field(default_factory=dict)  # vLLM's words for it
    not_exported: tuple[str, ...] = ()  # tensors of ours that no engine reads
    is_block: bool = False  # engines guess as many tokens as it was trained to, not as many as its tree is deep
    settings: Mapping[str, str] = field(default_factory=dict)  # our key -> theirs of config.json
    # What their config.json, or what tensors there are, say beside: our key -> (its value or UNSAID, ours).
    facts: Callable[[Any, dict[str, Any], Mapping[str, Tensor]], Facts] = lambda draft, theirs, tensors: {}
    # Of config.json, beside what says nothing of the computation: key -> the values that are computed; none: any.
    keys: Mapping[str, tuple] = field(default_factory=dict)
    unread: str = "$"  # a pattern of their tensors that nothing here reads

    def known(self, config: Any) -> dict[str, tuple]:
        """Return `keys` with those of a window, of a draft that can have one, and of `settings`."""
        window = WINDOW if hasattr(config, "window") else ()
        return {**dict.fromkeys((*window, *self.settings.values()), ()), **self.keys}

    def read_settings(self, draft: DraftModule, theirs: dict[str, Any], tensors: Mapping[str, Tensor]) -> Facts:
        """Raises PipelineError for what leaves a setting open."""
        config = draft.config
        found: Facts = {ours: (theirs.get(key, UNSAID), getattr(config, ours)) for ours, key in self.settings.items()}
        if hasattr(config, "window"):
            found["window"] = (theirs.get("sliding_window"), config.window)
        return found | self.facts(draft, theirs, tensors)

    def table(self, draft: DraftModule, theirs: Mapping[str, Tensor]) -> dict[str, str]:
        """Return our name for each of theirs, in all forms; where two differ, in the one that has most of these."""
        ours = list(draft.state_dict())
        tables = [{form.tensors(name, draft.config): name for name in ours} for form in self.forms.values()]
        tables.sort(key=lambda table: len(table.keys() & theirs.keys()))
        return {name: mine for table in tables for name, mine in table.items()}


def llama_of(draft: DraftModule, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Its layers as transformers writes a config, and as it wrote one before 5.0."""
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
    slides = {"layer_types": [SLIDING] * layers, "sliding_window": config.window, "use_sliding_window": True}
    return llama | draft.behind_attention() | (slides if config.window else {})
