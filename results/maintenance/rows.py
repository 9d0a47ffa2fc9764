"""Rows that cannot be as they are: in a damaged file, twice under one key, or without what they belong to."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, UniqueConstraint, func, select, text

from ..counts import counted
from ..store.schema import Base
from .finding import SHOWN, Finding, restore

T = Base.metadata.tables


def integrity(connection: Connection, path: Path | None) -> list[Finding]:
    """What SQLite says of the file `path` itself, foreign keys included; of a server nothing."""
    if path is None:
        return []
    findings = []
    wrong = [str(row[0]) for row in connection.execute(text("PRAGMA integrity_check(20)"))]
    if wrong != ["ok"]:
        findings.append(
            Finding(
                severity="error",
                what=f"the file is damaged: {' '.join('; '.join(wrong[:SHOWN]).split())[:300]}",
                remedy=restore(path),
            )
        )
    broken = connection.execute(text("PRAGMA foreign_key_check")).fetchall()
    for table, parent in sorted({(row[0], row[2]) for row in broken}):
        count = sum(1 for row in broken if (row[0], row[2]) == (table, parent))
        findings.append(_orphaned(table, parent, count, path))
    return findings


def _orphaned(table: str, parent: str, count: int, path: Path | None) -> Finding:
    return Finding(
        severity="error",
        what=f"{counted(count, 'row')} of {table} refer{'s' if count == 1 else ''} to rows of {parent} that are not there",
        remedy=restore(path) if path is not None else "restore the newest pg_dump",
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
    return [Finding(severity="error", what=what.format(count=count), remedy=remedy)]


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
        findings.append(
            Finding(
                severity="error",
                what=f"sweep {row.name!r} has no revision",
                remedy="launch its grid again under that name",
            )
        )
    return findings
