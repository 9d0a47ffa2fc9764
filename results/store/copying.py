"""A copy of a SQLite database that is whole, made while others write to it."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from ..console.output_files import sync
from ..errors import StoreError, WriteRefused
from .database import damage, shown

PART = ".part"
"""How the name of a copy ends that is not complete yet."""


def copy_database(engine: Engine, source: Path, target: Path) -> None:
    """Copies a SQLite database while others write to it: whole, checked, synced, as readable as the source, or not at all.

    Raises sqlite3.Error or OSError (FileExistsError when the target is there).
    """
    with _empty_beside(target) as part:
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("VACUUM INTO ?", (str(part),))
        finally:
            raw.close()
        _verified(part)
        os.chmod(part, stat.S_IMODE(source.stat().st_mode))
        _publish(part, target)


@contextmanager
def _empty_beside(target: Path) -> Iterator[Path]:
    """An empty file beside the target that only its owner may read; gone afterwards."""
    part = target.with_name(f".{target.name}.{os.getpid()}-{time.time_ns()}{PART}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield part
    finally:
        for left in (part, part.with_name(f"{part.name}-journal")):
            left.unlink(missing_ok=True)


def not_copied(error: sqlite3.Error | OSError, url: URL, target: Path) -> StoreError:
    """Explain why copy_database did not copy the database at `url`."""
    damaged = damage(error, url)
    if damaged is not None:
        return damaged
    cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return WriteRefused(f"{shown(url)} cannot be copied to {target}: {cause}; make room, or name another place")


def _verified(copy: Path) -> None:
    # immutable: a copy in the mode of a write-ahead log would otherwise grow files beside it
    with closing(sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {found}")
    sync(copy)


def _publish(part: Path, target: Path) -> None:
    """Gives the copy its name, unless something else has it by now."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(17, "it exists already", str(target)) from None
        os.rename(part, target)
    sync(target.parent)
