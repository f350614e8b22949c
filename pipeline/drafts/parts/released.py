"""How others lay out a checkpoint of a kind of draft: what `artifacts/imported.py` asks, beside the draft itself."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.drafts.parts.module import DraftModule

Names = dict[str, str | None]
Facts = dict[str, tuple[Any, Any]]
UNSAID: Any = object()  # the value of a setting that a file does not give: the recipe's is taken

# Keys that name the target's layers, counted from 0: two by those whose input is taken, one by those whose output is.
AUXILIARY, INPUTS, OUTPUTS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
LAYER_KEYS = (AUXILIARY, INPUTS, OUTPUTS)


def same_names(names: Collection[str]) -> Names:
    return {name: name for name in names}


def no_facts(draft: DraftModule, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> Facts:
    return {}


@dataclass(frozen=True)
class Released:
    """What a checkpoint's names and config.json mean."""

    # Our name of each of its tensors; None for one that nothing here reads.
    names: Callable[[Collection[str]], Names] = same_names
    # What its config, or what tensors there are (by our names), says of the draft's settings: our key -> (its value or
    # UNSAID, ours).
    facts: Callable[[Any, dict[str, Any], Mapping[str, Tensor]], Facts] = no_facts
    # Of its config, beside what says nothing of the computation: key -> the values that are computed; none: any.
    keys: dict[str, tuple] = field(default_factory=dict)
