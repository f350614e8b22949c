"""Markdown tables, and text escaped for Markdown."""

import html
import re
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

TERMINAL_WIDTH = 100  # columns
MIN_COLUMN_WIDTH = 6  # of a wrapped table's column


def format_table(heads: list[str], rows: Iterable[list[Any]]) -> str:
    """Return a Markdown table: a line for the heads and one for each row."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def format_narrow_table(heads: list[str], rows: Iterable[list[Any]], width: int = TERMINAL_WIDTH) -> str:
    """Return an aligned table of at most `width` characters: the widest cells are wrapped into further lines."""
    lines = [list(map(str, cells)) for cells in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    while sum(widths) + 3 * len(widths) + 1 > width and max(widths) > MIN_COLUMN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    out = []
    for cells in lines:
        wrapped = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            out.append("| " + " | ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)) + " |")
        if cells is lines[0]:
            out.append("|" + "|".join("-" * (size + 2) for size in widths) + "|")
    return "\n".join(out)


def escape_markdown(text: str) -> str:
    """Return the text escaped for Markdown and HTML, on one line: nothing in it is markup or moves a cursor."""
    text = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return re.sub(r"([\\`*\[\]|#!~:_])", r"\\\1", html.escape(text, quote=False))
