"""Checks of the database and of the clock."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from ...results.console.quantities import format_bytes
from ...results.console.text import counted
from ...results.errors import StoreError, StoreMissing
from ...results.store import queries
from ...results.store.database import translate_driver_errors
from ...results.store.schema import HEAD, AttemptRow, EventRow
from ...results.store.store import Store
from .context import LOCK_SECONDS, Check, Context, absent, bad, ok, warn

CLOCK_S = 0.2
"""Seconds over which the clock is observed."""
MAX_DRIFT_S = 0.05
"""Tolerated difference in seconds between wall clock and monotonic clock over that time."""
CLOCK_AHEAD_S = (2.0, 60.0)
"""Seconds that a row's time may lie in the future before it is a warning, and before it is bad. The second is the
duration of a supervisor's lease: a larger error confuses the ownership of sweeps."""


def _split_remedy(error: BaseException) -> tuple[str, str]:
    """Return (finding, remedy) of an error of ours, split at the last semicolon of its message.

    The remedy is "" for a message without a semicolon.
    """
    finding, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return (finding, remedy) if finding else (remedy, "")


def check_database(context: Context) -> Check:
    """Check that the database opens; report its revision, number of sweeps and size.

    Absent if there is none, bad if it cannot be opened. Nothing is created.
    """
    try:
        with context.open_store() as store, translate_driver_errors(store.url):
            count = len(store.sweeps())
            return ok(f"{store}, revision {HEAD}, {counted(count, 'sweep')}, {_size_text(store)}")
    except StoreMissing as error:
        return absent(*_split_remedy(error))
    except StoreError as error:
        return bad(*_split_remedy(error))


def _size_text(store: Store) -> str:
    """Return the size of the database with a unit; for SQLite also that of its write-ahead log."""
    if store.path is None:
        with store.transaction(write=False) as session:
            return format_bytes(int(session.scalar(text("SELECT pg_database_size(current_database())")) or 0))
    log = store.path.with_name(f"{store.path.name}-wal")
    return f"{format_bytes(store.path.stat().st_size)}, write-ahead log {format_bytes(log.stat().st_size if log.exists() else 0)}"


def _connect(path: Path) -> sqlite3.Connection:
    """Open an existing SQLite file; never creates one."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=LOCK_SECONDS, isolation_level=None)


def check_integrity(context: Context) -> Check:
    """Run SQLite's quick_check on the database file; damage is bad. Absent for a server and without a file.

    Reads the entire file. The finding has the first three messages, cut to 300 characters.
    """
    if context.database_file is None:
        return absent("not checked: PostgreSQL verifies its own integrity")
    if not context.database_file.exists():
        return absent("no database yet")
    with contextlib.closing(_connect(context.database_file)) as connection:
        try:
            messages = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        except sqlite3.DatabaseError as error:
            messages = [str(error)]
    if messages == ["ok"]:
        return ok("quick_check found no error")
    summary = " ".join("; ".join(messages).split())[:300]
    return bad(
        f"quick_check: {summary}",
        f"recover what can be read: sqlite3 {context.database_file} .recover | sqlite3 NEW.db",
    )


def check_lock(context: Context) -> Check:
    """Check that a write lock on the database can be acquired within 5 s, and measure the time.

    Bad if a SQLite file is locked or read-only; absent without a file. On a server a write transaction that changes
    nothing is carried out.

    Raises:
        StoreError: The server refuses the transaction, or there is no database on it.
    """
    began = time.monotonic()
    if context.database_file is None:
        with context.open_store() as store:
            store.write(lambda session: session.execute(text("SELECT 1")), patience=LOCK_SECONDS)
        return ok(f"a write transaction took {1000 * (time.monotonic() - began):.0f} ms")
    if not context.database_file.exists():
        return absent("no database yet")
    with contextlib.closing(_connect(context.database_file)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            if "locked" not in str(error):
                return bad(f"cannot be locked for writing: {error}", f"make {context.database_file} writable")
            finding = f"another program has held the lock for {LOCK_SECONDS:g} s"
            return bad(finding, f"close that program; fuser {context.database_file} shows it")
    return ok(f"acquired and released in {1000 * (time.monotonic() - began):.0f} ms")


def check_clock(context: Context) -> Check:
    """Check that the wall clock does not jump against the monotonic clock. Takes 0.2 s (CLOCK_S).

    A difference of more than 50 ms (MAX_DRIFT_S) in either direction is a warning.
    """
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_S)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    finding = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {1000 * abs(drift):.1f} ms of drift against a steady clock in {CLOCK_S} s"
    if abs(drift) > MAX_DRIFT_S:
        return warn(
            finding, "a program sets the clock in jumps; let a single program (chrony, timesyncd) adjust it gradually"
        )
    return ok(finding)


def check_future_rows(context: Context) -> Check:
    """Check that the newest row is not ahead of this machine's clock, and that the database's clock agrees with it.

    The larger of two times decides: by how much the newest heartbeat or event lies in the future, and by how much the
    clocks differ, in either direction. Above 2 s it is a warning, above 60 s bad (CLOCK_AHEAD_S). Absent without a
    database.
    """
    try:
        with context.open_store() as store, store.transaction(write=False) as session:
            database_now, newest = queries.now(session), _newest_row_time(session)
            local_now = datetime.now(UTC)
    except StoreError as error:
        return absent(f"no database to compare with: {_split_remedy(error)[0]}")
    difference_s = (database_now - local_now).total_seconds()
    ahead_s = (newest - local_now).total_seconds() if newest is not None else 0.0
    worst_s = max(ahead_s, abs(difference_s))
    finding = "no row has a time in the future" if newest is not None else "no row yet"
    if ahead_s > CLOCK_AHEAD_S[0]:
        finding = f"the time of the newest row is {ahead_s:.0f} s in the future"
    if abs(difference_s) > CLOCK_AHEAD_S[0]:
        finding += f"; the database's clock is {abs(difference_s):.0f} s {'ahead of' if difference_s > 0 else 'behind'} this machine's"
    if worst_s <= CLOCK_AHEAD_S[0]:
        return ok(finding)
    remedy = "synchronise the clocks of all machines with one time server"
    return bad(finding, remedy) if worst_s > CLOCK_AHEAD_S[1] else warn(finding, remedy)


def _newest_row_time(session: Session) -> datetime | None:
    """Return the later of the newest heartbeat and the time of the last recorded event; None in an empty database."""
    times = [
        session.scalar(select(func.max(AttemptRow.heartbeat_at))),
        session.scalar(select(EventRow.at).order_by(EventRow.id.desc()).limit(1)),
    ]
    return max((moment for moment in times if moment is not None), default=None)
