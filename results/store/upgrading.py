"""Creation of databases, copies of a database in use, and upgrades of older databases to this release.

Alembic is imported only when a migration runs.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from ..console.output_files import fsync_path
from ..errors import StoreError, StoreMissing, StoreUnreachable, WriteRefused
from .database import (
    check_revision,
    damage,
    make_engine,
    redacted_url,
    resolve_url,
    revision_of,
    sqlite_file,
    translate_driver_errors,
)
from .schema import HEAD, REVISIONS, Base

PARTIAL_SUFFIX = ".part"
"""Suffix of the name of a copy that is not complete yet."""


def copy_database(engine: Engine, source: Path, target: Path) -> None:
    """Copy a SQLite database while others write to it.

    The copy is complete, verified, synced and has the permissions of the source; after an error there is no copy. It is
    one file, without WAL, written under a temporary name in the target's folder first.

    Args:
        engine: engine of the source.
        source: file of the source, for its permissions.
        target: new file, in an existing folder.

    Raises:
        sqlite3.Error: the source or the copy is damaged, or SQLite cannot write the copy.
        OSError: the copy cannot be written; FileExistsError if the target exists.
    """
    with _temporary_file(target) as part:
        raw = engine.raw_connection()
        try:
            raw.cursor().execute("VACUUM INTO ?", (str(part),))
        finally:
            raw.close()
        verify_copy(part)
        os.chmod(part, stat.S_IMODE(source.stat().st_mode))
        _publish(part, target)


@contextmanager
def _temporary_file(target: Path) -> Iterator[Path]:
    """Yield an empty new file next to the target that only its owner may read; it is deleted at the end.

    Its rollback journal is deleted, too. Raises OSError if it cannot be created.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}-{time.time_ns()}{PARTIAL_SUFFIX}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield part
    finally:
        for path in (part, part.with_name(f"{part.name}-journal")):
            path.unlink(missing_ok=True)


def copy_error(error: sqlite3.Error | OSError, url: URL, target: Path) -> StoreError:
    """Return the error that explains why copy_database did not copy the database at `url`.

    StoreDamaged for a damaged source or copy, WriteRefused otherwise. `target` is the file that was to be written.
    """
    damaged = damage(error, url)
    if damaged is not None:
        return damaged
    cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return WriteRefused(
        f"{redacted_url(url)} cannot be copied to {target}: {cause}; free disk space, or choose another path"
    )


