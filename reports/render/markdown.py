"""A table as Markdown, its trace in a last line that is a comment; and the rows of one that was written."""

from __future__ import annotations

import re
from typing import Any

from ...results.console.text import markdown_escaped
from ..table import Table
from .trace import TRACE, parse_trace_comment, trace_text

BARS = re.compile(r"(?<!\\)\|")


def text(table: Table, *, trace: bool = True) -> str:
    best = table.best
    grid = [[markdown_escaped(text) for text in table.columns]]
    for r, row in enumerate(table.rows):
        cells = enumerate(map(markdown_escaped, row))
        grid.append([f"**{text}**" if (r, c) in best else text for c, text in cells])
    widths = [max(3, *(len(row[index]) for row in grid)) for index in range(len(table.columns))]
    words = table.text_columns

    def line(row: list[str]) -> str:
        sized = enumerate(zip(row, widths, strict=True))
        return f"| {' | '.join(text.ljust(w) if i < words else text.rjust(w) for i, (text, w) in sized)} |"

    rule = ["-" * width if index < words else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    notes = [text for note in table.notes for text in ("", markdown_escaped(note))]
    above = [text for note in table.above for text in (markdown_escaped(note), "")]
    head = [f"**{markdown_escaped(table.title)}**", "", *above, line(grid[0]), line(rule)]
    tail = ["", f"<!-- {TRACE} {trace_text(table)} -->"] if trace else []
    return "\n".join([*head, *map(line, grid[1:]), *notes, *tail]) + "\n"


def rows(written: str) -> list[list[str]]:
    """The headings and the rows, each cell as it is written."""
    found = [BARS.split(line)[1:-1] for line in written.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in found if not all(set(cell) <= set("-: ") for cell in row)]


def trace_of(written: str) -> Any:
    """The trace that it carries, None without any. Raises ValueError where it is no JSON."""
    return parse_trace_comment(written)
