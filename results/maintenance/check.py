"""Looking after a database: a copy that is whole, and a list of everything that is wrong with it.

Neither needs the database to be idle, and neither changes it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, String, Table, UniqueConstraint, func, inspect, select, text, type_coerce
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from .. import paper
from ..errors import StoreError, StoreMissing, WriteRefused
from ..exchange.bundles import local_path
from ..exchange.import_files import STAGING
from ..store.database import (
    PART,
    copy_database,
    file_of,
    make_engine,
    network_filesystem,
    place,
    plain_errors,
    revision_of,
)
from ..store.processes import find, here
from ..store.schema import HEAD, REVISIONS, Base, UtcNow, UtcTime
from ..text import is_secret

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
Identify = Callable[[Mapping[str, Any], str], str]

LOW_BYTES = 2**30
"""Less free space than this beside the database is worth a warning; a tenth of it is an error."""
CLOCK_SLACK = timedelta(seconds=5)
SHOWN = 5
"""Examples that a finding names."""
TIME_LIKE = "____-__-__T__:__:__.___Z"

T = Base.metadata.tables


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    `error`: numbers are lost, wrong or about to be. `warning`: something does not work as it could. `note`: worth
    knowing. `remedy` is what to do about it.
    """

    severity: Severity
    what: str
    remedy: str


# --- backup ---------------------------------------------------------------------------------------------------------


def backup(url_or_path: str | Path | None, to: Path | None = None) -> Path:
    """Copies a SQLite database, as it is at this moment, to `<db>.<UTC time>.backup` beside it; returns the file.

    `to` names another folder, or the file itself. Writers go on meanwhile. The copy is checked, synced, readable by whom
    the database is, and complete: what was in the write-ahead log is in it. Nothing is ever overwritten.

    Raises StoreMissing, StoreError (not ours, a file of that name exists, no room; PostgreSQL, with the command to use).
    """
    url = place(url_or_path)
    source = file_of(url)
    if source is None:
        raise StoreError(f"PostgreSQL is backed up with its own tool; run: {dump_command(url)}")
    if not source.exists():
        raise StoreMissing(f"there is no database {source}; name it with --db")
    target = to.absolute() if to is not None else source.parent
    if target.is_dir():
        target = target / f"{source.name}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}.backup"
    if not target.parent.is_dir():
        raise StoreError(f"there is no folder {target.parent}; make it, or name another place with --to")
    if os.path.lexists(target):
        raise StoreError(f"{target} exists already and is left alone; name another file with --to")
    engine = make_engine(url)
    try:
        with plain_errors(url), engine.execution_options(begin="BEGIN").connect() as connection:
            if revision_of(connection) is None:
                raise StoreMissing(f"{source} is empty, so there is nothing to back up; name the database with --db")
        copy_database(engine, source, target)
    except (sqlite3.Error, OSError) as error:
        kind = WriteRefused if getattr(error, "errno", None) else StoreError
        raise kind(
            f"{source} cannot be copied to {target}: {error}; make room, or see what `atma-sweep db check` says"
        ) from error
    finally:
        engine.dispose()
    return target


def dump_command(url: URL) -> str:
    """The command that backs a PostgreSQL database up, without its password."""
    told = {name: value for name, value in url.query.items() if not is_secret(name)}
    plain = url._replace(drivername="postgresql", password=None, query=told).render_as_string()  # type: ignore[arg-type]
    return f"pg_dump --format=custom --file={shlex.quote(f'{url.database}.dump')} --dbname={shlex.quote(plain)}"


# --- check ----------------------------------------------------------------------------------------------------------