def verify_copy(copy: Path) -> None:
    """Check the integrity of a copy and sync it to the disk; reads all of it.

    Raises:
        sqlite3.DatabaseError: it is damaged.
        OSError: it cannot be synced.
    """
    # immutable: otherwise SQLite would create -wal and -shm files next to a copy in WAL mode
    with closing(sqlite3.connect(f"{copy.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")
    fsync_path(copy)


def _publish(part: Path, target: Path) -> None:
    """Give the copy its final name without replacing a file, and sync the folder.

    Raises:
        FileExistsError: another file has the name.
        OSError: the copy cannot be renamed.
    """
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(17, "it exists already", str(target)) from None
        os.rename(part, target)
    fsync_path(target.parent)


MIGRATIONS = Path(__file__).parents[1] / "migrations"


@contextmanager
def creation_lock(url: URL) -> Iterator[None]:
    """Hold the lock under which databases are created and upgraded: one process at a time per folder.

    Waits without limit for another process. The lock is on the folder itself, so that no lock file remains. For
    PostgreSQL this does nothing, since it locks inside its transaction.

    Raises:
        StoreError: the folder does not exist.
    """
    path = sqlite_file(url)
    if path is None:
        yield
        return
    if not path.parent.is_dir():
        raise StoreError(f"folder {path.parent} does not exist; create it, or choose another with --db")
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def migrate(connection: Connection, *, migrations: Path = MIGRATIONS, head: str = HEAD) -> None:
    """Run the missing migrations inside the connection's transaction; does not commit.

    An empty database gets all of them, one at `head` none.

    Args:
        connection: connection in a transaction.
        migrations: folder of the migration scripts.
        head: target revision.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations).replace("%", "%%"))
    config.attributes.update(connection=connection, metadata=Base.metadata)
    command.upgrade(config, head)


def create_if_empty(engine: Engine) -> None:
    """Run all migrations in one transaction if the database is empty; do nothing if it is of this program.

    On PostgreSQL other processes that try the same wait for an advisory lock. Raises StoreError for a database of
    another program.
    """
    with engine.begin() as connection:
        if connection.dialect.name != "sqlite":
            connection.execute(text("SELECT pg_advisory_xact_lock(7461001)"))
        if revision_of(connection) is None:
            migrate(connection)


def create_database(url: URL) -> None:
    """Create the database if it is missing or empty; do nothing if it exists.

    Of several processes that try at once, one does it and the others wait. A new file is removed if it cannot be
    completed. For PostgreSQL only the tables are created; the database itself must exist.

    Raises:
        StoreError: the folder does not exist, the database belongs to another program, or the driver reports an error
            (see translate_driver_errors).
    """
    with creation_lock(url), translate_driver_errors(url):
        path = sqlite_file(url)
        is_new = path is not None and not path.exists()
        engine = make_engine(url)
        try:
            try:
                create_if_empty(engine)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                create_if_empty(engine)  # it may exist already, with the answer lost
        except BaseException:
            engine.dispose()
            if path is not None and is_new:
                for part in ("", "-wal", "-shm", "-journal"):
                    path.with_name(f"{path.name}{part}").unlink(missing_ok=True)
            raise
        finally:
            engine.dispose()


def create_temporary_database(file: Path) -> None:
    """Create a database for the life of its process: the same tables, from the models, in a tenth of the time.

    It lacks the view `results`, which is for people with an SQL shell, and a power failure may destroy it. The caller
    deletes the file. Raises an error of the driver if the tables exist.
    """
    engine = make_engine(resolve_url(file))
    try:
        with engine.begin() as connection:
            Base.metadata.create_all(connection, checkfirst=False)
            connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
            connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
    finally:
        engine.dispose()


def _row_counts(connection: Connection) -> dict[str, int]:
    names = [name for name in inspect(connection).get_table_names() if name != "alembic_version"]
    return {name: int(connection.scalar(text(f'SELECT COUNT(*) FROM "{name}"')) or 0) for name in sorted(names)}


def _backup(engine: Engine, path: Path, revision: str) -> Path:
    """Copy the SQLite database next to itself, and return the copy.

    Its name is `STEM.before-upgrade-from-REVISION.TIME` with the suffix of the database; TIME is UTC.

    Raises:
        StoreError: the copy failed (StoreDamaged or WriteRefused).
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    copy = path.with_name(f"{path.stem}.before-upgrade-from-{revision}.{stamp}{path.suffix}")
    try:
        copy_database(engine, path, copy)
    except (sqlite3.Error, OSError) as error:
        raise copy_error(error, engine.url, copy) from error
    return copy


def upgrade_store(
    url_or_path: str | Path | None = None, *, migrations: Path = MIGRATIONS, head: str = HEAD
) -> Path | None:
    """Upgrade an older database to this release; nothing else ever migrates a database.

    The upgrade is one transaction that is applied completely or not at all. Foreign keys are off, since a rebuilt table
    would otherwise delete its child rows. A foreign-key check and a comparison of row counts follow.

    Args:
        url_or_path: database URL, file, or None for the default.
        migrations: folder of the migration scripts.
        head: target revision.

    Returns:
        The backup of the SQLite database, made next to it before any change. None if there was nothing to do, and for
        PostgreSQL (which is backed up with pg_dump).

    Raises:
        StoreMissing: there is no database, or it is empty.
        StoreTooNew: a newer release has written it.
        StoreBusy: the database is locked.
        StoreUnreachable: the server does not answer, or the connection was lost during the upgrade.
        StoreError: it is not a database of this program, the backup failed, or the upgrade failed or would lose rows;
            nothing has changed.
    """
    url = resolve_url(url_or_path)
    path = sqlite_file(url)
    if path is not None and not path.exists():
        raise StoreMissing(f"there is no database {path}; launch a grid first, or name the database with --db")
    with creation_lock(url):
        engine = make_engine(url, foreign_keys=False)
        try:
            with translate_driver_errors(url), engine.begin() as connection:
                revision = revision_of(connection)
            if revision == head:
                return None
            if revision is None or revision not in REVISIONS:
                check_revision(revision, redacted_url(url))
            copy = _backup(engine, path, str(revision)) if path is not None else None
            with engine.begin() as connection:
                _upgrade_checked(connection, migrations, head)
            return copy
        except DBAPIError as error:
            if error.connection_invalidated:
                raise StoreUnreachable(
                    f"{redacted_url(url)} was lost during the upgrade, which takes effect completely or not at "
                    "all; run it again"
                ) from error
            raise StoreError(
                f"the upgrade of {redacted_url(url)} failed and was undone: {error.orig}; please report this"
            ) from error
        finally:
            engine.dispose()


def _upgrade_checked(connection: Connection, migrations: Path, head: str) -> None:
    """Run the migrations in the connection's transaction, and raise StoreError if rows would be lost.

    Rows would be lost if a table has fewer rows than before. On SQLite, broken foreign keys raise the error as well.
    PostgreSQL first waits for other upgrades (an advisory lock). The caller's transaction then rolls everything back.
    """
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(7461001)"))
    before = _row_counts(connection)
    migrate(connection, migrations=migrations, head=head)
    after = _row_counts(connection)
    lost = [f"{name} {rows} -> {after.get(name, 0)}" for name, rows in before.items() if after.get(name, 0) < rows]
    if sqlite:
        broken = connection.execute(text("PRAGMA foreign_key_check")).fetchall()
        lost += [f"{row[0]} refers to a missing {row[2]}" for row in broken[:3]]
    if lost:
        raise StoreError(f"the upgrade would lose data ({'; '.join(lost)}) and was undone; please report this")
