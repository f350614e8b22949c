"""Settings of drafts and trees: plain dataclasses that work without a recipe; recipes use them as sections."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The base class of settings. Subclasses check themselves and raise ValueError. In a recipe pydantic also refuses
    other keys and types.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self):
        """Check the values. Subclasses override this; nested settings check themselves."""

    def require_at_least(self, minimum: float, *names: str) -> None:
        """Raise ValueError for a number below `minimum`; None passes."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r}: expected a number")
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value}: expected at least {minimum}")

    def _set(self, name: str, value: Any) -> None:
        """Set a field that follows from others, during construction."""
        object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
