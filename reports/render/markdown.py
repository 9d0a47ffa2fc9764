"""Table as Markdown, with its trace as a comment in the last line; and functions that read a rendering back."""

from __future__ import annotations

import re
from typing import Any

from ...results.console.text import markdown_escaped
from ..table import Table
from .trace import TRACE, parse_trace_comment, trace_text

BARS = re.compile(r"(?<!\\)\|")


def text(table: Table, *, trace: bool = True) -> str:
    """Return the table as Markdown: title, lines above, aligned columns, notes; the best values are bold.

    With `trace` the last line is a comment with the trace.
    """
    best = table.best
    grid = [[markdown_escaped(text) for text in table.columns]]
    for r, row in enumerate(table.rows):
        cells = enumerate(map(markdown_escaped, row))
        grid.append([f"**{text}**" if (r, c) in best else text for c, text in cells])
    widths = [max(3, *(len(row[index]) for row in grid)) for index in range(len(table.columns))]
    text_columns = table.text_columns

    def line(row: list[str]) -> str:
        sized = enumerate(zip(row, widths, strict=True))
        return f"| {' | '.join(text.ljust(w) if i < text_columns else text.rjust(w) for i, (text, w) in sized)} |"

    rule = ["-" * width if index < text_columns else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    notes = [text for note in table.notes for text in ("", markdown_escaped(note))]
    above = [text for note in table.above for text in (markdown_escaped(note), "")]
    head = [f"**{markdown_escaped(table.title)}**", "", *above, line(grid[0]), line(rule)]
    tail = ["", f"<!-- {TRACE} {trace_text(table)} -->"] if trace else []
    return "\n".join([*head, *map(line, grid[1:]), *notes, *tail]) + "\n"


def rows(written: str) -> list[list[str]]:
    """Return the headings and the rows of a Markdown rendering, without the rule; cells stay escaped."""
    rows = [BARS.split(line)[1:-1] for line in written.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not all(set(cell) <= set("-: ") for cell in row)]


def trace_of(written: str) -> Any:
    """Return the trace that the rendering carries; None where it has none.

    Raises:
        ValueError: The trace is not JSON.
    """
    return parse_trace_comment(written)
