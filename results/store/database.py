"""Database URLs, engines and driver errors: from `--db` to an engine, and messages for what fails on the way.

SQLite runs in WAL mode on a local disk. Every write transaction starts with BEGIN IMMEDIATE, since a deferred one that
reads and then writes fails under load or loses updates. Waits for the lock last up to 30 s. A commit waits for the disk
only with the execution option `durable`; it then makes all earlier commits durable as well.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Pool, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.orm import Session

from ..console.text import HIDDEN, is_secret, storable_text, without_passwords
from ..errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreMissing,
    StoreOutdated,
    StoreTooNew,
    StoreUnreachable,
    WriteRefused,
    install_hint,
)
from ..names import DATABASE, quoted_short
from .schema import HEAD, REVISIONS

BUSY_MS = 30_000
NETWORK_FILESYSTEMS = frozenset(
    "9p afs beegfs ceph cifs coda fuse.ceph fuse.ceph-fuse fuse.gcsfuse fuse.glusterfs fuse.rclone fuse.s3fs fuse.sshfs "
    "glusterfs gpfs lustre ncpfs nfs nfs4 orangefs panfs pvfs2 smb3 smbfs wekafs".split()
)
DEFAULT = f"sqlite:///{DATABASE}"
_URLS = "use a file name, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
_ADDRESS = re.compile(r"(?i)postgres|[^/]*:[^/]*@|\w*//")


def resolve_url(url_or_path: str | Path | None = None) -> URL:
    """Return the URL of the database: of the argument, else of ATMA_DB, else of atma.db in the working folder.

    Text without `://` is the path of a SQLite file. The path of a SQLite file becomes absolute, with `~` expanded;
    other parts of a SQLite URL, such as its query, are dropped. PostgreSQL gets the driver psycopg. Nothing is opened,
    and the file need not exist.

    Raises:
        StoreError: the URL is neither SQLite on a file nor PostgreSQL, cannot be parsed, is in memory, or has an @ in a
            password. The message never contains the URL.
    """
    address = str(url_or_path or os.environ.get("ATMA_DB") or DEFAULT)
    if "://" not in address and _ADDRESS.match(address) and not os.path.lexists(address):
        raise StoreError(
            f"the address of the database has an @ but no ://, so its beginning seems to be missing; {_URLS}"
        )
    try:
        url = make_url(address) if "://" in address else URL.create("sqlite", database=address)
    except (ArgumentError, ValueError):
        # the address and the error are not repeated: any part may be the password
        raise StoreError(f"the address of the database is not a valid URL; {_URLS}") from None
    backend = url.get_backend_name()
    if backend != "sqlite" and address.count("@") > 1:
        raise StoreError("the database's URL has more than one @; write an @ in the password as %40")
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise StoreError("an in-memory database cannot be shared between processes; name a file instead")
        try:
            return URL.create("sqlite", database=str(Path(url.database).expanduser().absolute()))
        except RuntimeError as error:  # raised for ~ with an unknown user
            error_text = str(error).rstrip(".")
            raise StoreError(
                f"{quoted_short(url.database)} cannot be a database: {error_text}; name another with --db"
            ) from error
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise StoreError(f"{backend} databases are not supported; use sqlite:///FILE or postgresql://...")


def sqlite_file(url: URL) -> Path | None:
    """Return the file of a SQLite database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def redacted_url(url: URL) -> str:
    """Return the database as shown to users: its file, or its URL without passwords (in the query as well)."""
    query = {name: HIDDEN if is_secret(name) else value for name, value in url.query.items()}
    text = url._replace(query=query).render_as_string(hide_password=True)  # type: ignore[arg-type]
    return str(sqlite_file(url) or without_passwords(text))


