"""Checks of a database's host: file system, free space, leftovers of backups, clock, and dead attempts."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection, String, func, select, type_coerce

from ..console.text import counted
from ..store.database import network_filesystem
from ..store.schema import Base, UtcNow, UtcTime
from ..store.upgrading import PARTIAL_SUFFIX
from .finding import Finding, first_names
from .walk import ATTEMPT, attempt_label, attempts, is_gone

LOW_BYTES = 2**30
"""Free space next to the database below which there is a warning; below a tenth of it an error."""


def check_host(path: Path) -> list[Finding]:
    """Return findings about the file system and the folder of a SQLite database; the database itself is not read.

    An error for a network file system. A warning if the folder has less free space than 1 GiB (LOW_BYTES) or twice the
    size of the database, whichever is more; an error below a tenth of 1 GiB. A note per leftover of a killed backup.
    `path` must exist.
    """
    findings = []
    table = Path("/proc/self/mountinfo")
    kind = network_filesystem(path.resolve(), table.read_text(errors="replace")) if table.exists() else None
    if kind:
        findings.append(
            Finding.error(
                f"{path} is on {kind}, a network file system, where SQLite databases become corrupt",
                "move it to a local disk, or use PostgreSQL (--db)",
            )
        )
    free, size = shutil.disk_usage(path.parent).free, path.stat().st_size
    if free < max(LOW_BYTES, 2 * size):
        findings.append(
            Finding(
                severity="error" if free < LOW_BYTES // 10 else "warning",
                what=f"{path.parent} has {free / 1e9:.2f} GB free, and the database takes {size / 1e9:.2f} GB",
                remedy="free disk space: an upgrade or a backup needs as much as the database",
            )
        )
    for leftover in sorted(path.parent.glob(f".{path.stem}.*{PARTIAL_SUFFIX}")):
        findings.append(
            Finding.note(f"{leftover} was left by a backup that was killed, unless one is running", "delete it")
        )
    return findings


CLOCK_SLACK = timedelta(seconds=5)
TIME_LIKE = "____-__-__T__:__:__.___Z"


def check_clock(connection: Connection) -> list[Finding]:
    """Return a warning if the newest time in any table is later than the database's clock by more than 5 s.

    Empty otherwise, and without any time. Ends of leases and values that are no times are not considered.
    """
    now = connection.scalar(select(UtcNow()))
    newest: tuple[datetime, str] | None = None
    for name, table in Base.metadata.tables.items():
        for column in table.columns:
            if isinstance(column.type, UtcTime) and column.name != "lease_until":
                latest = connection.scalar(select(func.max(column)).where(type_coerce(column, String).like(TIME_LIKE)))
                if latest is not None and (newest is None or latest > newest[0]):
                    newest = latest, f"{name}.{column.name}"
    assert now is not None
    if newest is None or newest[0] <= now + CLOCK_SLACK:
        return []
    return [
        Finding.warning(
            f"the clock says {now:%Y-%m-%d %H:%M:%S} UTC, but {newest[1]} has the later time "
            f"{newest[0]:%Y-%m-%d %H:%M:%S}",
            "set the clock (timedatectl), or wait until it has caught up: leases and ages depend on it",
        )
    ]


def find_dead_attempts(connection: Connection) -> list[Finding]:
    """Return a warning about running attempts whose process, on this host, is gone; empty if there are none.

    Attempts on other hosts are not examined.
    """
    columns = (ATTEMPT.state, ATTEMPT.pid, ATTEMPT.pid_started, ATTEMPT.host, ATTEMPT.pid_space)
    running = (row for row in attempts(connection, *columns) if row.state == "running")
    gone = [attempt_label(row, f"pid {row.pid}") for row in running if is_gone(row)]
    if not gone:
        return []
    return [
        Finding.warning(
            f"{counted(len(gone), 'attempt')} marked as running, but without a process: {first_names(gone)}",
            "launch the grid again; it marks them interrupted and resumes from their checkpoints",
        )
    ]
