"""Tables as Markdown."""

from collections.abc import Iterable
from typing import Any


def table(heads: list[str], rows: Iterable[list[Any]]) -> str:
    """A line for the heads and one for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