def network_filesystem(path: Path, mountinfo: str) -> str | None:
    """Return the type of the network file system that holds `path`, such as `nfs4`; None for a local one.

    A type is a network file system if NETWORK_FILESYSTEMS lists it, such as nfs, cifs, smb3, 9p, lustre, gpfs, ceph or
    fuse.sshfs.

    Args:
        path: absolute path, with symbolic links resolved.
        mountinfo: text of /proc/self/mountinfo. The deepest mount that contains the path counts, and the last of equal
            ones; lines that cannot be parsed are skipped.
    """
    best, filesystem = -1, ""
    for line in mountinfo.splitlines():
        mount, _, right = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, filesystem = len(point.parts), right.split()[0]
    return filesystem if filesystem in NETWORK_FILESYSTEMS else None


def refuse_network(path: Path) -> None:
    """Raise StoreError if the SQLite file is on a network file system (WAL needs the shared memory of one host).

    Links are resolved; the file need not exist. Does nothing on systems without /proc/self/mountinfo.
    """
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return
    kind = network_filesystem(path.resolve(), table.read_text(errors="replace"))
    if kind:
        raise StoreError(
            f"{path} is on {kind}, where SQLite databases become corrupt; use a local disk or PostgreSQL (--db)"
        )


def jsonable(value: Any) -> Any:
    """Return a copy of the value with non-finite floats as "NaN", "Infinity" or "-Infinity", and with keys as text.

    Goes through dicts, lists and tuples (which become lists); every other value is returned as it is. JSON has no such
    numbers and PostgreSQL rejects them; pydantic parses these texts.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _to_json(value: Any) -> str:
    return storable_text(json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, default=_plain))


def _plain(value: Any) -> Any:
    """Return mappings that are no dict, paths and numpy numbers as values that JSON supports."""
    if hasattr(value, "items"):
        return jsonable(dict(value))
    return jsonable(value.item()) if hasattr(value, "item") else str(value)


engines_in_use: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()
"""Engines of this process, with an increasing number for the order in which they were made."""
_numbers = itertools.count()
_inherited: list[Pool] = []


def _detach_after_fork() -> None:
    """Leave the parent's connections untouched in a forked child (not even closed), and start without any."""
    for engine in list(engines_in_use):
        _inherited.append(engine.pool)
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_detach_after_fork)


def open_engines() -> list[Engine]:
    """Return the engines of all databases that this process has opened and not discarded, the newest first."""
    return [engine for engine, _ in sorted(engines_in_use.items(), key=lambda item: -item[1])]


_SYNCHRONOUS = {False: "NORMAL", True: "FULL"}
"""PRAGMA synchronous by durability.

In WAL mode only a FULL commit waits until the log is on the disk, with all earlier commits.
"""
_WAIT_FOR_DISK = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
"""Makes one PostgreSQL transaction wait for the disk if the server or role is set not to.

Stricter settings stay.
"""


_KEEPALIVE = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}  # fmt: skip
"""Connection parameters that detect a dead connection within about a minute.

Parameters in the URL have precedence.
"""


