"""A table as CSV: one header line and the printed values. CSV knows no comment: its trace is a file beside it."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ...results.text import csv_cell
from ..table import Table


def text(table: Table, *, trace: bool = True) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_cell, row) for row in (table.columns, *table.rows))
    return out.getvalue()


def trace_beside(table: Table) -> str:
    """What the file beside it holds."""
    return json.dumps(table.trace, indent=1, allow_nan=False) + "\n"


def rows(written: str) -> list[list[str]]:
    """The headings and the rows."""
    return list(csv.reader(io.StringIO(written)))


def trace_of(written: str) -> Any:
    """The trace, of what the file beside it holds. Raises ValueError where it is no JSON."""
    return json.loads(written)
