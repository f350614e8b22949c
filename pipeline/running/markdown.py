"""Tables as Markdown."""

import html
import re
from collections.abc import Iterable
from typing import Any


def table(heads: list[str], rows: Iterable[list[Any]]) -> str:
    """A line for the heads and one for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def plain(text: str) -> str:
    """The text as a reader of Markdown or HTML sees it, on one line: nothing in it is markup or moves a cursor."""
    text = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return re.sub(r"([\\`*\[\]|#!~:_])", r"\\\1", html.escape(text, quote=False))
