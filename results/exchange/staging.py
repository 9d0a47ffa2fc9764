"""Temporary tables next to the database, which hold the rows of a bundle until all of them are validated.

Temporary tables belong to one connection and vanish with it, so that an aborted import leaves nothing behind. Memory
use stays constant however long the curves are, since the database moves the rows itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Index, Integer, MetaData, Table, exists, func, insert, select, true
from sqlalchemy.orm import Session

from ..store.store import Store
from .row_validation import ATTEMPT_TABLES, FIELD_RULES, TABLES, bundle_columns


class StagingTablesLost(Exception):
    """Raised if the connection that held the staged rows is lost, and the rows with it; none of them was written."""


class StagingTables:
    """Staged numbers of every attempt of a bundle.

    `store` must be used by this import alone: its connection holds the tables.
    """

    def __init__(self, store: Store) -> None:
        """Create the temporary tables in a transaction of the store, and remember their connection.

        They are named `incoming_<table>` and `incoming_place`.
        """
        self.store = store
        metadata = MetaData()
        self._tables = {
            name: Table(
                f"incoming_{name}",
                metadata,
                *(Column(column.name, column.type) for column in bundle_columns(name)),
                prefixes=["TEMPORARY"],
            )
            for name in ATTEMPT_TABLES
        }
        self._attempt_ids = Table(
            "incoming_place",
            metadata,
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("place", Integer, nullable=False),
            prefixes=["TEMPORARY"],
        )
        with store.transaction(write=False) as session:
            self._holder = session.connection().connection.dbapi_connection
            for table in (*self._tables.values(), self._attempt_ids):
                table.create(session.connection())

    def check(self, session: Session) -> None:
        """Raise StagingTablesLost if `session` has another connection than the one with the rows."""
        if session.connection().connection.dbapi_connection is not self._holder:
            raise StagingTablesLost

    def add(self, name: str, columns: Mapping[str, list[Any]], session: Session) -> None:
        """Stage validated rows of a table, given as a dictionary from column name to values; do nothing for no rows.

        Args:
            name: "provenance", "measurement", "example" or "curve_point".
            columns: values by column; JSON columns are parsed, times are text.
            session: session on the connection that holds the tables.
        """
        fields, listed = FIELD_RULES[name], []
        for word, values in columns.items():
            if fields[word].kind == "json":
                values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
            listed.append(values)
        connection = session.connection()
        mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
        names = ", ".join(f'"{word}"' for word in columns)
        marks = ", ".join([mark] * len(columns))
        rows = list(zip(*listed, strict=True))
        if rows:
            # bypasses SQLAlchemy's handling of each value, which would take most of the time
            connection.exec_driver_sql(f"INSERT INTO incoming_{name} ({names}) VALUES ({marks})", rows)

    def set_attempt_ids(self, session: Session, ids: Mapping[int, int]) -> None:
        """Replace the selection of attempts whose rows are to be moved.

        `ids` maps the number of an attempt in the bundle to its id in this database.
        """
        session.execute(self._attempt_ids.delete())
        if ids:
            session.execute(
                insert(self._attempt_ids), [{"id": id_, "place": attempt_id} for id_, attempt_id in ids.items()]
            )

    def move_rows(self, session: Session, name: str) -> int:
        """Copy the staged rows of the selected attempts (see set_attempt_ids) into a table, and return their number.

        The staged rows stay.
        """
        return self._move_rows(session, name, true())

    def move_missing_items(self, session: Session) -> int:
        """Copy staged items that the selected attempts lack in the database, and return their number.

        Skips items whose measurements the bundle has and the database does not: these were deleted in the database.
        Creates an index on the staged measurements, so call it once.
        """
        item, bundle_values, store_values = (
            self._tables["example"].c,
            self._tables["measurement"].c,
            TABLES["measurement"].c,
        )
        # used for every item
        names = ("attempt_id", "probe", "length", "metric")
        Index("incoming_numbers", *(bundle_values[name] for name in names)).create(session.connection())
        held = TABLES["example"].c
        same = [held[name] == item[name] for name in ("probe", "metric", "length", "item", "position")]
        present = exists(select(1).where(held.attempt_id == self._attempt_ids.c.place, *same))

        def was_deleted(*names: str) -> ColumnElement[bool]:
            """Return an SQL condition on an item: the bundle has its measurement, and the database does not.

            `names` are the columns by which the measurement is identified, besides the attempt.
            """
            same = [bundle_values[name] == item[name] for name in ("attempt_id", *names)]
            in_store = [
                store_values.attempt_id == self._attempt_ids.c.place,
                *(store_values[name] == item[name] for name in names),
            ]
            return exists(select(1).where(*same)) & ~exists(select(1).where(*in_store))

        # deleted is the measurement of the item's own metric, or every one of its probe at this length
        return self._move_rows(
            session, "example", ~present & ~was_deleted("probe", "length") & ~was_deleted("probe", "length", "metric")
        )

    def _move_rows(self, session: Session, name: str, condition: ColumnElement[bool]) -> int:
        """Copy the staged rows of the selected attempts that meet the condition, and return their number.

        Attempt numbers of the bundle become ids of this database.
        """
        source, target = self._tables[name], TABLES[name]
        names = [column.name for column in source.columns]
        moved = source.join(self._attempt_ids, self._attempt_ids.c.id == source.c.attempt_id)
        rows = select(*(self._attempt_ids.c.place if word == "attempt_id" else source.c[word] for word in names))
        count = session.scalar(select(func.count()).select_from(moved).where(condition))
        session.execute(insert(target).from_select(names, rows.select_from(moved).where(condition)))
        return int(count or 0)
