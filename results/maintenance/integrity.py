"""The file, schema and keys of a database: its release, what somebody altered by hand, rows that cannot be as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Index, Table, UniqueConstraint, func, inspect, select, text

from ..console.text import counted
from ..store.schema import HEAD, REVISIONS, Base
from .finding import SHOWN, Finding, restore

T = Base.metadata.tables


def release(found: str | None) -> list[Finding]:
    """What is to be said of a database of that revision (None: an empty one); nothing of one of this release."""
    if found == HEAD:
        return []
    return [_empty() if found is None else _other_release(found)]


def _empty() -> Finding:
    return Finding.note("the database is empty", "launch a grid, or name another with --db")


def _other_release(found: str) -> Finding:
    if found in REVISIONS:
        return Finding.warning(
            f"the schema is of an older release (revision {found}; this one uses {HEAD})",
            "run: atma-sweep db upgrade, then check again",
        )
    return Finding.error(
        f"the schema was written by a newer atma-sweep (revision {found})", "upgrade the program, then check again"
    )


def schema(connection: Connection) -> list[Finding]:
    """Tables, columns, constraints, indexes and the view that are missing or changed. What was added is nobody's matter."""
    lost = [what for difference in _differences(connection) for what in _lost(difference)]
    tables = {name for name in T if f"the table {name}" not in lost}
    lost += [what for name in T if name in tables for what in _unseen(connection, T[name])]
    if "results" not in inspect(connection).get_view_names():
        lost.append("the view results")
    return [
        Finding.error(
            f"{what} is missing or changed",
            "somebody altered the database by hand: put a backup in its place, or export the sweeps and import "
            "them into a new one",
        )
        for what in dict.fromkeys(lost)
    ]


def _differences(connection: Connection) -> list[Any]:
    """What a migration would do to make the models of this database, in alembic's words; changed columns are lists."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    found = compare_metadata(MigrationContext.configure(connection, opts={"compare_type": False}), Base.metadata)
    return [difference for difference in found if isinstance(difference, tuple)]


def _lost(difference: tuple[Any, ...]) -> list[str]:
    kind, given = difference[0], difference[-1]
    if kind == "add_table":
        return [f"the table {given.name}"]
    if kind == "add_column":
        return [f"the table {difference[2]}'s column {given.name}"]
    if kind == "add_index":
        return [f"the index {given.name}"]
    if kind == "add_constraint":
        return [f"the constraint {given.name}"]
    if kind == "add_fk":
        return [f"the foreign key {given.table.name}.{'.'.join(given.column_keys)}"]
    return []


def _unseen(connection: Connection, table: Table) -> list[str]:
    """What alembic does not compare: CHECK constraints, the primary key, and whether an index is about some rows only."""
    found = inspect(connection)
    kinds = ("check_constraint", "table_or_column_check_constraint")
    checks = {check["name"] for check in found.get_check_constraints(table.name)}
    named = sorted(str(one.name) for one in table.constraints if one.__visit_name__ in kinds)
    lost = [f"the constraint {name}" for name in named if name not in checks]
    primary = found.get_pk_constraint(table.name)["constrained_columns"]
    if primary != [column.name for column in table.primary_key.columns]:
        lost.append(f"the primary key of {table.name}")
    have = {
        index["name"]: any(key.endswith("_where") for key in index.get("dialect_options", {}))
        for index in found.get_indexes(table.name)
    }
    partial = {str(index.name): _partial(index) for index in table.indexes}
    return lost + [f"the index {name}" for name in sorted(partial) if have.get(name, partial[name]) != partial[name]]


def _partial(index: Index) -> bool:
    return index.dialect_options["sqlite"].get("where") is not None


def integrity(connection: Connection, path: Path | None) -> list[Finding]:
    """What SQLite says of the file `path` itself, foreign keys included; of a server nothing."""
    if path is None:
        return []
    findings = []
    wrong = [str(row[0]) for row in connection.execute(text("PRAGMA integrity_check(20)"))]
    if wrong != ["ok"]:
        findings.append(
            Finding.error(f"the file is damaged: {' '.join('; '.join(wrong[:SHOWN]).split())[:300]}", restore(path))
        )
    broken = connection.execute(text("PRAGMA foreign_key_check")).fetchall()
    for table, parent in sorted({(row[0], row[2]) for row in broken}):
        count = sum(1 for row in broken if (row[0], row[2]) == (table, parent))
        findings.append(_orphaned(table, parent, count, path))
    return findings


def _orphaned(table: str, parent: str, count: int, path: Path | None) -> Finding:
    return Finding.error(
        f"{counted(count, 'row')} of {table} refer{'s' if count == 1 else ''} to rows of {parent} that are not there",
        restore(path) if path is not None else "restore the newest pg_dump",
    )


def duplicates(connection: Connection) -> list[Finding]:
    """Keys that are there twice, as they can be where a constraint was lost."""
    findings = []
    # the index is what may be damaged, so it must not give the answer
    unaided = " NOT INDEXED" if connection.dialect.name == "sqlite" else ""
    for name, table in T.items():
        keys = [[column.name for column in table.primary_key.columns]]
        keys += [[column.name for column in c.columns] for c in table.constraints if isinstance(c, UniqueConstraint)]
        for key in keys:
            listed = ", ".join(f'"{column}"' for column in key)
            query = f'SELECT COUNT(*) FROM (SELECT 1 FROM "{name}"{unaided} GROUP BY {listed} HAVING COUNT(*) > 1) AS d'
            findings += _twice(connection, query, f"{name} has {{count}} keys ({', '.join(key)}) more than once")
    query = f"SELECT 1 FROM attempt{unaided} WHERE state = 'running' GROUP BY cell_id HAVING COUNT(*) > 1"
    findings += _twice(connection, f"SELECT COUNT(*) FROM ({query}) AS d", "cells with two live attempts: {count}")
    return findings


def _twice(connection: Connection, query: str, what: str) -> list[Finding]:
    count = connection.scalar(text(query))
    if not count:
        return []
    remedy = "restore the newest backup, or export the sweeps and import them into a new database"
    return [Finding.error(what.format(count=count), remedy)]


def orphans(connection: Connection) -> list[Finding]:
    """Rows without what they belong to. On SQLite foreign_key_check has told of declared keys already."""
    findings = []
    if connection.dialect.name != "sqlite":
        for name, table in T.items():
            for key in table.foreign_keys:
                parent = key.column.table.alias()
                query = select(func.count()).select_from(
                    table.outerjoin(parent, parent.c[key.column.name] == key.parent)
                )
                count = connection.scalar(query.where(key.parent.is_not(None), parent.c[key.column.name].is_(None)))
                findings += [_orphaned(name, key.column.table.name, count, None)] if count else []
    launched = select(T["revision"].c.sweep_id)
    for row in connection.execute(select(T["sweep"].c.name).where(T["sweep"].c.id.not_in(launched))):
        findings.append(Finding.error(f"sweep {row.name!r} has no revision", "launch its grid again under that name"))
    return findings
