"""Checks for values that this program never writes, as a manual change or a failing disk leaves them.

The rules are those for the rows of a bundle (exchange/row_validation.py). Normal reads do not look for such values;
this check runs after an unforeseen error, so that the message can name the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, Column, Connection, Engine, Integer, Table, text
from sqlalchemy.exc import SQLAlchemyError

from ..errors import RowDamaged
from ..exchange.row_validation import FIELD_RULES, FieldRule, rule_of_type
from ..store.database import redacted_url
from ..store.schema import Base
from .finding import Finding, first_names

ROWS_AT_ONCE = 10_000
MAX_NUMBER = 1e150
"""Largest number whose square a float can hold (approximately)."""


@dataclass(frozen=True, kw_only=True)
class DamagedValue:
    """A value that its column cannot have."""

    table: str
    row: str
    """Primary key, as `id 3` or `attempt_id 3, step 7`."""
    column: str
    value: str
    """The value for a message: short, on one line."""
    problem: str

    def __str__(self) -> str:
        return f"{self.table}.{self.column} of the row with {self.row} is {self.value}; it {self.problem}"


def damaged_values(connection: Connection) -> Iterator[DamagedValue]:
    """Yield every value that its column cannot have, table by table. Reads the entire database.

    Rows are read in batches, and within a batch the values come column by column. On SQLite, text of the connection is
    decoded leniently until the iteration ends or the generator is closed.
    """
    raw = connection.connection.dbapi_connection
    sqlite = connection.dialect.name == "sqlite"
    before = getattr(raw, "text_factory", None)
    if sqlite:
        raw.text_factory = lambda content: content.decode(errors="surrogateescape")  # type: ignore[union-attr]
    try:
        for table in Base.metadata.tables.values():
            yield from _damaged_values_of_table(connection, table)
    finally:
        if sqlite:
            raw.text_factory = before  # type: ignore[union-attr]


def damage_of(engines: Iterable[Engine]) -> RowDamaged | None:
    """Return the error to raise in place of an unforeseen one if one of the databases holds a damaged value.

    None otherwise, also if a database cannot be read. It is about the first such value and is not raised here.
    """
    for engine in engines:
        line = first_damage(engine)
        if line is not None:
            return RowDamaged(f"{redacted_url(engine.url)}: {line}; run: atma-sweep db check, and restore a backup")
    return None


def first_damage(engine: Engine) -> str | None:
    """Return one line about the first damaged value of a database, or else (SQLite) the first dangling reference.

    None without any, or if reading fails. May read the entire database.
    """
    try:
        with engine.execution_options(begin="BEGIN").connect() as connection:
            damaged = next(damaged_values(connection), None)
            if damaged is not None:
                return str(damaged)
            return _dangling(connection) if connection.dialect.name == "sqlite" else None
    except SQLAlchemyError:
        return None


def damaged_rows(connection: Connection) -> list[Finding]:
    """Return one error that counts the damaged values of a database and names the first ones; empty without any."""
    lines = [str(damaged) for damaged in damaged_values(connection)]
    if not lines:
        return []
    return [
        Finding.error(
            f"{len(lines)} invalid values: {first_names(lines)}",
            "they were changed by hand or by a failing disk: restore the newest backup",
        )
    ]


def _dangling(connection: Connection) -> str | None:
    """Return a line about the first row that refers to a missing row; SQLite only."""
    for table, rowid, parent, _ in connection.execute(text("PRAGMA foreign_key_check")):
        return f"{table} has a row (rowid {rowid}) that refers to a missing row of {parent}"
    return None


def _damaged_values_of_table(connection: Connection, table: Table) -> Iterator[DamagedValue]:
    """Yield the damaged values of one table, in batches of 10,000 rows (ROWS_AT_ONCE); within a batch column by column.

    Values of JSON columns are parsed first. A float is also damaged if its absolute value exceeds 1e150 (MAX_NUMBER).
    """
    fields = {column.name: _rule_of_column(column) for column in table.columns}
    names = ", ".join(f'"{name}"' for name in fields)
    keys = [column.name for column in table.primary_key]
    rows = connection.execute(text(f'SELECT {names} FROM "{table.name}"'))
    while part := rows.fetchmany(ROWS_AT_ONCE):
        for (name, field), values in zip(fields.items(), zip(*part, strict=True), strict=True):
            plain = [_bundle_value(field, value) for value in values]
            if field.first_invalid(plain) is None and not _too_large(field, plain):
                continue
            for row, value in zip(part, plain, strict=True):
                problem = field.problem(value)
                if problem is None and _too_large(field, [value]):
                    problem = f"is too large to compute with (beyond {MAX_NUMBER:g})"
                if problem is not None:
                    row_keys = dict(zip(fields, row, strict=True))
                    yield DamagedValue(
                        table=table.name,
                        row=", ".join(f"{key} {_quoted_value(row_keys[key])}" for key in keys),
                        column=name,
                        value=_quoted_value(row_keys[name]),
                        problem=problem,
                    )


def _rule_of_column(column: Column[Any]) -> FieldRule:
    """Return the rule for the values of a column: the one for bundles if there is one, else that of its type.

    An integer primary key has the rule of its type; a JSON column that no bundle holds may be any list or object.
    """
    field = FIELD_RULES.get(column.table.name, {}).get(column.name)
    if field is None and isinstance(column.type, JSON):
        return FieldRule(kind="tree", null=bool(column.nullable))
    if field is not None and not (column.primary_key and isinstance(column.type, Integer)):
        return field
    return rule_of_type(column)


def _bundle_value(field: FieldRule, value: Any) -> Any:
    """Return a driver's value in the form that a bundle has: 0 and 1 of flags as bool, JSON text parsed.

    Values without such a form are returned unchanged.
    """
    if field.kind == "flag" and value in (0, 1) and isinstance(value, int):
        return bool(value)
    if field.kind in ("json", "tree") and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _too_large(field: FieldRule, values: Sequence[Any]) -> bool:
    """Return True if the absolute value of a number of a `real` column exceeds 1e150 (MAX_NUMBER).

    Its square would not be finite. False for other columns and for values that are no numbers.
    """
    return field.kind == "real" and any(isinstance(value, int | float) and abs(value) > MAX_NUMBER for value in values)


def _quoted_value(value: Any) -> str:
    """Return a value for a message: short, on one line, without control characters."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
