"""Settings from JSON, checked as a recipe's are; apart from settings.py, which is to run without pydantic, too."""

from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipeline.basics.settings import Settings

Made = TypeVar("Made", bound=Settings)


def from_json(kind: type[Made], raw: dict[str, Any]) -> Made:
    """What `to_json` gave. Raises ValueError for anything else, as a recipe would."""
    return TypeAdapter(kind).validate_python(raw)
