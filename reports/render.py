"""A table as text: terminal, Markdown, CSV, LaTeX, HTML or JSON. Text from a grid may hold anything: it is escaped.

Every rendering but the terminal's carries the table's trace, from which `check.check_file` makes the table again: JSON in
every row, HTML in data- attributes, Markdown and LaTeX in a last line that is a comment. CSV knows no comment: its trace
is a file beside it.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..results import terminal
from ..results.files import is_straight
from ..results.text import choice, csv_cell, html_escaped, json_safe, markdown_escaped, plain, tex_escaped
from .data import ReportError
from .numbers import PLUS_MINUS
from .table import Table

TRACE = "atma-sweep-trace:"
MANY_ROWS = 40  # a LaTeX table with more goes over pages
WIDEST_COLUMN = 5  # centimetres of LaTeX that a column of sentences gets
SENTENCE = 40  # characters that make a column of words one of sentences

TEX_PACKAGES = "booktabs,longtable,array,siunitx"
TEX_PREAMBLE = "\n".join(
    [
        r"\usepackage[T1]{fontenc}",
        r"\usepackage{textcomp}",
        rf"\usepackage{{{TEX_PACKAGES}}}",
        r"\sisetup{detect-weight=true, mode=text, separate-uncertainty=true, group-minimum-digits=9}",
    ]
)
"""What a LaTeX document needs before it can take our tables."""
NUMBER = re.compile(r"([+-]?)(\d+)(?:\.(\d+))?")
SPREAD = re.compile(rf"({NUMBER.pattern}){PLUS_MINUS}(\d+(?:\.\d+)?)")

CSS = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem;color:#1b1b1f;background:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.6rem}
th,td{padding:.2rem .7rem;text-align:left;vertical-align:top}
thead th{border-top:2px solid;border-bottom:1px solid;position:sticky;top:0;background:#fff}
tbody tr:last-child>*{border-bottom:2px solid}
tbody th{font-weight:400}
.n{text-align:right}
.w{color:#6b4b00}
tbody tr:hover>*{background:#f1f3f8}
@media (prefers-color-scheme:dark){body,thead th{background:#16171b;color:#e6e6ea}tbody tr:hover>*{background:#24262e}.w{color:#e3b768}}
""".strip()


def trace_text(table: Table) -> str:
    """The trace as JSON in one line that holds nothing a comment of HTML could end at."""
    text = json.dumps(table.trace, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def _sources(table: Table) -> str:
    """The trace in a few words, for people."""
    sources = table.trace.get("sources", ())
    attempts = [attempt for source in sources for attempt in source["attempts"]]
    if not attempts:
        return "Trace: no attempt stands behind this table."
    told = []
    for source in sources:
        commit = (
            f"commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}" if source["commit"] else ""
        )
        told.append(" on ".join(word for word in (commit or "no commit recorded", source["gpu"]) if word))
    which = (
        f"{len(attempts)} attempts, {min(attempts)} to {max(attempts)}"
        if len(attempts) > 1
        else f"attempt {attempts[0]}"
    )
    return f"Trace: {which} ({'; '.join(dict.fromkeys(told))})."


def _terminal(table: Table, *, trace: bool = True, color: bool = False, width: int | None = None) -> str:
    rows = [[plain(text) for text in row] for row in table.rows]
    drawn = terminal.lines(
        [plain(one) for one in table.columns], rows, table.text_columns, width, bold=table.best, color=color
    )
    above = [line for text in (table.title, *table.above) for line in terminal.wrapped(plain(text), width)]
    below = [*table.notes, *([_sources(table)] if trace else [])]
    return (
        "\n".join([*above, *drawn, *(line for text in below for line in terminal.wrapped(plain(text), width))]) + "\n"
    )


def _markdown(table: Table, *, trace: bool = True) -> str:
    best = table.best
    grid = [[markdown_escaped(text) for text in table.columns]]
    for r, row in enumerate(table.rows):
        cells = enumerate(map(markdown_escaped, row))
        grid.append([f"**{text}**" if (r, c) in best else text for c, text in cells])
    widths = [max(3, *(len(row[index]) for row in grid)) for index in range(len(table.columns))]
    words = table.text_columns

    def line(row: list[str]) -> str:
        cells = (
            text.ljust(w) if i < words else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if index < words else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    notes = [text for note in table.notes for text in ("", markdown_escaped(note))]
    above = [text for note in table.above for text in (markdown_escaped(note), "")]
    head = [f"**{markdown_escaped(table.title)}**", "", *above, line(grid[0]), line(rule)]
    tail = ["", f"<!-- {TRACE} {trace_text(table)} -->"] if trace else []
    return "\n".join([*head, *map(line, grid[1:]), *notes, *tail]) + "\n"


def _csv(table: Table, *, trace: bool = True) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_cell, row) for row in (table.columns, *table.rows))
    return out.getvalue()


