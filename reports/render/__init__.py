"""A table as text: terminal, Markdown, CSV, LaTeX, HTML or JSON, a file each. Text from a grid may hold anything: it is escaped.

Every rendering but the terminal's carries the table's trace, from which `check.check_file` makes the table again.

Imports nothing of the package but reports/table.py and results/console. Start at markdown.py.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from ...results.console.output_files import is_stream
from ...results.console.text import choices_hint
from ..sweep_data import ReportError
from ..table import Table
from . import csv_renderer, html_renderer, json_renderer, latex, markdown, terminal

RENDERERS: dict[str, ModuleType] = {
    "terminal": terminal,
    "md": markdown,
    "csv": csv_renderer,
    "tex": latex,
    "html": html_renderer,
    "json": json_renderer,
}
"""By format: the file, whose `text` writes a table, and whose `rows` and `trace_of` read it back (but from a terminal)."""
FORMATS = tuple(RENDERERS)
SUFFIXES = {f".{format}": format for format in FORMATS if format != "terminal"}
"""By ending of a file: the format it holds."""


def render(
    table: Table, format: str = "terminal", *, trace: bool = True, color: bool = False, width: int | None = None
) -> str:
    """The table as text that ends with a newline. Raises ReportError for an unknown format.

    `csv` has one header line and the printed values, never a trace; `json` is a list of objects, one a row, with the database's column
    names, the unrounded values and the printed ones. `trace=False` leaves the trace out; `color` lets the terminal show
    the best values in bold, and has lines of at most `width` signs.
    """
    if format not in RENDERERS:
        raise ReportError(f"there is no format {format!r}; {choices_hint(format, FORMATS)}")
    if format == "terminal":
        return terminal.text(table, trace=trace, color=color, width=width)
    return str(RENDERERS[format].text(table, trace=trace))


def trace_path(path: Path) -> Path:
    """Where the trace of a written CSV lies: beside it."""
    return path.with_name(f"{path.name}.trace.json")


def rendered_files(table: Table, path: Path, format: str, *, trace: bool = True) -> dict[Path, str]:
    """By file, what is to be written for a table at `path`: the rendering, and beside a CSV its trace (beside no pipe or
    device).

    Raises ReportError for an unknown format.
    """
    found = {path: render(table, format, trace=trace)}
    if format == "csv" and trace and not is_stream(path):
        found[trace_path(path)] = csv_renderer.trace_file_text(table)
    return found
