"""The base class of a recipe's sections, and the types of their keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Dtype = Literal["float32", "bfloat16", "float16"]
AutoDtype = Literal["auto", "float32", "bfloat16", "float16"]  # auto: pipeline/recipe/dtypes.py
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]  # becomes the name of a folder
# Processes of a cluster; a single machine takes fewer (pipeline/running/cores.py).
Processes = Annotated[int, Field(gt=0, le=4096)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = StrictBool | StrictInt | StrictFloat | StrictStr


def _require_absolute(folder: str) -> str:
    if not Path(folder).is_absolute():
        raise ValueError("a relative folder: give one that is the same from wherever a node starts, as /local/shards")
    return folder


Folder = Annotated[str, AfterValidator(_require_absolute)]


def _require_distinct(gpus: list[int]) -> list[int]:
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"{gpus} names one GPU twice")
    return gpus


Gpus = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(_require_distinct)
]  # of one machine


# The results of a run: the target's regenerated answers, feature shards, a draft's weights, the measured figures.
Result = Literal["regenerated", "dump", "weights", "figures"]


@dataclass(frozen=True)
class Affects:
    """A mark of a key: the only results that it changes. An unmarked key changes every result of its section."""

    results: tuple[Result, ...] = ()


Value = TypeVar("Value")
Runtime = Annotated[Value, Affects()]  # a key of how the run is executed: it changes no result
Measured = Annotated[Value, Affects(("figures",))]  # a key that changes the figures only


@dataclass(frozen=True)
class OmitNone:
    """A mark of a later key: no hash counts it while it is None, so that older dumps and drafts stay valid."""


Later = Annotated[Value | None, OmitNone()]


class Section(BaseModel):
    """The base class of a recipe's sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def settings_affecting(self, result: Result) -> dict[str, Any]:
        """Return the values, as JSON, of the keys that change a result."""
        metadata = {key: field.metadata for key, field in type(self).model_fields.items()}
        unaffecting = {
            key
            for key, annotations in metadata.items()
            for mark in annotations
            if isinstance(mark, Affects) and result not in mark.results
        }
        later = {key for key, annotations in metadata.items() if any(isinstance(m, OmitNone) for m in annotations)}
        values = self.model_dump(mode="json", exclude=unaffecting)
        return {key: value for key, value in values.items() if value is not None or key not in later}