def check(
    url_or_path: str | Path | None, *, runs: Path | None = None, identify: Identify | None = None
) -> list[Finding]:
    """Everything that is wrong with a database, worst first; empty when nothing is.

    `runs` is the folder that the database's relative paths lie under (None: they are not looked for). `identify` gives
    the id of a cell's config, the one that it has here if the config may have that (None: ids are not compared). Prints
    and changes nothing.

    Raises StoreMissing, and StoreError for a file that is somebody else's or a server that does not answer.
    """
    url = place(url_or_path)
    path = file_of(url)
    if path is not None and not path.exists():
        raise StoreMissing(f"there is no database {path}; launch a grid first, or name the database with --db")
    findings = _around(path) if path is not None else []
    try:
        with plain_errors(url):
            findings += _inside(url, runs, identify)
    except StoreError as error:
        if path is None or not isinstance(error.__cause__, DBAPIError) or "not a database" in str(error):
            raise
        findings.append(_unreadable(str(error.__cause__.orig), path))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _unreadable(why: str, path: Path | None) -> Finding:
    remedy = _restore(path) if path is not None else "look at the server's log, and restore the newest pg_dump"
    return Finding(severity="error", what=f"parts cannot be read: {' '.join(why.split())}", remedy=remedy)


def _restore(path: Path) -> str:
    kept = sorted([*path.parent.glob(f"{path.name}.*.backup"), *path.parent.glob(f"{path.stem}.before-upgrade-*")])
    # with another database's log beside it, a backup would be damaged at once
    away = f"stop what uses it and move {path} away, with its -wal and -shm"
    if kept:
        return f"{away}, then give its name to a copy of the newest backup: {max(kept, key=os.path.getmtime)}"
    return f"{away}, then save what can be saved: sqlite3 MOVED.db .recover | sqlite3 {shlex.quote(str(path))}"


def _around(path: Path) -> list[Finding]:
    """What is wrong with the place that a SQLite database lies in."""
    findings = []
    table = Path("/proc/self/mountinfo")
    kind = network_filesystem(path.resolve(), table.read_text(errors="replace")) if table.exists() else None
    if kind:
        findings.append(
            Finding(
                severity="error",
                what=f"{path} lies on {kind}, a network file system, where SQLite corrupts",
                remedy="move it to a local disk, or use PostgreSQL (--db)",
            )
        )
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    if free < max(LOW_BYTES, 2 * size):
        findings.append(
            Finding(
                severity="error" if free < LOW_BYTES // 10 else "warning",
                what=f"{path.parent} has {free / 1e9:.2f} GB free, and the database takes {size / 1e9:.2f} GB",
                remedy="make room: an upgrade and a backup need as much again",
            )
        )
    for left in sorted(path.parent.glob(f".{path.stem}.*{PART}")):
        findings.append(
            Finding(
                severity="note",
                what=f"{left} was left by a backup that was killed, unless one is running",
                remedy="delete it",
            )
        )
    return findings


def _inside(url: URL, runs: Path | None, identify: Identify | None) -> list[Finding]:
    engine = make_engine(url)
    try:
        with engine.execution_options(begin="BEGIN").connect() as connection:
            found = revision_of(connection)
            findings = _integrity(connection, url)
            if found is None:
                return [*findings, _empty()]
            if found != HEAD:
                return [*findings, _other_release(found)]
            findings += _schema(connection)
            if any(finding.what.startswith("the table") for finding in findings):
                return findings  # without a table or column nothing else can be asked
            steps: list[Callable[[], list[Finding]]] = [
                lambda: _duplicates(connection),
                lambda: _orphans(connection),
                lambda: _dead(connection),
                lambda: _clock(connection),
                lambda: _missing_files(connection, runs) if runs is not None else [],
                lambda: _identities(connection, identify) if identify is not None else [],
            ]
            for step in steps:
                try:
                    findings += step()
                except DBAPIError as error:
                    findings.append(_unreadable(str(error.orig), file_of(url)))
                    break  # the transaction is of no more use on PostgreSQL
            return findings
    finally:
        engine.dispose()


def _empty() -> Finding:
    return Finding(severity="note", what="the database is empty", remedy="launch a grid, or name another with --db")


def _other_release(found: str) -> Finding:
    if found in REVISIONS:
        return Finding(
            severity="warning",
            what=f"the schema is of an older release (revision {found}; this one uses {HEAD})",
            remedy="run: atma-sweep db upgrade, then check again",
        )
    return Finding(
        severity="error",
        what=f"the schema was written by a newer atma-sweep (revision {found})",
        remedy="upgrade the program, then check again",
    )


