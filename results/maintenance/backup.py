"""Backup of a database while others write to it."""

from __future__ import annotations

import os
import shlex
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.engine import URL

from ..console.text import is_secret
from ..errors import StoreError, StoreMissing
from ..store.database import make_engine, resolve_url, revision_of, sqlite_file, translate_driver_errors
from ..store.upgrading import copy_database, copy_error


def backup(url_or_path: str | Path | None, to: Path | None = None) -> Path:
    """Copy a SQLite database in its current state to `<db>.<UTC time>.backup` next to it, and return the file.

    Writers are not blocked. The copy is verified, synced, has the permissions of the database, and includes the
    write-ahead log. Nothing is ever overwritten. A database of an older or newer release is copied as well.

    Args:
        url_or_path: database URL, file, or None for the default.
        to: another existing folder, or the file to write.

    Returns:
        Absolute path of the copy.

    Raises:
        StoreMissing: there is no database, or it is empty.
        StoreError: it is not a database of this program, the target exists, its folder does not, or the disk is full.
            For PostgreSQL: the message contains the command to use.
    """
    url = resolve_url(url_or_path)
    source = sqlite_file(url)
    if source is None:
        raise StoreError(f"PostgreSQL is backed up with its own tool; run: {dump_command(url)}")
    if not source.exists():
        raise StoreMissing(f"there is no database {source}; name it with --db")
    target = to.absolute() if to is not None else source.parent
    if target.is_dir():
        target = target / f"{source.name}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%fZ')}.backup"
    if not target.parent.is_dir():
        raise StoreError(f"folder {target.parent} does not exist; create it, or choose another with --to")
    if os.path.lexists(target):
        raise StoreError(f"{target} exists already and was not changed; name another file with --to")
    engine = make_engine(url)
    try:
        with translate_driver_errors(url), engine.execution_options(begin="BEGIN").connect() as connection:
            if revision_of(connection) is None:
                raise StoreMissing(f"{source} is empty, so there is nothing to back up; name the database with --db")
        copy_database(engine, source, target)
    except (sqlite3.Error, OSError) as error:
        raise copy_error(error, engine.url, target) from error
    finally:
        engine.dispose()
    return target


def dump_command(url: URL) -> str:
    """Return the shell command that backs up a PostgreSQL database, without its password."""
    query = {name: value for name, value in url.query.items() if not is_secret(name)}
    plain = url._replace(drivername="postgresql", password=None, query=query).render_as_string()  # type: ignore[arg-type]
    return f"pg_dump --format=custom --file={shlex.quote(f'{url.database}.dump')} --dbname={shlex.quote(plain)}"
