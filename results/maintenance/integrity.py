"""Checks of a database's release, schema, keys and references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Index, Table, UniqueConstraint, func, inspect, select, text

from ..console.text import counted
from ..store.schema import HEAD, REVISIONS, Base
from .finding import MAX_NAMED, Finding, restore_advice

TABLES = Base.metadata.tables


def check_release(revision: str | None) -> list[Finding]:
    """Return a finding about a database whose schema revision is not this release's; empty if it is.

    A note for an empty database (`revision` None), a warning for an older revision, an error for an unknown one.
    """
    if revision == HEAD:
        return []
    return [_empty() if revision is None else _wrong_release(revision)]


def _empty() -> Finding:
    return Finding.note("the database is empty", "launch a grid, or name another with --db")


def _wrong_release(revision: str) -> Finding:
    """Return the finding about a schema revision other than HEAD.

    A warning for a known (older) revision, an error for an unknown one, which a newer release has written.
    """
    if revision in REVISIONS:
        return Finding.warning(
            f"the schema is of an older release (revision {revision}; this one uses {HEAD})",
            "run: atma-sweep db upgrade, then check again",
        )
    return Finding.error(
        f"the schema was written by a newer atma-sweep (revision {revision})", "upgrade the program, then check again"
    )


def check_schema(connection: Connection) -> list[Finding]:
    """Return one error per missing or changed table, column, constraint, index or view; empty if there are none.

    Additions and changed column types are ignored. The text of an error starts with the element, such as `the table
    cell`.
    """
    lost = [element for difference in _differences(connection) for element in _missing_elements(difference)]
    tables = {name for name in TABLES if f"the table {name}" not in lost}
    lost += [element for name in TABLES if name in tables for element in _uncompared_elements(connection, TABLES[name])]
    if "results" not in inspect(connection).get_view_names():
        lost.append("the view results")
    return [
        Finding.error(
            f"{element} is missing or changed",
            "the schema was changed by hand: restore a backup, or export the sweeps and import them into a new "
            "database",
        )
        for element in dict.fromkeys(lost)
    ]


def _differences(connection: Connection) -> list[Any]:
    """Return the operations by which alembic would turn this database's schema into that of the models.

    Each is a tuple that starts with the kind, such as `add_column` or `remove_index`. Changed columns, which alembic
    returns as lists, are left out; types are not compared.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    differences = compare_metadata(MigrationContext.configure(connection, opts={"compare_type": False}), Base.metadata)
    return [difference for difference in differences if isinstance(difference, tuple)]


def _missing_elements(difference: tuple[Any, ...]) -> list[str]:
    """Return the schema element that an operation of alembic would add, as a list of one text.

    The text is such as `the index ix_name`. Empty for other operations, such as removals.
    """
    kind, element = difference[0], difference[-1]
    if kind == "add_table":
        return [f"the table {element.name}"]
    if kind == "add_column":
        return [f"the table {difference[2]}'s column {element.name}"]
    if kind == "add_index":
        return [f"the index {element.name}"]
    if kind == "add_constraint":
        return [f"the constraint {element.name}"]
    if kind == "add_fk":
        return [f"the foreign key {element.table.name}.{'.'.join(element.column_keys)}"]
    return []


def _uncompared_elements(connection: Connection, table: Table) -> list[str]:
    """Return the missing or changed elements of a table that alembic does not compare, as texts.

    These are CHECK constraints (by name), the primary key (its columns in order), and whether an index is partial. The
    table must exist.
    """
    inspector = inspect(connection)
    kinds = ("check_constraint", "table_or_column_check_constraint")
    checks = {check["name"] for check in inspector.get_check_constraints(table.name)}
    named = sorted(str(constraint.name) for constraint in table.constraints if constraint.__visit_name__ in kinds)
    lost = [f"the constraint {name}" for name in named if name not in checks]
    primary = inspector.get_pk_constraint(table.name)["constrained_columns"]
    if primary != [column.name for column in table.primary_key.columns]:
        lost.append(f"the primary key of {table.name}")
    have = {
        index["name"]: any(key.endswith("_where") for key in index.get("dialect_options", {}))
        for index in inspector.get_indexes(table.name)
    }
    partial = {str(index.name): _is_partial(index) for index in table.indexes}
    return lost + [f"the index {name}" for name in sorted(partial) if have.get(name, partial[name]) != partial[name]]


