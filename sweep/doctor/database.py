"""Looks at the database and the clock."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from ...results.console.text import counted
from ...results.errors import StoreError, StoreMissing
from ...results.store import queries
from ...results.store.database import translate_driver_errors
from ...results.store.schema import HEAD, AttemptRow, EventRow
from ...results.store.store import Store
from ..units import size
from .context import LOCK_SECONDS, Check, Context, absent, bad, ok, warn

CLOCK_S = 0.2
JUMP_S = 0.05
"""How far wall clock and monotonic clock may part meanwhile."""
AHEAD_S = (2.0, 60.0)
"""Rows this far from the future are odd; this far, as long as a supervisor's lease, they upset who owns a sweep."""


def _parted(error: BaseException) -> tuple[str, str]:
    """Our own messages end with the remedy, after a semicolon."""
    found, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return (found, remedy) if found else (remedy, "")


def look_at_database(context: Context) -> Check:
    try:
        with context.store() as store, translate_driver_errors(store.url):
            count = len(store.sweeps())
            return ok(f"{store}, revision {HEAD}, {counted(count, 'sweep')}, {_sizes(store)}")
    except StoreMissing as error:
        return absent(*_parted(error))
    except StoreError as error:
        return bad(*_parted(error))


def _sizes(store: Store) -> str:
    if store.path is None:
        with store.transaction(write=False) as session:
            return size(int(session.scalar(text("SELECT pg_database_size(current_database())")) or 0))
    log = store.path.with_name(f"{store.path.name}-wal")
    return f"{size(store.path.stat().st_size)}, write-ahead log {size(log.stat().st_size if log.exists() else 0)}"


def _connect(path: Path) -> sqlite3.Connection:
    """An existing file, never a new one."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=LOCK_SECONDS, isolation_level=None)


def look_at_integrity(context: Context) -> Check:
    if context.file is None:
        return absent("PostgreSQL looks after its own")
    if not context.file.exists():
        return absent("no database yet")
    with contextlib.closing(_connect(context.file)) as connection:
        try:
            said = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        except sqlite3.DatabaseError as error:
            said = [str(error)]
    if said == ["ok"]:
        return ok("quick_check found nothing")
    found = " ".join("; ".join(said).split())[:300]
    return bad(f"quick_check: {found}", f"copy what can be read: sqlite3 {context.file} .recover | sqlite3 NEW.db")


def look_at_lock(context: Context) -> Check:
    began = time.monotonic()
    if context.file is None:
        with context.store() as store:
            store.write(lambda session: session.execute(text("SELECT 1")), patience=LOCK_SECONDS)
        return ok(f"a write transaction took {1000 * (time.monotonic() - began):.0f} ms")
    if not context.file.exists():
        return absent("no database yet")
    with contextlib.closing(_connect(context.file)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            if "locked" not in str(error):
                return bad(f"cannot be locked for writing: {error}", f"make {context.file} writable")
            what = f"another program has held it for {LOCK_SECONDS:g} s"
            return bad(what, f"close that program; fuser {context.file} names it")
    return ok(f"taken and given back in {1000 * (time.monotonic() - began):.0f} ms")


def look_at_clock(context: Context) -> Check:
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_S)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    found = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {1000 * abs(drift):.1f} ms off a steady clock over {CLOCK_S} s"
    if abs(drift) > JUMP_S:
        return warn(found, "something sets the clock; let one program (chrony, timesyncd) steer it slowly")
    return ok(found)


def look_at_clock_and_rows(context: Context) -> Check:
    try:
        with context.store() as store, store.transaction(write=False) as session:
            theirs, newest = queries.now(session), _newest(session)
            ours = datetime.now(UTC)
    except StoreError as error:
        return absent(f"no database to compare with: {_parted(error)[0]}")
    apart = (theirs - ours).total_seconds()
    ahead = (newest - ours).total_seconds() if newest is not None else 0.0
    worst = max(ahead, abs(apart))
    found = "no row is from the future" if newest is not None else "no row yet"
    if ahead > AHEAD_S[0]:
        found = f"the newest row is from {ahead:.0f} s in the future"
    if abs(apart) > AHEAD_S[0]:
        found += f"; the database's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
    if worst <= AHEAD_S[0]:
        return ok(found)
    remedy = "set the clocks of all machines by one time server"
    return bad(found, remedy) if worst > AHEAD_S[1] else warn(found, remedy)


def _newest(session: Session) -> datetime | None:
    times = [
        session.scalar(select(func.max(AttemptRow.heartbeat_at))),
        session.scalar(select(EventRow.at).order_by(EventRow.id.desc()).limit(1)),
    ]
    return max((moment for moment in times if moment is not None), default=None)