# --- LaTeX ----------------------------------------------------------------------------------------------------------


def _number_format(texts: Iterable[str]) -> str | None:
    """The siunitx `table-format` that holds every number of a column, None where there is no number in it."""
    sign, whole, decimals, spread = "", 0, 0, 0
    for text in texts:
        found = SPREAD.fullmatch(text)
        number = NUMBER.fullmatch(found[1] if found else text)
        if number is None:
            continue
        sign = max(sign, number[1], key=["", "-", "+"].index)
        whole, decimals = max(whole, len(number[2])), max(decimals, len(number[3] or ""))
        if found:
            spread = max(spread, len(found[SPREAD.groups].replace(".", "").lstrip("0")) or 1)
    if not whole:
        return None
    return f"{sign}{whole}.{decimals}" + (f"({spread})" if spread else "")


def _tex_number(text: str, best: bool) -> str:
    """An entry of an S column: a number as it is, words in braces, so that siunitx leaves them alone."""
    spread = SPREAD.fullmatch(text)
    # siunitx leaves out a spread of zero, which is a statement too: written as words
    if NUMBER.fullmatch(text) or (spread and spread[SPREAD.groups].strip("0.")):
        return (r"\bfseries " if best else "") + text.replace(PLUS_MINUS, " +- ")
    return "{" + (r"\bfseries " if best else "") + tex_escaped(text) + "}"


def _tex_columns(table: Table) -> list[str]:
    kinds = []
    for index in range(len(table.columns)):
        texts = [row[index] for row in table.rows]
        if index < table.text_columns:
            longest = max(map(len, texts), default=0)
            kinds.append("l" if longest < SENTENCE else rf">{{\raggedright\arraybackslash}}p{{{WIDEST_COLUMN}cm}}")
            continue
        shape = _number_format(texts)
        # siunitx leaves an explicit plus out unless it is told to print every one
        plus = ", print-implicit-plus" if shape and shape.startswith("+") else ""
        kinds.append(f"S[table-format={shape}{plus}]" if shape else "r")
    return kinds


def _tex_rows(table: Table) -> list[str]:
    best = table.best

    def line(r: int, row: tuple[str, ...]) -> str:
        # braces keep a leading bracket from reading as an argument of the \\ before it
        words = ["{" + tex_escaped(text) + "}" for text in row[: table.text_columns]]
        numbers = [_tex_number(text, (r, c) in best) for c, text in enumerate(row) if c >= table.text_columns]
        return " & ".join([*words, *numbers]) + r" \\"

    return [line(r, row) for r, row in enumerate(table.rows)]


def _tex(table: Table, *, trace: bool = True) -> str:
    head = [r"\toprule", " & ".join("{" + tex_escaped(text) + "}" for text in table.columns) + r" \\", r"\midrule"]
    columns = "{@{}" + "".join(_tex_columns(table)) + "@{}}"
    # LaTeX counts tables by itself
    title = table.title.removeprefix(f"Table {table.number}. ")
    caption = rf"\caption{{{tex_escaped(title)}}}\label{{tab:{re.sub(r'[^a-z0-9-]', '', table.number)}}}"
    notes = [rf"{{\par\smallskip\raggedright {tex_escaped(note)}\par}}" for note in table.notes]
    above = [rf"{{\raggedright {tex_escaped(note)}\par}}\smallskip" for note in table.above]
    small = [r"\begingroup\footnotesize\setlength{\tabcolsep}{3.5pt}"]
    if table.number == "6" or len(table.rows) > MANY_ROWS:
        repeated = [*head, r"\endhead", r"\midrule", r"\endfoot", r"\bottomrule", r"\endlastfoot"]
        body = [rf"\begin{{longtable}}{columns}", caption + r"\\", *head, r"\endfirsthead", *repeated]
        lines = [*small, *above, *body, *_tex_rows(table), r"\end{longtable}", *notes, r"\par\endgroup"]
    else:
        body = [r"\begin{table}[htbp]\centering", *small, caption, *above, rf"\begin{{tabular}}{columns}", *head]
        lines = [*body, *_tex_rows(table), r"\bottomrule", r"\end{tabular}", *notes, r"\par\endgroup", r"\end{table}"]
    needs = [f"% needs {line}" for line in TEX_PREAMBLE.splitlines()]
    return "\n".join([*needs, *lines, *([f"% {TRACE} {trace_text(table)}"] if trace else [])]) + "\n"


