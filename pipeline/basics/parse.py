"""Settings from JSON, checked as a recipe's are; not in settings.py, which has to work without pydantic."""

from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipeline.basics.settings import Settings

Kind = TypeVar("Kind", bound=Settings)


def parse_settings(kind: type[Kind], raw: dict[str, Any]) -> Kind:
    """Parse what `to_json` gave. Raise ValueError for anything else, as a recipe would."""
    return TypeAdapter(kind).validate_python(raw)
