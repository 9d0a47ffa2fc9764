"""A table as JSON: a list of objects, one a row, with unrounded values, the printed ones and the trace."""

from __future__ import annotations

import json
from typing import Any

from ...results.console.text import json_safe
from ..table import Table


def text(table: Table, *, trace: bool = True) -> str:
    rows = [raw if trace else {name: value for name, value in raw.items() if name != "trace"} for raw in table.raw]
    return json_safe(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def rows(written: str) -> list[list[str]]:
    """The rows as they are printed elsewhere, without headings."""
    return [_printed(row) for row in json.loads(written)]


def _printed(row: dict[str, Any]) -> list[str]:
    return [*map(str, row["row"].values()), *(str(value["printed"]) for value in row["values"])]


def trace_of(written: str) -> Any:
    """The trace of its first row. Raises ValueError, LookupError and TypeError where there is none."""
    return json.loads(written)[0]["trace"]
