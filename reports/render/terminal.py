"""Table as plain lines for a terminal."""

from __future__ import annotations

from ...results.console import terminal_table
from ...results.console.text import sanitize_line
from ..table import Table
from .trace import sources_text


def text(table: Table, *, trace: bool = True, color: bool = False, width: int | None = None) -> str:
    """Return the title, lines above, the rows and the notes as lines for a terminal, without control characters.

    Args:
        table: The table.
        trace: Whether a last sentence summarizes the trace.
        color: Whether escape codes make the best values bold.
        width: Maximum characters per line; None for no limit.
    """
    rows = [[sanitize_line(text) for text in row] for row in table.rows]
    drawn = terminal_table.table_lines(
        [sanitize_line(heading) for heading in table.columns],
        rows,
        table.text_columns,
        width,
        bold=table.best,
        color=color,
    )
    above = [
        line for text in (table.title, *table.above) for line in terminal_table.wrapped(sanitize_line(text), width)
    ]
    below = [*table.notes, *([sources_text(table)] if trace else [])]
    notes = [line for text in below for line in terminal_table.wrapped(sanitize_line(text), width)]
    return "\n".join([*above, *drawn, *notes]) + "\n"
