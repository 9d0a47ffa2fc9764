"""Table as JSON: a list of objects, one per row, with unrounded values, printed values and the trace."""

from __future__ import annotations

import json
from typing import Any

from ...results.console.text import json_safe
from ..table import Table


def text(table: Table, *, trace: bool = True) -> str:
    """Return the rows (`table.raw`) as JSON, without title and notes.

    The key "trace" of every row is left out unless `trace`.

    Raises:
        ValueError: A number is not finite.
    """
    rows = [raw if trace else {name: value for name, value in raw.items() if name != "trace"} for raw in table.raw]
    return json_safe(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def rows(written: str) -> list[list[str]]:
    """Return the printed texts of every row of the JSON, without headings: labels first, then numbers."""
    return [_printed(row) for row in json.loads(written)]


def _printed(row: dict[str, Any]) -> list[str]:
    return [*map(str, row["row"].values()), *(str(value["printed"]) for value in row["values"])]


def trace_of(written: str) -> Any:
    """Return the trace of the first row of the JSON.

    Raises:
        ValueError: The text is not JSON.
        LookupError: There is no row, or it has no trace.
        TypeError: The JSON is not a list of objects.
    """
    return json.loads(written)[0]["trace"]
