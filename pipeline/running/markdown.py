"""Tables as Markdown."""

import html
import re
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

TERMINAL = 100  # columns
NARROWEST = 6  # of a wrapped table's column


def table(heads: list[str], rows: Iterable[list[Any]]) -> str:
    """A line for the heads and one for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def narrow_table(heads: list[str], rows: Iterable[list[Any]], width: int = TERMINAL) -> str:
    """Return an aligned table of at most `width` columns: the widest cells go on in further lines."""
    lines = [list(map(str, cells)) for cells in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    while sum(widths) + 3 * len(widths) + 1 > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    out = []
    for cells in lines:
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            out.append("| " + " | ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)) + " |")
        if cells is lines[0]:
            out.append("|" + "|".join("-" * (size + 2) for size in widths) + "|")
    return "\n".join(out)


def plain(text: str) -> str:
    """The text as a reader of Markdown or HTML sees it, on one line: nothing in it is markup or moves a cursor."""
    text = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return re.sub(r"([\\`*\[\]|#!~:_])", r"\\\1", html.escape(text, quote=False))
