"""A table as text: terminal, Markdown, CSV, LaTeX or JSON. Text from a grid may hold anything: it is escaped."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable

from .data import ReportError, Table

WIDE = 10_000  # characters; wide enough that rich never wraps or cuts a cell

TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")


def plain(text: str) -> str:
    """The text in one line, with what a terminal could take for a command shown as a replacement character."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def tex_escaped(text: str) -> str:
    """The text for LaTeX, every special character spelled out."""
    return "".join(TEX.get(sign, sign) for sign in plain(text))


def markdown_escaped(text: str) -> str:
    """The text for GitHub Markdown: no markup, no HTML, no column break."""
    safe = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKDOWN.sub(r"\\\1", safe)


def _terminal(table: Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(table.columns):
        drawn.add_column(Text(plain(heading)), justify="left" if index < table.text_columns else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(plain(text)) for text in row))
    console = Console(file=io.StringIO(), width=WIDE, color_system=None, force_terminal=False)
    console.print(drawn)
    body = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [plain(table.title), *(line.rstrip() for line in body.splitlines()), *map(plain, table.notes)]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> str:
    grid = [[markdown_escaped(text) for text in row] for row in (table.columns, *table.rows)]
    widths = [max(3, *(len(row[index]) for row in grid)) for index in range(len(table.columns))]
    words = table.text_columns

    def line(row: list[str]) -> str:
        cells = (
            text.ljust(w) if i < words else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if index < words else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    notes = [text for note in table.notes for text in ("", markdown_escaped(note))]
    head = [f"**{markdown_escaped(table.title)}**", "", line(grid[0]), line(rule)]
    return "\n".join([*head, *map(line, grid[1:]), *notes]) + "\n"


def _csv(table: Table) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([table.columns, *table.rows])
    return out.getvalue()


def _tex(table: Table) -> str:
    def line(row: tuple[str, ...]) -> str:
        # braces keep a leading bracket from reading as an argument of the \\ before it
        return " & ".join("{" + tex_escaped(text) + "}" for text in row) + r" \\"

    numbers = len(table.columns) - table.text_columns
    head = [r"\toprule", line(table.columns), r"\midrule"]
    return (
        "\n".join(
            [
                r"% needs \usepackage{booktabs,longtable} and \usepackage[T1]{fontenc}",
                r"\begin{longtable}{" + "l" * table.text_columns + "r" * numbers + "}",
                rf"\caption{{{tex_escaped(table.title)}}}\label{{tab:{table.number}}}\\",
                *head,
                r"\endfirsthead",
                *head,
                r"\endhead",
                r"\bottomrule",
                r"\endfoot",
                *map(line, table.rows),
                r"\end{longtable}",
                *(rf"\par\noindent {tex_escaped(note)}" for note in table.notes),
            ]
        )
        + "\n"
    )


def _json(table: Table) -> str:
    return json.dumps(list(table.raw), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


RENDERERS: dict[str, Callable[[Table], str]] = {
    "terminal": _terminal,
    "md": _markdown,
    "csv": _csv,
    "tex": _tex,
    "json": _json,
}
FORMATS = tuple(RENDERERS)


def render(table: Table, format: str = "terminal") -> str:
    """The table as text that ends with a newline. Raises ReportError for an unknown format.

    `csv` has one header line and the printed values; `json` is a list of objects, one a cell, with the database's
    column names, the unrounded values and the printed ones.
    """
    if format not in RENDERERS:
        raise ReportError(f"there is no format {format!r}; choose one of: {', '.join(FORMATS)}")
    return RENDERERS[format](table)
