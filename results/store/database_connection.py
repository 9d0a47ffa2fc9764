"""Transactions on a database that may be locked or unreachable for a while: retries, waiting and time-outs.

DatabaseConnection is the base class of Store. `transaction` makes one try; `read` and `write` repeat it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from ..errors import StoreBusy, StoreReplaced, UserError, WriteRefused
from .database import (
    READ_ONLY_REMEDY,
    SERVER_DOWN_REMEDY,
    make_engine,
    redacted_url,
    remedy_for,
    resolve_url,
    sqlite_file,
)

Result = TypeVar("Result")
Work = Callable[[Session], Result]
WAIT_TIMEOUT_S = 300.0
WARN_AFTER_S, WARN_AGAIN_AFTER_S = 5.0, 60.0
"""Seconds of waiting before the first logged warning, and between further ones.

Python prints warnings on standard error unless a program sets up logging.
"""
OUTCOME_TIMEOUT_S = 5.0
"""Seconds that a server gets to finish a transaction whose connection was lost, before it is asked to end it."""

# PostgreSQL knows the outcome of every recent transaction; a number that it never issued was lost in a crash, uncommitted
_FATE = text(
    "SELECT CASE WHEN CAST(:number AS bigint) < txid_current() "
    "THEN txid_status(CAST(:number AS bigint)) ELSE 'aborted' END"
)
_END = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE CAST(CAST(backend_xid AS text) AS bigint) = CAST(:number AS bigint) % 4294967296"
)


_log = logging.getLogger(__name__)
explain: Callable[[list[Engine]], UserError | None] | None = None
"""Hook that looks for damaged values after an unforeseen error of a read.

