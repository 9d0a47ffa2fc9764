"""The contract of every renderer of the registry: odd words are told as they are, read back, and steer nothing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.reports.render import RENDERERS, csv_renderer, render
from atma_sweep.reports.table import Table, TableEntry
from atma_sweep.results.console.text import csv_field, html_escaped, markdown_escaped, sanitize_line, tex_escaped

TEXTS = {
    "plain": "polar", "bar": "a|b", "ampersand": "a & b", "tag": "<b>x</b>", "newline": "two\nlines", "accent": "größe",
    "sign": "×−→", "missing": "n/a", "empty": "", "quote": 'say "x", twice', "comment": "--> <!-- %", "formula": "=1+1",
    "backslash": r"\input{x} $y$ _z^", "steering": "\x1b[31mred",
}  # fmt: skip
SHOWN: dict[str, Callable[[str], str]] = {
    "terminal": sanitize_line, "md": markdown_escaped, "csv": csv_field, "tex": lambda word: "{" + tex_escaped(word) + "}",
    "html": lambda word: html.unescape(html_escaped(word)), "json": str,
}  # fmt: skip
"""By format: the word as `rows` of its renderer reads it back."""
READ = [format for format in RENDERERS if format != "terminal"]


def table_of(word: str, number: str = "3.14") -> Table:
    """Return a table of one row that has the text wherever a grid may put one."""
    entry = TableEntry(
        text=number, heading="Val", probe="val", metric="val_loss", value=3.14159, origins=(("c0ffee", 7),)
    )
    trace = {"table": "6", "sweep": word, "revision": 1, "cells": {"c0ffee": [7]}, "sources": []}
    raw = {"row": {"Type": word}, "values": [{"printed": number, "value": 3.14159}], "trace": trace}
    return Table(
        number="6", title=f"Table 6. {word}", columns=("Type", "Val"), text_columns=1, rows=((word, number),),
        raw_of=lambda: (raw,), trace_of=lambda: trace, notes=(word,), entries=((entry,),), above=(word,),
    )  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("format", RENDERERS)
def test_a_word_is_shown_and_steers_nothing(format: str, name: str) -> None:
    written = render(table_of(TEXTS[name]), format)
    assert written.endswith("\n")
    assert "\x1b" not in written
    if format == "terminal":
        assert sanitize_line(TEXTS[name]) in written
        return
    *_, (word, number) = RENDERERS[format].rows(written)
    assert word.strip() == SHOWN[format](TEXTS[name]).strip()
    assert number == "3.14"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("format", READ)
def test_traces_are_read_back_or_omitted(format: str, name: str) -> None:
    table = table_of(TEXTS[name])
    written = csv_renderer.trace_file_text(table) if format == "csv" else render(table, format)
    assert RENDERERS[format].trace_of(written) == table.trace
    assert "c0ffee" not in re.sub(r'data-cells="[^"]*"', "", render(table, format, trace=False))


@pytest.mark.parametrize("format", RENDERERS)
@pytest.mark.parametrize("number", ["n/a", "-", "diverged", "±0.1", ""])
def test_a_number_that_is_none_stands_as_its_word(format: str, number: str) -> None:
    written = render(table_of("polar", number), format)
    if format in READ:
        *_, row = RENDERERS[format].rows(written)
        assert row[1].strip("{}") in (number, tex_escaped(number), markdown_escaped(number))
    else:
        assert number in written


@pytest.mark.parametrize("format", RENDERERS)
def test_a_table_without_rows_has_its_headings(format: str) -> None:
    trace: dict[str, Any] = {"table": "6", "cells": {}}
    fields: dict[str, Any] = {"rows": (), "raw_of": tuple, "trace_of": lambda: trace, "notes": ()}
    written = render(Table(number="6", title="Empty", columns=("Type", "Val"), text_columns=1, **fields), format)
    assert json.loads(written) == [] if format == "json" else "Val" in written
