"""Renderers of a table: terminal, Markdown, CSV, LaTeX, HTML and JSON, one file each.

Text from a grid may hold anything, so every renderer escapes it. Every rendering except the terminal's carries the
table's trace, from which `check.check_file` builds the table again.

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
"""Module by format: its `text` renders a table, its `rows` and `trace_of` read a rendering back (not from a
terminal).
"""
FORMATS = tuple(RENDERERS)
SUFFIXES = {f".{format}": format for format in FORMATS if format != "terminal"}
"""Format by file extension with its dot: .md, .csv, .tex, .html and .json."""


def render(
    table: Table, format: str = "terminal", *, trace: bool = True, color: bool = False, width: int | None = None
) -> str:
    """Return the table as text that ends with a newline.

    `csv` has one header line and the printed values, never a trace. `json` is a list of objects, one per row, with the
    database's column names, the unrounded values and the printed ones. The trace is the JSON text from which
    `atma-sweep report --check` builds the table again.

    Args:
        table: The table.
        format: "terminal", "md", "csv", "tex", "html" or "json".
        trace: Whether the text carries the table's trace: a comment in Markdown and LaTeX, an attribute in HTML, the
            key "trace" of every row in JSON, a sentence that summarizes it in a terminal. No effect on CSV.
        color: Whether the terminal shows the best values in bold; no effect on other formats.
        width: Maximum characters per line in a terminal; None for no limit; no effect on other formats.

    Raises:
        ReportError: The format is unknown.
    """
    if format not in RENDERERS:
        raise ReportError(f"unknown format {format!r}; {choices_hint(format, FORMATS)}")
    if format == "terminal":
        return terminal.text(table, trace=trace, color=color, width=width)
    return str(RENDERERS[format].text(table, trace=trace))


def trace_path(path: Path) -> Path:
    """Return the path of the trace file of a CSV: `table.csv.trace.json` next to `table.csv`."""
    return path.with_name(f"{path.name}.trace.json")


def rendered_files(table: Table, path: Path, format: str, *, trace: bool = True) -> dict[Path, str]:
    """Return the text of each file that belongs to a table, by path; nothing is written here.

    It is the rendering at `path`, and for a CSV with `trace` also its trace file, unless `path` is a pipe or device.

    Args:
        table: The table.
        path: Path of the rendering; its suffix has no effect.
        format: "terminal", "md", "csv", "tex", "html" or "json".
        trace: Whether the files carry the table's trace.

    Raises:
        ReportError: The format is unknown.
    """
    texts_by_path = {path: render(table, format, trace=trace)}
    if format == "csv" and trace and not is_stream(path):
        texts_by_path[trace_path(path)] = csv_renderer.trace_file_text(table)
    return texts_by_path
