"""How others lay out a checkpoint of a kind of draft: what `artifacts/imported.py` asks, beside the draft itself."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.drafts.parts.module import DraftModule

Names = dict[str, str | None]
Facts = dict[str, tuple[Any, Any]]


def same_names(names: Collection[str]) -> Names:
    return {name: name for name in names}


def no_facts(draft: DraftModule, theirs: dict[str, Any], names: Mapping[str, Tensor]) -> Facts:
    return {}


@dataclass(frozen=True)
class Released:
    """What a checkpoint's names and config.json mean."""

    # Our name of each of its tensors; None for one that nothing here reads.
    names: Callable[[Collection[str]], Names] = same_names
    # What its config, or what tensors there are (by our names), says of the draft's settings: our key -> (its value,
    # ours).
    facts: Callable[[Any, dict[str, Any], Mapping[str, Tensor]], Facts] = no_facts
    # Of its config, beside what says nothing of the computation: key -> the values that are computed; none: any.
    keys: dict[str, tuple] = field(default_factory=dict)
