"""Table as an HTML page, with the origin of every number in data- attributes; and a parser that reads a page back."""

from __future__ import annotations

import html
import html.parser
import json
from collections.abc import Sequence
from typing import Any

from ...results.console.text import html_escaped
from ..table import Table
from .column_heads import ColumnHead, column_heads, spans
from .trace import trace_text

CSS = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem;color:#1b1b1f;background:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.6rem}
th,td{padding:.2rem .7rem;text-align:left;vertical-align:top}
thead th{vertical-align:bottom}
thead{position:sticky;top:0;background:#fff;border-top:2px solid}
thead tr:last-child>*{border-bottom:1px solid}
th[data-unit]::after{content:attr(data-unit);display:block;font-weight:400;font-size:.85em}
.s>th{text-align:center;background:linear-gradient(currentColor,currentColor) center bottom/calc(100% - .8rem) 1px no-repeat}
tbody tr:last-child>*{border-bottom:2px solid}
tbody th{font-weight:400}
.n{text-align:right}
.w{color:#6b4b00}
tbody tr:hover>*{background:#f1f3f8}
@media (prefers-color-scheme:dark){body,thead{background:#16171b;color:#e6e6ea}tbody tr:hover>*{background:#24262e}.w{color:#e3b768}}
""".strip()

NUMBER_CLASS = ' class="n"'


def text(table: Table, *, trace: bool = True) -> str:
    """Return the table as a complete HTML page with its title, lines above, notes and a style sheet.

    Every number carries its cells, attempts, probe, metric, length, unrounded value, sd, n and reason, where known, in
    data- attributes. With `trace` the table element carries the whole trace and its table, sweep and revision.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{html_escaped(table.title)}</title>\n<style>{CSS}</style></head>\n<body>\n"
        f"{fragment(table, trace=trace)}</body>\n</html>\n"
    )


def fragment(table: Table, *, trace: bool = True) -> str:
    """Return the lines above the table, the table element and its notes: the body of `text`, and a notebook's output."""
    first = table.text_columns
    facts = ""
    if trace:
        table_facts = {name: table.trace[name] for name in ("table", "sweep", "revision") if name in table.trace}
        facts = "".join(f' data-{name}="{html_escaped(str(fact))}"' for name, fact in table_facts.items())
        facts += f' data-atma-sweep-trace="{html.escape(trace_text(table))}"'
    heads = column_heads(table)
    head = "".join(
        f'<th scope="col"{_unit(head)}{"" if index < first else NUMBER_CLASS}>{html_escaped(head.label)}</th>'
        for index, head in enumerate(heads)
    )
    head = f"<tr>{head}</tr>"
    if any(head.span for head in heads):
        head = f'<tr class="s">{spanning_cells(heads)}</tr>\n{head}'
    body = []
    for r, row in enumerate(table.rows):
        numbers = "".join(_number(table, r, c) for c in range(len(row) - first))
        label = "".join(f'<th scope="row">{html_escaped(text)}</th>' for text in row[:1])
        more = "".join(f"<td>{html_escaped(text)}</td>" for text in row[1:first])
        body.append(f"<tr>{label}{more}{numbers}</tr>")
    title = html_escaped(table.title)
    notes, above = ("".join(f"<p>{html_escaped(n)}</p>\n" for n in lines) for lines in (table.notes, table.above))
    return (
        f"{above}<table{facts}>\n<caption>{title}</caption>\n<thead>{head}</thead>\n<tbody>\n"
        + "\n".join(body)
        + f"\n</tbody>\n</table>\n{notes}"
    )


def _unit(head: ColumnHead) -> str:
    """Return the attribute by which the style sheet shows the unit of a column without a common heading."""
    return f' data-unit="{html_escaped(head.unit)}"' if head.unit and not head.span else ""


def spanning_cells(heads: Sequence[ColumnHead]) -> str:
    """Return the HTML cells above the headings: common headings with their units, each over its columns."""
    cells = []
    for span, unit, columns in spans(heads):
        text = html_escaped(f"{span} ({unit})" if unit else span)
        cells.append(f'<th scope="colgroup" colspan="{columns}">{text}</th>' if span else "<td></td>")
    return "".join(cells)


def _number(table: Table, r: int, c: int) -> str:
    """Return the HTML cell of one number with its data- attributes, bold if it is the best.

    A number without a value has the class w.

    Args:
        table: The table.
        r: Row index.
        c: Column index among the numbers, so 0 is the first column after the text columns.
    """
    entry = table.entries[r][c]
    facts = {"cells": " ".join(entry.cells), "attempts": " ".join(map(str, entry.attempts))}
    facts |= {name: getattr(entry, name) for name in ("probe", "metric", "length", "value", "sd", "n", "reason")}
    attributes = {name: html_escaped(str(fact)) for name, fact in facts.items() if fact not in (None, "")}
    data = "".join(f' data-{name}="{fact}"' for name, fact in attributes.items())
    text = html_escaped(entry.text)
    return f'<td class="n{" w" if entry.value is None else ""}"{data}>{f"<b>{text}</b>" if entry.best else text}</td>'


class _TableParser(html.parser.HTMLParser):
    """Parser of a page: the texts of all table rows, and the trace of the first table that carries one."""

    def __init__(self) -> None:
        """Begin with no rows and no trace."""
        super().__init__()
        self.rows: list[list[str]] = []
        self.trace: str | None = None
        self._inside = False
        self._above = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Start a row or a cell, and store the trace of the first table that carries one."""
        if tag == "table" and self.trace is None:
            self.trace = dict(attrs).get("data-atma-sweep-trace")
        elif tag == "tr":
            # the line above the headings has fewer cells than columns
            self._above = dict(attrs).get("class") == "s"
            if not self._above:
                self.rows.append([])
        elif tag in ("th", "td") and not self._above:
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def _parsed(text: str) -> _TableParser:
    parser = _TableParser()
    parser.feed(text)
    return parser


def rows(written: str) -> list[list[str]]:
    """Return the headings and the rows of all tables of a page; our pages have one."""
    return _parsed(written).rows


def trace_of(written: str) -> Any:
    """Return the trace that a page carries; None where it has none.

    Raises:
        ValueError: The trace is not JSON.
    """
    return json.loads(_parsed(written).trace or "null")
