"""Places and connections: from `--db` to an engine, and what may go wrong on the way.

SQLite: WAL on a local disk, every write transaction starts with BEGIN IMMEDIATE (a deferred one that reads and then
writes fails under load, or loses updates), waits of 30 s for the lock. A commit waits for the disk only where it is asked
to (the execution option `durable`), and then it takes all earlier ones with it.
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


def place(url_or_path: str | Path | None = None) -> URL:
    """The database that was asked for: the argument, else ATMA_DB, else atma.db in the working folder.

    Raises StoreError for a URL that is neither SQLite on a file nor PostgreSQL.
    """
    asked = str(url_or_path or os.environ.get("ATMA_DB") or DEFAULT)
    if "://" not in asked and _ADDRESS.match(asked) and not os.path.lexists(asked):
        raise StoreError(f"what names the database has an @ but no ://, as if it began in the middle; {_URLS}")
    try:
        url = make_url(asked) if "://" in asked else URL.create("sqlite", database=asked)
    except (ArgumentError, ValueError):
        # nothing of it is said again: any part may be the password, also in the words of the error
        raise StoreError(f"what names the database is no URL that can be read; {_URLS}") from None
    backend = url.get_backend_name()
    if backend != "sqlite" and asked.count("@") > 1:
        raise StoreError("the database's URL has more than one @; write that of a password as %40")
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise StoreError("an in-memory database cannot be shared between processes; name a file instead")
        try:
            return URL.create("sqlite", database=str(Path(url.database).expanduser().absolute()))
        except RuntimeError as error:  # of ~ and a user that there is not
            said = str(error).rstrip(".")
            raise StoreError(
                f"{quoted_short(url.database)} is no place for a database: {said}; name one with --db"
            ) from error
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise StoreError(f"{backend} databases are not supported; use sqlite:///FILE or postgresql://...")


def file_of(url: URL) -> Path | None:
    """The file of a SQLite database, None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def shown(url: URL) -> str:
    """The database for people: its file, or its URL without passwords, in its query neither."""
    query = {name: HIDDEN if is_secret(name) else value for name, value in url.query.items()}
    told = url._replace(query=query).render_as_string(hide_password=True)  # type: ignore[arg-type]
    return str(file_of(url) or without_passwords(told))


def network_filesystem(path: Path, mountinfo: str) -> str | None:
    """The type of the network file system that `path` (absolute) lies on, None for a local one.

    `mountinfo` is the text of /proc/self/mountinfo. Of the mounts that hold the path the deepest counts, of equal ones
    the last, which covers the others.
    """
    best, found = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), right.split()[0]
    return found if found in NETWORK_FILESYSTEMS else None


def refuse_network(path: Path) -> None:
    """Raises StoreError when SQLite would have to work over a network file system (WAL needs one host's memory)."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return
    kind = network_filesystem(path.resolve(), table.read_text(errors="replace"))
    if kind:
        raise StoreError(f"{path} lies on {kind}, where SQLite corrupts; use a local disk or PostgreSQL (--db)")


def jsonable(value: Any) -> Any:
    """The value with non-finite floats as the words that pydantic reads back: JSON has no NaN and PostgreSQL none."""
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
    """Mappings that are no dict, paths and numpy numbers inside JSON columns."""
    if hasattr(value, "items"):
        return jsonable(dict(value))
    return jsonable(value.item()) if hasattr(value, "item") else str(value)


engines_in_use: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()
"""With the number under which each was made, so that the newest can be told."""
_numbers = itertools.count()
_inherited: list[Pool] = []


def _detach_after_fork() -> None:
    """In a forked child: leaves the parent's connections untouched (not even closed) and starts with none."""
    for engine in list(engines_in_use):
        _inherited.append(engine.pool)
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_detach_after_fork)


def open_engines() -> list[Engine]:
    """Return the engines of all databases that this process has opened and not given up, the newest first."""
    return [engine for engine, _ in sorted(engines_in_use.items(), key=lambda item: -item[1])]


_SYNCHRONOUS = {False: "NORMAL", True: "FULL"}
"""Of a commit in WAL mode, only FULL waits until the log is on the disk; what was logged before is then there, too."""
_WAIT_FOR_DISK = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
"""For one transaction, and only against a server or role that was told not to wait; stricter settings stay."""


_KEEPALIVE = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}  # fmt: skip
"""So that a connection into nothing is noticed within a minute or so; an URL that says otherwise is obeyed."""