def make_engine(url: URL, *, foreign_keys: bool = True, read_only: bool = False) -> Engine:
    """Return an engine with the settings of this module. After a fork the child opens its own connections.

    Connects to nothing yet. The engine is added to `engines_in_use`. Its transactions heed the execution options
    `durable` (wait for the disk), `wait_ms` (lock time-out, at most 30,000, BUSY_MS) and `begin` (SQLite's BEGIN
    statement; BEGIN IMMEDIATE by default). A SQLite file is switched to WAL mode at the first connection.

    Args:
        url: database URL as returned by `resolve_url`.
        foreign_keys: let SQLite enforce foreign keys; ignored for PostgreSQL, which always does.
        read_only: make the database itself refuse every change.

    Raises:
        StoreError: the PostgreSQL driver is not installed.
    """
    sqlite = url.get_backend_name() == "sqlite"
    lively = {} if sqlite else {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
    try:
        engine = create_engine(url, json_serializer=_to_json, pool_pre_ping=not sqlite, connect_args=lively)
    except ModuleNotFoundError as error:
        raise StoreError(f"PostgreSQL needs psycopg; {install_hint('psycopg')}") from error
    engines_in_use[engine] = next(_numbers)

    @event.listens_for(engine, "handle_error")
    def _failed(context: Any) -> None:
        """Raise StoreDamaged for a damaged file; otherwise note the URL at the error, for explain_driver_error."""
        damaged = damage(context.original_exception, url)
        if damaged is not None:
            raise damaged from context.original_exception
        if context.sqlalchemy_exception is not None:
            context.sqlalchemy_exception.database_url = url  # for explain_driver_error

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: Any) -> None:
        """Set up a new connection to SQLite or PostgreSQL.

        SQLite: autocommit (isolation level None), lock time-out, journal mode, synchronous mode, foreign keys and
        read-only mode. PostgreSQL: lock time-out and the read-only default, committed.

        Raises StoreDamaged for a file whose header cannot be decoded.
        """
        if not sqlite:
            connection.execute(f"SET lock_timeout = {BUSY_MS}")
            if read_only:
                connection.execute("SET default_transaction_read_only = on")
            connection.commit()
            return
        connection.isolation_level = None  # _begun begins transactions itself
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        try:
            is_logged = cursor.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        except UnicodeDecodeError as error:
            raise damage(error, url) or error from error
        if not is_logged:
            cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={_SYNCHRONOUS[False]}")
        cursor.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        """Begin a transaction with the lock time-out and the durability of its execution options.

        Options: `wait_ms` (default and maximum 30,000, BUSY_MS), `durable` (default False), `begin` (SQLite only).
        """
        options = connection.get_execution_options()
        durable = bool(options.get("durable"))
        wait = min(options.get("wait_ms", BUSY_MS), BUSY_MS)
        if not sqlite:
            if durable:
                connection.exec_driver_sql(_WAIT_FOR_DISK)
            if wait < BUSY_MS:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(wait, 1)}")  # 0 would mean no limit
            return
        if connection.info.get("wait_ms", BUSY_MS) != wait:
            connection.exec_driver_sql(f"PRAGMA busy_timeout={wait}")
            connection.info["wait_ms"] = wait
        # this pragma is not allowed inside a transaction, so it stays until a transaction needs another value
        if connection.info.get("durable", False) != durable:
            connection.exec_driver_sql(f"PRAGMA synchronous={_SYNCHRONOUS[durable]}")
            connection.info["durable"] = durable
        connection.exec_driver_sql(options.get("begin", "BEGIN IMMEDIATE"))

    return engine


def revision_of(connection: Connection) -> str | None:
    """Return the database's schema revision, such as `0009`; None if it has no tables.

    The revision need not be one that this release knows.

    Raises:
        StoreError: it has tables, but not those of this program.
    """
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" in tables and "attempt" in tables and "sweep" in tables:
        return str(connection.scalar(text("SELECT version_num FROM alembic_version")))
    if tables:
        raise StoreError(
            f"{redacted_url(connection.engine.url)} is not a database of atma-sweep; name another with --db"
        )
    return None


def check_revision(revision: str | None, database_name: str) -> None:
    """Raise an error unless the schema revision is this release's.

    Args:
        revision: revision of the database; None for an empty one.
        database_name: the database as the messages show it.

    Raises:
        StoreMissing: the database is empty.
        StoreOutdated: the revision is older.
        StoreTooNew: the revision is unknown.
    """
    if revision is None:
        raise StoreMissing(f"{database_name} is empty; launch a grid first, or name the database with --db")
    if revision not in REVISIONS:
        raise StoreTooNew(
            f"{database_name} was written by a newer atma-sweep (revision {revision}); upgrade the program"
        )
    if revision != HEAD:
        raise StoreOutdated(f"{database_name} is of an older release (revision {revision}); run: atma-sweep db upgrade")