def _is_partial(index: Index) -> bool:
    return index.dialect_options["sqlite"].get("where") is not None


def check_integrity(connection: Connection, path: Path | None) -> list[Finding]:
    """Return errors of SQLite's own checks of the file, foreign keys included; empty for a server (`path` None).

    At most one error about the file and one per pair of tables with dangling references. Reads the entire file.
    """
    if path is None:
        return []
    findings = []
    wrong = [str(row[0]) for row in connection.execute(text("PRAGMA integrity_check(20)"))]
    if wrong != ["ok"]:
        findings.append(
            Finding.error(
                f"the file is damaged: {' '.join('; '.join(wrong[:MAX_NAMED]).split())[:300]}", restore_advice(path)
            )
        )
    broken = connection.execute(text("PRAGMA foreign_key_check")).fetchall()
    for table, parent in sorted({(row[0], row[2]) for row in broken}):
        count = sum(1 for row in broken if (row[0], row[2]) == (table, parent))
        findings.append(_orphaned(table, parent, count, path))
    return findings


def _orphaned(table: str, parent: str, count: int, path: Path | None) -> Finding:
    """Return the error about `count` rows of `table` that refer to missing rows of `parent`.

    `path` is the SQLite file, for the advice; None means a server.
    """
    return Finding.error(
        f"{counted(count, 'row')} of {table} refer{'s' if count == 1 else ''} to missing rows of {parent}",
        restore_advice(path) if path is not None else "restore the newest pg_dump",
    )


def find_duplicates(connection: Connection) -> list[Finding]:
    """Return errors about duplicate keys, which are possible after a constraint was lost.

    One per primary or unique key with duplicates, and one about cells with several running attempts.
    """
    findings = []
    # the index may be the damaged part, so it must not be used
    unaided = " NOT INDEXED" if connection.dialect.name == "sqlite" else ""
    for name, table in TABLES.items():
        keys = [[column.name for column in table.primary_key.columns]]
        keys += [[column.name for column in c.columns] for c in table.constraints if isinstance(c, UniqueConstraint)]
        for key in keys:
            listed = ", ".join(f'"{column}"' for column in key)
            query = f'SELECT COUNT(*) FROM (SELECT 1 FROM "{name}"{unaided} GROUP BY {listed} HAVING COUNT(*) > 1) AS d'
            findings += _duplicate_findings(
                connection, query, f"{name} has {{count}} duplicate keys ({', '.join(key)})"
            )
    query = f"SELECT 1 FROM attempt{unaided} WHERE state = 'running' GROUP BY cell_id HAVING COUNT(*) > 1"
    findings += _duplicate_findings(
        connection, f"SELECT COUNT(*) FROM ({query}) AS d", "cells with two attempts in state running: {count}"
    )
    return findings


def _duplicate_findings(connection: Connection, query: str, template: str) -> list[Finding]:
    """Return one error with the count that the query returns; empty for zero.

    Args:
        connection: open connection.
        query: SQL that returns one number.
        template: text of the error, with `{count}`.
    """
    count = connection.scalar(text(query))
    if not count:
        return []
    remedy = "restore the newest backup, or export the sweeps and import them into a new database"
    return [Finding.error(template.format(count=count), remedy)]


def find_orphans(connection: Connection) -> list[Finding]:
    """Return errors about rows without their parent row (PostgreSQL only), and about sweeps without a revision.

    On SQLite, `check_integrity` reports the declared foreign keys. One error per foreign key, and one per sweep.
    """
    findings = []
    if connection.dialect.name != "sqlite":
        for name, table in TABLES.items():
            for key in table.foreign_keys:
                parent = key.column.table.alias()
                query = select(func.count()).select_from(
                    table.outerjoin(parent, parent.c[key.column.name] == key.parent)
                )
                count = connection.scalar(query.where(key.parent.is_not(None), parent.c[key.column.name].is_(None)))
                findings += [_orphaned(name, key.column.table.name, count, None)] if count else []
    launched = select(TABLES["revision"].c.sweep_id)
    for row in connection.execute(select(TABLES["sweep"].c.name).where(TABLES["sweep"].c.id.not_in(launched))):
        findings.append(
            Finding.error(
                f"sweep {row.name!r} has no revision (record of a launched grid)",
                "launch its grid again under that name",
            )
        )
    return findings