def make_engine(url: URL, *, foreign_keys: bool = True, read_only: bool = False) -> Engine:
    """An engine with the pragmas of this module. Usable after a fork: the child opens its own connections.

    `read_only`: the database itself refuses whatever would change it, whoever asks.

    Raises StoreError when the PostgreSQL driver is not installed.
    """
    sqlite = url.get_backend_name() == "sqlite"
    lively = {} if sqlite else {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
    try:
        engine = create_engine(url, json_serializer=_to_json, pool_pre_ping=not sqlite, connect_args=lively)
    except ModuleNotFoundError as error:
        raise StoreError("PostgreSQL needs psycopg; install it with: pip install 'atma-sweep[postgres]'") from error
    engines_in_use[engine] = next(_numbers)

    @event.listens_for(engine, "handle_error")
    def _failed(context: Any) -> None:
        damaged = damage(context.original_exception, url)
        if damaged is not None:
            raise damaged from context.original_exception
        if context.sqlalchemy_exception is not None:
            context.sqlalchemy_exception.database_url = url  # for explain_driver_error

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: Any) -> None:
        if not sqlite:
            connection.execute(f"SET lock_timeout = {BUSY_MS}")
            if read_only:
                connection.execute("SET default_transaction_read_only = on")
            connection.commit()
            return
        connection.isolation_level = None  # we begin ourselves, below
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
        options = connection.get_execution_options()
        durable = bool(options.get("durable"))
        wait = min(options.get("wait_ms", BUSY_MS), BUSY_MS)
        if not sqlite:
            if durable:
                connection.exec_driver_sql(_WAIT_FOR_DISK)
            if wait < BUSY_MS:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(wait, 1)}")  # 0 would be for ever
            return
        if connection.info.get("wait_ms", BUSY_MS) != wait:
            connection.exec_driver_sql(f"PRAGMA busy_timeout={wait}")
            connection.info["wait_ms"] = wait
        # not allowed inside a transaction, so it lasts until the next one that wants it otherwise
        if connection.info.get("durable", False) != durable:
            connection.exec_driver_sql(f"PRAGMA synchronous={_SYNCHRONOUS[durable]}")
            connection.info["durable"] = durable
        connection.exec_driver_sql(options.get("begin", "BEGIN IMMEDIATE"))

    return engine


def revision_of(connection: Connection) -> str | None:
    """The database's revision, None when it is empty. Raises StoreError when it holds somebody else's tables."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" in tables and "attempt" in tables and "sweep" in tables:
        return str(connection.scalar(text("SELECT version_num FROM alembic_version")))
    if tables:
        raise StoreError(f"{shown(connection.engine.url)} is not a database of atma-sweep; name another with --db")
    return None


def check_revision(found: str | None, where: str) -> None:
    """Raises StoreMissing for an empty database, StoreOutdated for an older one, StoreTooNew for an unknown one."""
    if found is None:
        raise StoreMissing(f"{where} is empty; launch a grid first, or name the database with --db")
    if found not in REVISIONS:
        raise StoreTooNew(f"{where} was written by a newer atma-sweep (revision {found}); upgrade the program")
    if found != HEAD:
        raise StoreOutdated(f"{where} is of an older release (revision {found}); run: atma-sweep db upgrade")


@contextmanager
def translate_driver_errors(url: URL) -> Iterator[None]:
    """Turns what a driver says about a file that is no database, or a server that is not there, into one line.

    Raises StoreBusy, StoreAway, StoreDamaged, WriteRefused, StoreError.
    """
    try:
        yield
    except DBAPIError as error:
        unusable = StoreError(f"cannot use {shown(url)} as a database: {_first_line(error)}; name another with --db")
        raise explain_driver_error(error, url) or unusable from error


def explain_driver_error(error: BaseException, url: URL | None = None) -> StoreError | None:
    """Explain an error of a database driver that a user can mend; None for any other error.

    Without `url` the error has to come from an engine of `make_engine`, which notes its address there.
    """
    url = url or getattr(error, "database_url", None)
    if not isinstance(error, DBAPIError | sqlite3.Error) or url is None:
        return None
    first = _first_line(error)
    if any(word in first for word in ("locked", "busy", "lock timeout")):
        return StoreBusy(f"{shown(url)} stays locked by another program; close it and try again")
    if isinstance(error, OperationalError) and file_of(url) is None and is_server_unreachable(str(error.orig)):
        return StoreUnreachable(f"{shown(url)} does not answer: {first}; start its server, or name another with --db")
    if "readonly" in first or "read-only" in first:
        return WriteRefused(
            f"{shown(url)} or its folder cannot be written here, and even reading needs that; {READ_ONLY}"
        )
    if any(part in first for part in _DISK) or ("unable to open" in first and _is_full(url)):
        return WriteRefused(
            f"{shown(url)} cannot be written, and even reading needs that: its disk is full or broken ({first}); make room"
        )
    return damage(_original(error), url)


def _original(error: BaseException) -> BaseException:
    """The driver's own error."""
    return (error.orig if isinstance(error, DBAPIError) else None) or error