# --- HTML and JSON --------------------------------------------------------------------------------------------------


def _html_number(table: Table, r: int, c: int) -> str:
    one = table.entries[r][c]
    facts = {
        "cells": " ".join(one.cells),
        "attempts": " ".join(map(str, one.attempts)),
        "probe": one.probe,
        "metric": one.metric,
        "length": one.length,
        "value": one.value,
        "sd": one.sd,
        "n": one.n,
        "reason": one.reason,
    }
    data = "".join(
        f' data-{name}="{html_escaped(str(fact))}"' for name, fact in facts.items() if fact not in (None, "")
    )
    text = html_escaped(one.text)
    return f'<td class="n{" w" if one.value is None else ""}"{data}>{f"<b>{text}</b>" if one.best else text}</td>'


def _html(table: Table, *, trace: bool = True) -> str:
    def words(tag: str, scope: str, texts: Iterable[str], kind: str = "") -> str:
        return "".join(f'<{tag} scope="{scope}"{kind}>{html_escaped(text)}</{tag}>' for text in texts)

    first = table.text_columns
    facts = ""
    if trace:
        told = {name: table.trace[name] for name in ("table", "sweep", "revision") if name in table.trace}
        facts = "".join(f' data-{name}="{html_escaped(str(fact))}"' for name, fact in told.items())
        facts += f' data-atma-sweep-trace="{html.escape(trace_text(table))}"'
    head = words("th", "col", table.columns[:first]) + words("th", "col", table.columns[first:], ' class="n"')
    body = []
    for r, row in enumerate(table.rows):
        numbers = "".join(_html_number(table, r, c) for c in range(len(row) - first))
        body.append(
            f"<tr>{words('th', 'row', row[:1])}{words('td', 'row', row[1:first])}{numbers}</tr>".replace(
                '<td scope="row">', "<td>"
            )
        )
    title = html_escaped(table.title)
    notes, above = ("".join(f"<p>{html_escaped(n)}</p>\n" for n in some) for some in (table.notes, table.above))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{CSS}</style></head>\n<body>\n{above}<table{facts}>\n<caption>{title}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + f"\n</tbody>\n</table>\n{notes}</body>\n</html>\n"
    )


def _json(table: Table, *, trace: bool = True) -> str:
    rows = [raw if trace else {name: value for name, value in raw.items() if name != "trace"} for raw in table.raw]
    return json_safe(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


RENDERERS: dict[str, Callable[..., str]] = {
    "terminal": _terminal,
    "md": _markdown,
    "csv": _csv,
    "tex": _tex,
    "html": _html,
    "json": _json,
}
FORMATS = tuple(RENDERERS)
SUFFIXES = {".md": "md", ".csv": "csv", ".tex": "tex", ".html": "html", ".json": "json"}
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
        raise ReportError(f"there is no format {format!r}; {choice(format, FORMATS)}")
    if format == "terminal":
        return _terminal(table, trace=trace, color=color, width=width)
    return RENDERERS[format](table, trace=trace)


def trace_file(path: Path) -> Path:
    """Where the trace of a written CSV lies: beside it."""
    return path.with_name(f"{path.name}.trace.json")


def files_of(table: Table, path: Path, format: str, *, trace: bool = True) -> dict[Path, str]:
    """By file, what is to be written for a table at `path`: the rendering, and beside a CSV its trace (beside no pipe or
    device).

    Raises ReportError for an unknown format.
    """
    found = {path: render(table, format, trace=trace)}
    if format == "csv" and trace and not is_straight(path):
        found[trace_file(path)] = json.dumps(table.trace, indent=1, allow_nan=False) + "\n"
    return found
