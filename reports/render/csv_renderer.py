"""A table as CSV: one header line and the printed values. CSV knows no comment: its trace is a file beside it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ...results.console.text import csv_field
from ..table import Table


def text(table: Table, *, trace: bool = True) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_field, row) for row in (table.columns, *table.rows))
    return out.getvalue()


def trace_file_text(table: Table) -> str:
    """What the file beside it holds: the trace, and by column how probable it is that each row's number is the best."""
    columns = zip(table.columns[table.text_columns :], zip(*table.entries, strict=True), strict=False)
    chances = {heading: [one.p_best for one in column] for heading, column in columns}
    known = {heading: some for heading, some in chances.items() if any(p is not None for p in some)}
    told = {**table.trace, "p_best": known} if known else table.trace
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def rows(written: str) -> list[list[str]]:
    """The headings and the rows."""
    return list(csv.reader(io.StringIO(written)))


def trace_of(written: str) -> Any:
    """The trace, of what the file beside it holds. Raises ValueError where it is no JSON."""
    return json.loads(written)