def _first_line(error: BaseException) -> str:
    original = _original(error)
    return next(iter(str(original).strip().splitlines()), type(original).__name__)


def _is_full(url: URL) -> bool:
    """Return whether the disk of a SQLite file has no room for the files that SQLite keeps beside it."""
    path = file_of(url)
    return path is not None and path.parent.is_dir() and shutil.disk_usage(path.parent).free < SHARED_MEMORY_BYTES


def damage(error: BaseException | None, url: URL) -> StoreDamaged | None:
    """Explain an error which SQLite raises for a damaged file; None for any other error."""
    path = file_of(url)
    if path is None or error is None:
        return None
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    # of a damaged schema SQLite may quote bytes that are no text; a value that is none is a matter of its row
    is_text = isinstance(error, UnicodeDecodeError)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT) or is_text or "malformed" in str(error):
        return _damaged(path, "text that is not UTF-8" if is_text else str(error))
    if code == sqlite3.SQLITE_NOTADB and _was_database(path):
        return _damaged(path, "its header cannot be read")
    return None


def damage_behind() -> StoreDamaged | None:
    """Check the SQLite files that this process has open, after an error that nobody foresaw."""
    for engine in list(engines_in_use):
        path = file_of(engine.url)
        if path is None or not path.is_file():
            continue
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
                connection.set_progress_handler(partial(_is_late, time.monotonic() + CHECK_S), 100_000)
                verdict = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        except sqlite3.OperationalError:
            continue  # locked, away, or too large to check now
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return damage(error, engine.url) or _damaged(path, str(error))
        if verdict != "ok":
            return _damaged(path, " ".join(verdict.split())[:200])
    return None


def _is_late(deadline: float) -> bool:
    return time.monotonic() > deadline


def _damaged(path: Path, why: str) -> StoreDamaged:
    file = shlex.quote(str(path))
    return StoreDamaged(
        f"{path} is damaged: {why}; see atma-sweep db check, then restore a backup, or save what can be read: "
        f"sqlite3 {file} .recover | sqlite3 NEW.db"
    )


def _was_database(path: Path) -> bool:
    """Return whether a file begins much as SQLite files do, or with zeros, as after a crash of the machine."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    return sum(map(int.__eq__, start, _MAGIC)) >= len(_MAGIC) - 4 or not start.strip(b"\0")


def is_server_unreachable(said: str) -> bool:
    """Whether a PostgreSQL client's message means that no server took us in, rather than one that knows us not."""
    refused = "FATAL" in said and not any(words in said for words in ("starting up", "shutting down", "too many"))
    return ("connection" in said or "resolve host" in said) and not refused


SERVER_DOWN_REMEDY = "does not answer; start its server"
_DISK = ("is full", "disk I/O error", "No space left")
DISK = "cannot be written, its disk is full or broken; make room"
SHARED_MEMORY_BYTES = 2**15
"""What SQLite needs beside a file, even to read it."""
CHECK_S = 10.0
"""How long a file is searched for damage after an error that nobody foresaw."""
_MAGIC = b"SQLite format 3\0"
READ_ONLY = "see to its permissions, or name another database with --db"
_AWAY = {
    ("locked", "busy", "lock timeout", "deadlock"): "stays locked by another program; close it",
    _DISK: DISK,
    ("unable to open database file",): "cannot be opened any more; see to its folder",
    ("server closed", "connection", "shutting down", "starting up"): SERVER_DOWN_REMEDY,
}


def remedy_for(error: DBAPIError) -> str | None:
    """What is to be done about a database that cannot answer now, but may later; None for any other error."""
    if error.connection_invalidated:
        return SERVER_DOWN_REMEDY
    said = str(error.orig) if isinstance(error, OperationalError) else ""
    return next((remedy for words, remedy in _AWAY.items() if any(word in said for word in words)), None)


def upsert(session: Session, row: Any, *, key: Sequence[str], replace: bool = True) -> Any:
    """An insert that, where the key exists, replaces the other columns given (or leaves the row alone)."""
    # one dialect at a time: importing both costs `status` a tenth of its time
    dialect: Any = importlib.import_module(f"sqlalchemy.dialects.{session.get_bind().dialect.name}")
    statement: Any = dialect.insert(row)
    if not replace:
        return statement.on_conflict_do_nothing(index_elements=list(key))
    others = [column.name for column in row.__table__.columns if column.name not in (*key, "id")]
    return statement.on_conflict_do_update(
        index_elements=list(key), set_={name: statement.excluded[name] for name in others}
    )
