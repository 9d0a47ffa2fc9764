"""The many rows of a bundle in temporary tables beside the database, until all of them are known to be in order.

Temporary tables belong to one connection and go with it, so nothing is left of an import that ends half-way, and memory
stays flat however long the curves are: the database moves the rows itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Index, Integer, MetaData, Table, exists, func, insert, select, true
from sqlalchemy.orm import Session

from ..store.store import Store
from .row_validation import ATTEMPT_TABLES, FIELD_RULES, T, bundle_columns


class StageLost(Exception):
    """The connection that held the rows is gone, and they with it; nothing of them has been written."""


class Stage:
    """The numbers of every attempt of a bundle. `store` must be the import's own: its connection holds the tables."""

    def __init__(self, store: Store) -> None:
        self.store = store
        aside = MetaData()
        self._tables = {
            name: Table(
                f"incoming_{name}",
                aside,
                *(Column(column.name, column.type) for column in bundle_columns(name)),
                prefixes=["TEMPORARY"],
            )
            for name in ATTEMPT_TABLES
        }
        self._places = Table(
            "incoming_place",
            aside,
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("place", Integer, nullable=False),
            prefixes=["TEMPORARY"],
        )
        with store.transaction(write=False) as session:
            self._holder = session.connection().connection.dbapi_connection
            for table in (*self._tables.values(), self._places):
                table.create(session.connection())

    def check(self, session: Session) -> None:
        """Raises StageLost when the connection of `session` is another one than that of the rows."""
        if session.connection().connection.dbapi_connection is not self._holder:
            raise StageLost

    def add(self, name: str, columns: Mapping[str, list[Any]], session: Session) -> None:
        """Puts checked rows aside, given as columns."""
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
            # past SQLAlchemy's own handling of each value, which takes longer than everything else together
            connection.exec_driver_sql(f"INSERT INTO incoming_{name} ({names}) VALUES ({marks})", rows)

    def place(self, session: Session, places: Mapping[int, int]) -> None:
        """Says which attempts' rows are to be moved, and which attempt here each of them is."""
        session.execute(self._places.delete())
        if places:
            session.execute(insert(self._places), [{"id": id_, "place": place} for id_, place in places.items()])

    def move(self, session: Session, name: str) -> int:
        """Moves the rows of those attempts into the database; returns how many."""
        return self._move(session, name, true())

    def move_items(self, session: Session) -> int:
        """`move` of items to attempts that are here already: of those that are not here, but for those whose numbers the bundle has
        and the database has not."""
        item, theirs, ours = self._tables["example"].c, self._tables["measurement"].c, T["measurement"].c
        # looked up for every item
        names = ("attempt_id", "probe", "length", "metric")
        Index("incoming_numbers", *(theirs[name] for name in names)).create(session.connection())
        held = T["example"].c
        same = [held[name] == item[name] for name in ("probe", "metric", "length", "item", "position")]
        present = exists(select(1).where(held.attempt_id == self._places.c.place, *same))

        def gone(*names: str) -> ColumnElement[bool]:
            same = [theirs[name] == item[name] for name in ("attempt_id", *names)]
            here = [ours.attempt_id == self._places.c.place, *(ours[name] == item[name] for name in names)]
            return exists(select(1).where(*same)) & ~exists(select(1).where(*here))

        return self._move(session, "example", ~present & ~gone("probe", "length") & ~gone("probe", "length", "metric"))

    def _move(self, session: Session, name: str, which: ColumnElement[bool]) -> int:
        source, target = self._tables[name], T[name]
        given = [column.name for column in source.columns]
        moved = source.join(self._places, self._places.c.id == source.c.attempt_id)
        rows = select(*(self._places.c.place if word == "attempt_id" else source.c[word] for word in given))
        count = session.scalar(select(func.count()).select_from(moved).where(which))
        session.execute(insert(target).from_select(given, rows.select_from(moved).where(which)))
        return int(count or 0)