def _integrity(connection: Connection, url: URL) -> list[Finding]:
    path = file_of(url)
    if path is None:
        return []
    findings = []
    wrong = [str(row[0]) for row in connection.execute(text("PRAGMA integrity_check(20)"))]
    if wrong != ["ok"]:
        findings.append(
            Finding(
                severity="error",
                what=f"the file is damaged: {' '.join('; '.join(wrong[:SHOWN]).split())[:300]}",
                remedy=_restore(path),
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
        what=f"{count} rows of {table} refer to rows of {parent} that are not there",
        remedy=_restore(path) if path is not None else "restore the newest pg_dump",
    )


def _schema(connection: Connection) -> list[Finding]:
    """Tables, columns, constraints, indexes and the view against the models."""
    found = inspect(connection)
    lost: list[str] = []
    tables = set(found.get_table_names())
    for name, table in T.items():
        if name not in tables:
            lost.append(f"the table {name}")
            continue
        have = {column["name"] for column in found.get_columns(name)}
        lost += [f"the table {name}'s column {column.name}" for column in table.columns if column.name not in have]
        uniques = {unique["name"] for unique in found.get_unique_constraints(name)}
        lost += [f"the constraint {word}" for word in _names(table, "unique_constraint") if word not in uniques]
        checks = {check["name"] for check in found.get_check_constraints(name)}
        lost += [f"the constraint {word}" for word in _names(table, "check_constraint") if word not in checks]
        keys = {(tuple(key["constrained_columns"]), key["referred_table"]) for key in found.get_foreign_keys(name)}
        for key in table.foreign_key_constraints:
            if (tuple(key.column_keys), key.referred_table.name) not in keys:
                lost.append(f"the foreign key {name}.{'.'.join(key.column_keys)}")
        primary = found.get_pk_constraint(name)["constrained_columns"]
        if primary != [column.name for column in table.primary_key.columns]:
            lost.append(f"the primary key of {name}")
        lost += _lost_indexes(found.get_indexes(name), table)
    views = found.get_view_names()
    if "results" not in views:
        lost.append("the view results")
    return [
        Finding(
            severity="error",
            what=f"{what} is missing or changed",
            remedy="somebody altered the database by hand: put a backup in its place, or export the sweeps and import "
            "them into a new one",
        )
        for what in lost
    ]


def _names(table: Table, kind: str) -> list[str]:
    kinds = (kind, f"table_or_column_{kind}")
    return sorted(str(constraint.name) for constraint in table.constraints if constraint.__visit_name__ in kinds)


def _lost_indexes(have: list[Any], table: Table) -> list[str]:
    lost = []
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        same = [other for other in have if other["name"] == index.name]
        columns = [column.name for column in index.columns]
        partial = bool(index.dialect_options["sqlite"].get("where") is not None)
        good = same and same[0]["column_names"] == columns and bool(same[0]["unique"]) == bool(index.unique)
        options = same[0].get("dialect_options", {}) if same else {}
        if not good or partial != any(key.endswith("_where") for key in options):
            lost.append(f"the index {index.name}")
    return lost


def _duplicates(connection: Connection) -> list[Finding]:
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
    findings += _twice(connection, f"SELECT COUNT(*) FROM ({query}) AS d", "{count} cells have two live attempts")
    return findings


def _twice(connection: Connection, query: str, what: str) -> list[Finding]:
    count = connection.scalar(text(query))
    if not count:
        return []
    remedy = "restore the newest backup, or export the sweeps and import them into a new database"
    return [Finding(severity="error", what=what.format(count=count), remedy=remedy)]


def _orphans(connection: Connection) -> list[Finding]:
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


def _dead(connection: Connection) -> list[Finding]:
    """Attempts marked running whose process, on this host, is gone."""
    attempt = T["attempt"].c
    query = select(attempt.cell_id, attempt.number, attempt.pid, attempt.pid_started, attempt.host, attempt.pid_space)
    gone = [
        f"{row.cell_id} attempt {row.number} (pid {row.pid})"
        for row in connection.execute(query.where(attempt.state == "running"))
        if here(row.host, row.pid_space) and find(row.pid, row.pid_started) is None
    ]
    if not gone:
        return []
    return [
        Finding(
            severity="warning",
            what=f"{len(gone)} attempts are marked running, and their process is gone: {_some(gone)}",
            remedy="launch the grid again; it marks them interrupted and goes on from their checkpoints",
        )
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _clock(connection: Connection) -> list[Finding]:
    now = connection.scalar(select(UtcNow()))
    newest: tuple[datetime, str] | None = None
    for name, table in T.items():
        for column in table.columns:
            if isinstance(column.type, UtcTime) and column.name != "lease_until":
                latest = connection.scalar(select(func.max(column)).where(type_coerce(column, String).like(TIME_LIKE)))
                if latest is not None and (newest is None or latest > newest[0]):
                    newest = latest, f"{name}.{column.name}"
    assert now is not None
    if newest is None or newest[0] <= now + CLOCK_SLACK:
        return []
    return [
        Finding(
            severity="warning",
            what=f"the clock says {now:%Y-%m-%d %H:%M:%S} UTC, and {newest[1]} {newest[0]:%Y-%m-%d %H:%M:%S}",
            remedy="set the clock (timedatectl), or wait until it has caught up: leases and ages go by it",
        )
    ]


def _missing_files(connection: Connection, runs: Path) -> list[Finding]:
    """Weights that are gone, and checkpoints that would be gone on from; and folders of imports that were killed."""
    attempt = T["attempt"].c
    columns = (attempt.cell_id, attempt.number, attempt.kind, attempt.state, attempt.weights, attempt.checkpoint)
    weights, newest, finished = [], {}, set()
    for row in connection.execute(select(*columns).order_by(attempt.id)):
        if row.weights and _missing(runs, row.weights):
            weights.append(f"{row.cell_id} attempt {row.number} ({row.weights})")
        if row.kind == "train" and row.state in ("done", "diverged"):
            finished.add(row.cell_id)
        elif row.kind == "train" and row.checkpoint:
            newest[row.cell_id] = row
    # a finished cell has its checkpoints removed, and older ones make room for newer ones
    gone = [
        f"{cell} attempt {row.number} ({row.checkpoint})"
        for cell, row in newest.items()
        if cell not in finished and _missing(runs, row.checkpoint)
    ]
    findings = []
    if weights:
        findings.append(
            Finding(
                severity="warning",
                what=f"the kept weights of {len(weights)} attempts are not under {runs}: {_some(weights)}",
                remedy="bring the folders back or name them with --runs; else those cells can be evaluated no more, "
                "and launch --retrain trains them again",
            )
        )
    if gone:
        findings.append(
            Finding(
                severity="warning",
                what=f"the newest checkpoint of {len(gone)} unfinished cells is not under {runs}: {_some(gone)}",
                remedy="bring the folders back or name them with --runs; else the next launch starts them anew",
            )
        )
    for left in sorted(runs.glob(f"{STAGING}*")) if runs.is_dir() else ():
        findings.append(
            Finding(
                severity="note",
                what=f"{left} was left by an import that was killed, unless one is running",
                remedy="delete it",
            )
        )
    return findings


def _missing(runs: Path, address: str) -> bool:
    local = local_path(address)
    return local is not None and not (runs / local).exists()


def _identities(connection: Connection, identify: Identify) -> list[Finding]:
    wrong, unread = [], []
    cell = T["cell"].c
    for row in connection.execute(select(cell.id, cell.slug, cell.config).order_by(cell.id)):
        # published numbers have ids of their own, since nobody knows their whole config
        if paper.is_published_cell(row.id, row.slug):
            continue
        try:
            found = identify(row.config, row.id)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # what pydantic and the registries raise
            unread.append(f"{row.id} ({type(error).__name__}: {' '.join(str(error).split())[:100]})")
        else:
            if found != row.id:
                wrong.append(f"{row.id} ({found})")
    findings = []
    if wrong:
        findings.append(
            Finding(
                severity="error",
                what=f"{len(wrong)} cells have an id that is not that of their config: {_some(wrong)}",
                remedy="their config was changed by hand: restore the newest backup",
            )
        )
    if unread:
        findings.append(
            Finding(
                severity="warning",
                what=f"the config of {len(unread)} cells cannot be read: {_some(unread)}",
                remedy="install the plugins that their grid names, or the release that launched it",
            )
        )
    return findings