@contextmanager
def translate_driver_errors(url: URL) -> Iterator[None]:
    """Turn driver errors of the body into one-line errors for users; other exceptions pass unchanged.

    Raises:
        StoreBusy: the database is locked.
        StoreUnreachable: the server does not answer.
        StoreDamaged: the file is damaged.
        WriteRefused: the file is read-only or the disk is full.
        StoreError: any other driver error.
    """
    try:
        yield
    except DBAPIError as error:
        unusable = StoreError(
            f"cannot use {redacted_url(url)} as a database: {_first_line(error)}; name another with --db"
        )
        raise explain_driver_error(error, url) or unusable from error


def explain_driver_error(error: BaseException, url: URL | None = None) -> StoreError | None:
    """Return the StoreError to show for a database driver's error that a user can resolve; None for any other error.

    The result is StoreBusy for a lock, StoreUnreachable for a server that does not answer, WriteRefused for a read-only
    file or a full disk, and StoreDamaged for a damaged file. It is returned, not raised.

    Without `url` the error must come from an engine of `make_engine`, which notes its URL at the error; for another
    error the result is None.
    """
    url = url or getattr(error, "database_url", None)
    if not isinstance(error, DBAPIError | sqlite3.Error) or url is None:
        return None
    first = _first_line(error)
    if any(word in first for word in ("locked", "busy", "lock timeout")):
        return StoreBusy(f"{redacted_url(url)} is locked by another program; close it and try again")
    if isinstance(error, OperationalError) and sqlite_file(url) is None and is_server_unreachable(str(error.orig)):
        return StoreUnreachable(
            f"{redacted_url(url)} does not answer: {first}; start its server, or name another with --db"
        )
    if "readonly" in first or "read-only" in first:
        return WriteRefused(
            f"{redacted_url(url)} or its folder is not writable here, which SQLite needs even for reading; "
            f"{READ_ONLY_REMEDY}"
        )
    if any(part in first for part in _DISK) or ("unable to open" in first and _is_full(url)):
        return WriteRefused(
            f"{redacted_url(url)} cannot be written, which SQLite needs even for reading: its disk is full or "
            f"broken ({first}); free disk space"
        )
    return damage(_original(error), url)


def _original(error: BaseException) -> BaseException:
    """Return the driver's own error."""
    return (error.orig if isinstance(error, DBAPIError) else None) or error


def _first_line(error: BaseException) -> str:
    """Return the first line of the driver's message, or the name of the error's class."""
    original = _original(error)
    return next(iter(str(original).strip().splitlines()), type(original).__name__)


def _is_full(url: URL) -> bool:
    """Return True if the disk of a SQLite file has less than 32 KiB free, which SQLite needs next to it."""
    path = sqlite_file(url)
    return path is not None and path.parent.is_dir() and shutil.disk_usage(path.parent).free < SHARED_MEMORY_BYTES


def damage(error: BaseException | None, url: URL) -> StoreDamaged | None:
    """Return the StoreDamaged to show (not raised) for an error that SQLite raises on a damaged file.

    None for any other error, for no error, and for PostgreSQL. A file that never was a database is not damaged. May
    read the first bytes of the file.

    Args:
        error: error of sqlite3 or SQLAlchemy, or a UnicodeDecodeError while reading.
        url: URL of the database.
    """
    path = sqlite_file(url)
    if path is None or error is None:
        return None
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    # SQLite may quote undecodable bytes of a damaged schema; for an undecodable value the row is reported instead
    is_text = isinstance(error, UnicodeDecodeError)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT) or is_text or "malformed" in str(error):
        return _damaged(path, "text that is not UTF-8" if is_text else str(error))
    if code == sqlite3.SQLITE_NOTADB and _was_database(path):
        return _damaged(path, "its header cannot be read")
    return None


def find_damage() -> StoreDamaged | None:
    """Check the SQLite files that this process has open, after an unforeseen error.

    Each file is checked for at most 10 seconds (CHECK_S). Files that are locked, missing or too large to check in that
    time are skipped, and so is PostgreSQL. Stops at the first damaged file.

    Returns:
        The error to show (not raised); None if no damage was found.
    """
    for engine in list(engines_in_use):
        path = sqlite_file(engine.url)
        if path is None or not path.is_file():
            continue
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
                connection.set_progress_handler(partial(_is_late, time.monotonic() + CHECK_S), 100_000)
                verdict = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        except sqlite3.OperationalError:
            continue  # locked, missing, or too large to check now
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return damage(error, engine.url) or _damaged(path, str(error))
        if verdict != "ok":
            return _damaged(path, " ".join(verdict.split())[:200])
    return None


