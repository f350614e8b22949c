"""Settings of drafts and trees: plain dataclasses, which need no recipe, and of which a recipe makes its sections."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Its subclasses check themselves and raise ValueError. In a recipe pydantic also refuses other keys and types."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self):
        """What a class checks; those that it is made of, too, check theirs."""

    def at_least(self, least: float, *names: str) -> None:
        """Raises ValueError for a number below `least`; None is left alone."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r}: expected a number")
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected at least {least}")

    def _set(self, name: str, value: Any) -> None:
        """Fills in what follows from other fields, while this is made."""
        object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
