"""Transactions on a database that may be locked or away for a while: how they are tried, waited for and given up."""

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
from .database import READ_ONLY, SERVER_DOWN_REMEDY, file_of, make_engine, place, remedy_for, shown

Result = TypeVar("Result")
Work = Callable[[Session], Result]
WAIT_TIMEOUT_S = 300.0
TELL_S, TELL_AGAIN_S = 5.0, 60.0
"""A wait is logged as a warning after the first, and then each time that the second has passed. Python prints warnings on
standard error unless a program sets up logging."""
OUTCOME_TIMEOUT_S = 5.0
"""What a server gets to finish a transaction whose connection is gone, before it is asked to end it."""

# what PostgreSQL itself keeps of every recent transaction; one that it never gave out was lost with what it stood for
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
"""Looks for damaged values behind an unforeseen error of a read. The Python surface sets it (results/__init__.py); the command
line looks for them itself."""


class _OutcomeUnknown(Exception):
    """Nobody knows yet what became of a write."""


class DatabaseConnection:
    """A database and the connections to it; pickles as its address."""

    def __init__(
        self, url_or_path: str | Path | None = None, *, patience: float = WAIT_TIMEOUT_S, read_only: bool = False
    ) -> None:
        self.url = place(url_or_path)
        self.path = file_of(self.url)
        self.patience, self.read_only = patience, read_only
        self.engine = make_engine(self.url, read_only=read_only)
        self._reader = self.engine.execution_options(begin="BEGIN")
        self._durable = self.engine.execution_options(durable=True)
        self._silent: dict[bool, float] = {}
        """Since when the database takes no reads (False) or no writes (True), on the monotonic clock."""
        self._answered = 0.0
        self._file: tuple[int, int] | None = None
        """Device and inode of the database's file as it was first used."""

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), patience=self.patience, read_only=self.read_only)
        return made, (self.url.render_as_string(hide_password=False),)

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def runs(self) -> Path:
        """Where artifacts go unless told otherwise: `<db name>-runs` beside the file, or in the working folder."""
        if self.path is not None:
            return self.path.with_name(f"{self.path.stem}-runs")
        return Path.cwd() / f"{self.url.database or 'atma'}-runs"

    def close(self) -> None:
        """Closes the connections; new ones are opened when it is used again."""
        self.engine.dispose()
        self._file = None

    @contextmanager
    def transaction(self, *, write: bool = True, durable: bool = False, wait: float | None = None) -> Iterator[Session]:
        """A session in a transaction: committed at the end, rolled back when anything is raised, always closed.

        `wait`: seconds that it waits for a lock, at most as long as the driver would anyway.
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
            if not write and (blamed := self.blame(error)) is not None:
                raise blamed from error
            raise
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()

    def _check_file(self) -> None:
        """Raise StoreReplaced where the path names another file by now: what is written to the open one would be lost."""
        if self.path is None:
            return
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            found = None
        except OSError:
            return  # SQLite says better what is wrong with the folder
        else:
            found = status.st_dev, status.st_ino
        if self._file is None:
            self._file = found
        elif found != self._file:
            change = "was removed" if found is None else "was replaced by another file"
            raise StoreReplaced(
                f"{self.path} {change} while it was in use, and takes no more writes; stop what uses it, put the database "
                "back with its -wal and -shm, then launch again"
            )

    def blame(self, error: Exception) -> UserError | None:
        """Return what to raise for an error that nobody foresaw, where the database holds a value that nobody writes."""
        undecodable = "Could not decode" in str(error)
        if explain is None or isinstance(error, UserError) or (isinstance(error, DBAPIError) and not undecodable):
            return None
        return explain([self.engine])

    def write(self, work: Work[Result], *, patience: float | None = None, durable: bool = False) -> Result:
        """Runs `work` in a write transaction, again and again with growing pauses while the database cannot take it.

        That is while it is locked, its disk is full, or its server is away. `work` may run more than once, so it must do
        nothing but use the session; but it is done once: when the connection dies before the answer has come, the server
        is asked what became of it before anything is tried again. `durable`: when this returns, a power cut loses neither
        this write nor any before it, whoever made them; for what must last before a file goes.

        Raises StoreBusy after `patience`, counted from when the database last took a write, so that who cleans up after
        it was given up does not wait as long once more.
        """
        return self._patiently(_RetriedWrite(self, work, durable), patience, write=True)

    def read(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """The same in a transaction that only reads; `work` gets the arguments after the session."""

        def once(wait: float) -> Result:
            with self.transaction(write=False, wait=wait) as session:
                return work(session, *args, **options)

        return self._patiently(once, None, write=False)

    def _patiently(self, once: Callable[[float], Result], patience: float | None, *, write: bool) -> Result:
        """Calls `once`, with the seconds that are left, until the database answers."""
        limit = self.patience if patience is None else patience
        began, pause = time.monotonic(), 0.05
        tell_at = began + TELL_S
        while True:
            since = min((began, *tuple(self._silent.values())))
            try:
                done = once(max(since + limit - time.monotonic(), 0.0))
            except (DBAPIError, _OutcomeUnknown) as error:
                remedy = remedy_for(error) if isinstance(error, DBAPIError) else SERVER_DOWN_REMEDY
                if remedy is None:
                    self._heard(write)
                    if "readonly" in str(error) or "read-only" in str(error):
                        raise WriteRefused(f"{self} cannot be written here, only read; {READ_ONLY}") from error
                    raise
                self._silent.setdefault(write, max(began, self._answered))
                now = time.monotonic()
                if now >= since + limit:
                    raise StoreBusy(f"{self} {remedy} and launch again") from error
                if now >= tell_at:
                    _log.warning("%s %s; trying again for another %.0f s", self, remedy, since + limit - now)
                    tell_at = now + TELL_AGAIN_S
            except Exception:
                self._heard(write)  # it was asked, and what it said is why
                raise
            else:
                self._heard(write)
                return done
            time.sleep(min(pause, max(since + limit - time.monotonic(), 0.0)))
            pause = min(2 * pause, 5.0)

    def _heard(self, write: bool) -> None:
        self._silent.pop(False, None)
        if write:
            self._silent.pop(True, None)
            self._answered = time.monotonic()


class _RetriedWrite(Generic[Result]):
    """One write, which is done once however often it is called.

    Only a server can lose an answer, and only PostgreSQL is one: it numbers its transactions and knows what became of
    each. SQLite says it itself when a commit has failed.
    """

    def __init__(self, database: DatabaseConnection, work: Work[Result], durable: bool) -> None:
        self._database, self._work, self._durable = database, work, durable
        self._number: int | None = None
        """Of the transaction that was tried, as long as nobody has said what became of it."""
        self._result: list[Result] = []
        self._lost = 0.0

    def __call__(self, wait: float) -> Result:
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
        """Whether the transaction of that number was done. Raises _Unsettled while the server is still at it."""
        with self._database.transaction(write=False, wait=wait) as session:
            fate = session.scalar(_FATE, {"number": number})
            if fate == "in progress" and time.monotonic() - self._lost > OUTCOME_TIMEOUT_S:
                session.execute(_END, {"number": number})
        if fate == "in progress":
            raise _OutcomeUnknown
        return bool(fate == "committed")
