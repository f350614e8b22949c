"""Settings of drafts and trees: plain dataclasses, which need no recipe, and of which a recipe makes its sections."""

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Its subclasses check themselves and raise ValueError. In a recipe pydantic also refuses other keys and types."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    def at_least(self, least: float, *names: str) -> None:
        """Raises ValueError for a number below `least`; None is left alone."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r}: expected a number")
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected at least {least}")

    def _set(self, name: str, value: Any) -> None:
        """Of what follows from other fields, while this is made."""
        object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """What `to_json` gave. Raises ValueError or TypeError for anything else."""
        hints, given = get_type_hints(cls), {}
        known = {field.name: field for field in fields(cls)}
        if unknown := set(raw) - set(known):
            raise ValueError(f"unknown key {min(unknown)!r}")
        for name, field in known.items():
            if name not in raw:
                if field.default is MISSING and field.default_factory is MISSING:
                    raise ValueError(f"{name} is missing")
                continue
            inner = [kind for kind in (hints[name], *getattr(hints[name], "__args__", ())) if _is_settings(kind)]
            given[name] = inner[0].from_json(raw[name]) if inner and isinstance(raw[name], dict) else raw[name]
        return cls(**given)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)
