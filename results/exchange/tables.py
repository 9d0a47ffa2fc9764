"""Tables of a sweep as files for other programs: CSV, JSON lines and Parquet."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from sqlalchemy import Boolean, Column, Double, Integer, select

from ..console.output_files import atomic_file
from ..console.text import choices_hint, csv_field, json_safe
from ..errors import StoreError, install_hint
from ..store import queries
from ..store.database import jsonable
from ..store.records import AXES
from .bundles import format_utc, json_line, json_value
from .row_validation import TABLES

if TYPE_CHECKING:
    from ..store.store import Store

TableName = Literal["cells", "measurements", "curves", "examples", "attempts"]
TableFormat = Literal["csv", "jsonl", "parquet"]

FORMAT_BY_SUFFIX = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
"""Format of a file by its suffix."""
ROWS_PER_BATCH = 50_000
"""Rows of a table that are in memory at once."""
_CELL = ("slug", "seed", *AXES)
_ATTEMPT = ("cell_id", "number", "kind", "state")


def _table_query(table_name: str) -> tuple[list[Column[Any]], Any, list[Any]]:
    """Return the columns of an exported table, the joined tables to select from, and the columns to sort by.

    The columns are those that `export_table` describes. The source joins `revision_cell`, so the caller must select one
    revision. Rows come in the grid's order; within a cell by attempt id and the key of the row. `table_name` is
    "cells", "attempts", "measurements", "curves" or "examples".
    """
    cell, attempt = TABLES["cell"], TABLES["attempt"]
    member = TABLES["revision_cell"]
    of_cell = [cell.c[name] for name in _CELL]
    if table_name == "cells":
        rest = [column for column in cell.columns if column.name not in ("id", *_CELL)]
        source = member.join(cell, cell.c.id == member.c.cell_id)
        return [cell.c.id, *of_cell, member.c.position, member.c.axes, *rest], source, [member.c.position]
    source = member.join(cell, cell.c.id == member.c.cell_id).join(attempt, attempt.c.cell_id == cell.c.id)
    order: list[Any] = [member.c.position, attempt.c.id]
    if table_name == "attempts":
        rest = [column for column in attempt.columns if column.name not in ("id", "cell_id")]
        return [attempt.c.id, attempt.c.cell_id, *of_cell, *rest], source, order
    table = TABLES[{"measurements": "measurement", "curves": "curve_point", "examples": "example"}[table_name]]
    rest = [column for column in table.columns if column.name not in ("id", "attempt_id")]
    source = source.join(table, table.c.attempt_id == attempt.c.id)
    order += [table.c[name] for name in ("probe", "metric", "length", "step", "item", "position") if name in table.c]
    return [table.c.attempt_id, *(attempt.c[name] for name in _ATTEMPT), *of_cell, *rest], source, order


def _dtype(column: Column[Any]) -> str:
    kind = column.type
    if isinstance(kind, Boolean):
        return "boolean"
    return "Int64" if isinstance(kind, Integer) else "Float64" if isinstance(kind, Double) else "string"


def _cell_text(value: Any) -> Any:
    """Return a value as written to CSV and Parquet.

    Lists and dicts become JSON text, times ISO-8601 text; other values are returned unchanged.
    """
    if isinstance(value, dict | list):
        return json_safe(json.dumps(jsonable(value), ensure_ascii=False))
    return format_utc(value) if isinstance(value, datetime) else value


def export_table(store: Store, what: TableName, to: Path, fmt: TableFormat, sweep: str | None = None) -> int:
    """Write a table of a sweep's newest revision to a file for another program, and return its number of rows.

    `cells` has one row per cell: id, slug, seed, the five factors, position, axes, and the other columns of the
    database's table `cell`. `attempts` has one row per attempt: id, cell_id, slug, seed, factors, and the other columns
    of `attempt`. `measurements`, `curves` and `examples` begin with attempt_id, cell_id, number, kind and state of the
    attempt, slug, seed and factors. Attempts in every state are included, with all their rows, not only the newest.

    Rows come in the grid's order, within a cell by age of the attempt. Columns have the database's names and units,
    times are ISO-8601 text in UTC. JSON columns are text in CSV and Parquet. In CSV, text that a spreadsheet would
    evaluate begins with an apostrophe, and control characters are replaced; JSON lines and Parquet keep every text. An
    existing file is replaced when the new one is complete.

    Args:
        store: database.
        what: "cells", "attempts", "measurements", "curves" or "examples".
        to: file to write.
        fmt: csv, jsonl or parquet.
        sweep: sweep; None for the one launched last.

    Raises:
        SweepUnknown: there is no such sweep.
        StoreError: there is no such table or format, or pyarrow is not installed.
        WriteRefused: the file cannot be written.
    """
    if what not in ("cells", "measurements", "curves", "examples", "attempts"):
        raise StoreError(f"there is no table {what!r}; {choices_hint(what, get_args(TableName))}")
    if fmt not in ("csv", "jsonl", "parquet"):
        raise StoreError(f"{fmt!r} is not a format; {choices_hint(fmt, get_args(TableFormat))}")
    columns, source, order = _table_query(what)
    count = 0
    with atomic_file(to) as stream, store.transaction(write=False) as session:
        queries.snapshot(session)
        revision = queries.revision_row(session, queries.sweep_row(session, sweep).id)
        query = select(*columns).select_from(source).where(TABLES["revision_cell"].c.revision_id == revision.id)
        result = session.execute(query.order_by(*order).execution_options(yield_per=ROWS_PER_BATCH))
        with _table_writer(fmt, columns, stream) as write:
            write([])
            for rows in result.partitions(ROWS_PER_BATCH):
                write([tuple(row) for row in rows])
                count += len(rows)
    return count


@contextlib.contextmanager
def _table_writer(fmt: str, columns: list[Column[Any]], stream: IO[bytes]) -> Iterator[Callable[[list[Any]], None]]:
    """Yield a function that appends rows, possibly none, to the stream in one of the formats.

    CSV begins with a header line; JSON lines has none. The stream is complete when the context ends; it stays open.

    Args:
        fmt: csv, jsonl or parquet.
        columns: columns of the table, in the order of the rows' values.
        stream: binary stream.

    Raises:
        StoreError: Parquet was asked for and pyarrow is not installed.
    """
    names = [column.name for column in columns]
    if fmt == "jsonl":

        def write_lines(rows: list[Any]) -> None:
            for row in rows:
                values = map(json_value, columns, row)
                stream.write(json_line(dict(zip(names, values, strict=True))))

        yield write_lines
        return
    import pandas as pd

    def frame(rows: list[Any]) -> pd.DataFrame:
        """Return rows as a data frame with the columns' types; lists, dicts and times become text."""
        by_column = zip(*rows, strict=True) if rows else [()] * len(columns)
        return pd.DataFrame(
            {
                column.name: pd.array([_cell_text(value) for value in values], dtype=_dtype(column))  # type: ignore[call-overload]
                for column, values in zip(columns, by_column, strict=True)
            }
        )

    if fmt == "csv":
        stream.write((",".join(names) + "\n").encode())

        def write_sheet(rows: list[Any]) -> None:
            """Append rows as CSV without a header, with text that a spreadsheet would evaluate escaped."""
            sheet = frame(rows)
            for name in sheet.columns[sheet.dtypes == "string"]:
                # most text columns have few different values
                safe = {text: csv_field(text) for text in sheet[name].dropna().unique()}
                if any(text != safe_text for text, safe_text in safe.items()):
                    sheet[name] = sheet[name].map(safe, na_action="ignore").astype("string")
            sheet.to_csv(stream, index=False, header=False, lineterminator="\n", encoding="utf-8")

        yield write_sheet
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise StoreError(f"Parquet needs pyarrow; {install_hint('pyarrow')}, or use csv") from error
    kinds = {"boolean": pa.bool_(), "Int64": pa.int64(), "Float64": pa.float64(), "string": pa.string()}
    shape = pa.schema([(column.name, kinds[_dtype(column)]) for column in columns])
    with pq.ParquetWriter(stream, shape) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pandas(frame(rows), schema=shape, preserve_index=False))
