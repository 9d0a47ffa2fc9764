"""Table as CSV: one header line and the printed values. CSV has no comments, so the trace is a file next to it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ...results.console.text import csv_field
from ..table import Table


def text(table: Table, *, trace: bool = True) -> str:
    """Return the headings and the printed rows as CSV, without title and notes.

    Fields that a spreadsheet would read as a formula are made safe (`csv_field`). `trace` has no effect, since CSV has
    no comments.
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_field, row) for row in (table.columns, *table.rows))
    return out.getvalue()


def trace_file_text(table: Table) -> str:
    """Return the trace file of a CSV as JSON: the table's trace and, where known, the probabilities of being best.

    The key `p_best` maps a column heading to one probability per row (None where unknown). Columns without any
    probability are left out, and so is the key where no column has one.
    """
    columns = zip(table.columns[table.text_columns :], zip(*table.entries, strict=True), strict=False)
    chances = {heading: [entry.p_best for entry in column] for heading, column in columns}
    p_best = {
        heading: probabilities
        for heading, probabilities in chances.items()
        if any(p is not None for p in probabilities)
    }
    fields = {**table.trace, "p_best": p_best} if p_best else table.trace
    return json.dumps(fields, indent=1, allow_nan=False) + "\n"


def rows(written: str) -> list[list[str]]:
    """Return the parsed CSV: the headings, then the rows."""
    return list(csv.reader(io.StringIO(written)))


def trace_of(written: str) -> Any:
    """Return the trace from the text of a trace file.

    Raises:
        ValueError: The text is not JSON.
    """
    return json.loads(written)