results/__init__.py sets it for the Python interface; the command line runs the search itself.
"""


class _OutcomeUnknown(Exception):
    """Raised while it is unknown if a write was committed."""


class DatabaseConnection:
    """Connections to one database; pickles as its address.

    The pickled address contains the password of a PostgreSQL URL. `str()` gives the address without passwords. Threads
    may share an instance.
    """

    def __init__(
        self, url_or_path: str | Path | None = None, *, patience: float = WAIT_TIMEOUT_S, read_only: bool = False
    ) -> None:
        """Create the engine; nothing is opened yet, and a missing file is not noticed.

        Args:
            url_or_path: database URL, file, or None for the default (ATMA_DB, else atma.db in the working folder).
            patience: seconds that reads and writes wait for a locked or unreachable database.
            read_only: no connection can change anything.

        Raises:
            StoreError: the URL is not supported, or its driver is not installed.
        """
        self.url = resolve_url(url_or_path)
        self.path = sqlite_file(self.url)
        self.patience, self.read_only = patience, read_only
        self.engine = make_engine(self.url, read_only=read_only)
        self._reader = self.engine.execution_options(begin="BEGIN")
        self._durable = self.engine.execution_options(durable=True)
        self._unavailable_since: dict[bool, float] = {}
        """Monotonic time since which the database has refused reads (key False) or writes (key True)."""
        self._last_write = 0.0
        self._file: tuple[int, int] | None = None
        """Device and inode of the database's file when it was first used."""

    def __reduce__(self) -> tuple[Any, ...]:
        constructor = partial(type(self), patience=self.patience, read_only=self.read_only)
        return constructor, (self.url.render_as_string(hide_password=False),)

    def __str__(self) -> str:
        return redacted_url(self.url)

    @property
    def runs(self) -> Path:
        """Default folder for artifacts: `<db name>-runs` next to the file, or in the working folder for PostgreSQL."""
        if self.path is not None:
            return self.path.with_name(f"{self.path.stem}-runs")
        return Path.cwd() / f"{self.url.database or 'atma'}-runs"

    def close(self) -> None:
        """Close the connections; new ones are opened at the next use."""
        self.engine.dispose()
        self._file = None

    @contextmanager
    def transaction(self, *, write: bool = True, durable: bool = False, wait: float | None = None) -> Iterator[Session]:
        """Yield a session in a transaction: committed at the end, rolled back on any exception, always closed.

        Makes one try: a locked database or a lost connection raises the driver's DBAPIError. An unforeseen error of a
        read is replaced by a UserError if `explain` finds that the database holds an invalid value.

        Args:
            write: False begins a transaction without the write lock, for reads. The database would not refuse writes in
                it.
            durable: wait at the commit until the write is on the disk; ignored if `write` is False.
            wait: seconds to wait for a lock; the driver's own limit (BUSY_MS) is the maximum and the default.

        Raises:
            StoreReplaced: the database file was removed or replaced while it was in use.
            StoreDamaged: the database file is damaged.
        """
        self._check_file()
        engine = self._reader if not write else self._durable if durable else self.engine
        session = Session(engine, expire_on_commit=False)
        try:
            if wait is not None:
                session.connection(execution_options={"wait_ms": round(1000 * wait)})
            yield session
            session.commit()
        except Exception as error:
            session.rollback()
            if not write and (blamed := self.diagnose(error)) is not None:
                raise blamed from error
            raise
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()

    def _check_file(self) -> None:
        """Raise StoreReplaced if the path no longer names the file that is open: writes to it would be lost.

        Remembers the file (device and inode) at the first call at which it exists. Does nothing for PostgreSQL, or if
        the folder cannot be read.
        """
        if self.path is None:
            return
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            identity = None
        except OSError:
            return  # SQLite says better what is wrong with the folder
        else:
            identity = status.st_dev, status.st_ino
        if self._file is None:
            self._file = identity
        elif identity != self._file:
            change = "was removed" if identity is None else "was replaced by another file"
            raise StoreReplaced(
                f"{self.path} {change} while it was in use and accepts no more writes; stop the programs that "
                "use it, put the database back with its -wal and -shm, then launch again"
            )

    def diagnose(self, error: Exception) -> UserError | None:
        """Return the error to raise in place of an unforeseen one if the database holds an invalid value.

        None if no such value was found, if no `explain` hook is set, and for errors that already say enough: a
        UserError, or a driver's error other than undecodable text. The search of the hook may read the entire database.
        """
        undecodable = "Could not decode" in str(error)
        if explain is None or isinstance(error, UserError) or (isinstance(error, DBAPIError) and not undecodable):
            return None
        return explain([self.engine])

    def write(self, work: Work[Result], *, patience: float | None = None, durable: bool = False) -> Result:
        """Run `work(session)` in a write transaction, retried while the database cannot take it, and return its result.

        It is retried with growing pauses (0.05 to 5 s) while the database is locked, its disk is full, or its server is
        unreachable; the calling thread blocks and warnings are logged. `work` may run several times, so it must only
        use the session; the write is applied once. If the connection is lost before the answer arrives, the server is
        asked for the outcome before anything is tried again. An exception of `work` rolls back and is raised at once.

        Args:
            work: function that writes.
            patience: seconds to wait, counted from the call or from the moment since which the database has refused,
                whichever is earlier; None for the store's own setting.
            durable: on return, a power failure loses neither this write nor any earlier one, by whichever process. For
                writes that must last before a file is deleted.

        Raises:
            StoreBusy: the database could not take the write in time.
            WriteRefused: the database is read-only.
            StoreReplaced: the database file was removed or replaced while it was in use.
            StoreDamaged: the database file is damaged.
        """
        return self._retry_until_available(_RetriedWrite(self, work, durable), patience, write=True)

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Return `work(session, *args, **options)`, called in a read transaction and retried as in `write`.

        `work` may run several times. Its result must not be a generator or another object that still needs the session,
        which is closed on return.

        Raises:
            StoreBusy: the database did not answer within the store's patience.
        """

        def once(wait: float) -> Result:
            with self.transaction(write=False, wait=wait) as session:
                return work(session, *args, **options)

        return self._retry_until_available(once, None, write=False)

    def _retry_until_available(self, once: Callable[[float], Result], patience: float | None, *, write: bool) -> Result:
        """Call `once` until the database answers, and return its result; sleeps in between.

        Args:
            once: one try; its argument is the number of seconds that remain (0 or more). Its DBAPIError and
                _OutcomeUnknown are retried if the cause may pass; every other exception is raised at once.
            patience: seconds to wait, counted from the call or from the moment since which the database has refused
                reads or writes, whichever is earlier; None for the store's own setting. At least one try is made.
            write: True if `once` writes.

        Raises:
            StoreBusy: the time is over.
            WriteRefused: the database is read-only.
            DBAPIError: a driver's error that waiting does not cure.
        """
        limit = self.patience if patience is None else patience
        began, pause = time.monotonic(), 0.05
        tell_at = began + WARN_AFTER_S
        while True:
            since = min((began, *tuple(self._unavailable_since.values())))
            try:
                done = once(max(since + limit - time.monotonic(), 0.0))
            except (DBAPIError, _OutcomeUnknown) as error:
                remedy = remedy_for(error) if isinstance(error, DBAPIError) else SERVER_DOWN_REMEDY
                if remedy is None:
                    self._note_answer(write)
                    if "readonly" in str(error) or "read-only" in str(error):
                        raise WriteRefused(f"{self} is read-only here; {READ_ONLY_REMEDY}") from error
                    raise
                self._unavailable_since.setdefault(write, max(began, self._last_write))
                now = time.monotonic()
                if now >= since + limit:
                    raise StoreBusy(f"{self} {remedy} and launch again") from error
                if now >= tell_at:
                    _log.warning("%s %s; trying again for another %.0f s", self, remedy, since + limit - now)
                    tell_at = now + WARN_AGAIN_AFTER_S
            except Exception:
                self._note_answer(write)  # it was asked, and what it said is why
                raise
            else:
                self._note_answer(write)
                return done
            time.sleep(min(pause, max(since + limit - time.monotonic(), 0.0)))
            pause = min(2 * pause, 5.0)

    def _note_answer(self, write: bool) -> None:
        self._unavailable_since.pop(False, None)
        if write:
            self._unavailable_since.pop(True, None)
            self._last_write = time.monotonic()


class _RetriedWrite(Generic[Result]):
    """A write that is applied once, however often it is called.

    Only a server can lose an answer. PostgreSQL numbers its transactions and can report the outcome of each. SQLite
    itself reports a failed commit.
    """

    def __init__(self, database: DatabaseConnection, work: Work[Result], durable: bool) -> None:
        """Keep the database, the function that writes, and the `durable` flag of its transaction.

        Nothing is run yet.
        """
        self._database, self._work, self._durable = database, work, durable
        self._number: int | None = None
        """Number of the transaction that was tried, while its outcome is unknown."""
        self._result: list[Result] = []
        self._lost = 0.0

    def __call__(self, wait: float) -> Result:
        """Apply the write, unless an earlier call committed it, and return the result of `work`.

        Args:
            wait: seconds to wait for a lock.

        Raises:
            DBAPIError: the try failed; call again for another one.
            _OutcomeUnknown: it is unknown whether an earlier try was committed.
        """
        if self._number is not None and self._committed(self._number, wait):
            return self._result[0]
        self._number, self._result = None, []
        try:
            with self._database.transaction(durable=self._durable, wait=wait) as session:
                if self._database.path is None:
                    self._number = session.scalar(text("SELECT txid_current()"))
                self._result.append(self._work(session))
        except DBAPIError:
            self._lost = time.monotonic()
            raise
        return self._result[0]

    def _committed(self, number: int, wait: float) -> bool:
        """Return True if the PostgreSQL transaction of that number was committed, False if it was not.

        If the transaction is still in progress 5 s (OUTCOME_TIMEOUT_S) after the connection was lost, its server
        process is terminated.

        Args:
            number: number of the transaction, as txid_current gave it.
            wait: seconds to wait for a lock.

        Raises:
            _OutcomeUnknown: the transaction is still in progress.
            DBAPIError: the server does not answer.
        """
        with self._database.transaction(write=False, wait=wait) as session:
            fate = session.scalar(_FATE, {"number": number})
            if fate == "in progress" and time.monotonic() - self._lost > OUTCOME_TIMEOUT_S:
                session.execute(_END, {"number": number})
        if fate == "in progress":
            raise _OutcomeUnknown
        return bool(fate == "committed")