def _is_late(deadline: float) -> bool:
    return time.monotonic() > deadline


def _damaged(path: Path, cause: str) -> StoreDamaged:
    """Return a StoreDamaged (not raised) that gives the reason and the command that saves what can be read."""
    file = shlex.quote(str(path))
    return StoreDamaged(
        f"{path} is damaged: {cause}; run atma-sweep db check, then restore a backup, or recover what can be "
        f"read: sqlite3 {file} .recover | sqlite3 NEW.db"
    )


def _was_database(path: Path) -> bool:
    """Return True if a file begins approximately like a SQLite file, or with zeros, as after a crash of the machine.

    At most four of the 16 bytes of SQLite's header may differ. An empty file counts as zeros.
    """
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    return sum(map(int.__eq__, start, _MAGIC)) >= len(_MAGIC) - 4 or not start.strip(b"\0")


def is_server_unreachable(message: str) -> bool:
    """Return True if a PostgreSQL client's message says that no server accepted the connection.

    That includes a server that starts up, shuts down or has too many connections. False for a server that answered and
    refused the user or the database.
    """
    refused = "FATAL" in message and not any(
        phrase in message for phrase in ("starting up", "shutting down", "too many")
    )
    return ("connection" in message or "resolve host" in message) and not refused


SERVER_DOWN_REMEDY = "does not answer; start its server"
_DISK = ("is full", "disk I/O error", "No space left")
DISK_REMEDY = "cannot be written, its disk is full or broken; free disk space"
SHARED_MEMORY_BYTES = 2**15
"""Disk space that SQLite needs next to a file, even to read it."""
CHECK_S = 10.0
"""Seconds that a file is searched for damage after an unforeseen error."""
_MAGIC = b"SQLite format 3\0"
READ_ONLY_REMEDY = "check its permissions, or name another database with --db"
_REMEDIES = {
    ("locked", "busy", "lock timeout", "deadlock"): "is locked by another program; close it",
    _DISK: DISK_REMEDY,
    ("unable to open database file",): "cannot be opened any more; check its folder",
    ("server closed", "connection", "shutting down", "starting up"): SERVER_DOWN_REMEDY,
}
"""Advice by phrases of driver messages, for errors that may pass."""


def remedy_for(error: DBAPIError) -> str | None:
    """Return the advice (the end of a sentence) for a database that cannot answer now but may later.

    None for an error that waiting does not cure.
    """
    if error.connection_invalidated:
        return SERVER_DOWN_REMEDY
    message = str(error.orig) if isinstance(error, OperationalError) else ""
    return next((remedy for phrases, remedy in _REMEDIES.items() if any(word in message for word in phrases)), None)


def upsert(session: Session, row: Any, *, key: Sequence[str], replace: bool = True) -> Any:
    """Return an INSERT that, if the key exists, replaces the other columns (`replace`) or keeps the existing row.

    The statement is not executed. With `replace`, columns that the executed values omit are set to their defaults.

    Args:
        session: open session; its dialect decides the syntax.
        row: mapped class of the table.
        key: columns of the unique key.
        replace: replace all columns other than the key and `id`.
    """
    # imports one dialect only: importing both takes a tenth of the time of `status`
    dialect: Any = importlib.import_module(f"sqlalchemy.dialects.{session.get_bind().dialect.name}")
    statement: Any = dialect.insert(row)
    if not replace:
        return statement.on_conflict_do_nothing(index_elements=list(key))
    replaced = [column.name for column in row.__table__.columns if column.name not in (*key, "id")]
    return statement.on_conflict_do_update(
        index_elements=list(key), set_={name: statement.excluded[name] for name in replaced}
    )
